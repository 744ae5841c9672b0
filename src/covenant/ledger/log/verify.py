"""Verification of the audit chain: every row hashed anew and linked to the one before it, and the end compared with
what the ledger itself remembers. Names what it finds by index: a changed row, missing rows, a cut end, a wrong anchor.

After a fault it goes on from the hash that is stored there, so that one changed row is one finding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from covenant.model.audit_chain import AuditHead, AuditReport, link

PAGE_ROWS: Final = 1_000
FINDINGS_MAX: Final = 100


class StoredRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One row as it is stored, in hexadecimal. `coherent` is false if a column says other than the text does."""

    index: int
    row_hex: str
    chain_hash_hex: str
    coherent: bool


class Marks(msgspec.Struct, frozen=True, gc=False):
    """`anchor` is where a purge cut the chain, `verified` how far it was found valid; `first` the lowest index."""

    anchor: AuditHead
    verified: AuditHead
    first: int


class Verification:
    """Fed with rows in order, from the one after `start`; `head` is the newest row that the ledger knows of."""

    def __init__(self, start: AuditHead, head: AuditHead) -> None:
        self._start = start
        self._head = head
        self._at = start
        self._rows = 0
        self._findings: list[str] = []

    def find(self, finding: str) -> None:
        self._findings.append(finding)

    def take(self, stored: Iterable[StoredRow]) -> None:
        for row in stored:
            self._row(row.index, bytes.fromhex(row.row_hex), row.chain_hash_hex, coherent=row.coherent)

    def _row(self, index: int, row: bytes, chain_hash_hex: str, *, coherent: bool) -> None:
        self._rows += 1
        chain_hash = bytes.fromhex(chain_hash_hex).decode(errors="replace")
        if index > self._at.index + 1:
            self.find(f"{_rows(self._at.index + 1, index - 1)} missing")
        elif not _follows(self._at, row, chain_hash):
            anchored = self._rows == 1 and index > 1
            self.find(f"row {index} was changed" + (", or the anchor before it" if anchored else ""))
        elif not coherent:
            self.find(f"row {index} has another issuer or time than its text says")
        self._at = AuditHead(index, chain_hash)
        if index == self._head.index and chain_hash != self._head.chain_hash:
            self.find(f"row {index} is not the last one that the ledger wrote")

    def report(self) -> AuditReport:
        if self._at.index < self._head.index:
            self.find(f"{_rows(self._at.index + 1, self._head.index)} missing: the end was cut off")
        findings = self._findings[:FINDINGS_MAX]
        if len(self._findings) > FINDINGS_MAX:
            findings.append(f"and {len(self._findings) - FINDINGS_MAX} more")
        return AuditReport(
            events=self._rows,
            anchors=max(self._head.index, self._at.index) - self._start.index,
            valid=not findings,
            root_hash_hex=self._at.chain_hash,
            failures=tuple(findings),
        )


def _follows(at: AuditHead, row: bytes, chain_hash: str) -> bool:
    try:
        return link(at, row.decode()).chain_hash == chain_hash
    except UnicodeDecodeError:
        return False


def _rows(first: int, last: int) -> str:
    return f"row {first} is" if first == last else f"rows {first} to {last} are"
