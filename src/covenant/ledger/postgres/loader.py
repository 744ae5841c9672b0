"""Loads the rows that decisions ask for into the state of a batch, many of a kind by one statement.

A row on which a decision depends is locked. Taking from a queue skips rows that others have locked: they take them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

import asyncpg
import msgspec
from msgspec.structs import asdict

from covenant.ledger.clock import Clock
from covenant.ledger.machine.decisions import decide
from covenant.ledger.machine.decisions.context import CommandRefused
from covenant.ledger.machine.view import Cached, Remembered
from covenant.ledger.postgres.batch_items import Item, apply_decision
from covenant.ledger.postgres.batch_state import BatchState
from covenant.ledger.postgres.cache_rows import SharedWork, key_text
from covenant.ledger.postgres.connections import fetch_rows, fetch_value
from covenant.ledger.postgres.missing_rows import (
    Missing,
    OldResult,
    Want,
    WantBody,
    WantCached,
    WantDelegation,
    WantDue,
    WantEndedFirst,
    WantEnvelope,
    WantEnvelopeCount,
    WantIdlePushes,
    WantLeases,
    WantLiveDelegations,
    WantOfBatch,
    WantOrphans,
    WantOutbox,
    WantPeer,
    WantPushes,
    WantQueue,
    WantRecipients,
    WantRequest,
    WantResults,
    WantShared,
    WantTask,
    WantUses,
)
from covenant.ledger.postgres.queue_head import LOWEST, Floors
from covenant.ledger.postgres.stored_task import (
    Row,
    Slot,
    column,
    decode_archived,
    decode_delegation,
    decode_entry,
    decode_message,
    decode_push,
    decode_task,
)
from covenant.model.errors import Refusal
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import DelegationKey
from covenant.model.push import Push
from covenant.model.task import CacheKey

ROUNDS_MAX: Final = 2_000
"""How often one command may ask for more rows before it is decided."""
MOVES_MAX: Final = 3
"""How often a task may have moved between the looks into both tables. After that it is in neither: it is erased."""

_cached: Final = msgspec.json.Decoder(Cached).decode
_cache_key: Final = msgspec.json.Decoder(CacheKey).decode
_remembered: Final = msgspec.json.Decoder(Remembered).decode


class Loader:
    """Loads by one connection, inside its transaction."""

    def __init__(
        self, connection: asyncpg.Connection[Any], now_ms: int, queue_floors: Floors, result_floors: Floors
    ) -> None:
        self.connection = connection
        self.now_ms = now_ms
        self._queue_floors, self._result_floors = queue_floors, result_floors

    async def load(self, into: BatchState, wants: Iterable[Want[Any]]) -> None:
        by_kind: defaultdict[type[Any], dict[Any, None]] = defaultdict(dict)
        for want in wants:
            by_kind[type(want)][want] = None
        for kind, load in _LOADS.items():
            if kind in by_kind:
                try:
                    await load(self, into, tuple(by_kind[kind]))
                except KeyError as error:  # all columns are selected, and one has been renamed
                    raise asyncpg.UndefinedColumnError(f"column {error} does not exist") from error

    async def rows(self, name: str, **values: Any) -> Sequence[Row]:
        return await fetch_rows("load", self.connection, name, **values)

    async def tasks(self, into: BatchState, wants: Sequence[WantTask]) -> None:
        left = {want.task_id for want in wants}
        for _ in range(MOVES_MAX):
            for row in await self.rows("live", task_ids=list(left)):
                left.discard(self._entry(into, row))
            if not left:
                return
            known: set[TaskId] = set()
            for row in await self.rows("ended", task_ids=list(left)):
                known.add(row["id"])
                if row["no"] is not None:
                    left.discard(row["id"])
                    into.load_archived(row["id"], decode_archived(row), _slot(row, "tasks"))
            for task_id in left - known:
                into.load_archived(task_id, None, None)
            left &= known  # the task came back to `live` between the two looks
            if not left:
                return
        for task_id in left:
            into.load_erased(task_id)

    def _entry(self, into: BatchState, row: Row) -> TaskId:
        task_id = TaskId(row["task_id"])
        into.load_entry(task_id, decode_entry(row), _slot(row, "live"))
        return task_id

    def entries(self, into: BatchState, rows: Sequence[Row]) -> list[TaskId]:
        return [self._entry(into, row) for row in rows]

    async def bodies(self, into: BatchState, wants: Sequence[WantBody]) -> None:
        for row in await self.rows("bodies", task_ids=[want.task_id for want in wants]):
            into.load(WantBody(TaskId(row["task_id"])), decode_task(row["body"]))

    async def queues(self, into: BatchState, wants: Sequence[WantQueue]) -> None:
        for want in wants:
            rows = await self._read_queue("queue", self._queue_floors, want.recipient, want.count)
            into.queue.heads[want.recipient].load(_places(rows, self.entries(into, rows)), want.count)
            for row in rows:
                into.load(WantBody(TaskId(row["task_id"])), decode_task(row["task_body"]))

    async def _read_queue(self, name: str, floors: Floors, owner: str, count: int) -> Sequence[Row]:
        """The first rows of a queue, or of a sender's results."""
        floor = floors.look(owner)
        rows = await self.rows(name, owner=owner, floor=floor, count=count)
        if floor != LOWEST and len(rows) < count:
            rows = await self.rows(name, owner=owner, floor=LOWEST, count=count)
        if rows:
            floors.note_first(owner, rows[0]["queue_place"])
        return rows

    async def recipients(self, into: BatchState, wants: Sequence[WantRecipients]) -> None:
        into.load(wants[0], {row["recipient"]: row["place"] for row in await self.rows("recipients")})

    async def results(self, into: BatchState, wants: Sequence[WantResults]) -> None:
        for want in wants:
            if want.sender is None:
                rows = await self.rows("all_results", count=want.count)
            else:
                rows = await self._read_queue("results", self._result_floors, want.sender, want.count)
            into.results.heads[want.sender].load(_places(rows, self.entries(into, rows)), want.count)

    async def shared(self, into: BatchState, wants: Sequence[WantShared]) -> None:
        works = {key_text(want.cache_key): SharedWork(want.cache_key) for want in wants}
        for row in await self.rows("shared", keys=list(works)):
            work = works[row["key"]]
            work.stored, work.leader, work.cached_bytes = True, row["leader"], row["cached_bytes"]
            work.cached = _cached(row["cached"]) if row["cached"] is not None else None
            work.cached_place = row["cached_place"]
        for row in await self.rows("followers", keys=list(works)):
            works[row["shared"]].followers[self._entry(into, row)] = None
        for work in works.values():
            into.load_shared(work)

    async def requests(self, into: BatchState, wants: Sequence[WantRequest]) -> None:
        texts = {(want.verb, column(want.holder), column(want.request_id)): want for want in wants}
        verbs, holders, request_ids = (list(part) for part in zip(*texts, strict=True))
        found = await self.rows("requests", verbs=verbs, holders=holders, request_ids=request_ids)
        known = {texts[row["verb"], row["holder"], row["request_id"]]: _remembered(row["given"]) for row in found}
        for want in wants:
            into.load(want, known.get(want))

    async def uses(self, into: BatchState, wants: Sequence[WantUses]) -> None:
        signatures = [want.signature for want in wants]
        rows = await self.rows("uses", signatures=signatures)
        if len(rows) < len(signatures):
            # A missing row cannot be locked.
            await self.rows("new_uses", signatures=signatures)
            rows = await self.rows("uses", signatures=signatures)
        for row in rows:
            into.load(WantUses(row["signature"]), row["used"])

    async def pushes(self, into: BatchState, wants: Sequence[WantPushes]) -> None:
        found: defaultdict[TaskId, list[Push]] = defaultdict(list)
        for row in await self.rows("pushes", task_ids=[want.task_id for want in wants]):
            found[row["task_id"]].append(decode_push(row["body"]))
        for want in wants:
            into.load_pushes(want.task_id, found[want.task_id])

    async def delegations(self, into: BatchState, wants: Sequence[WantDelegation]) -> None:
        for want in wants:
            rows = await self.rows("delegation", **_key(want.delegation))
            into.load_delegation(want.delegation, decode_delegation(rows[0]["body"]) if rows else None)

    async def peers(self, into: BatchState, wants: Sequence[WantPeer]) -> None:
        for want in wants:
            delegations = await self.rows("delegations_of_peer", peer=want.peer)
            messages = await self.rows("parcels_of_peer", peer=want.peer)
            into.load_peer(
                want.peer,
                [decode_delegation(row["body"]) for row in delegations],
                [decode_message(row["body"]) for row in messages],
            )

    async def peer_outbox(self, into: BatchState, wants: Sequence[WantOutbox]) -> None:
        for want in wants:
            rows = await self.rows("parcels", **_key(want.delegation))
            into.load_outbox(want.delegation, [decode_message(row["body"]) for row in rows])


