"""The rows of a batch: the changes of its state as arrays for one statement, and further statements for rare kinds of
rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import asyncpg

from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import DRAINED, LEASED, SETTLED
from covenant.ledger.postgres.batch_items import DecidedBatch
from covenant.ledger.postgres.batch_state import BatchState
from covenant.ledger.postgres.cache_rows import key_text
from covenant.ledger.postgres.connections import execute
from covenant.ledger.postgres.counters import counts_of_batch
from covenant.ledger.postgres.news import encode_topics
from covenant.ledger.postgres.node_runs import Joined
from covenant.ledger.postgres.queue_head import Floors
from covenant.ledger.postgres.registers import RegisterRow
from covenant.ledger.postgres.stored_task import BIGINT_MAX, Slot, column, encode_head, encode_rest, encode_text
from covenant.ledger.register_index import idle_at_ms
from covenant.model.push import Push
from covenant.model.settings import Limits

IDS: Final = ("id_task_ids", "id_nos")
_HELD: Final = ("held_nos", "held_ns")
COUNTED_LEVEL: Final = 13
"""From this level of the schema on, a batch counts in one row."""


def _columns_of(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_{name}" for name in names.split())


LIVE: Final = _columns_of(
    "l",
    """no task_id n state a2a_state sender recipient lessee tenant agent_id context_id origin parent
    created_at_ms updated_at_ms generation turn attempt deadline_ms place settled_place touched touched_at_ms due_at_ms
    shared node boot interrupted pushed ended_n head rest sender_display recipient_display task_kind idempotency_key
    remote cause error_message intent size""",
)
_MOVED: Final = _columns_of(
    "m",
    """no n state a2a_state lessee updated_at_ms generation turn attempt place settled_place touched
    touched_at_ms due_at_ms node boot interrupted pushed ended_n rest cause error_message size""",
)
TASKS: Final = _columns_of(
    "t",
    """no task_id n a2a_state sender recipient lessee tenant agent_id context_id origin parent created_at_ms
    updated_at_ms generation turn attempt settled_place ended_n error_message rest sender_display recipient_display
    task_kind idempotency_key deadline_ms remote cause intent size""",
)
EVENTS: Final = _columns_of("e", "no n generation ts_ms kind body")
QUEUE: Final = _columns_of("q", "recipient place no")
RESULTS: Final = _columns_of("r", "sender place no")
_AUDIT: Final = _columns_of("a", "idx place ts_ms issuer chain_hash row")


def live_row(entry: Entry, slot: Slot) -> tuple[Any, ...]:
    task, key = entry.task, entry.cache_key
    no, n, state, a2a_state, lessee, updated_at_ms, *moved, rest, cause, error_message, size = _moved_row(entry, slot)
    generation, turn, attempt, place, settled_place, touched, touched_at_ms, due_at_ms, *holder = moved
    return (
        *(no, task.id, n, state, a2a_state, task.sender.pubkey, task.recipient.pubkey, lessee, task.tenant),
        *(task.recipient.display.partition("@")[0], column(task.context_id or ""), task.origin, task.parent),
        *(entry.accepted_at_ms, updated_at_ms, generation, turn, attempt, _deadline_ms(entry)),
        *(place, settled_place, touched, touched_at_ms, due_at_ms),
        key_text(key) if key is not None and entry.state is not SETTLED else None,
        *holder,
        *(encode_head(entry), rest, task.sender.display, task.recipient.display, *_filter_columns(entry)),
        *(cause, error_message, slot.intent, size),
    )


def _moved_row(entry: Entry, slot: Slot) -> tuple[Any, ...]:
    lease, due_at_ms = entry.lease, entry.due_at_ms(entry.updated_at_ms)
    held = lease if entry.state is LEASED else None
    return (
        *(slot.no, slot.n, entry.state.value, entry.a2a_state, lease.leased_to.pubkey if lease is not None else None),
        *(entry.updated_at_ms, entry.generation, entry.turn, entry.attempt, slot.place, slot.settled_place),
        *(slot.touched, max(held.leased_at_ms, held.renewed_at_ms) if held is not None else None),
        min(due_at_ms, BIGINT_MAX) if due_at_ms is not None else None,
        *((held.node, held.boot) if held is not None else (None, None)),
        *(entry.interrupted, slot.pushed, slot.ended_n, encode_rest(entry), _cause(entry), _error(entry), slot.size),
    )


def task_row(entry: Entry, slot: Slot) -> tuple[Any, ...]:
    task, lease = entry.task, entry.lease
    task_kind, idempotency_key, remote = _filter_columns(entry)
    return (
        *(slot.no, task.id, slot.n, entry.a2a_state, task.sender.pubkey, task.recipient.pubkey),
        *(lease.leased_to.pubkey if lease is not None else None, task.tenant),
        *(task.recipient.display.partition("@")[0], column(task.context_id or ""), task.origin, task.parent),
        *(entry.accepted_at_ms, entry.updated_at_ms, entry.generation, entry.turn, entry.attempt, slot.settled_place),
        *(slot.ended_n, _error(entry), encode_rest(entry), task.sender.display, task.recipient.display),
        *(task_kind, idempotency_key, _deadline_ms(entry), remote, _cause(entry), slot.intent, slot.size),
    )


def push_row(push: Push, made: int, limits: Limits) -> tuple[Any, ...]:
    idle_ms = idle_at_ms(push, push.moved_at_ms, limits) if push.ended is not None else None
    return push.task_id, column(push.id), made, idle_ms, encode_text(push)


def _filter_columns(entry: Entry) -> tuple[str | None, str | None, bool]:
    """The task's kind, its key, and whether a remote agent does it."""
    task = entry.task
    return (
        column(task.task_kind) if task.task_kind is not None else None,
        column(task.idempotency.key) if task.idempotency is not None else None,
        task.target is not None,
    )


