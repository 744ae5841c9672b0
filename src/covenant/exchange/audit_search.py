"""Finds rows of the audit by kind, issuer and time: newest first, in pages, each after a bounded search."""

from __future__ import annotations

from typing import Final

import msgspec

from covenant.exchange.access.principals import Principal
from covenant.exchange.request_checks import check_limit
from covenant.ledger.contract.identities import LAST, AuditLedger, AuditRecord

LIMIT_MAX: Final = 1_000
CHUNK_ROWS: Final = 1_000
"""Rows read at once when rows are filtered by their content."""
CHUNKS_MAX: Final = 20
"""The most chunks that a page searches. If it is not full by then, its `next` continues from there."""


class AuditFilter(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`issuer` is the beginning of a display; `since_ms` is included, `before_ms` is not."""

    type: str | None = None
    issuer: str | None = None
    since_ms: int | None = None
    before_ms: int | None = None


class AuditPage(msgspec.Struct, frozen=True, gc=False):
    """`records` are oldest first. `next`: rows below this position were not searched yet; None: there are none."""

    records: tuple[AuditRecord, ...]
    next: int | None


class _Kind(msgspec.Struct, frozen=True, gc=False):
    type: str


class _Issuer(msgspec.Struct, frozen=True, gc=False):
    display: str = ""


class _Row(msgspec.Struct, frozen=True, gc=False):
    kind: _Kind
    issuer: _Issuer


_row: Final = msgspec.json.Decoder(_Row).decode


async def find_audit(
    ledger: AuditLedger, principal: Principal, filters: AuditFilter, limit: int, below: int = LAST
) -> AuditPage:
    """The newest rows below a position that pass the filter. A caller that is not the operator finds its own rows."""
    check_limit(limit, LIMIT_MAX)
    narrow = filters.type is not None or filters.issuer is not None
    before_ms = LAST if filters.before_ms is None else filters.before_ms
    at_once = CHUNK_ROWS if narrow else limit
    found: list[AuditRecord] = []
    for _ in range(CHUNKS_MAX):
        rows = await ledger.audit_recent(principal.viewer, at_once, filters.since_ms, before_ms, below)
        for record in reversed(rows):
            if narrow and not _passes(filters, record):
                continue
            found.append(record)
            if len(found) == limit:
                return AuditPage(tuple(reversed(found)), record.place)
        if len(rows) < at_once:
            return AuditPage(tuple(reversed(found)), None)
        below = rows[0].place
    return AuditPage(tuple(reversed(found)), below)


def _passes(filters: AuditFilter, record: AuditRecord) -> bool:
    row = _row(record.row)
    if filters.type is not None and row.kind.type != filters.type:
        return False
    return filters.issuer is None or row.issuer.display.startswith(filters.issuer)
