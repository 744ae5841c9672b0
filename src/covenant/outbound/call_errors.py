"""Errors of outgoing calls. Each has one text for the caller, and another one for the operator.

    Refusal
    └── Invalid
        └── AddressRefused   400   the URL may not be called: its spelling, its port, or where it leads
    CovenantError
    ├── CallFailed                 the call was allowed, and the other side did not answer as it should
    └── RemoteError                names the remote's task where it is known
        ├── NoCard                 no card was found, or it cannot be used: unreadable, unsigned, no interface
        ├── RemoteRefused          the remote refused the call, or its answer cannot be read; `code` is ours
        ├── OutcomeUnknown         the message may have been taken: sending it again may do the work twice
        └── RemoteTimedOut         no answer in the caller's time; a remote task that is known is told to stop

Anybody may see `message`: it says nothing that a stranger could not know already, so a name that leads inside
and a name that leads nowhere read the same. `detail` is for the log and the operator: names, addresses, what to set.
"""

from __future__ import annotations

from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal

import msgspec

from covenant.model.errors import CovenantError, Invalid
from covenant.wire.jsonrpc import RpcError, one_line, reason_in

ALLOW_SETTING: Final = "outbound.allow"

FailureCode = Literal["connect_failed", "connection_lost", "timed_out", "too_large", "bad_response", "bad_redirect"]
RETRY_AFTER_S_MAX: Final = 3_600.0


class AddressRefused(Invalid):
    """This URL may not be called. `transient` if that may change by itself, as when no name server answered."""

    def __init__(self, message: str, *, detail: str | None = None, transient: bool = False) -> None:
        super().__init__("address_refused", message)
        self.detail = detail or message
        self.transient = transient


class CallFailed(CovenantError):
    """The call was allowed and failed. `transient` if the same call may succeed later.

    `sent`: the other side may have received it.
    """

    def __init__(
        self, code: FailureCode, message: str, *, detail: str | None = None, transient: bool = True, sent: bool = True
    ) -> None:
        super().__init__(message)
        self.sent = sent
        self.code = code
        self.message = message
        self.detail = detail or message
        self.transient = transient


def not_callable(detail: str, *, transient: bool = False) -> AddressRefused:
    """One text for every refused address or name and failed look-up: different texts would map the inside network."""
    return AddressRefused(
        f"this address may not be called; if it should be, the operator can add it to the setting {ALLOW_SETTING}",
        detail=detail,
        transient=transient,
    )


def too_large(bytes_max: int) -> CallFailed:
    return CallFailed("too_large", f"the answer has more than {bytes_max} bytes", transient=False)


RefusalCode = Literal[
    "unknown_task",
    "other_dialect",
    "unsupported",
    "unauthenticated",
    "forbidden",
    "not_found",
    "over_limit",
    "unavailable",
    "bad_answer",
    "refused",
]


class RemoteError(CovenantError):
    code: str = "remote_error"
    transient = False
    """Whether the same call may succeed later."""

    def __init__(self, message: str, *, task_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.task_id = task_id


class NoCard(RemoteError):
    code = "no_card"

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The answer of the last place that was tried, if there was one."""


class RemoteRefused(RemoteError):
    def __init__(
        self,
        code: RefusalCode,
        message: str,
        *,
        task_id: str | None = None,
        status: int | None = None,
        rpc_code: int | None = None,
        retry_after_s: float | None = None,
        remote_message: str = "",
    ) -> None:
        """`remote_message`: the remote's own text."""
        super().__init__(message, task_id=task_id)
        self.remote_message = remote_message
        self.code = code
        self.transient = code in ("over_limit", "unavailable")
        self.status = status
        self.rpc_code = rpc_code
        self.retry_after_s = retry_after_s


class OutcomeUnknown(RemoteError):
    code = "outcome_unknown"


class RemoteTimedOut(RemoteError):
    code = "timed_out"


# An unknown version is -32009 in A2A 1.0, and -32007 at some servers; -32601 is an unknown method.
_BY_RPC: Final[dict[int, RefusalCode]] = {
    -32001: "unknown_task",
    -32004: "unsupported",
    -32007: "other_dialect",
    -32009: "other_dialect",
    -32601: "other_dialect",
}
_BY_REASON: Final[dict[str, RefusalCode]] = {
    "TASK_NOT_FOUND": "unknown_task",
    "UNSUPPORTED_OPERATION": "unsupported",
    "VERSION_NOT_SUPPORTED": "other_dialect",
    "METHOD_NOT_FOUND": "other_dialect",
    "UNAUTHENTICATED": "unauthenticated",
    "PERMISSION_DENIED": "forbidden",
    "RESOURCE_EXHAUSTED": "over_limit",
    "UNAVAILABLE": "unavailable",
}
_BY_STATUS: Final[dict[int, RefusalCode]] = {
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "other_dialect",
    429: "over_limit",
    501: "other_dialect",
}


def refused_by_rpc(error: RpcError) -> RemoteRefused:
    code = _BY_RPC.get(error.code) or _BY_REASON.get(error.reason or "", "refused")
    summary = f"the remote refused: {error.message}" if error.message else "the remote refused"
    return RemoteRefused(code, f"{summary} (JSON-RPC {error.code})", rpc_code=error.code, remote_message=error.message)


def refused_by_status(status: int, headers: Mapping[str, str], body: bytes) -> RemoteRefused:
    """`google.rpc.Status`, or any JSON that has a message, or the status alone."""
    error = _error_in(body)
    code = _BY_REASON.get(reason_in(error.get("details")) or "") or _BY_STATUS.get(status)
    message = one_line(error.get("message"))
    return RemoteRefused(
        code or ("unavailable" if status >= 500 else "refused"),
        f"the remote refused: {message} (HTTP {status})" if message else f"the remote answered HTTP {status}",
        status=status,
        remote_message=message,
        retry_after_s=min(retry_after(headers) or 0.0, RETRY_AFTER_S_MAX) or None,
    )


def retry_after(headers: Mapping[str, str], now_ms: int | None = None) -> float | None:
    """Reads a Retry-After header, in seconds. A date is read only if `now_ms` is given."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit() and len(value) <= 9:
        return float(value)
    if now_ms is None:
        return None
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now_ms / 1000)
    except (ValueError, OverflowError):
        return None


def error_text(body: bytes) -> str:
    """The remote's own code and message, as one line; empty if the body has neither."""
    error = _error_in(body)
    return ": ".join(filter(None, (one_line(error.get("code")), one_line(error.get("message")))))


def has_error(body: bytes) -> bool:
    """Whether the body is a JSON object with the key `error`: A2A's own answers have no such key."""
    if b'"error"' not in body:
        return False
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error is not msgspec.UNSET
    except (msgspec.DecodeError, RecursionError):
        return False


class _ErrorBody(msgspec.Struct):
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _error_in(body: bytes) -> Mapping[str, Any]:
    try:
        read = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    if not isinstance(read, dict):
        return {}
    error = read.get("error")
    if isinstance(error, str):
        return {"message": error, "code": read.get("code")}
    return error if isinstance(error, dict) else read