def _deadline_ms(entry: Entry) -> int | None:
    deadline_ms = entry.task.deadline_ms
    return min(deadline_ms, BIGINT_MAX) if deadline_ms is not None else None


def _cause(entry: Entry) -> str | None:
    return entry.cause.value if entry.cause is not None else None


def _error(entry: Entry) -> str:
    error = entry.result.error_message if entry.result is not None else None
    return column(error) if isinstance(error, str) else ""


def batch_values(decided: DecidedBatch, node: str, joined: Joined, version: int, level: int) -> dict[str, Any]:
    """The values of the statement that writes a batch.

    `version` is that of the registers that it was decided on, `level` the lowest schema level of the living nodes.
    """
    work, seq = decided.work, decided.seq
    counts = counts_of_batch(work.counts, joined.writer, seq, as_rows=level < COUNTED_LEVEL)
    return (
        _rows_of(work)
        | counts
        | {
            "seq": seq,
            "writer": joined.writer,
            "boot": joined.boot,
            "audit_index": work.audit_head.index,
            "audit_hash": work.audit_head.chain_hash,
            "chain": node,
            "version": version,
            "topics": encode_topics(decided.topics),
        }
    )


def _rows_of(work: BatchState) -> dict[str, Any]:
    """The arrays of the rows to write. Kinds without rows have none."""
    ids: list[tuple[Any, ...]] = []
    new: list[tuple[Any, ...]] = []
    moved: list[tuple[Any, ...]] = []
    ended: list[tuple[Any, ...]] = []
    gone: list[int] = []
    back: list[int] = []
    held: list[tuple[Any, ...]] = []
    for task_id in work.moved:
        entry, slot = work.entries[task_id], work.slots[task_id]
        assert entry is not None
        if slot.table is None:
            ids.append((task_id, slot.no))
        elif slot.table == "live":
            held.append((slot.no, slot.held_n))
        if entry.state is DRAINED:
            ended.append(task_row(entry, slot))
            if slot.table == "live":
                gone.append(slot.no)
        elif slot.table == "live":
            moved.append(_moved_row(entry, slot))
        else:
            new.append(live_row(entry, slot))
            if slot.table == "tasks":
                back.append(slot.no)
    values: dict[str, Any] = {}
    for names, rows in (
        (IDS, ids),
        (LIVE, new),
        (_MOVED, moved),
        (TASKS, ended),
        (_HELD, sorted(held)),
        (EVENTS, work.events),
        (QUEUE, [(*at, no) for at, no in work.queue.added.items()]),
        (RESULTS, [(*at, no) for at, no in work.results.added.items()]),
        (_AUDIT, work.audit),
    ):
        if rows:
            values |= _arrays(names, rows)
    if gone:
        values["gone_nos"] = gone
    if back:
        values["back_nos"] = back
    if work.started:
        values["started"] = list(work.started)
    return values | _removed("ql", "recipient", work.queue.removed) | _removed("rl", "sender", work.results.removed)


