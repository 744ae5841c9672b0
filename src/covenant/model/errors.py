"""Every refusal and fault Covenant can answer with, as one tree.

    CovenantError
    ├── Refusal                 the caller can do something about it; carries a machine code and a status
    │   ├── Invalid        400  the request itself is wrong
    │   │   ├── WrongType       a value of another type than its field; also a `TypeError`
    │   │   └── InvalidParams   a field of an A2A request, which it names
    │   ├── Unauthenticated 401 no token, or one that is not (any longer) known
    │   ├── Forbidden      403  known, but without the capability, or claiming to be somebody else
    │   ├── NotFound       404  unknown, or not yours: the two are the same answer on purpose
    │   ├── Conflict       409  a duplicate with other content, a stale lease, a state that does not allow it
    │   ├── TooLarge       413  over a size limit
    │   ├── OverLimit      429  over a count or rate limit; `retry_after_ms` says when to try again
    │   └── Unavailable    503  cannot be made durable now
    ├── Damaged                 the files on disk contradict each other; names file and line
    ├── HomeUnusable            a file of the home cannot be read or written now; names it, and the free space
    ├── HomeLocked              another process has this home open
    └── SettingsError           a setting has a bad value; names the setting

Each code stands for one status, that of its class; doors translate, they never choose.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

OUTCOME_UNKNOWN: Final = "outcome_unknown"
_LIKENESS_MIN: Final = 0.6
_LENGTH_MAX: Final = 256
"""A longer word is no typing mistake, and comparing it would be expensive."""


class CovenantError(Exception):
    """The root of every error that leaves a package. Inside one, modules may signal each other by other exceptions."""


class Refusal(CovenantError):
    """A request that was understood and refused. Nothing changed, unless `code` is `outcome_unknown`."""

    status: int = 400
    code: str

    def __init__(self, code: str, message: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms


class Invalid(Refusal):
    status = 400


class WrongType(Invalid, TypeError):
    """A value of another type than its field declares. `field` is the path of the field: `task.parts[0].text`."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__("invalid_value", f"{field}: {what}")
        self.field = field
        self.what = what


class InvalidParams(Invalid):
    """An invalid field of an A2A request. `field` is its path, spelt as on the wire."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__("invalid_params", f"{field}: {description}")
        self.field = field
        self.description = description


class Unauthenticated(Refusal):
    status = 401


class Forbidden(Refusal):
    status = 403


class NotFound(Refusal):
    status = 404


class Conflict(Refusal):
    status = 409


class TooLarge(Refusal):
    status = 413


class OverLimit(Refusal):
    status = 429


class Unavailable(Refusal):
    status = 503


REFUSALS: Final[tuple[type[Refusal], ...]] = (
    Invalid,
    Unauthenticated,
    Forbidden,
    NotFound,
    Conflict,
    TooLarge,
    OverLimit,
    Unavailable,
)
"""One class for each HTTP status."""


def outcome_unknown() -> Unavailable:
    """The disk failed during a write: after a restart the record may or may not be there."""
    return Unavailable(
        OUTCOME_UNKNOWN,
        "the disk failed while this was being written; it may or may not have happened. "
        "Restart the daemon, then repeat the request under the same id",
    )


def storage_failed(reason: str) -> Unavailable:
    """The journal's writer has failed, and nothing is written before a restart. This request was not tried."""
    return Unavailable(
        "storage_failed",
        f"nothing can be written since the disk failed ({reason}); "
        "repair the disk and restart the daemon, then repeat the request",
    )


class Damaged(CovenantError):
    """A record that had been synced is missing or changed. `covenant doctor` shows the ways to recover."""

    def __init__(self, file: str, line: int, reason: str) -> None:
        super().__init__(f"{file}, line {line}: {reason}; run `covenant doctor` for the way out")
        self.file = file
        self.line = line
        self.reason = reason


class HomeUnusable(CovenantError):
    """A file of the home cannot be read or written at present: a full or read-only disk, or another owner.

    Nothing is damaged. The message names the file, the free space and the fix.
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number
        """The operating system's error number, if there is one."""


class HomeLocked(CovenantError):
    """Another process holds this home's lock."""


class SettingsError(CovenantError):
    """A setting with a value that cannot be used. The message names the setting and the values that it takes."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suffix for a refusal: `; did you mean max_uses?`, or an empty text if no known word is close."""
    if len(word) > _LENGTH_MAX:
        return ""
    found = difflib.get_close_matches(word, tuple(known), n=1, cutoff=_LIKENESS_MIN)
    return f"; did you mean {found[0]}?" if found else ""
