"""Writes the contents of a ledger into an empty database, within the caller's transaction.

Rows are copied, not inserted. Counters are computed from the written rows; places begin anew, in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count
from typing import Any, Final

import asyncpg
import msgspec
from msgspec.structs import asdict, replace

from covenant.ledger.contract.blobs import CHUNK_BYTES
from covenant.ledger.contract.task_query import excerpt
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import DRAINED, LEASED, QUEUED, SETTLED
from covenant.ledger.postgres.batch_inputs import NUMBERS
from covenant.ledger.postgres.batch_rows import EVENTS, LIVE, QUEUE, RESULTS, TASKS, live_row, push_row, task_row
from covenant.ledger.postgres.cache_rows import key_text
from covenant.ledger.postgres.connections import fetch_value
from covenant.ledger.postgres.counters import ALL, KEPT_BYTES, Counters, contribution, count_delegation, count_push
from covenant.ledger.postgres.queue_head import PLACE_BITS, queue_place
from covenant.ledger.postgres.registers import AGENT, GRANT, IDENTITY, PEER, REVOKED, TENANT, agent_name
from covenant.ledger.postgres.stored_task import Slot, column, encode_text
from covenant.ledger.transfer.contents import Contents
from covenant.ledger.transfer.task_record import TaskRecord
from covenant.model.errors import CovenantError
from covenant.model.ids import TaskId
from covenant.model.task import Cause, Ending, Lease, Result, Task, utf8_length, weigh_result

ROWS_AT_ONCE: Final = 2_000
BYTES_AT_ONCE: Final = 8 << 20

_task: Final = msgspec.json.Decoder(Task).decode
_result: Final = msgspec.json.Decoder(Result).decode
_lease: Final = msgspec.json.Decoder(Lease).decode

_COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    table: tuple(name.partition("_")[2] for name in names)
    for table, names in (("live", LIVE), ("tasks", TASKS), ("events", EVENTS), ("queue", QUEUE), ("results", RESULTS))
} | {"ids": ("task_id", "no")}


class DatabaseWriter:
    def __init__(self, connection: asyncpg.Connection[Any], contents: Contents) -> None:
        self._connection = connection
        self._contents = contents
        self._state = contents.state
        self._counts = Counters()
        self._places = count(1)
        self._lanes: dict[TaskId, int] = {entry.task.id: next(self._places) for entry in self._state.ordered()}
        """The place of each live task, in batches: as if each had arrived alone."""
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in _COLUMNS}
        self._size = 0

    async def write(self, chain: str) -> None:
        """`chain`: the name of the audit chain in the database."""
        task_no = await self._write_tasks()
        await self._write_registers()
        await self._write_pushes_and_shared()
        await self._write_peers()
        await self._write_audit(chain)
        notes = [(each.tenant, each.agent_id, 1, each.body) async for each in self._contents.notes()]
        await self._copy("notes", ("tenant", "agent_id", "version", "body"), notes)
        await self._write_blobs()
        await self._copy(
            "lane_counts", ("kind", "lane", "writer", "n"), [(kind, lane, 0, n) for kind, lane, n in self._counts]
        )
        block = max(task_no - 1, 0) // NUMBERS * NUMBERS + 1
        await self._run("numbers", task_no=block, place=next(self._places))

    async def _run(self, name: str, **values: Any) -> Any:
        return await fetch_value("transfer", self._connection, name, **values)

    async def _copy(self, table: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        if rows:
            await self._connection.copy_records_to_table(table, records=rows, columns=columns)

    # Tasks

    async def _write_tasks(self) -> int:
        no, live = 0, set(self._state.entries)
        async for task_id in self._contents.erased_ids():
            no += 1
            self._rows["ids"].append((task_id, no))
            await self._flush()
        async for record in self._contents.tasks():
            no += 1
            live.discard(TaskId(record.facts.task_id))
            self._add_task(no, record)
            await self._flush()
        if live:
            raise CovenantError(f"the archive does not have the task {live.pop()}; `covenant doctor` says more")
        await self._flush(whole=True)
        return no

    async def _flush(self, *, whole: bool = False) -> None:
        if whole or self._size > BYTES_AT_ONCE or len(self._rows["ids"]) >= ROWS_AT_ONCE:
            for table, rows in self._rows.items():
                await self._copy(table, _COLUMNS[table], rows)
                rows.clear()
            self._size = 0

    def _add_task(self, no: int, record: TaskRecord) -> None:
        task_id = TaskId(record.facts.task_id)
        task = _task(record.parts.task or "null")
        entry = self._state.entries.get(task_id) or _finished(record, task)
        slot = Slot(no)
        slot.n = len(record.events)
        slot.intent = column(excerpt(task.intent_text))
        slot.size = sum(utf8_length(event.text) for event in record.events)
        slot.ended_n = max((n for n, each in enumerate(record.events, 1) if each.kind == "task_settled"), default=None)
        self._size += slot.size
        self._rows["ids"].append((task_id, no))
        for n, event in enumerate(record.events, 1):
            self._rows["events"].append((no, n, event.generation, event.ts_ms, event.kind, event.text))
        self._counts.change(None, contribution(entry, listed=True))
        if entry.state is DRAINED:
            slot.settled_place = no
            self._rows["tasks"].append(task_row(entry, slot))
            self._counts.count("resolved", ALL, entry.events)
            self._counts.count(KEPT_BYTES, task.tenant or ALL, slot.size)
        else:
            self._add_live(entry, slot)

    def _add_live(self, entry: Entry, slot: Slot) -> None:
        task, place = entry.task, self._lanes[entry.task.id] << PLACE_BITS
        slot.place = queue_place(place, task.priority) if entry.state is QUEUED else place
        slot.pushed = task.id in self._state.pushes_by_task
        if entry.state is QUEUED:
            self._rows["queue"].append((task.recipient.pubkey, slot.place, slot.no))
        elif entry.state is LEASED:
            slot.touched = place
        elif entry.state is SETTLED:
            slot.settled_place = place
            self._rows["results"].append((task.sender.pubkey, place, slot.no))
        self._rows["live"].append(live_row(entry, slot))

    # Registers

    def _registers(self) -> Iterator[tuple[str, str, Any]]:
        state = self._state
        for identity in state.identities_by_token.values():
            yield IDENTITY, identity.token_sha256, identity
        for grant in state.grants_by_signature.values():
            yield GRANT, grant.signature_b58, replace(grant, used=0)
        for tenant in state.tenants.values():
            yield TENANT, tenant.name, tenant
        for stored in state.stored_agents.values():
            for agent in stored.values():
                yield AGENT, agent_name(agent.tenant, agent.id), agent
        for peer in state.peers_by_id.values():
            yield PEER, peer.id, peer
        for token in state.tokens_revoked.values():
            yield REVOKED, token.token_id, token

    async def _write_registers(self) -> None:
        rows = [
            (kind, column(name), 1, next(self._places), encode_text(body)) for kind, name, body in self._registers()
        ]
        await self._copy("register_rows", ("kind", "name", "version", "made", "body"), rows)
        await self._run("registers")
        grants = self._state.grants_by_signature.values()
        uses = [(grant.signature_b58, grant.used) for grant in grants if grant.used]
        await self._copy("grant_uses", ("signature", "used"), uses)

    # Pushes, cache and requests

    async def _write_pushes_and_shared(self) -> None:
        state, counts = self._state, self._counts
        rows = [push_row(push, next(self._places), state.limits) for push in state.all_pushes()]
        for push in state.all_pushes():
            count_push(counts, push, 1)
        await self._copy("pushes", ("task_id", "id", "made", "idle_at_ms", "body"), rows)
        rows = [
            (verb, column(holder), column(request_id), next(self._places), encode_text(remembered))
            for (verb, holder, request_id), remembered in state.requests.items()
        ]
        counts.count("requests", ALL, len(rows))
        await self._copy("requests", ("verb", "holder", "request_id", "place", "given"), rows)
        await self._write_shared()

    async def _write_shared(self) -> None:
        cached = dict(self._state.cache.items())
        rows: list[tuple[Any, ...]] = []
        for key in dict.fromkeys((*cached, *self._state.leaders)):
            kept, leader = cached.get(key), self._state.leaders.get(key)
            found: tuple[Any, ...] = (None, None, 0, None)
            if kept is not None:
                size = weigh_result(kept.result)
                found = (encode_text(kept), kept.cached_at_ms, size, next(self._places))
                self._counts.add((("cached", ALL, 1), ("cached_bytes", ALL, size)))
            rows.append((key_text(key), encode_text(key), leader, *found))
        columns = ("key", "name", "leader", "cached", "cached_at_ms", "cached_bytes", "cached_place")
        await self._copy("shared", columns, rows)

    async def _write_peers(self) -> None:
        state, counts = self._state, self._counts
        rows: list[tuple[Any, ...]] = []
        for each in state.delegations_in_order():
            count_delegation(counts, each, 1)
            key = (each.role.value, each.peer, column(each.offer_id), each.task_id)
            rows.append((*key, next(self._places), each.ended, encode_text(each)))
        columns = ("role", "peer", "offer_id", "task_id", "moved", "ended", "body")
        await self._copy("delegations", columns, rows)
        rows = []
        for message in state.all_outbox_messages():
            counts.count("parcels", message.peer, 1)
            key_of = message.delegation
            place = (key_of.role.value, key_of.peer, column(key_of.offer_id), message.seq, next(self._places))
            rows.append((*place, encode_text(message)))
        await self._copy("parcels", ("role", "peer", "offer_id", "seq", "made", "body"), rows)
        rows = [(each.sender, column(each.jti), each.until_ms) for each in state.all_envelopes()]
        await self._copy("envelopes", ("sender", "jti", "until_ms"), rows)
        last_seen = [(peer.id, peer.heard_at_ms) for peer in state.peers_by_id.values() if peer.heard_at_ms]
        await self._copy("peers_heard", ("peer", "heard_at_ms"), last_seen)
        logged = [(next(self._places), encode_text(each)) for each in state.messages]
        await self._copy("messages", ("place", "body"), logged)
        usage = [{**asdict(each), "role": each.role.value} for each in state.usage.values()]
        if usage:
            await self._copy("peer_usage", tuple(usage[0]), [tuple(each.values()) for each in usage])

    # The audit and the blobs

    async def _write_audit(self, chain: str) -> None:
        chains = await self._contents.chains()
        if not chains:
            return
        (found,) = chains
        head, end = found.head, self._contents.end
        await self._run("writer", chain=chain, seq=end, index=head.index, chain_hash=head.chain_hash)
        mark = (found.anchor.index, found.anchor.chain_hash)
        columns = ("chain", "anchor_index", "anchor_hash", "verified_index", "verified_hash")
        await self._copy("audit_chains", columns, [(chain, *mark, *mark)])
        rows: list[tuple[Any, ...]] = []
        names = ("chain", "idx", "place", "ts_ms", "issuer", "chain_hash", "row")
        async for line in self._contents.audit():
            place = next(self._places)
            rows.append((chain, line.index, place, line.ts_ms, line.issuer, line.chain_hash, line.row))
            if len(rows) == ROWS_AT_ONCE:
                await self._copy("audit", names, rows)
                rows = []
        await self._copy("audit", names, rows)

    async def _write_blobs(self) -> None:
        async for blob in self._contents.blobs():
            upload_id = await self._run("upload")
            digest, no, kept = hashlib.sha256(), 0, b""
            async for data in self._contents.blob_bytes(blob):
                digest.update(data)
                kept += data
                while len(kept) >= CHUNK_BYTES:
                    await self._copy("blob_chunk", ("upload_id", "no", "body"), [(upload_id, no, kept[:CHUNK_BYTES])])
                    kept, no = kept[CHUNK_BYTES:], no + 1
            if kept:
                await self._copy("blob_chunk", ("upload_id", "no", "body"), [(upload_id, no, kept)])
            if digest.hexdigest() != blob.sha256:
                raise CovenantError(f"the file {blob.sha256} is damaged; `covenant doctor` lists such files")
            row = (blob.space, blob.sha256, blob.size, blob.stored_at_ms, upload_id)
            await self._copy("blob", ("space", "sha256", "size", "stored_at_ms", "upload_id"), [row])
            references = [(blob.space, blob.sha256, *each) for each in blob.references]
            await self._copy("blob_reference", ("space", "sha256", "task_id", "made_at_ms"), references)


def _finished(record: TaskRecord, task: Task) -> Entry:
    """The entry of a task that has left the ledger for its archive, with the fields that are still read."""
    facts, parts = record.facts, record.parts
    turn = [at for at, each in enumerate(parts.handovers) if each[1] == "continued"]
    leases = [each[3] for each in parts.handovers[turn[-1] if turn else 0 :] if each[1] == "leased"]
    return Entry(
        task,
        facts.digest,
        DRAINED,
        facts.created_at_ms,
        facts.updated_at_ms,
        facts.generation,
        facts.turn,
        facts.attempt,
        lease=_lease(leases[-1]) if leases and leases[-1] is not None else None,
        result=_result(parts.result) if parts.result is not None else None,
        ending=Ending(facts.ending or ""),
        cause=Cause(facts.cause or ""),
        events=len(record.events),
    )


def moved_chain(state: LedgerState) -> str:
    """The name of an audit chain that no daemon continues."""
    return f"home-{state.audit_head.chain_hash[:12]}"
