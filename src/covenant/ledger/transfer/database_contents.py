"""The contents of a database, read within one transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any, Final

import asyncpg
import msgspec
from msgspec.structs import replace

from covenant.ledger.contract.blobs import CHUNK_BYTES
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine import effects
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.priorities import HEAD_START
from covenant.ledger.machine.states import FOLLOWING, LEASED, QUEUED, SETTLED, State
from covenant.ledger.machine.view import Cached, Remembered
from covenant.ledger.postgres.connections import fetch_rows
from covenant.ledger.postgres.queue_head import PLACE_BITS
from covenant.ledger.postgres.registers import (
    AGENT,
    GRANT,
    IDENTITY,
    PEER,
    RESIDENT,
    REVOKED,
    SECRET,
    TENANT,
    decode_row,
)
from covenant.ledger.postgres.sql import statement
from covenant.ledger.postgres.stored_task import (
    Row,
    decode_delegation,
    decode_entry,
    decode_message,
    decode_push,
    decode_rest,
    uncolumn,
)
from covenant.ledger.transfer.contents import AgentNotes, AuditChain, AuditLine, Contents, MovedBlob
from covenant.ledger.transfer.task_record import TaskEventText, TaskFacts, TaskRecord, read_events
from covenant.model.errors import CovenantError
from covenant.model.grant import AuditHead
from covenant.model.ids import PublicKey
from covenant.model.peers.delegation import LoggedMessage, ReceivedEnvelope
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.usage_by_day import PeerUsage
from covenant.model.settings import Limits
from covenant.model.task import CacheKey

PAGE_ROWS: Final = 200
MOVED: Final = frozenset(
    """
    audit audit_chains blob blob_chunk blob_reference delegations envelopes events grant_uses ids live messages notes
    parcels     peer_usage peers_heard pushes queue register_rows requests results shared tasks writers
    """.split()
)
"""The tables that are moved."""
NOT_MOVED: Final = frozenset(
    "blob_upload counted lane_counts ledger_level moves news nodes registers secrets singletons".split()
)
"""The tables that are made anew: derived from others, about the daemons' runs, or encrypted for one database."""
_REGISTERS: Final[dict[str, Callable[[LedgerState, Any], None]]] = {
    IDENTITY: lambda state, body: state.put_identity(body),
    GRANT: lambda state, body: state.put_grant(body),
    TENANT: lambda state, body: state.put_tenant(body),
    AGENT: lambda state, body: state.put_agent(body),
    PEER: lambda state, body: state.put_peer(body),
    REVOKED: lambda state, body: state.put_revoked(body, body.at_ms),
    RESIDENT: lambda *_: None,  # each daemon announces its own
    SECRET: lambda *_: None,  # the home has its own
}

_rows = partial(fetch_rows, "transfer")


def _decoder(kind: Any) -> Callable[[str], Any]:
    return msgspec.json.Decoder(kind).decode


_message, _cache_key, _cached, _remembered = map(_decoder, (LoggedMessage, CacheKey, Cached, Remembered))


