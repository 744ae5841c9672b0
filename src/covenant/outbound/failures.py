"""What can come of a call that does not succeed. Each says one thing to whoever asked, and another to the operator.

    Refusal
    └── Invalid
        └── AddressRefused   400   the URL may not be called: its spelling, its port, or where it leads
    CovenantError
    └── CallFailed                 it may be called, and the other side did not answer as it should

`message` may be told to anybody: it says nothing that a stranger could not know already, so a name that leads inside
and a name that leads nowhere read the same. `detail` is for the log and the operator: names, addresses, what to set.
"""

from __future__ import annotations

from typing import Final, Literal

from covenant.model.errors import CovenantError, Invalid

ALLOW_SETTING: Final = "outbound.allow"

FailureCode = Literal["connect_failed", "connection_lost", "timed_out", "too_large", "bad_response", "bad_redirect"]


class AddressRefused(Invalid):
    """This URL may not be called. `transient` if that may change by itself, as when no name server answered."""

    def __init__(self, message: str, *, detail: str | None = None, transient: bool = False) -> None:
        super().__init__("address_refused", message)
        self.detail = detail or message
        self.transient = transient


class CallFailed(CovenantError):
    """The call was allowed and failed. `transient` if the same call may succeed later."""

    def __init__(self, code: FailureCode, message: str, *, detail: str | None = None, transient: bool = True) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.detail = detail or message
        self.transient = transient


def not_callable(detail: str, *, transient: bool = False) -> AddressRefused:
    """The one answer for every address, name and failed look-up: telling them apart would map the inside network."""
    return AddressRefused(
        f"this address may not be called; if it should be, the operator can add it to the setting {ALLOW_SETTING}",
        detail=detail,
        transient=transient,
    )


def too_large(bytes_max: int) -> CallFailed:
    return CallFailed("too_large", f"the answer has more than {bytes_max} bytes", transient=False)
