"""The audit: reads and verifies the chains, one a node."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from typing import Any, Final

import asyncpg
import msgspec
from msgspec.structs import replace

from covenant.ledger.contract.identities import LAST, AuditMark, AuditRecord
from covenant.ledger.postgres.connections import Connections, fetch_rows
from covenant.ledger.postgres.stored_task import Row
from covenant.model.grant import GENESIS, AuditHead, AuditReport, AuditVerification, StoredRow
from covenant.model.ids import PublicKey

PAGE_ROWS: Final = 1_000
ANCHORED: Final = "audit_anchored"
"""The type of a row that has the heads of all chains."""


class _Issuer(msgspec.Struct, frozen=True, gc=False):
    pubkey: str


class _Text(msgspec.Struct, frozen=True, gc=False):
    timestamp_ms: int
    issuer: _Issuer


class _Head(msgspec.Struct, frozen=True, gc=False):
    chain: str
    index: int
    chain_hash: str


class _Anchor(msgspec.Struct, frozen=True, gc=False):
    type: str
    heads: tuple[_Head, ...] = ()


class _AnchorRow(msgspec.Struct, frozen=True, gc=False):
    kind: _Anchor


_text: Final = msgspec.json.Decoder(_Text).decode
_anchor_row: Final = msgspec.json.Decoder(_AnchorRow).decode


class AuditReads:
    _connections: Connections

    async def audit_recent(
        self, issuer: PublicKey | None, limit: int, since_ms: int | None, before_ms: int = LAST, below: int = LAST
    ) -> Sequence[AuditRecord]:
        rows = await self._connections.rows(
            "audit", "recent", issuer=issuer, count=limit, since_ms=since_ms or 0, before_ms=before_ms, below=below
        )
        # Converted, so that a column of another type is found here.
        return tuple(msgspec.convert([_record(row) for row in rows], list[AuditRecord]))

    async def audit_before(self, before_ms: int) -> Sequence[AuditMark]:
        rows = await self._connections.rows("audit", "before", before_ms=before_ms)
        return tuple(AuditMark(row["rows"], row["through"], row["chain_hash"], row["chain"]) for row in rows)

    async def audit_heads(self) -> Sequence[AuditMark]:
        rows = await self._connections.rows("audit", "heads")
        marks = [AuditMark(row["audit_index"], row["audit_index"], row["audit_hash"], row["chain"]) for row in rows]
        return marks if len(marks) > 1 else ()

    async def audit_verify(self) -> AuditReport:
        return await self._verify(whole=True)

    async def audit_verify_new(self) -> AuditReport:
        return await self._verify(whole=False)

    async def _verify(self, *, whole: bool) -> AuditReport:
        """Verifies the chains, each from its anchor to the head in its writer's row."""
        reports: list[tuple[str, AuditHead, AuditReport]] = []
        cut: dict[tuple[str, str], str] = {}
        """By the chain that has the anchor and the chain that it is about: the first row that is missing or another."""
        async with self._connections.snapshot() as db:
            for chain in await fetch_rows("audit", db, "chains"):
                head = AuditHead(chain["audit_index"], chain["audit_hash"])
                anchor = _head(chain["anchor_index"], chain["anchor_hash"])
                verified = _head(chain["verified_index"], chain["verified_hash"])
                start = anchor if whole or verified.index < anchor.index else verified
                verification = AuditVerification(start, head)
                if 0 < chain["first"] <= anchor.index:
                    verification.add_finding(f"row {chain['first']} is before the anchor at {anchor.index}")
                after, seen, page = start.index, dict[str, _Head](), partial(fetch_rows, "audit", db, "page")
                while rows := await page(chain=chain["chain"], after=after, count=PAGE_ROWS):
                    verification.add_rows(map(_stored, rows))
                    async for other, failure in _cut(db, chain["chain"], _new_heads(rows, seen)):
                        cut.setdefault((chain["chain"], other), failure)
                    after = rows[-1]["idx"]
                reports.append((chain["chain"], head, verification.report()))
        for name, head, report in reports:
            if report.valid and report.events:
                await self._mark(name, head)
        report = _together([(name, report) for name, _, report in reports])
        return replace(report, valid=False, failures=(*report.failures, *cut.values())) if cut else report

    async def _mark(self, chain: str, head: AuditHead) -> None:
        await self._connections.rows(
            *("audit", "verified"),
            chain=chain,
            index=head.index,
            hash=head.chain_hash,
            genesis=GENESIS.chain_hash,
        )


def _anchors(text: str) -> Sequence[_Head]:
    """The heads of other chains in a row. An undecodable row is found by the hash of its own chain."""
    if f'"{ANCHORED}"' not in text:
        return ()
    try:
        kind = _anchor_row(text).kind
    except msgspec.MsgspecError:
        return ()
    return kind.heads if kind.type == ANCHORED else ()


def _new_heads(rows: Iterable[Row], seen: dict[str, _Head]) -> list[_Head]:
    """The heads of other chains in these rows that are not the same as before. `seen`: the last head of each chain."""
    heads: list[_Head] = []
    for row in rows:
        for head in _anchors(row["row"]):
            if seen.get(head.chain) != head:
                seen[head.chain] = head
                heads.append(head)
    return heads


async def _cut(db: asyncpg.Connection[Any], by: str, heads: Sequence[_Head]) -> AsyncIterator[tuple[str, str]]:
    """Chains that lack a row which the chain of `by` has recorded, whatever was anchored after it."""
    if not heads:
        return
    rows = await fetch_rows(
        *("audit", db, "cut"),
        chains=[head.chain for head in heads],
        idxs=[head.index for head in heads],
        hashes=[head.chain_hash for head in heads],
    )
    for row in rows:
        fault = "is missing" if row["missing"] else "is another one"
        yield row["chain"], f"{row['chain']}: row {row['idx']}, which the chain of {by} has seen, {fault}"


def _record(row: Row) -> dict[str, Any]:
    named = {name: row[name] for name in ("row", "chain", "place")}
    return named | {"index": row["idx"], "timestamp_ms": row["ts_ms"]}


def _head(index: int, chain_hash: str) -> AuditHead:
    return AuditHead(index, chain_hash) if index else GENESIS


def _stored(row: Row) -> StoredRow:
    text = row["row"]
    try:
        content = _text(text)
        coherent = (content.timestamp_ms, content.issuer.pubkey) == (row["ts_ms"], row["issuer"])
    except msgspec.MsgspecError:
        coherent = False
    return StoredRow(row["idx"], text.encode().hex(), row["chain_hash"].encode().hex(), coherent)


def _together(reports: Sequence[tuple[str, AuditReport]]) -> AuditReport:
    """One report of all chains: its root covers their heads, in the order of their names."""
    if len(reports) == 1:
        return reports[0][1]
    heads = "\n".join(f"{name} {report.root_hash_hex}" for name, report in sorted(reports))
    return AuditReport(
        events=sum(report.events for _, report in reports),
        anchors=sum(report.anchors for _, report in reports),
        valid=all(report.valid for _, report in reports),
        root_hash_hex=hashlib.sha256(heads.encode()).hexdigest(),
        failures=tuple(_failures(reports)),
    )


def _failures(reports: Iterable[tuple[str, AuditReport]]) -> Iterable[str]:
    return (f"{name}: {failure}" for name, report in reports for failure in report.failures)
