"""`/ui/feed`: what changes, as server-sent events. The id of each is the ledger's durable position.

One clock serves all who follow: so often it takes what changed, looks up the few tasks that it tells of, keeps the
round in a bounded ring, and wakes them. Each one reads from the ring at its own place, so a slow reader costs nobody
anything and gets what happened meanwhile at once. A reader whose place is not in the ring any more is told to read
everything anew (`resync`).

A round tells of the tasks that changed last, `LATEST_MAX` at most, and of how many more there were. Its cost does not
grow with its readers, who share what is looked up and written, and hardly with what changed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from covenant.dashboard.same_origin import check_same_origin, read_cookie
from covenant.dashboard.sessions import Role, Sessions, UiSession, no_session
from covenant.doors.http.endpoint import Endpoint
from covenant.doors.http.host_names import BaseUrl
from covenant.doors.http.responses import MAILBOX
from covenant.doors.metrics import LIVE
from covenant.doors.operator_api.operation import ApiContext
from covenant.doors.waits import CallerGoneError, while_connected
from covenant.ledger.change_log import LATEST_MAX, Changes, TaskChange
from covenant.ledger.contract.ledger import Ledger
from covenant.model.errors import OverLimit, Unauthenticated
from covenant.model.ids import TaskId
from covenant.wire.sse import KEEP_ALIVE, KEEP_ALIVE_S

ROUND_S: Final = 0.25
"""A round tells of `LATEST_MAX` tasks: a client is told of 20 a second at most."""
ROUNDS_PER_COUNT: Final = 2
"""So counts are told twice a second at most."""
RING_ROUNDS_MAX: Final = 1_200
LINGER_S: Final = 60.0
"""How long changes are kept after the last reader left: it may only be loading its next page."""
PER_SESSION_MAX: Final = 8
LAST_SEEN_MAX: Final = 18
NAMES_MAX: Final = 100
"""Peers, and tasks with pushes, that one event names."""

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


class FeedRound(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What is told of a moment. `position`: of the last record that it tells of."""

    position: int
    tasks: Sequence[FeedRow] = ()
    """The one that changed last comes first."""
    more: int = 0
    """Tasks that changed besides."""
    peers: frozenset[str] = frozenset()
    pushes: frozenset[TaskId] = frozenset()
    audited: int = 0


class FeedRing:
    """Rounds, the newest last. `start`: what happened after this position is all there."""

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
        """What happened after a position, the newest first; None if that is not known."""
        if not self.start <= position <= self.position:
            return None
        found: list[FeedRound] = []
        for each in reversed(self._rounds):
            if each.position <= position:
                break
            found.append(each)
        return found


class FeedClock:
    """Takes what changed while somebody follows, or did a moment ago."""

    def __init__(self, ledger: Ledger, *, followers_max: int) -> None:
        self._ledger = ledger
        self._followers_max = followers_max
        self.ring = FeedRing(ledger.changes.position)
        self.counts: dict[str, int] = {}
        self.counted = 0
        """The number of the last counts that were new."""
        self._followers = 0
        self._of_session: dict[str, int] = {}
        self._news = asyncio.Event()
        self._wanted = asyncio.Event()

    @contextmanager
    def following(self, session: UiSession) -> Iterator[None]:
        key = session.secret_sha256
        if self._followers >= self._followers_max or self._of_session.get(key, 0) >= PER_SESSION_MAX:
            raise OverLimit("too_many_feeds", "too many pages follow the feed; close some", retry_after_ms=5_000)
        self._followers += 1
        self._of_session[key] = self._of_session.get(key, 0) + 1
        if not self._wanted.is_set():
            self._ledger.changes.begin()
            self.ring.clear(self._ledger.changes.position)
            self._wanted.set()
        try:
            yield
        finally:
            self._followers -= 1
            self._of_session[key] -= 1
            if not self._of_session[key]:
                del self._of_session[key]

    async def news(self, position: int, timeout_s: float) -> None:
        """Until something happened after the position, or the time is over."""
        if self.ring.position == position:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return

    async def run(self) -> None:
        """As long as the daemon runs."""
        while True:
            await self._wanted.wait()
            await self._run_rounds()

    async def _run_rounds(self) -> None:
        rounds, left_s = 0, 0.0
        try:
            while left_s < LINGER_S:
                await asyncio.sleep(ROUND_S)
                left_s = 0.0 if self._followers else left_s + ROUND_S
                rounds += 1
                await self.look(counting=rounds % ROUNDS_PER_COUNT == 0)
        finally:
            self._wanted.clear()
            self._ledger.changes.end()

    async def look(self, *, counting: bool) -> None:
        """One round: what changed goes into the ring, and whoever follows is woken."""
        changes = self._ledger.changes.take()
        if not changes:
            return
        if counting:
            await self._count()
        if changes.complete:
            self.ring.add(await self._round(changes))
        else:
            self.ring.clear(changes.position)
        woken, self._news = self._news, asyncio.Event()
        woken.set()

    async def _round(self, changes: Changes) -> FeedRound:
        found = [await self._row(task_id, change) for task_id, change in changes.latest.items()]
        rows = tuple(row for row in found if row is not None)
        return FeedRound(
            position=changes.position,
            tasks=rows,
            more=changes.others + len(found) - len(rows),
            peers=changes.peers,
            pushes=changes.pushes,
            audited=changes.audited,
        )

    async def _row(self, task_id: TaskId, change: TaskChange) -> FeedRow | None:
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

    async def _count(self) -> None:
        counts = await self._ledger.counts()
        shown = {state.wire_name: int(getattr(counts, state.value)) for state in LIVE}
        for name in ("holders_lost", "delegations_lost", "pushes_dead", "behind"):
            shown[name] = int(getattr(counts, name))
        if shown != self.counts:
            self.counts = shown
            self.counted += 1


