"""What the operator asks about push configurations."""

from __future__ import annotations

from covenant.wire.mailbox import Request, Whole


class ListPushes(Request, frozen=True, kw_only=True):
    """`dead`: only those that were given up."""

    limit: Whole | None = None
    dead: bool | None = None


class RetryPush(Request, frozen=True, kw_only=True):
    task_id: str
    push_id: str
