"""`/ui/feed`: changes of the ledger as server-sent events. An event's id names the daemon's run and a position in it.
A tenant's is sealed, since a position counts the records of everybody.

One collector serves all readers. Each round it takes the changes, looks up the few tasks that the round names, keeps
the round in a bounded ring, and wakes the readers. Each reader has its own place in the ring, so a slow reader delays
nobody and then gets all the rounds that it missed at once. A reader whose place has left the ring gets `resync` and
reads everything again.

A round names the tasks that changed last, at most `LATEST_MAX`, and counts the others. Readers share the look-ups and
the written frames, so a round's cost does not grow with the number of readers, and hardly with the number of changes.
While a tenant reads, and for `LINGER_S` afterwards, a round has the same of the tenant's tasks alone: otherwise the
tasks of others would take the places of its own. The tenant of a task is looked up once, together with those of the
round's other tasks, or not at all if the change itself names it. Its agent and state are looked up for a reader.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from starlette.types import Scope

from covenant.dashboard.same_origin import check_same_origin, read_cookie
from covenant.dashboard.sessions import Role, Sessions, UiSession, no_session
from covenant.doors.http.endpoint import Endpoint
from covenant.doors.http.host_names import BaseUrl
from covenant.doors.http.responses import MAILBOX
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, HttpExchange
from covenant.doors.metrics import LIVE
from covenant.doors.operator_api.operation import ApiContext
from covenant.doors.waits import CallerGoneError, while_connected
from covenant.ledger.change_log import LATEST_MAX, Changes, TaskChange
from covenant.ledger.contract.ledger import Ledger
from covenant.model.errors import OverLimit, Unauthenticated
from covenant.model.ids import TaskId
from covenant.wire.sse import KEEP_ALIVE, KEEP_ALIVE_S

ROUND_S: Final = 0.25
"""A round names at most `LATEST_MAX` tasks, so a client is sent at most 20 tasks a second."""
ROUNDS_PER_COUNT: Final = 2
"""Counts are sent at most twice a second."""
RING_ROUNDS_MAX: Final = 1_200
LINGER_S: Final = 60.0
"""Changes are still collected for this long after the last reader left: that reader may be loading its next page."""
PER_SESSION_MAX: Final = 8
LAST_SEEN_MAX: Final = 18
NOWHERE: Final = -1
"""A position that no ring holds."""
NAMES_MAX: Final = 100
"""The most peers, or tasks with pushes, that one event names."""
OWNERS_MAX: Final = 50_000
"""The most tasks whose tenants are remembered: about 10 MiB."""

_encode = msgspec.json.Encoder().encode
_HEADERS: Final = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class FeedRow(msgspec.Struct, frozen=True, gc=False):
    task_id: TaskId
    state: str
    agent: str
    tenant: str | None
    at_ms: int


class OwnChanges(msgspec.Struct, gc=False):
    """The tasks of one tenant that changed in a round: the last ones, newest first, and how many more."""

    latest: dict[TaskId, TaskChange]
    more: int = 0


class TenantReaders(msgspec.Struct, gc=False):
    """The readers of one tenant. Rounds before the time of `epoch` have no changes of the tenant."""

    epoch: str
    followers: int = 0
    idle_s: float = 0.0

    @property
    def over(self) -> bool:
        return not self.followers and self.idle_s >= LINGER_S


class FeedRound(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The changes of one round. `position` is that of the last record in it."""

    position: int
    tasks: Sequence[FeedRow] = ()
    """The task that changed last comes first."""
    more: int = 0
    """How many more tasks changed."""
    own: Mapping[str, OwnChanges] = {}
    """The changes of each tenant that reads."""
    peers: frozenset[str] = frozenset()
    pushes: frozenset[TaskId] = frozenset()
    audited: int = 0
    nodes: bool = False


class FeedRing:
    """The latest rounds, newest last. The ring holds every change after the position `start`."""

    def __init__(self, position: int) -> None:
        self.start = position
        self.position = position
        self._rounds: deque[FeedRound] = deque()

    def add(self, new: FeedRound) -> None:
        self.position = new.position
        self._rounds.append(new)
        while len(self._rounds) > RING_ROUNDS_MAX:
            self.start = self._rounds.popleft().position

    def clear(self, position: int) -> None:
        self._rounds.clear()
        self.start = self.position = position

    def since(self, position: int) -> Sequence[FeedRound] | None:
        """The rounds after a position, newest first; None if the ring does not hold all of them."""
        if not self.start <= position <= self.position:
            return None
        found: list[FeedRound] = []
        for each in reversed(self._rounds):
            if each.position <= position:
                break
            found.append(each)
        return found