class FeedEndpoint(Endpoint):
    _streams = True

    def __init__(
        self, api: ApiContext, sessions: Sessions, base_url: BaseUrl, *, node: str, followers_max: int
    ) -> None:
        super().__init__("ui_feed", MAILBOX, api.meter)
        self._ledger = api.services.ledger
        self._version = api.version
        self._sessions = sessions
        self._base_url = base_url
        self._node = node
        self.clock: Final = FeedClock(self._ledger, followers_max=followers_max)
        self._written: tuple[tuple[int, int], bytes] = ((-1, -1), b"")
        """What was told last to those who see everything, and from where to where."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_same_origin(scope, self._base_url, unsafe=False)
        session = await self._sessions.find(read_cookie(scope, self._base_url))
        with self.clock.following(session):
            try:
                with while_connected(send, receive) as work:

                    def end() -> None:
                        work.end(no_session())

                    session.on_end.add(end)
                    try:
                        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                        await self._follow(session, _last_seen(scope), send)
                    finally:
                        session.on_end.discard(end)
            except Unauthenticated:
                body = _frame("end", self.clock.ring.position, {"why": "logged_out"})
                await send({"type": "http.response.body", "body": body, "more_body": False})
            except CallerGoneError:
                return

    async def _follow(self, session: UiSession, seen: int | None, send: Send) -> None:
        async def write(body: bytes) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": True})

        clock, ring = self.clock, self.clock.ring
        position, counted = ring.position, -1
        hello = {"position": position, "node": self._node, "version": self._version, "role": session.role.value}
        await write(_frame("hello", position, hello))
        if seen is not None:
            position = seen
        while True:
            rounds = ring.since(position)
            if rounds is None:
                position = ring.position
                await write(_frame("resync", position, {"position": position}))
            elif rounds:
                if told := self._tell(session, position, rounds):
                    await write(told)
                position = rounds[0].position
            if clock.counted != counted and session.role is not Role.TENANT and clock.counts:
                counted = clock.counted
                await write(_frame("counts", position, {"lanes": clock.counts, "at_ms": self._ledger.now_ms()}))
            await clock.news(position, KEEP_ALIVE_S)
            if ring.position == position:
                await self._check(session, write)

    async def _check(self, session: UiSession, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Nothing happened for a while: say so, unless the session is over by now."""
        self._sessions.check(session)
        await write(KEEP_ALIVE)

    def _tell(self, session: UiSession, position: int, rounds: Sequence[FeedRound]) -> bytes:
        """What happened in these rounds after a position, as this session may see it."""
        if session.role is Role.TENANT:
            return write_own(rounds, session.tenant)
        span = position, rounds[0].position
        if self._written[0] != span:
            self._written = span, write_all(rounds)
        return self._written[1]


def write_own(rounds: Sequence[FeedRound], tenant: str | None) -> bytes:
    """Others' tasks are not even counted: a tenant hears that it may look again."""
    told = _newest(row for each in rounds for row in each.tasks if row.tenant == tenant)[:LATEST_MAX]
    more = any(each.more for each in rounds)
    return _frame("tasks", rounds[0].position, {"tasks": told, "more": int(more)}) if told or more else b""


def write_all(rounds: Sequence[FeedRound]) -> bytes:
    position = rounds[0].position
    rows = _newest(row for each in rounds for row in each.tasks)
    told = rows[:LATEST_MAX]
    more = sum(each.more for each in rounds) + len(rows) - len(told)
    peers = sorted(set().union(*(each.peers for each in rounds)))
    pushes = sorted(set().union(*(each.pushes for each in rounds)))
    audited = sum(each.audited for each in rounds)
    frames: list[bytes] = []
    if told or more:
        frames.append(_frame("tasks", position, {"tasks": told, "more": more}))
    if peers:
        frames.append(_frame("peers", position, {"peers": peers[:NAMES_MAX]}))
    if pushes:
        frames.append(_frame("pushes", position, {"tasks": pushes[:NAMES_MAX]}))
    if audited:
        frames.append(_frame("audit", position, {"count": audited}))
    return b"".join(frames)


def _newest(rows: Iterable[FeedRow]) -> list[FeedRow]:
    """Each task once, as it was last."""
    found: dict[TaskId, FeedRow] = {}
    for row in rows:
        found.setdefault(row.task_id, row)
    return [*found.values()]


def _frame(event: str, position: int, data: dict[str, Any]) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (position, event.encode(), _encode(data))


def _last_seen(scope: Scope) -> int | None:
    """The position that the browser has seen last; None if it begins, or says nothing that could be one."""
    for name, value in scope["headers"]:
        if name == b"last-event-id":
            said = value.strip()
            return int(said) if said.isdigit() and len(said) <= LAST_SEEN_MAX else 0
    return None