def _arrays(names: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """The columns of rows."""
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def _removed(prefix: str, name: str, places: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """The owners of the removed places, each once, and the places."""
    places = list(places)
    if not places:
        return {}
    return {f"{prefix}_{name}": list({owner: None for owner, _ in places}), f"{prefix}_place": [at for _, at in places]}


def taken_heads(prefix: str, name: str, places: Iterable[tuple[str, int]], floors: Floors) -> dict[str, Any]:
    """The range of places of the first tasks that left each queue, and how many they are: the gate counts them."""
    queues: dict[str, list[int]] = {}
    for owner, place in places:
        queues.setdefault(owner, []).append(place)
    if not queues:
        return {}
    return {
        f"{prefix}_{name}": list(queues),
        f"{prefix}_first": [min(floors.at(owner), *at) for owner, at in queues.items()],
        f"{prefix}_last": [max(at) for at in queues.values()],
        f"{prefix}_count": [len(at) for at in queues.values()],
    }


async def write_rare_rows(connection: asyncpg.Connection[Any], work: BatchState, chain: str) -> None:
    """Writes the rows that few batches have."""
    for name, values in _rare_writes(work, chain):
        await execute("write", connection, name, **values)


def _rare_writes(work: BatchState, chain: str) -> Iterable[tuple[str, dict[str, Any]]]:
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
        pushes = [push_row(push, work.next_place(), work.limits) for push in work.pushes_put.values()]
        yield "pushes", _arrays(("task_ids", "ids", "made", "idle_at_ms", "bodies"), pushes)
    if work.pushes_gone:
        gone = [(task_id, column(push_id)) for task_id, push_id in work.pushes_gone]
        yield "pushes_gone", _arrays(("task_ids", "ids"), gone)
    for name, values in work.peer_writes:
        yield name, {key: column(value) if isinstance(value, str) else value for key, value in values.items()}
    if work.purged is not None:
        yield "audit_purged", {"chain": chain, "through": work.purged.through}
        yield (
            "audit_anchored",
            {"chain": chain, "through": work.purged.through, "anchor_hash": work.purged.anchor_hash},
        )


def _requests(work: BatchState) -> Iterable[tuple[str, dict[str, Any]]]:
    # A new row is inserted plainly: if another node had the same request meanwhile, this batch is decided again.
    for name, is_new in (("new_requests", True), ("requests", False)):
        rows = [
            (key[0], column(key[1]), column(key[2]), place, encode_text(remembered))
            for key, (place, remembered) in work.requests_put.items()
            if (key in work.requests_new) is is_new
        ]
        if rows:
            yield name, _arrays(("verbs", "holders", "request_ids", "places", "given"), rows)


def _shared(work: BatchState) -> Iterable[tuple[str, dict[str, Any]]]:
    moved = [each for each in work.shared.values() if each.moved]
    kept = [each for each in moved if each.leader is not None or each.cached is not None]
    gone = [key_text(each.key) for each in moved if each.stored and each.leader is None and each.cached is None]
    # A new row is inserted plainly: if another node has made it meanwhile, this batch is decided again.
    for name, stored in (("new_shared", False), ("shared", True)):
        rows = [
            (
                key_text(each.key),
                encode_text(each.key),
                each.leader,
                encode_text(each.cached) if each.cached is not None else None,
                each.cached.cached_at_ms if each.cached is not None else None,
                each.cached_bytes,
                each.cached_place,
            )
            for each in kept
            if each.stored is stored
        ]
        if rows:
            names = ("keys", "names", "leaders", "cached", "cached_at_ms", "cached_bytes", "cached_places")
            yield name, _arrays(names, rows)
    if gone:
        yield "shared_gone", {"keys": gone}


async def write_registers(
    connection: asyncpg.Connection[Any], rows: Sequence[RegisterRow], version: int, work: BatchState
) -> None:
    await execute("write", connection, "registers", version=version)
    await execute(
        *("write", connection, "register_rows"),
        version=version,
        kinds=[row.kind for row in rows],
        names=[column(row.name) for row in rows],
        made=[work.next_place() for _ in rows],
        bodies=[encode_text(row.body) if row.body is not None else None for row in rows],
    )
