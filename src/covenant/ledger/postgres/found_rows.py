"""Finding tasks: walked in the database, a part at a time and up to a bounded number, and looked at once more here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from string import ascii_lowercase, ascii_uppercase
from typing import Any, Final

import msgspec

from covenant.ledger.contract.task_query import (
    AGENTS_COUNTED_MAX,
    AgentLanes,
    FoundPage,
    FoundTask,
    LaneCounts,
    Place,
    TaskCounts,
    TaskQuery,
    fold,
    found_task,
    passes,
    place_after,
)
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.states import State
from covenant.ledger.postgres.connections import Connections
from covenant.ledger.postgres.sql import Statement, statements
from covenant.ledger.postgres.stored_task import Row, column, decode_rest, decode_result, decode_task

PART: Final = 500
SCAN_MAX: Final = 20_000
COUNT_MAX: Final = 20_000
"""How many tasks are counted one by one, where no running total tells."""

_CONDITIONS: Final = {
    "within": "tenant = :within",
    "tenant": "tenant = :tenant",
    "origin": "origin = :origin",
    "parent": "parent = :parent",
    "context": "context_id = :context",
    "attempt_min": "attempt >= :attempt_min",
    "since_ms": "created_at_ms >= :since_ms",
    "until_ms": "created_at_ms < :until_ms",
    "moved_since_ms": "updated_at_ms >= :moved_since_ms",
    "id": "starts_with(task_id, :id)",
    "agent": "agent_id = :agent_id",
    "viewer": ":viewer IN (sender, recipient)",
}


_HITS: Final = {
    "agent": "f.body::json #>> '{task,recipient,display}' = :agent",
    "sender": "f.body::json #>> '{task,sender,display}' = :sender",
    "task_kind": "f.body::json #>> '{task,task_kind}' = :task_kind",
    "key": "f.body::json #>> '{task,idempotency,key}' = :key",
    "text": "strpos(translate(f.body::json #>> '{task,intent_text}', :upper, :lower), :folded) > 0",
}


async def find_tasks(connections: Connections, query: TaskQuery, totals: Totals) -> FoundPage:
    """`totals`: how many tasks are in each lane (see `lane_of`)."""
    tasks, end = await _page(connections, query)
    total, at_least = None, False
    if query.count and all(getattr(query, name) == getattr(_NO_FILTER, name) for name in _UNCOUNTED):
        total = running_total(await totals(), query)
    elif query.count:
        total, at_least = await _total(connections, query)
    cursor = end.cursor(query.order) if end is not None else None
    return FoundPage(tasks=tuple(tasks), next=cursor, total=total, at_least=at_least)


Totals = Callable[[], Awaitable[Sequence[tuple[str, int]]]]
_NO_FILTER: Final = TaskQuery()
_PAGED_BY: Final = frozenset({"order", "ascending", "limit", "after", "count"})
_UNCOUNTED: Final = frozenset(TaskQuery.__struct_fields__) - {"agent", "tenant", "within", "states"} - _PAGED_BY


def running_total(totals: Iterable[tuple[str, int]], query: TaskQuery) -> int:
    words = {word for state in query.states or State for word in _LANES.get(state, (state.wire_name,))}
    total = 0
    for lane, count in totals:
        tenant, display, _, word = lane.split(" ")
        asked = ((query.tenant, tenant), (query.within, tenant), (query.agent, display))
        if word in words and all(wanted in (None, given) for wanted, given in asked):
            total += count
    return total


_LANES: Final = {State.DRAINED: ("failed", "done")}


async def _page(connections: Connections, query: TaskQuery) -> tuple[list[FoundTask], Place | None]:
    found: list[tuple[FoundTask, Place]] = []
    at, seen = place_after(query), 0
    while seen < SCAN_MAX:
        rows = await _part(connections, query, at)
        for row in rows:
            at = Place(row["moment"], row["no"])
            entry = _entry(row) if row["task_body"] is not None else None
            if entry is None or not passes(query, entry):
                continue
            if len(found) == query.limit:
                return [task for task, _ in found], found[-1][1]
            lost = bool(row["holder_lost"])
            found.append((msgspec.structs.replace(found_task(entry, _nobody), holder_lost=lost), at))
        seen += len(rows)
        if len(rows) < PART:
            return [task for task, _ in found], None
    return [task for task, _ in found], at


async def _total(connections: Connections, query: TaskQuery) -> tuple[int, bool]:
    at, seen, total = None, 0, 0
    while seen < COUNT_MAX:
        rows = await _part(connections, query, at)
        total += sum(row["task_body"] is not None and passes(query, _entry(row)) for row in rows)
        seen += len(rows)
        if len(rows) < PART:
            return total, False
        at = Place(rows[-1]["moment"], rows[-1]["no"])
    return total, True


async def _part(connections: Connections, query: TaskQuery, at: Place | None) -> list[Row]:
    values: dict[str, Any] = msgspec.structs.asdict(query) | {"count": PART}
    if query.agent is not None:
        values["agent_id"] = query.agent.partition("@")[0]
    if query.context is not None:
        values["context"] = column(query.context)
    conditions = ["true", *_asked(query, _CONDITIONS)]
    ended = list(conditions)
    if query.states:
        values["states"] = [state.value for state in query.states]
        conditions.append("state = ANY(:states::text[])")
        if State.DRAINED not in query.states:
            ended.append("false")
    if query.outcomes:
        values["outcomes"] = [outcome.value for outcome in query.outcomes]
        for each in (conditions, ended):
            each.append("a2a_state = ANY(:outcomes::text[])")
    if query.text is not None:
        values |= {"upper": ascii_uppercase, "lower": ascii_lowercase, "folded": fold(query.text)}
    moment = "created_at_ms" if query.order == "created" else "updated_at_ms"
    sign = ">" if query.ascending else "<"
    if at is not None:
        values["at_ms"], values["at_no"] = at.ms, at.no
    text = statements("found")["walk"].format(
        hit=" AND ".join(["true", *_asked(query, _HITS)]),
        moment=moment,
        conditions=" AND ".join(conditions),
        ended_conditions=" AND ".join(ended),
        begin=f"AND ({moment}, no) {sign} (:at_ms, :at_no)" if at is not None else "",
        way="ASC" if query.ascending else "DESC",
    )
    return list(await connections.fetch(Statement(text), values))


def count_lanes(totals: Iterable[tuple[str, int]], scope: TaskQuery) -> TaskCounts:
    """From the running totals: lanes (see `lane_of`), and how many tasks are in each."""
    agents: dict[tuple[str, str | None], dict[str, int]] = {}
    for lane, count in totals:
        tenant, display, pubkey, word = lane.split(" ")
        if scope.within not in (None, tenant) or scope.viewer not in (None, pubkey):
            continue
        lanes = agents.setdefault((display, tenant or None), {})
        lanes[word] = lanes.get(word, 0) + count
    every = [AgentLanes(agent=agent, tenant=tenant, **lanes) for (agent, tenant), lanes in agents.items()]
    every.sort(key=_by_work)
    sums = {name: sum(getattr(each, name) for each in every) for name in LaneCounts.__struct_fields__}
    return TaskCounts(lanes=LaneCounts(**sums), by_agent=tuple(every[:AGENTS_COUNTED_MAX]))


def _by_work(lanes: AgentLanes) -> tuple[int, int, str, str]:
    return (
        -(lanes.queued + lanes.in_flight + lanes.parked + lanes.following),
        -(lanes.failed + lanes.done + lanes.result_pending),
        lanes.agent,
        lanes.tenant or "",
    )


def _asked(query: TaskQuery, known: Mapping[str, str]) -> Iterator[str]:
    """The conditions of a query. No column holds a NUL, but for contexts, where it is escaped."""
    for name, sql in known.items():
        value = getattr(query, name)
        if value is not None:
            yield "false" if isinstance(value, str) and "\x00" in value and name != "context" else sql


def _entry(row: Row) -> Entry:
    """What a query asks of an entry; not all of it."""
    rest = decode_rest(row["rest"])
    ended = row["ended_body"]
    return Entry(
        decode_task(row["task_body"]),
        rest.digest,
        State(row["state"]),
        rest.accepted_at_ms,
        rest.updated_at_ms,
        turn=rest.turn,
        attempt=rest.attempt,
        lease=rest.lease,
        interruption=rest.interruption,
        result=decode_result(ended) if ended is not None else None,
        ending=rest.ending,
        cause=rest.cause,
    )


def _nobody(_node: str | None, _boot: str) -> bool:
    """Whose holder is lost, the database tells."""
    return True
