"""Writing a batch: the working set's changes as arrays, for one statement; and a statement each for what few batches
touch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import asyncpg
import msgspec

from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import DRAINED, LEASED, SETTLED
from covenant.ledger.postgres.cache_rows import key_text
from covenant.ledger.postgres.push_rows import idle_at_ms
from covenant.ledger.postgres.registers import RegisterRow
from covenant.ledger.postgres.sql import statement
from covenant.ledger.postgres.stored_task import BIGINT_MAX, Slot, column, encode_head, encode_rest
from covenant.ledger.postgres.working_set import WorkingSet

_encode: Final = msgspec.json.Encoder().encode

_LIVE: Final = """no task_id n state a2a_state sender recipient lessee tenant agent_id context_id origin parent
    created_at_ms updated_at_ms generation turn attempt deadline_ms place settled_place touched touched_at_ms due_at_ms
    shared node boot interrupted pushed ended_n head rest sender_display recipient_display task_kind idempotency_key
    remote cause error_message intent size""".split()
_MOVED: Final = """no n state a2a_state lessee updated_at_ms generation turn attempt place settled_place touched
    touched_at_ms due_at_ms node boot interrupted pushed ended_n rest cause error_message size""".split()
_TASKS: Final = """no task_id n a2a_state sender recipient lessee tenant agent_id context_id origin parent created_at_ms
    updated_at_ms generation turn attempt settled_place ended_n error_message rest sender_display recipient_display
    task_kind idempotency_key deadline_ms remote cause intent size""".split()


class Written(msgspec.Struct, frozen=True):
    """Whether the writer's row moved, whether the rest was written with it, and the place of the next batch."""

    writer: bool
    rows: bool
    place: int


def _row(entry: Entry, slot: Slot) -> dict[str, Any]:
    """All columns of a task, in either table."""
    task, lease = entry.task, entry.lease
    key = entry.cache_key
    held = lease if entry.state is LEASED else None
    error = entry.result.error_message if entry.result is not None else None
    due_at_ms = entry.due_at_ms(entry.updated_at_ms)
    return {
        "no": slot.no,
        "task_id": task.id,
        "n": slot.n,
        "state": entry.state.value,
        "a2a_state": entry.a2a_state,
        "sender": task.sender.pubkey,
        "recipient": task.recipient.pubkey,
        "lessee": lease.leased_to.pubkey if lease is not None else None,
        "tenant": task.tenant,
        "agent_id": task.recipient.display.partition("@")[0],
        "context_id": column(task.context_id or ""),
        "origin": task.origin,
        "parent": task.parent,
        "created_at_ms": entry.accepted_at_ms,
        "updated_at_ms": entry.updated_at_ms,
        "generation": entry.generation,
        "turn": entry.turn,
        "attempt": entry.attempt,
        "deadline_ms": min(task.deadline_ms, BIGINT_MAX) if task.deadline_ms is not None else None,
        "place": slot.place,
        "settled_place": slot.settled_place,
        "touched": slot.touched,
        "touched_at_ms": max(held.leased_at_ms, held.renewed_at_ms) if held is not None else None,
        "due_at_ms": min(due_at_ms, BIGINT_MAX) if due_at_ms is not None else None,
        "shared": key_text(key) if key is not None and entry.state is not SETTLED else None,
        "node": held.node if held is not None else None,
        "boot": held.boot if held is not None else None,
        "interrupted": entry.interrupted,
        "pushed": slot.pushed,
        "ended_n": slot.ended_n,
        "error_message": column(error) if isinstance(error, str) else "",
        "rest": encode_rest(entry),
        "sender_display": task.sender.display,
        "recipient_display": task.recipient.display,
        "task_kind": column(task.task_kind) if task.task_kind is not None else None,
        "idempotency_key": column(task.idempotency.key) if task.idempotency is not None else None,
        "remote": task.target is not None,
        "cause": entry.cause.value if entry.cause is not None else None,
        "intent": slot.intent,
        "size": slot.size,
    }


def batch_values(work: WorkingSet) -> dict[str, Any]:
    new: list[dict[str, Any]] = []
    moved: list[dict[str, Any]] = []
    ended: list[dict[str, Any]] = []
    values: dict[str, Any] = {"id_task_ids": [], "id_nos": [], "gone_nos": [], "back_nos": []}
    held: list[tuple[int, int]] = []
    for task_id in work.moved:
        entry, slot = work.entries[task_id], work.slots[task_id]
        assert entry is not None
        row = _row(entry, slot)
        if slot.was is None:
            values["id_task_ids"].append(task_id)
            values["id_nos"].append(slot.no)
        elif slot.was == "live":
            held.append((slot.no, slot.held_n))
        if entry.state is DRAINED:
            ended.append(row)
            if slot.was == "live":
                values["gone_nos"].append(slot.no)
        elif slot.was == "live":
            moved.append(row)
        else:
            row["head"] = encode_head(entry)
            new.append(row)
            if slot.was == "tasks":
                values["back_nos"].append(slot.no)
    held.sort()
    values["held_nos"], values["held_ns"] = _columns(held, 2)
    values |= _named("l", _LIVE, new) | _named("m", _MOVED, moved) | _named("t", _TASKS, ended)
    values |= _tuples("e", "no n generation ts_ms kind body", work.events)
    values |= _tuples("q", "recipient place no", [(*at, no) for at, no in work.queue_in.items()])
    values |= _tuples("ql", "recipient place", list(work.queue_out))
    values |= _tuples("r", "sender place no", [(*at, no) for at, no in work.results_in.items()])
    values |= _tuples("rl", "sender place", list(work.results_out))
    values |= _tuples("a", "idx place ts_ms issuer chain_hash row", work.audit)
    values |= _tuples("c", "kind lane n", sorted(work.counts))
    return values


