"""Finding tasks: what has a column is asked of the database, the rest is looked at here, up to a bounded number."""

from __future__ import annotations

from collections.abc import Iterable
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
COUNT_MAX: Final = 100_000

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


async def find_tasks(connections: Connections, query: TaskQuery) -> FoundPage:
    tasks, end = await _page(connections, query)
    total, at_least = await _total(connections, query) if query.count else (None, False)
    cursor = end.cursor(query.order) if end is not None else None
    return FoundPage(tasks=tuple(tasks), next=cursor, total=total, at_least=at_least)


async def _page(connections: Connections, query: TaskQuery) -> tuple[list[FoundTask], Place | None]:
    found: list[tuple[FoundTask, Place]] = []
    at, seen = place_after(query), 0
    while seen < SCAN_MAX:
        rows = await _part(connections, query, at)
        for row in rows:
            at = Place(row["moment"], row["no"])
            entry = _entry(row)
            if not passes(query, entry):
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
        total += sum(passes(query, _entry(row)) for row in rows)
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
    conditions = ["true", *(sql for name, sql in _CONDITIONS.items() if getattr(query, name) is not None)]
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
    moment = "created_at_ms" if query.order == "created" else "updated_at_ms"
    sign = ">" if query.ascending else "<"
    if at is not None:
        values["at_ms"], values["at_no"] = at.ms, at.no
    text = statements("found")["walk"].format(
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