class FeedCollector:
    """Collects changes while somebody reads the feed, and for `LINGER_S` afterwards."""

    def __init__(self, ledger: Ledger, *, followers_max: int) -> None:
        self._ledger = ledger
        self._followers_max = followers_max
        self.ring = FeedRing(ledger.changes.position)
        self.counts: dict[str, int] = {}
        self.counted = 0
        """Grows by one whenever the counts differ from those before."""
        self._stale = True
        """Whether something may have changed since the last count."""
        self._followers = 0
        self._followers_of_session: dict[str, int] = {}
        self._tenants: dict[str, TenantReaders] = {}
        """The tenants that read, or have read within `LINGER_S`."""
        self._owners: dict[TaskId, str | None] = {}
        self._changed = asyncio.Event()
        self._followed = asyncio.Event()

    @contextmanager
    def following(self, session: UiSession) -> Iterator[None]:
        key = session.secret_sha256
        if self._followers >= self._followers_max or self._followers_of_session.get(key, 0) >= PER_SESSION_MAX:
            raise OverLimit("too_many_feeds", "too many pages follow the feed; close some", retry_after_ms=5_000)
        self._followers += 1
        self._followers_of_session[key] = self._followers_of_session.get(key, 0) + 1
        if not self._followed.is_set():
            self._begin()
        readers = self._readers_of(session.tenant) if session.tenant is not None else None
        if readers is not None:
            readers.followers += 1
        try:
            yield
        finally:
            self._followers -= 1
            if readers is not None:
                readers.followers, readers.idle_s = readers.followers - 1, 0.0
            self._followers_of_session[key] -= 1
            if not self._followers_of_session[key]:
                del self._followers_of_session[key]

    def _readers_of(self, tenant: str) -> TenantReaders:
        readers = self._tenants.get(tenant)
        if readers is None or readers.over:
            readers = self._tenants[tenant] = TenantReaders(secrets.token_hex(4))
        return readers

    def epoch_of(self, tenant: str) -> str:
        """Names the time since when rounds have the changes of this tenant, which reads now."""
        return self._tenants[tenant].epoch

    async def wait_for_change(self, position: int, counted: int, timeout_s: float) -> bool:
        """Waits for a change after `position`, or for new counts; False after `timeout_s` without either."""
        if (self.ring.position, self.counted) == (position, counted):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                return False
        return True

    def _begin(self) -> None:
        self._ledger.changes.begin()
        self.ring.clear(self._ledger.changes.position)
        self._stale = True
        self._followed.set()

    async def run(self) -> None:
        """Runs until canceled. After a failure, as while a database is away, it is run again for those who read."""
        if self._followers and not self._followed.is_set():
            self._begin()
            self._wake()
        while True:
            await self._followed.wait()
            await self._run_rounds()

    async def _run_rounds(self) -> None:
        rounds, idle_s = 0, 0.0
        try:
            while idle_s < LINGER_S:
                await asyncio.sleep(ROUND_S)
                idle_s = 0.0 if self._followers else idle_s + ROUND_S
                self._forget_tenants(ROUND_S)
                rounds += 1
                await self.run_round(counting=rounds % ROUNDS_PER_COUNT == 0)
        finally:
            self._followed.clear()
            self._forget_tenants(LINGER_S)
            self._ledger.changes.end()

    def _forget_tenants(self, idle_s: float) -> None:
        """Forgets the tenants that have not read for long, after another `idle_s` seconds."""
        for readers in self._tenants.values():
            readers.idle_s += idle_s
        self._tenants = {tenant: readers for tenant, readers in self._tenants.items() if not readers.over}
        if not self._tenants:
            self._owners.clear()

    async def run_round(self, *, counting: bool) -> None:
        """Runs one round: puts the changes into the ring and wakes the readers."""
        changes = self._ledger.changes.take()
        self._stale = self._stale or bool(changes)
        if changes and changes.complete:
            self.ring.add(await self._round(changes))
        elif changes:
            self.ring.clear(changes.position)
        if counting:
            await self.count()
        if changes:
            self._wake()

    def _wake(self) -> None:
        woken, self._changed = self._changed, asyncio.Event()
        woken.set()

    async def _round(self, changes: Changes) -> FeedRound:
        found = [await self._feed_row(task_id, change) for task_id, change in changes.latest.items()]
        rows = tuple(row for row in found if row is not None)
        return FeedRound(
            position=changes.position,
            tasks=rows,
            more=len(changes.others) + len(found) - len(rows),
            own=await self._own_changes({**changes.latest, **changes.others}) if self._tenants else {},
            peers=changes.peers,
            pushes=changes.pushes,
            audited=changes.audited,
            nodes=changes.nodes,
        )

    async def _feed_row(self, task_id: TaskId, change: TaskChange) -> FeedRow | None:
        agent, tenant, state = change.agent, change.tenant, change.state
        if agent is None:
            parties = await self._ledger.parties(task_id)
            if parties is None:
                return None
            agent, tenant = parties.recipient.display, parties.tenant
        if state is None:
            entry = await self._ledger.entry(task_id)
            state = entry.state if entry is not None else None
        return FeedRow(task_id, state.wire_name if state is not None else "resolved", agent, tenant, change.at_ms)

    async def _own_changes(self, changed: Mapping[TaskId, TaskChange]) -> dict[str, OwnChanges]:
        """The changes, newest first, by the tenants that read."""
        owners = self._owners
        owners |= {task_id: change.tenant for task_id, change in changed.items() if change.agent is not None}
        unknown = [task_id for task_id in changed if task_id not in owners]
        tenants = await self._ledger.tenants_of(unknown)
        owners |= {task_id: tenants.get(task_id) for task_id in unknown}
        found: dict[str, OwnChanges] = {}
        for task_id, change in changed.items():
            tenant = owners[task_id]
            if tenant not in self._tenants:
                continue
            own = found.setdefault(tenant, OwnChanges({}))
            if len(own.latest) < LATEST_MAX:
                own.latest[task_id] = change
            else:
                own.more += 1
        for task_id in list(owners)[: max(0, len(owners) - OWNERS_MAX)]:
            del owners[task_id]
        return found

    async def tenant_tasks(self, rounds: Sequence[FeedRound], tenant: str) -> tuple[list[FeedRow], int]:
        """The tasks of a tenant that changed last, each once, in its latest state; and how many more changed."""
        found: dict[TaskId, TaskChange | FeedRow] = {}
        more = 0
        for each in rounds:
            own = each.own.get(tenant)
            if own is not None:
                rows_by_id = {row.task_id: row for row in each.tasks}
                for task_id, change in own.latest.items():
                    found.setdefault(task_id, rows_by_id.get(task_id, change))
                more += own.more
        rows: list[FeedRow] = []
        for task_id, known_row in list(found.items())[:LATEST_MAX]:
            row = known_row if isinstance(known_row, FeedRow) else await self._feed_row(task_id, known_row)
            rows += [row] if row is not None else []
        return rows, more + len(found) - len(rows)

    async def count(self) -> None:
        """Counts again if something may have changed. While the archive lags, counts change without new records."""
        if not self._stale:
            return
        self._stale = False
        try:
            counts = await self._ledger.counts()
        except BaseException:
            self._stale = True
            raise
        self._stale = self._stale or counts.behind > 0
        shown = {state.wire_name: int(getattr(counts, state.value)) for state in LIVE}
        # A task that began and ended since the last count leaves the live counts as they were; `commits` differs.
        for name in ("holders_lost", "delegations_lost", "pushes_dead", "behind", "commits"):
            shown[name] = int(getattr(counts, name))
        if shown != self.counts:
            self.counts = shown
            self.counted += 1
            self._wake()


