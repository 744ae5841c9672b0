"""Loads the rows that decisions ask for into the state of a batch, many of a kind by one statement.

A row on which a decision depends is locked. Taking from a queue skips rows that others have locked: they take them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import asyncpg
import msgspec

from covenant.ledger.clock import Clock
from covenant.ledger.machine.decisions import decide
from covenant.ledger.machine.decisions.context import CommandRefused
from covenant.ledger.machine.event_codec import encode_events
from covenant.ledger.machine.events import AnyEvent
from covenant.ledger.machine.view import Cached, Remembered
from covenant.ledger.postgres.batch_items import Item, split_events
from covenant.ledger.postgres.batch_state import BatchState
from covenant.ledger.postgres.cache_rows import OldResult, SharedWork, key_text
from covenant.ledger.postgres.connections import fetch_rows, fetch_value
from covenant.ledger.postgres.missing_rows import (
    Missing,
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
from covenant.ledger.postgres.stored_task import Row, Slot, column, decode_archived, decode_entry, decode_task
from covenant.model.errors import Refusal
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import Delegation, DelegationKey, OutboxMessage
from covenant.model.push import Push
from covenant.model.task import CacheKey

ROUNDS_MAX: Final = 2_000
"""How often one command may ask for more rows before it is decided."""
MOVES_MAX: Final = 3
"""How often a task may have moved between the looks into both tables. After that it is in neither: it is erased."""

_cached: Final = msgspec.json.Decoder(Cached).decode
_cache_key: Final = msgspec.json.Decoder(CacheKey).decode
_remembered: Final = msgspec.json.Decoder(Remembered).decode
_push: Final = msgspec.json.Decoder(Push).decode
_delegation: Final = msgspec.json.Decoder(Delegation).decode
_outbox_message: Final = msgspec.json.Decoder(OutboxMessage).decode


class Loader:
    """Loads by one connection, inside its transaction."""

    def __init__(
        self, connection: asyncpg.Connection[Any], now_ms: int, queue_floors: Floors, result_floors: Floors
    ) -> None:
        self._connection = connection
        self._now_ms = now_ms
        self._queue_floors, self._result_floors = queue_floors, result_floors

    async def load(self, into: BatchState, wants: Iterable[Want]) -> None:
        by_kind: defaultdict[type[Any], dict[Any, None]] = defaultdict(dict)
        for want in wants:
            by_kind[type(want)][want] = None
        for kind, load in _LOADS.items():
            if kind in by_kind:
                try:
                    await load(self, into, tuple(by_kind[kind]))
                except KeyError as error:  # all columns are selected, and one has been renamed
                    raise asyncpg.UndefinedColumnError(f"column {error} does not exist") from error

    async def _rows(self, name: str, **values: Any) -> Sequence[Row]:
        return await fetch_rows("load", self._connection, name, **values)

    async def _value(self, name: str, **values: Any) -> Any:
        return await fetch_value("load", self._connection, name, **values)

    async def tasks(self, into: BatchState, wants: Sequence[WantTask]) -> None:
        left = {want.task_id for want in wants}
        for _ in range(MOVES_MAX):
            for row in await self._rows("live", task_ids=list(left)):
                left.discard(self._entry(into, row))
            if not left:
                return
            known: set[TaskId] = set()
            for row in await self._rows("ended", task_ids=list(left)):
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

    def _entries(self, into: BatchState, rows: Sequence[Row]) -> list[TaskId]:
        return [self._entry(into, row) for row in rows]

    async def bodies(self, into: BatchState, wants: Sequence[WantBody]) -> None:
        for row in await self._rows("bodies", task_ids=[want.task_id for want in wants]):
            into.load_body(TaskId(row["task_id"]), decode_task(row["body"]))

    async def queues(self, into: BatchState, wants: Sequence[WantQueue]) -> None:
        for want in wants:
            rows = await self._line("queue", self._queue_floors, want.recipient, want.limit)
            into.load_queue(want.recipient, _places(rows, self._entries(into, rows)), want.limit)
            for row in rows:
                into.load_body(TaskId(row["task_id"]), decode_task(row["task_body"]))

    async def _line(self, name: str, floors: Floors, whose: str, count: int) -> Sequence[Row]:
        """The first rows of a queue, or of a sender's results."""
        floor = floors.look(whose)
        rows = await self._rows(name, whose=whose, floor=floor, count=count)
        if floor != LOWEST and len(rows) < count:
            rows = await self._rows(name, whose=whose, floor=LOWEST, count=count)
        if rows:
            floors.note_first(whose, rows[0]["queue_place"])
        return rows

    async def recipients(self, into: BatchState, _: Sequence[WantRecipients]) -> None:
        into.load_recipients({row["recipient"]: row["place"] for row in await self._rows("recipients")})

    async def results(self, into: BatchState, wants: Sequence[WantResults]) -> None:
        for want in wants:
            if want.sender is None:
                rows = await self._rows("all_results", count=want.limit)
            else:
                rows = await self._line("results", self._result_floors, want.sender, want.limit)
            into.load_results(want.sender, _places(rows, self._entries(into, rows)), want.limit)

    async def leases(self, into: BatchState, wants: Sequence[WantLeases]) -> None:
        into.load_leases(self._entries(into, await self._rows("leases", count=wants[0].limit)))

    async def due(self, into: BatchState, wants: Sequence[WantDue]) -> None:
        rows = await self._rows("due", by_ms=wants[0].by_ms, count=wants[0].limit)
        into.load_due(self._entries(into, rows))

    async def orphans(self, into: BatchState, wants: Sequence[WantOrphans]) -> None:
        into.load_orphans(self._entries(into, await self._rows("orphans", count=wants[0].limit)))

    async def shared(self, into: BatchState, wants: Sequence[WantShared]) -> None:
        works = {key_text(want.key): SharedWork(want.key) for want in wants}
        for row in await self._rows("shared", keys=list(works)):
            work = works[row["key"]]
            work.stored, work.leader, work.cached_bytes = True, row["leader"], row["cached_bytes"]
            work.cached = _cached(row["cached"]) if row["cached"] is not None else None
            work.cached_place = row["cached_place"]
        for row in await self._rows("followers", keys=list(works)):
            works[row["shared"]].followers[self._entry(into, row)] = None
        for work in works.values():
            into.load_shared(work)

    async def cached(self, into: BatchState, wants: Sequence[WantCached]) -> None:
        rows = await self._rows("cached", count=wants[0].limit)
        into.load_oldest([OldResult(_cache_key(row["name"]), row["cached_at_ms"], row["cached_bytes"]) for row in rows])

    async def requests(self, into: BatchState, wants: Sequence[WantRequest]) -> None:
        texts = {(want.verb, column(want.holder), column(want.request_id)): want for want in wants}
        verbs, holders, request_ids = (list(part) for part in zip(*texts, strict=True))
        found = await self._rows("requests", verbs=verbs, holders=holders, request_ids=request_ids)
        known = {texts[row["verb"], row["holder"], row["request_id"]]: _remembered(row["given"]) for row in found}
        for want in wants:
            into.load_request((want.verb, want.holder, want.request_id), known.get(want))

    async def uses(self, into: BatchState, wants: Sequence[WantUses]) -> None:
        signatures = [want.signature for want in wants]
        rows = await self._rows("uses", signatures=signatures)
        if len(rows) < len(signatures):
            # A missing row cannot be locked.
            await self._rows("new_uses", signatures=signatures)
            rows = await self._rows("uses", signatures=signatures)
        for row in rows:
            into.load_uses(row["signature"], row["used"])

    async def pushes(self, into: BatchState, wants: Sequence[WantPushes]) -> None:
        found: defaultdict[TaskId, list[Push]] = defaultdict(list)
        for row in await self._rows("pushes", task_ids=[want.task_id for want in wants]):
            found[row["task_id"]].append(_push(row["body"]))
        for want in wants:
            into.load_pushes(want.task_id, found[want.task_id])

    async def pushes_idle(self, into: BatchState, wants: Sequence[WantIdlePushes]) -> None:
        rows = await self._rows("pushes_idle", by_ms=wants[0].by_ms, count=wants[0].limit)
        into.load_idle([_push(row["body"]) for row in rows])

    async def delegations(self, into: BatchState, wants: Sequence[WantDelegation]) -> None:
        for want in wants:
            found = await self._value("delegation", **_key(want.key))
            into.load_delegation(want.key, _delegation(found) if found is not None else None)

    async def peers(self, into: BatchState, wants: Sequence[WantPeer]) -> None:
        for want in wants:
            delegations = await self._rows("delegations_of_peer", peer=want.peer)
            messages = await self._rows("parcels_of_peer", peer=want.peer)
            into.load_peer(
                want.peer,
                [_delegation(row["body"]) for row in delegations],
                [_outbox_message(row["body"]) for row in messages],
            )

    async def live_delegations(self, into: BatchState, wants: Sequence[WantLiveDelegations]) -> None:
        for want in wants:
            into.load_live_count(want.peer, await self._value("delegations_live", peer=want.peer))

    async def ended_first(self, into: BatchState, _: Sequence[WantEndedFirst]) -> None:
        found = await self._value("delegation_ended_first")
        into.load_ended_first(_delegation(found).key if found is not None else None)

    async def peer_outbox(self, into: BatchState, wants: Sequence[WantOutbox]) -> None:
        for want in wants:
            rows = await self._rows("parcels", **_key(want.key))
            into.load_outbox(want.key, [_outbox_message(row["body"]) for row in rows])

    async def envelopes(self, into: BatchState, wants: Sequence[WantEnvelope]) -> None:
        for want in wants:
            taken = await self._value("envelope", sender=want.sender, jti=column(want.jti), now_ms=self._now_ms)
            into.load_envelope(want.sender, want.jti, taken=taken)

    async def envelope_counts(self, into: BatchState, wants: Sequence[WantEnvelopeCount]) -> None:
        for want in wants:
            count = await self._value("envelope_count", sender=want.sender, now_ms=self._now_ms)
            into.load_envelope_count(want.sender, count)


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