Load: TypeAlias = "Callable[[Loader, BatchState, Any], Awaitable[None]]"


def _listed(name: str, decode: Callable[[Row], Any] | None = None) -> Load:
    """Loads the rows of a statement that takes the fields of the want: live tasks, if not decoded otherwise."""

    async def load(loader: Loader, into: BatchState, wants: Sequence[WantOfBatch[list[Any]]]) -> None:
        rows = await loader.rows(name, **asdict(wants[0]))
        into.load(wants[0], loader.entries(into, rows) if decode is None else list(map(decode, rows)))

    return load


def _single(name: str, decode: Callable[[Any], Any] = lambda value: value) -> Load:
    """Loads the one value that a statement has for the fields of each want."""

    async def load(loader: Loader, into: BatchState, wants: Sequence[Want[Any]]) -> None:
        for want in wants:
            values = {key: column(value) for key, value in asdict(want).items()}
            value = await fetch_value("load", loader.connection, name, now_ms=loader.now_ms, **values)
            into.load(want, decode(value) if value is not None else None)

    return load


def _slot(row: Row, table: str) -> Slot:
    slot = Slot(row["no"], table)
    slot.n = slot.held_n = row["n"]
    slot.settled_place, slot.ended_n = row["settled_place"], row["ended_n"]
    slot.attempt, slot.turn = row["attempt"], row["turn"]
    slot.intent, slot.size = row["intent"], row["size"]
    if table == "live":
        slot.place, slot.touched, slot.pushed = row["place"], row["touched"], row["pushed"]
    return slot