def _named(prefix: str, names: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {f"{prefix}_{name}": [row[name] for row in rows] for name in names}


def _tuples(prefix: str, names: str, rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    parts = names.split()
    return {f"{prefix}_{name}": part for name, part in zip(parts, _columns(rows, len(parts)), strict=True)}


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[list[Any]]:
    return [list(part) for part in zip(*rows, strict=True)] if rows else [[] for _ in range(count)]


async def write_batch(connection: asyncpg.Connection[Any], values: dict[str, Any]) -> Written:
    batch = statement("write", "batch")
    row = await connection.fetchrow(batch.text, *batch.values(values))
    assert row is not None
    return Written(bool(row["writer"]), bool(row["written"]), row["place"])


async def write_beside(connection: asyncpg.Connection[Any], work: WorkingSet, chain: str) -> None:
    """What few batches touch."""
    for name, values in _beside(work, chain):
        asked = statement("write", name)
        await connection.execute(asked.text, *asked.values(values))


def _beside(work: WorkingSet, chain: str) -> Iterable[tuple[str, dict[str, Any]]]:
    if work.requests_put:
        yield from _requests(work)
        over = work.base.get("requests") + work.counts.get("requests") - work.limits.requests_remembered_max
        if over > 0:
            yield "requests_over", {"count": over}
            work.counts.count("requests", "", -over)
    yield from _shared(work)
    if work.uses_put:
        yield "uses", {"signatures": list(work.uses_put), "used": list(work.uses_put.values())}
    if work.pushes_put:
        pushes = list(work.pushes_put.values())
        yield (
            "pushes",
            {
                "task_ids": [push.task_id for push in pushes],
                "ids": [column(push.id) for push in pushes],
                "made": [work.next_place() for _ in pushes],
                "idle_at_ms": [
                    idle_at_ms(push, push.moved_at_ms, work.limits) if push.ended is not None else None
                    for push in pushes
                ],
                "bodies": [_encode(push).decode() for push in pushes],
            },
        )
    if work.pushes_gone:
        task_ids, ids = zip(*work.pushes_gone, strict=True)
        yield "pushes_gone", {"task_ids": list(task_ids), "ids": [column(each) for each in ids]}
    for name, values in work.peer_writes:
        yield name, {key: column(value) if isinstance(value, str) else value for key, value in values.items()}
    if work.purged is not None:
        yield "audit_purged", {"chain": chain, "through": work.purged.through}
        yield (
            "audit_anchored",
            {"chain": chain, "through": work.purged.through, "anchor_hash": work.purged.anchor_hash},
        )


def _requests(work: WorkingSet) -> Iterable[tuple[str, dict[str, Any]]]:
    # One that is new is inserted plainly: if another node was asked the same meanwhile, this batch is decided again.
    for name, is_new in (("new_requests", True), ("requests", False)):
        rows = [
            (key[0], column(key[1]), column(key[2]), place, _encode(given).decode())
            for key, (place, given) in work.requests_put.items()
            if (key in work.requests_new) is is_new
        ]
        if rows:
            yield (
                name,
                dict(zip(("verbs", "holders", "request_ids", "places", "given"), _columns(rows, 5), strict=True)),
            )


def _shared(work: WorkingSet) -> Iterable[tuple[str, dict[str, Any]]]:
    moved = [each for each in work.shared.values() if each.moved]
    kept = [each for each in moved if each.leader is not None or each.cached is not None]
    gone = [key_text(each.key) for each in moved if each.stored and each.leader is None and each.cached is None]
    # One that is new is inserted plainly: if another node has made it meanwhile, this batch is decided again.
    for name, stored in (("new_shared", False), ("shared", True)):
        rows = [
            (
                key_text(each.key),
                _encode(each.key).decode(),
                each.leader,
                _encode(each.cached).decode() if each.cached is not None else None,
                each.cached.cached_at_ms if each.cached is not None else None,
                each.cached_bytes,
                each.cached_place,
            )
            for each in kept
            if each.stored is stored
        ]
        if rows:
            names = ("keys", "names", "leaders", "cached", "cached_at_ms", "cached_bytes", "cached_places")
            yield name, dict(zip(names, _columns(rows, 7), strict=True))
    if gone:
        yield "shared_gone", {"keys": gone}


async def write_registers(
    connection: asyncpg.Connection[Any], rows: Sequence[RegisterRow], version: int, work: WorkingSet
) -> None:
    bumped, put = statement("write", "registers"), statement("write", "register_rows")
    await connection.execute(bumped.text, *bumped.values({"version": version}))
    values = {
        "version": version,
        "kinds": [row.kind for row in rows],
        "names": [column(row.name) for row in rows],
        "made": [work.next_place() for _ in rows],
        "bodies": [_encode(row.body).decode() if row.body is not None else None for row in rows],
    }
    await connection.execute(put.text, *put.values(values))
