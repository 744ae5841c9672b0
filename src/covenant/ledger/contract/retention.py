"""Erasing finished tasks: what is asked for, and what was done."""

from __future__ import annotations

from collections.abc import Sequence

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
    parties: tuple[str, ...] = ()
    """Public keys: only tasks that one of them has sent or is to do. None named: whosever they are."""
    wholly: bool = False
    """Of a tenant that is removed: the ids go too, and with them the promise that none of them is used again."""
    limit: int = ERASED_AT_ONCE_MAX
    after_ms: int = 0
    after_no: int = 0


class Scrub(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="scrub"):
    """What was erased of a removed tenant is to be unreadable: its counts go, and what has its bytes is rewritten."""

    tenant: str
    parties: tuple[str, ...]


class Erased(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """`bytes` is about what they took. `more`: there may be more to erase behind this batch."""

    tasks: int
    bytes: int
    after_ms: int = 0
    after_no: int = 0
    more: bool = False


class SearchedPlace(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A file or table in which the traces of a tenant were looked for.

    `kept`: those among `found` that stay on purpose, such as rows of the audit.
    """

    place: str
    found: int
    kept: int = 0

    @property
    def left(self) -> int:
        return self.found - self.kept


def tenant_markers(tenant: str, keys: Sequence[str]) -> tuple[str, ...]:
    """What everything of a tenant has in it, as JSON is written here: its name behind an agent's, or its own keys."""
    return (f'@{tenant}"', f'"tenant":"{tenant}"', *keys)