# In the order in which rows are locked, which is the same in every node.
_LOADS: Final[dict[type[Any], Callable[[Loader, BatchState, Any], Awaitable[None]]]] = {
    WantRequest: Loader.requests,
    WantShared: Loader.shared,
    WantRecipients: Loader.recipients,
    WantQueue: Loader.queues,
    WantResults: Loader.results,
    WantTask: Loader.tasks,
    WantLeases: Loader.leases,
    WantDue: Loader.due,
    WantOrphans: Loader.orphans,
    WantCached: Loader.cached,
    WantBody: Loader.bodies,
    WantUses: Loader.uses,
    WantPushes: Loader.pushes,
    WantIdlePushes: Loader.pushes_idle,
    WantEnvelope: Loader.envelopes,
    WantEnvelopeCount: Loader.envelope_counts,
    WantDelegation: Loader.delegations,
    WantPeer: Loader.peers,
    WantLiveDelegations: Loader.live_delegations,
    WantEndedFirst: Loader.ended_first,
    WantOutbox: Loader.peer_outbox,
}


async def decide_loaded(work: BatchState, loader: Loader, item: Item, clock: Clock, new_id: Callable[[], str]) -> None:
    """Decides a command, and loads the rows that its decision asks for."""
    item.answer, item.error, item.events = None, None, []
    for _ in range(ROUNDS_MAX):
        item.ts_ms = clock.now_ms()
        events: list[AnyEvent]
        try:
            try:
                decision = decide(work, item.command, item.ts_ms, new_id, clock.ages)
                answer, refusal, events = decision.answer, None, decision.events
            except CommandRefused as refused:
                answer, refusal, events = None, refused.refusal, refused.events
            work.check(events)
        except Missing as missing:
            await loader.load(work, missing.wants)
            continue
        except Refusal as refused_:
            item.error = refused_
            return
        if events:
            try:
                encoded, events = encode_events(events)
            except Refusal as wrong:
                item.error = wrong
                return
            work.apply(events, split_events(encoded, len(events)), item.ts_ms)
        item.answer, item.error, item.events = answer, refusal, events
        return
    raise AssertionError(f"{type(item.command).__name__} asks for more and more")
