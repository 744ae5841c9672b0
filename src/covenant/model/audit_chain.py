"""Audit rows: who was let in, who was not, and what was repaired. One hash chain holds them together.

A row's hash covers its exact bytes; its chain hash covers the hash before it and its own, so a changed,
missing or moved row breaks every later one.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from covenant.model.ids import AgentId


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    timestamp_ms: int
    issuer: AgentId
    kind: dict[str, Any] | msgspec.Raw
    """`type` and the fields of that type, as docs/formats/audit.md lists them; nulls are always present.

    Raw where it was encoded before.
    """


class AuditHead(msgspec.Struct, frozen=True, gc=False):
    """The newest row: how many there have been, and the chain's hash. A cut tail falls short of it."""

    index: int = 0
    chain_hash: str = "0" * 64


GENESIS: Final = AuditHead()


def link(head: AuditHead, row_text: str) -> AuditHead:
    """The head after one more row."""
    row_hash = hashlib.sha256(row_text.encode()).hexdigest()
    chained = hashlib.sha256(f"{head.chain_hash}\n{row_hash}".encode()).hexdigest()
    return AuditHead(head.index + 1, chained)


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What verification found. `valid` is false when `failures` is not empty."""

    events: int
    anchors: int
    valid: bool
    root_hash_hex: str
    failures: tuple[str, ...] = ()
