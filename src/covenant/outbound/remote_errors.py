"""What can come of asking a remote agent, besides an answer and besides a call that fails (see `failures`).

CovenantError
└── RemoteError            names the remote's task where it is known
    ├── NoCard             no card was found, or it cannot be used: unreadable, unsigned, no way to call it
    ├── RemoteRefused      the remote understood and said no; `code` is ours, the rest is what it said
    ├── OutcomeUnknown     the message may have been taken: sending it again may do the work twice
    └── RemoteTimedOut     no answer in the caller's time; the remote was told to stop
"""

from __future__ import annotations

from typing import Final, Literal

from covenant.model.errors import CovenantError

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

PASSING: Final = frozenset({"over_limit", "unavailable"})
"""Refusals that may be different in a while."""


class RemoteError(CovenantError):
    code: str = "remote_error"

    def __init__(self, message: str, *, task_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.task_id = task_id


class NoCard(RemoteError):
    code = "no_card"

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """What the last place that was looked at answered, if it answered."""


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
    ) -> None:
        super().__init__(message, task_id=task_id)
        self.code = code
        self.status = status
        self.rpc_code = rpc_code
        self.retry_after_s = retry_after_s


class OutcomeUnknown(RemoteError):
    code = "outcome_unknown"


class RemoteTimedOut(RemoteError):
    code = "timed_out"
