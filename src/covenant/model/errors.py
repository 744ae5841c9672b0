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
    │   ├── OverLimit      429  over a count or rate limit; `retry_after_ms` says when to come back
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


class CovenantError(Exception):
    """The root of every error that leaves a package. Inside one, modules may signal each other by other exceptions."""


class Refusal(CovenantError):
    """A request that was understood and not done. Nothing changed, unless `code` is `outcome_unknown`."""

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
    """A value that is not what its field is declared to be. `field` is its path: `task.parts[0].text`."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__("invalid_value", f"{field}: {what}")
        self.field = field
        self.what = what


class InvalidParams(Invalid):
    """A field of an A2A request that is not as it must be. `field` is its place, in the spelling of the wire."""

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
"""One for each status."""


def outcome_unknown() -> Unavailable:
    """The write was under way when the disk failed: it may or may not be there after a restart."""
    return Unavailable(
        "outcome_unknown",
        "the disk failed while this was being written; it may or may not have happened. "
        "Restart the daemon, then repeat the request under the same id",
    )


def storage_failed(reason: str) -> Unavailable:
    """The writer is dead: nothing was tried."""
    return Unavailable(
        "storage_failed",
        f"nothing can be written since the disk failed ({reason}); "
        "mend the disk and restart the daemon, then repeat the request",
    )


class Damaged(CovenantError):
    """A record that had been synced is missing or changed. `covenant doctor` offers the way out."""

    def __init__(self, file: str, line: int, reason: str) -> None:
        super().__init__(f"{file}, line {line}: {reason}; run `covenant doctor` for the way out")
        self.file = file
        self.line = line
        self.reason = reason


class HomeUnusable(CovenantError):
    """A file of the home cannot be read or written as things are: a full disk, a read-only one, another owner.

    Nothing is damaged. The message names the file, the free space and the way out.
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number
        """The system's number of the error, if there is one."""


class HomeLocked(CovenantError):
    """Another process holds this home's lock."""


class SettingsError(CovenantError):
    """A setting that cannot be used. The message names it and the values that can."""


_LIKENESS_MIN: Final = 0.6
_LENGTH_MAX: Final = 256
"""A longer word is nobody's slip, and comparing it would cost more than it is worth."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What a refusal adds: `; did you mean max_uses?`, or nothing where no known word is near."""
    if len(word) > _LENGTH_MAX:
        return ""
    found = difflib.get_close_matches(word, tuple(known), n=1, cutoff=_LIKENESS_MIN)
    return f"; did you mean {found[0]}?" if found else ""