def _places(rows: Sequence[Row], task_ids: Sequence[TaskId]) -> list[tuple[int, TaskId]]:
    return [(row["queue_place"], task_id) for row, task_id in zip(rows, task_ids, strict=True)]


def _key(key: DelegationKey) -> dict[str, str]:
    return {"role": key.role.value, "peer": key.peer, "offer_id": column(key.offer_id)}


def _old_result(row: Row) -> OldResult:
    return OldResult(_cache_key(row["name"]), row["cached_at_ms"], row["cached_bytes"])


# In the order in which rows are locked, which is the same in every node.
_LOADS: Final[dict[type[Want[Any]], Load]] = {
    WantRequest: Loader.requests,
    WantShared: Loader.shared,
    WantRecipients: Loader.recipients,
    WantQueue: Loader.queues,
    WantResults: Loader.results,
    WantTask: Loader.tasks,
    WantLeases: _listed("leases"),
    WantDue: _listed("due"),
    WantOrphans: _listed("orphans"),
    WantCached: _listed("cached", _old_result),
    WantBody: Loader.bodies,
    WantUses: Loader.uses,
    WantPushes: Loader.pushes,
    WantIdlePushes: _listed("pushes_idle", lambda row: decode_push(row["body"])),
    WantEnvelope: _single("envelope"),
    WantEnvelopeCount: _single("envelope_count"),
    WantDelegation: Loader.delegations,
    WantPeer: Loader.peers,
    WantLiveDelegations: _single("delegations_live"),
    WantEndedFirst: _single("delegation_ended_first", lambda body: decode_delegation(body).key),
    WantOutbox: Loader.peer_outbox,
}


async def decide_loaded(work: BatchState, loader: Loader, item: Item, clock: Clock, new_id: Callable[[], str]) -> None:
    """Decides a command, and loads the rows that its decision asks for."""
    item.answer, item.error, item.events = None, None, []
    for _ in range(ROUNDS_MAX):
        item.ts_ms = clock.now_ms()
        try:
            try:
                decision = decide(work, item.command, item.ts_ms, new_id, clock.ages)
                apply_decision(work, item, decision.answer, None, decision.events)
            except CommandRefused as refused:
                apply_decision(work, item, None, refused.refusal, refused.events)
        except Missing as missing:
            await loader.load(work, missing.wants)
            continue
        except Refusal as refusal:
            item.error = refusal
        return
    raise AssertionError(f"{type(item.command).__name__} asks for more and more")
