"""Erasing finished tasks: the request and its outcome."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

ERASED_AT_ONCE_MAX = 500


class EraseTasks(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="erase", omit_defaults=True):
    """Selects finished tasks of one tenant, oldest first: those whose last change is too old, and those above a size.

    A batch looks at `limit` tasks, live ones among them. The next one goes on where the last one ended (`after_…`).
    """

    tenant: str
    """Empty: the tasks without a tenant, which are those of the mailbox."""
    before_ms: int
    bytes_max: int = 0
    """The approximate size that the tenant's finished tasks may have; 0: any size."""
    parties: tuple[str, ...] = ()
    """Public keys: only tasks that one of them sent or receives. Empty: all tasks."""
    wholly: bool = False
    """For a removed tenant: also erases the ids, and with them the promise that no id is used again."""
    limit: int = ERASED_AT_ONCE_MAX
    after_ms: int = 0
    after_no: int = 0


class Scrub(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="scrub"):
    """Makes the erased data of a removed tenant unreadable: drops its counts and rewrites files that hold its bytes."""

    tenant: str
    parties: tuple[str, ...]


class Erased(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """`bytes` is their approximate size. `more`: there may be more to erase after this batch."""

    tasks: int
    bytes: int
    after_ms: int = 0
    after_no: int = 0
    more: bool = False


class SearchedPlace(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A file or table that was searched for the traces of a tenant.

    `kept`: those of `found` that stay on purpose, such as audit rows.
    """

    place: str
    found: int
    kept: int = 0

    @property
    def left(self) -> int:
        return self.found - self.kept


def tenant_markers(tenant: str, keys: Sequence[str]) -> tuple[str, ...]:
    """The texts that mark a tenant's data in our JSON: its name after an agent's name, or its own keys."""
    return (f'@{tenant}"', f'"tenant":"{tenant}"', *keys)