class FeedEndpoint(Endpoint):
    _streams = True

    def __init__(
        self, api: ApiContext, sessions: Sessions, base_url: BaseUrl, *, node: str, followers_max: int
    ) -> None:
        super().__init__("ui_feed", MAILBOX, api.meter)
        self._ledger = api.services.ledger
        self._cursors = api.services.catalogue.cursors
        self._version = api.version
        self._sessions = sessions
        self._base_url = base_url
        self._node = node
        self._run: Final = secrets.token_hex(4)
        """Positions of another run, or of another daemon, mean nothing in this one."""
        self.collector: Final = FeedCollector(self._ledger, followers_max=followers_max)
        self._written_frames: tuple[tuple[int, int], bytes] = ((-1, -1), b"")
        """The frames last written for readers that see everything, with the positions that they span."""

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        check_same_origin(scope, self._base_url, unsafe=False)
        session = self._sessions.find(read_cookie(scope, self._base_url), used=False)
        with self.collector.following(session):
            try:
                with while_connected(exchange) as work:

                    def end() -> None:
                        work.end(no_session())

                    session.on_end.add(end)
                    try:
                        await exchange({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                        await self._follow(session, self._last_seen(session, scope), exchange)
                    finally:
                        session.on_end.discard(end)
            except Unauthenticated:
                body = _frame("end", self._place(session, self.collector.ring.position), {"why": "logged_out"})
                await exchange({"type": "http.response.body", "body": body, "more_body": False})
            except CallerGoneError:
                return

    async def _follow(self, session: UiSession, seen: int | None, exchange: HttpExchange) -> None:
        async def write(body: bytes) -> None:
            self._sessions.check(session)  # a slow reader may take longer than its session lasts
            await exchange({"type": "http.response.body", "body": body, "more_body": True})

        collector, ring = self.collector, self.collector.ring
        position, counted = ring.position, -1
        if session.role is not Role.TENANT:
            await collector.count()
        hello = {"node": self._node, "version": self._version, "role": session.role.value}
        await write(_frame("hello", self._place(session, position), hello))
        if seen is not None:
            position = seen
        while True:
            self._sessions.check(session)
            rounds = ring.since(position)
            if rounds is None:
                position = ring.position
                await write(_frame("resync", self._place(session, position), {}))
            elif rounds:
                if frames := await self._frames_since(session, position, rounds):
                    await write(frames)
                position = rounds[0].position
            if collector.counted != counted:
                counted = collector.counted
                if session.role is not Role.TENANT and collector.counts:
                    lanes = {"lanes": collector.counts, "at_ms": self._ledger.now_ms()}
                    await write(_frame("counts", self._place(session, position), lanes))
            if not await collector.wait_for_change(position, counted, KEEP_ALIVE_S):
                await write(KEEP_ALIVE)

    async def _frames_since(self, session: UiSession, position: int, rounds: Sequence[FeedRound]) -> bytes:
        """The frames for these rounds after a position. A tenant's say nothing about the tasks of others."""
        if session.tenant is not None:
            rows, more = await self.collector.tenant_tasks(rounds, session.tenant)
            place = self._place(session, rounds[0].position)
            return _frame("tasks", place, {"tasks": rows, "more": more}) if rows or more else b""
        span = position, rounds[0].position
        if self._written_frames[0] != span:
            self._written_frames = span, write_all_frames(rounds, self._place(session, span[1]))
        return self._written_frames[1]

    def _place(self, session: UiSession, position: int) -> str:
        """The id of an event at this position."""
        if session.role is not Role.TENANT:
            return f"{self._run}.{position}"
        # With a nonce: equal places would tell a tenant that the other tenants did nothing in between.
        return self._cursors.seal(self._sealing_purpose(session), f"{position} {secrets.token_hex(8)}")

    def _sealing_purpose(self, session: UiSession) -> str:
        """The purpose that a tenant's place is sealed for. A place from before that epoch cannot be opened."""
        tenant = session.tenant or ""
        return f"feed {tenant} {self._run} {self.collector.epoch_of(tenant)}"

    def _last_seen(self, session: UiSession, scope: Scope) -> int | None:
        """The position that the browser saw last; None at the start, `NOWHERE` (so `resync`) if not of this run."""
        last_event_id: bytes | None = scope[HEADERS_BY_NAME].get(b"last-event-id")
        if last_event_id is None:
            return None
        text = last_event_id.strip().decode("latin-1")
        if session.role is Role.TENANT:
            position = self._cursors.open(self._sealing_purpose(session), text).partition(" ")[0]
        else:
            run, _, position = text.partition(".")
            position = position if run == self._run else ""
        well_formed = position.isascii() and position.isdigit() and len(position) <= LAST_SEEN_MAX
        return int(position) if well_formed else NOWHERE


def write_all_frames(rounds: Sequence[FeedRound], place: str) -> bytes:
    """The frames for readers who may see everything."""
    rows = _latest_states(row for each in rounds for row in each.tasks)
    named = rows[:LATEST_MAX]
    more = sum(each.more for each in rounds) + len(rows) - len(named)
    peers = sorted(set().union(*(each.peers for each in rounds)))
    pushes = sorted(set().union(*(each.pushes for each in rounds)))
    audited = sum(each.audited for each in rounds)
    frames: list[bytes] = []
    if named or more:
        frames.append(_frame("tasks", place, {"tasks": named, "more": more}))
    if peers:
        frames.append(_frame("peers", place, {"peers": peers[:NAMES_MAX]}))
    if pushes:
        frames.append(_frame("pushes", place, {"tasks": pushes[:NAMES_MAX]}))
    if audited:
        frames.append(_frame("audit", place, {"count": audited}))
    if any(each.nodes for each in rounds):
        frames.append(_frame("nodes", place, {}))
    return b"".join(frames)


def _latest_states(rows: Iterable[FeedRow]) -> list[FeedRow]:
    """Each task once, in its latest state."""
    found: dict[TaskId, FeedRow] = {}
    for row in rows:
        found.setdefault(row.task_id, row)
    return [*found.values()]


def _frame(event: str, place: str, data: dict[str, Any]) -> bytes:
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (place.encode(), event.encode(), _encode(data))
