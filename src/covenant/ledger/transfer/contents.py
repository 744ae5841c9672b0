"""The contents of a ledger, in any engine; and a fingerprint of them, by which two ledgers are compared."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
from msgspec.structs import astuple, replace

from covenant.ledger.embedded.journal.snapshot import Head, state_lines
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.transfer.task_record import TaskRecord
from covenant.model.errors import CovenantError
from covenant.model.grant import AuditHead, link
from covenant.model.task import without_body

_encode: Final = msgspec.json.Encoder(order="deterministic").encode


class AuditChain(msgspec.Struct, frozen=True, gc=False):
    chain: str
    head: AuditHead
    anchor: AuditHead


class AuditLine(msgspec.Struct, frozen=True, gc=False):
    chain: str
    index: int
    ts_ms: int
    issuer: str
    chain_hash: str
    row: str


class MovedBlob(msgspec.Struct, frozen=True, gc=False):
    """`key` is the place of its bytes, in the engine's own form."""

    space: str
    sha256: str
    size: int
    stored_at_ms: int
    references: tuple[tuple[str, int], ...]
    """Ids of tasks, and the time of each reference."""
    key: str = ""


class AgentNotes(msgspec.Struct, frozen=True, gc=False):
    """An agent's notes, as JSON."""

    tenant: str
    agent_id: str
    body: str


class Contents(Protocol):
    """Every reader can be called again, and returns the same."""

    state: LedgerState
    """The live tasks and the registers. Bodies of tasks may be missing."""
    end: int
    """How many records the ledger has, as peers know it: the target counts on from here."""

    def tasks(self) -> AsyncIterator[TaskRecord]:
        """All tasks, live and ended, oldest first."""

    def erased_ids(self) -> AsyncIterator[str]:
        """Ids of erased tasks, which must not be used again."""

    async def chains(self) -> Sequence[AuditChain]: ...

    def audit(self) -> AsyncIterator[AuditLine]:
        """Audit rows, in order."""

    def notes(self) -> AsyncIterator[AgentNotes]: ...
    def blobs(self) -> AsyncIterator[MovedBlob]: ...

    def blob_bytes(self, blob: MovedBlob) -> AsyncIterator[bytes]: ...


class Measure(msgspec.Struct, frozen=True, gc=False):
    count: int
    digest: str


class _SetDigest:
    """A digest of items in any order: the sum of their digests."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0

    def add(self, data: bytes) -> None:
        self.count += 1
        self._sum += int.from_bytes(hashlib.sha256(data).digest())

    def measure(self) -> Measure:
        return Measure(self.count, f"{self._sum % (1 << 256):064x}")


async def measure(contents: Contents) -> Mapping[str, Measure]:
    """The number of items of each kind, and a digest of them. Every byte of every blob is read."""
    sums: dict[str, _SetDigest] = {}

    def add(kind: str, data: bytes) -> None:
        sums.setdefault(kind, _SetDigest()).add(data)

    for kind, item in _state_items(contents.state):
        add(kind, _encode(item))
    async for record in contents.tasks():
        add("task", record.comparable())
    async for task_id in contents.erased_ids():
        add("erased_id", task_id.encode())
    async for line in contents.audit():
        add("audit", _encode((line.issuer, line.ts_ms, line.row)))
    async for noted in contents.notes():
        add("notes", _encode(noted))
    async for blob in contents.blobs():
        digest = hashlib.sha256()
        async for data in contents.blob_bytes(blob):
            digest.update(data)
        add("blob", _encode((replace(blob, key=""), digest.hexdigest())))
    return {kind: each.measure() for kind, each in sorted(sums.items())}


def _state_items(state: LedgerState) -> Sequence[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    line: Any
    for line in state_lines(0, state, lambda task_id: without_body(state.entries[task_id].task)):
        if isinstance(line, Head):
            continue  # the audit is compared row by row
        if (envelope := getattr(line, "envelope", None)) is not None:
            items.append(("envelope", (envelope.sender, envelope.jti, envelope.until_ms)))
        elif (entry := getattr(line, "entry", None)) is not None:
            items.append(("live_task", astuple(state.entries[entry.task.id].without_body())))
        else:
            items.append((str(line.__struct_config__.tag), line))
    items += [("leader", each) for each in state.leaders.items()]
    for name, lanes in (("queue", state.queue), ("results", state.results)):
        for owner in lanes.owners():
            items.append((name, (owner, lanes.first(owner, len(lanes)))))
    return items


async def check_chains(contents: Contents) -> None:
    """Raises CovenantError if any audit chain is invalid: a move would hide that."""
    chains = {each.chain: each for each in await contents.chains()}
    heads = {name: each.anchor for name, each in chains.items()}
    async for line in contents.audit():
        head = heads[line.chain] = link(heads[line.chain], line.row)
        if head != AuditHead(line.index, line.chain_hash):
            raise CovenantError(
                f"row {line.index} of the audit chain {line.chain} does not follow the one before it, so the audit was "
                "changed; `covenant audit verify` says where, and a backup has the rows as they were"
            )
    for name, each in chains.items():
        if heads[name] != each.head:
            raise CovenantError(f"the audit chain {name} ends before its head: rows of it are gone")
