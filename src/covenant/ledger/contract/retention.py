"""Erasing finished tasks: what is asked for, and what was done."""

from __future__ import annotations

import msgspec

ERASED_AT_ONCE_MAX = 500


class EraseTasks(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="erase", omit_defaults=True):
    """Finished tasks of one tenant, the oldest first: what moved last before a time, and what is too much.

    A batch looks at `limit` tasks, live ones among them. The next one goes on where the last one ended (`after_…`).
    """

    tenant: str
    """Empty: the tasks that have none, which are those of the mailbox."""
    before_ms: int
    bytes_max: int = 0
    """What the tenant's finished tasks may take, about; 0: any size."""
    limit: int = ERASED_AT_ONCE_MAX
    after_ms: int = 0
    after_no: int = 0


class Erased(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """`bytes` is about what they took. `more`: there may be more to erase behind this batch."""

    tasks: int
    bytes: int
    after_ms: int = 0
    after_no: int = 0
    more: bool = False