class DatabaseContents(Contents):
    def __init__(self, connection: asyncpg.Connection[Any], state: LedgerState, end: int) -> None:
        self._connection = connection
        self.state = state
        self.end = end

    async def tasks(self) -> AsyncIterator[TaskRecord]:
        query = statement("transfer", "tasks")
        page: list[Row] = []
        async for row in self._connection.cursor(query.text, prefetch=PAGE_ROWS):
            page.append(row)
            if len(page) == PAGE_ROWS:
                for record in await self._records(page):
                    yield record
                page = []
        for record in await self._records(page):
            yield record

    async def _records(self, rows: list[Row]) -> Iterable[TaskRecord]:
        events: dict[int, list[TaskEventText]] = {row["no"]: [] for row in rows}
        for each in await _rows(self._connection, "events", nos=list(events)):
            event = TaskEventText(each["ts_ms"], each["kind"], each["generation"], each["body"])
            events[each["no"]].append(event)
        return [read_events(_facts(row), events[row["no"]]) for row in rows]

    async def erased_ids(self) -> AsyncIterator[str]:
        for row in await _rows(self._connection, "erased"):
            yield row["task_id"]

    async def chains(self) -> list[AuditChain]:
        return [
            AuditChain(
                row["chain"],
                AuditHead(row["audit_index"], row["audit_hash"]),
                AuditHead(row["anchor_index"], row["anchor_hash"]),
            )
            for row in await _rows(self._connection, "chains")
        ]

    async def audit(self) -> AsyncIterator[AuditLine]:
        async for row in self._connection.cursor(statement("transfer", "audit").text, prefetch=PAGE_ROWS):
            yield AuditLine(row["chain"], row["idx"], row["ts_ms"], row["issuer"], row["chain_hash"], row["row"])

    async def notes(self) -> AsyncIterator[AgentNotes]:
        for row in await _rows(self._connection, "notes"):
            yield AgentNotes(row["tenant"], row["agent_id"], row["body"])

    async def blobs(self) -> AsyncIterator[MovedBlob]:
        for row in await _rows(self._connection, "blobs"):
            references = tuple(zip(row["ids"], row["since"], strict=True))
            facts = (row["space"], row["sha256"], row["size"], row["stored_at_ms"], references)
            yield MovedBlob(*facts, key=str(row["upload_id"]))

    async def blob_bytes(self, blob: MovedBlob) -> AsyncIterator[bytes]:
        for no in range(-(-blob.size // CHUNK_BYTES)):
            rows = await _rows(self._connection, "chunk", upload_id=int(blob.key), no=no)
            if not rows:
                raise CovenantError(f"the file {blob.sha256} has lost bytes; `covenant doctor` lists such files")
            yield rows[0]["body"]


async def read_database(connection: asyncpg.Connection[Any], limits: Limits) -> DatabaseContents:
    """Raises CovenantError for tables that this program cannot move."""
    tables = {row["tablename"] for row in await _rows(connection, "tables")}
    if unknown := tables - MOVED - NOT_MOVED:
        raise CovenantError(f"the database has tables that are not the ledger's: {', '.join(sorted(unknown))}")
    state = LedgerState(limits)
    await _read_registers(connection, state)
    for row in await _rows(connection, "pushes"):
        state.put_push(decode_push(row["body"]))
    await _read_peers(connection, state)
    for row in await _rows(connection, "cached"):
        if row["cached"] is not None:
            state.cache.put(_cache_key(row["name"]), _cached(row["cached"]))
    for row in await _rows(connection, "requests"):
        key = (row["verb"], PublicKey(uncolumn(row["holder"])), uncolumn(row["request_id"]))
        state.requests[key] = _remembered(row["given"])
    rows = [(row, decode_entry(row)) for row in await _rows(connection, "live")]
    for _, entry in sorted(rows, key=_lane_place):
        state.restore(entry)
    end = await connection.fetchval(statement("transfer", "end").text)
    return DatabaseContents(connection, state, end)


def _lane_place(found: tuple[Row, Entry]) -> tuple[int, int, int]:
    """The key by which tasks enter the lanes of the state in their order: a priority counts again as a task enters."""
    row, entry = found
    if entry.state is QUEUED:
        batch, within = divmod(row["place"], 1 << PLACE_BITS)
        return 0, batch + entry.task.priority * HEAD_START, within
    if entry.state is LEASED:
        return 1, row["touched"] or 0, row["no"]
    if entry.state is SETTLED:
        return 2, row["settled_place"], row["no"]
    return 3 if entry.state is FOLLOWING else 4, row["place"], row["no"]


async def _read_registers(connection: asyncpg.Connection[Any], state: LedgerState) -> None:
    uses = {row["signature"]: row["used"] for row in await _rows(connection, "uses")}
    last_seen = {row["peer"]: row["heard_at_ms"] for row in await _rows(connection, "heard")}
    for row in await fetch_rows("nodes", connection, "all_registers"):
        kind, _, body = decode_row(row["kind"], row["name"], row["body"])
        if body is None:
            continue
        if kind == GRANT:
            body = replace(body, used=uses.get(body.signature_b58, 0))
        elif kind == PEER:
            body = effects.last_heard(body, max(body.heard_at_ms, last_seen.get(body.id, 0)))
        _REGISTERS[kind](state, body)


async def _read_peers(connection: asyncpg.Connection[Any], state: LedgerState) -> None:
    for row in await _rows(connection, "delegations"):
        state.put_delegation(decode_delegation(row["body"]))
    for row in await _rows(connection, "parcels"):
        state.put_outbox_message(decode_message(row["body"]))
    for row in await _rows(connection, "envelopes"):
        sender, jti = InstanceId(row["sender"]), uncolumn(row["jti"])
        state.put_envelope(ReceivedEnvelope(sender=sender, jti=jti, typ="", until_ms=row["until_ms"]))
    for row in await _rows(connection, "messages"):
        state.messages.append(_message(row["body"]))
    for row in await _rows(connection, "usage"):
        state.add_usage(msgspec.convert(dict(row), PeerUsage))


def _facts(row: Row) -> TaskFacts:
    rest = decode_rest(row["rest"])
    return TaskFacts(
        task_id=row["task_id"],
        created_at_ms=row["created_at_ms"],
        updated_at_ms=row["updated_at_ms"],
        ledger_state=State(row["state"]).wire_name,
        a2a_state=row["a2a_state"],
        digest=rest.digest,
        generation=row["generation"],
        turn=row["turn"],
        attempt=row["attempt"],
        ending=rest.ending,
        cause=rest.cause,
    )
