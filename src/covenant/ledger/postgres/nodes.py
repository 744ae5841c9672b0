"""The life of a node among others: its heartbeat, the news and registers of other nodes, and lost nodes.

Only the database's clock decides whether a node is alive. A node that finds another one lapsed fences its writer and
declares it lost, as soon as that node has no batch under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

import asyncpg

from covenant.ledger.contract.identities import Register, RegisterChange
from covenant.ledger.postgres.connections import SETTINGS, Connections, execute, fetch_rows, fetch_value
from covenant.ledger.postgres.counters import Count, Counters
from covenant.ledger.postgres.database_errors import UNAVAILABLE, describe_trouble, fenced, lost_if_dropped, translated
from covenant.ledger.postgres.lost_commits import CODE, Batch, SeenBatches, rolled_back
from covenant.ledger.postgres.migrations import LEVEL
from covenant.ledger.postgres.news import CHANNEL, Topics, decode_topics
from covenant.ledger.postgres.node_runs import Joined, join
from covenant.ledger.postgres.old_rows import remove_old_rows
from covenant.ledger.postgres.registers import Registers, decode_row, refresh_registers
from covenant.ledger.postgres.singletons import Singletons
from covenant.model.errors import Unavailable
from covenant.model.peers.instance import InstanceId
from covenant.model.rate_limits import Backoff

LEASE_MS: Final = 3_000
"""How long a node may be silent before the others declare it lost. Its heartbeat comes three times in this time."""
POLL_S: Final = 0.05
"""How often news are read if no notification comes."""
NOTIFY_PAUSE_S: Final = 0.01
"""The least time between two notifications by one node."""
AWAY_S: Final = Backoff(POLL_S, 0.5)
"""Pauses between two looks at a database that does not answer."""
NEWS_MAX: Final = 1_000
"""The most rows of news that are read at once."""
STOP_S: Final = 0.5
TIDY_S: Final = 30.0
"""How often old rows are removed."""
OWN_KEPT: Final = 10_000
CUT_S: Final = 5.0
"""After this time without the database, watches end, and their readers begin again."""
ACKNOWLEDGE_S: Final = 0.01

log = logging.getLogger(__name__)

_rows, _value, _execute = partial(fetch_rows, "nodes"), partial(fetch_value, "nodes"), partial(execute, "nodes")


async def stop_task(task: asyncio.Task[None] | None) -> None:
    """Cancels until the task has ended: a cancel may be lost if it comes when a bounded wait ends."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=STOP_S)


class Membership:
    """One node's membership, on a connection of its own.

    `on_fenced` begins a new run after others have declared this one lost; `on_begun` is called when it has begun.
    """

    def __init__(
        self,
        connections: Connections,
        *,
        node: str,
        joined: Joined,
        lease_ms: int,
        lost_path: Path | None,
        registers: Registers,
        counters: Counters,
        on_news: Callable[[Topics], None],
        on_registers: Callable[[Iterable[RegisterChange]], None],
        on_nodes: Callable[[], None],
        on_cut: Callable[[], None],
        on_beat: Callable[[asyncpg.Connection[Any]], Awaitable[None]],
        on_fenced: Callable[[], Awaitable[None]],
        on_begun: Callable[[asyncpg.Connection[Any]], Awaitable[None]],
    ) -> None:
        self._connections = connections
        self._node = node
        self._joined = joined
        self._lease_ms = lease_ms
        self._registers = registers
        self._counters = counters
        self._on_news = on_news
        self._on_registers = on_registers
        self._on_nodes, self._on_cut = on_nodes, on_cut
        self._on_beat, self._on_fenced, self._on_begun = on_beat, on_fenced, on_begun
        self._begun_boots: set[str] = set()
        """Runs that were begun here: the answer to one may have been lost."""
        self._begun_anew = self._is_ended = False
        """`_is_ended`: this run is over. The next one begins at a heartbeat at which the database answers."""
        self._alive: dict[str, str] = {node: joined.boot}
        """The boot of each living node."""
        self.level = LEVEL
        """The lowest schema level that a living node knows."""
        self._lost_s: dict[str, float] = {}
        """Since when this node knows that another one is gone."""
        self._cursors: dict[int, int] = {}
        """By writer: the last batch whose news were read."""
        self._boots: dict[int, str] = {}
        """By writer: its run, as of the last look."""
        self._seen_batches = SeenBatches(lost_path)
        self._connection: asyncpg.Connection[Any] | None = None
        self._poll_soon = asyncio.Event()
        self._own: deque[tuple[int, Sequence[Count]]] = deque(maxlen=OWN_KEPT)
        """The counts of this node's recent batches, for a reload whose snapshot was before them."""
        self._notify_due = False
        self._notified_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._busy = asyncio.Lock()
        self._fresh_s = asyncio.get_running_loop().time()
        """When the last round that succeeded began: this node knows what the others wrote before."""
        self._beat_due = self._looked = False
        """`_looked`: a round has succeeded. Before the first one silence refuses nothing: a start may be slow."""
        self.singletons = Singletons(node, self._is_current, self.beat_now)
        self.written = joined.seq
        """The number of this node's last batch."""
        self.refusal: Unavailable | None = None
        """Why this node decides nothing; None if it may decide."""
        self._sign = ""
        """How the loss of commits was noticed."""
        self.trouble: str | None = None
        """Why the database did not answer the last round; None if it did."""

    def alive(self, node: str | None, boot: str) -> bool:
        return node is None or self._alive.get(node) == boot

    def away_s(self, node: str) -> float:
        """How long this node has known that another one is gone; infinite for an unknown node."""
        return asyncio.get_running_loop().time() - self._lost_s.get(node, -inf)

    def check(self) -> None:
        """Raises Unavailable if this node may have been declared lost, or knows that it was."""
        if self.refusal is not None:
            raise self.refusal
        if self._is_silent() and (self._looked or self.trouble is not None):
            silent_s = f"{self.silent_ms / 1_000:.1f} s"
            raise Unavailable(
                "database_unavailable",
                f"the ledger's database has not answered for {silent_s} ({self.trouble or 'silence'}), "
                "so other daemons may have declared this one lost; the request can be repeated",
                retry_after_ms=1_000,
            )

    @property
    def boot(self) -> str:
        return self._joined.boot

    def _is_silent(self) -> bool:
        return self.silent_ms > self._lease_ms * 2 / 3

    def _is_current(self) -> bool:
        return self.refusal is None and not self._is_silent()

    def ledger_epoch(self) -> str | None:
        restored_at_ms = self._joined.restored_at_ms
        return f"restored-{restored_at_ms}" if restored_at_ms else None

    def committed_batches(self) -> int:
        return sum((self._cursors | {self._joined.writer: self.written}).values())

    @property
    def silent_ms(self) -> int:
        """The time since this node has read the other nodes' changes, with that in which this process was suspended."""
        return int((asyncio.get_running_loop().time() - self._fresh_s) * 1_000)

    def living(self) -> int:
        return max(1, len(self._alive))

    async def begin(self) -> None:
        await self._connect()
        await self._reload()
        await self._read_nodes()
        self._task = asyncio.create_task(self._run())

    def count(self, seq: int, counts: Sequence[Count]) -> None:
        """Counts a batch that this node has committed, unless a reload has read it before its answer came."""
        self._own.append((seq, counts))
        if seq > self._cursors.get(self._joined.writer, 0):
            self._counters.add(counts)

    def wrote(self, seq: int) -> None:
        """Has the other nodes notified soon of a batch that this node has committed."""
        self.written = seq
        if not self._notify_due and len(self._alive) > 1:
            self._notify_due = True
            self._poll_soon.set()

    async def close(self) -> None:
        await stop_task(self._task)
        with suppress(TimeoutError, asyncpg.PostgresError, *UNAVAILABLE), lost_if_dropped():
            async with asyncio.timeout(self._lease_ms / 1_000):
                connection = await self._connect()
                await _execute(connection, "leave", node=self._node, boot=self._joined.boot)
                await connection.close()
        self._drop()

    async def abort(self) -> None:
        await stop_task(self._task)
        self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def _connect(self) -> asyncpg.Connection[Any]:
        if self._connection is None or self._connection.is_closed():
            lease_s = self._lease_ms / 1_000
            # The server must give up, too: a backend that waits for a lock does not notice that its client has left.
            bounded = {**SETTINGS, "lock_timeout": f"{self._lease_ms}ms"}
            self._connection = await self._connections.connect(bounded, connect_s=lease_s, command_s=lease_s)
            if not self._connections.pooler:
                await self._connection.add_listener(CHANNEL, self._on_notification)
        return self._connection

    def _on_notification(self, _connection: object, _pid: int, _channel: str, writer: object) -> None:
        """Reads the news soon, if another node has written."""
        if writer != str(self._joined.writer):
            self._poll_soon.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        beaten_s, tidied_s, failures = 0.0, loop.time(), 0
        self._fresh_s = loop.time()
        while True:
            begun_s = loop.time()
            try:
                with lost_if_dropped():
                    async with self._busy:
                        if self._beat_due or loop.time() - beaten_s >= self._lease_ms / 3_000:
                            self._beat_due = False
                            await self._connections.watch_for_standby(self._beat(), self._lease_ms / 1_500)
                            beaten_s = loop.time()
                        if self._begun_anew:
                            await self._catch_up()
                        await self._poll()
                        await self._notify_nodes()
                        if loop.time() - tidied_s >= TIDY_S:
                            tidied_s = loop.time()
                            await remove_old_rows(await self._connect(), self._joined.writer, self.written)
                self._fresh_s, self._looked, failures = begun_s, True, 0
                self._log_trouble(None)
            except Exception as error:  # noqa: BLE001  (a supervisor: the next look may succeed)
                failures += 1
                self._log_trouble(error)
                self._drop()
                if isinstance(error, TimeoutError):
                    self._connections.drop_all()
                if self.silent_ms >= CUT_S * 1_000:
                    self._on_cut()
                await asyncio.sleep(AWAY_S.pause(failures))
                continue
            self._poll_soon.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._poll_soon.wait(), POLL_S)
            if self._notify_due:
                await asyncio.sleep(self._notified_s + NOTIFY_PAUSE_S - loop.time())

    def _log_trouble(self, error: Exception | None) -> None:
        """Logs a trouble when it begins, changes and ends, however often it is found."""
        words = error.message if isinstance(error, Unavailable) else describe_trouble(error) if error else None
        if words is None and self.trouble is not None:
            log.info("ledger.signals_back")
        elif words is not None and words != self.trouble:
            known = isinstance(error, (*UNAVAILABLE, asyncpg.PostgresError, Unavailable))
            log.warning("ledger.signals_lost", extra={"reason": words}, exc_info=None if known else error)
        self.trouble = words

    def beat_now(self) -> None:
        """Has the heartbeat sent at once, for instance to find out why this run was found fenced."""
        self._beat_due = True
        self._poll_soon.set()

    async def _beat(self) -> None:
        async with asyncio.timeout(self._lease_ms / 1_000):
            connection = await self._connect()
            if await self._send_heartbeat(connection) is None:
                await self._check_run(connection)
                return
            if self.refusal is not None:
                await self._check_run(connection)
            for row in await _rows(connection, "lapsed"):
                await self._fence(connection, row["node"], row["boot"])
            await self._read_nodes()
            await self.singletons.reassign(connection, self._joined.boot)
            await self._on_beat(connection)

    async def _send_heartbeat(self, connection: asyncpg.Connection[Any]) -> int | None:
        """Sends the heartbeat; None if this run was declared lost."""
        seen: int | None = await _value(
            connection,
            "beat",
            node=self._node,
            boot=self._joined.boot,
            lease_ms=self._lease_ms,
            registers_seen=self._registers.version,
        )
        return seen

    async def _check_run(self, connection: asyncpg.Connection[Any]) -> None:
        """Finds out why this run is fenced, or whether the reason for the refusal is over."""
        row, joined, written = (await _rows(connection, "own_run", node=self._node))[0], self._joined, self.written
        if self._is_rolled_back:
            self._seen_batches.save(self._sign, joined, written)  # it may have failed before
        is_ours = row["boot"] == joined.boot or row["boot"] in self._begun_boots
        is_over = is_ours and (
            row["lost_at_ms"] or row["boot"] != joined.boot or self._is_rolled_back or self._is_ended
        )
        # Otherwise no new run begins: it would not know the batches that this one has seen and the database has lost.
        is_restored = row["restored_at_ms"] > joined.restored_at_ms
        if is_restored or (self._is_in_order(await _rows(connection, "writers"), written) and is_over):
            log.warning("ledger.fenced", extra={"node": self._node})
            self.refusal, self._is_ended = fenced(restored=is_restored), True
            self._connections.drop_all(but=connection)  # nothing of the run that was lost is committed any more
            self._seen_batches.forget()
            await self._on_fenced()
        elif row["boot"] == joined.boot:
            pass  # this run is alive: another check handles the trouble
        elif row["started_ms"] is None or row["started_ms"] < joined.started_ms:
            self.rolled_back(f"the run of {self._node} that it knows is an earlier one")
        elif self.refusal is None:
            log.error("ledger.replaced", extra={"node": self._node})
            self.refusal = Unavailable(
                "ledger_fenced",
                f"another daemon has started under the name {self._node}; give each its own daemon.node, and restart",
            )

    @property
    def _is_rolled_back(self) -> bool:
        return self.refusal is not None and self.refusal.code == CODE

    def rolled_back(self, sign: str) -> None:
        """Stops deciding, since the database has lost acknowledged batches, until an operator accepts the loss."""
        if not self._is_rolled_back:
            log.error("ledger.rolled_back", extra={"sign": sign})
            self.refusal, self._sign = rolled_back(sign), sign
        self._seen_batches.save(self._sign, self._joined, self.written)

    async def rejoin(self, boot: str) -> Joined:
        """Begins a new run. The writer is at rest, and decides nothing before this node has caught up."""
        self._begun_boots.add(boot)
        connection = await self._connect()
        self._joined = joined = await join(connection, node=self._node, boot=boot, lease_ms=self._lease_ms)
        self.written, self._begun_anew, self._is_ended = joined.seq, True, False
        self.singletons.forget()
        return joined

    async def _catch_up(self) -> None:
        """Reads the database's present state, after a new run has begun."""
        self._registers.version = 0
        self._own.clear()
        await self._reload()
        await self._read_nodes()
        await self._on_begun(await self._connect())
        self._begun_anew, self.refusal = False, None

    async def _fence(self, connection: asyncpg.Connection[Any], node: str, boot: str) -> None:
        """Fences a node's writer, once it has no batch under way, and the node, unless it has come back meanwhile."""
        with suppress(asyncpg.LockNotAvailableError):  # a wait would delay our own heartbeat: the next one tries again
            if await _value(connection, "fence", node=node, boot=boot) is not None:
                log.warning("ledger.node_lost", extra={"node": node})

    async def _read_nodes(self) -> None:
        connection = await self._connect()
        rows = await _rows(connection, "nodes")
        alive, before = {row["node"]: row["boot"] for row in rows if row["lost_at_ms"] is None}, self._alive
        now_s, known = asyncio.get_running_loop().time(), self._lost_s
        self._lost_s = {row["node"]: known.get(row["node"], now_s) for row in rows if row["node"] not in alive}
        self._alive = alive
        self.level = min((row["level"] for row in rows if row["node"] in alive), default=LEVEL)
        if alive != before:
            moved = dict(alive.items() ^ before.items())
            served = {each.agent.tenant for each in self._registers.residents.values() if each.node in moved}
            self._on_registers([RegisterChange(Register.AGENTS, tenant) for tenant in served])
            self._on_nodes()

    async def _poll(self) -> None:
        """Reads the news of other writers."""
        connection, written = await self._connect(), self.written
        writers = await _rows(connection, "writers_of_nodes")
        self._is_in_order(writers, written)
        version = writers[0]["version"] if writers else 0
        boots = {row["writer"]: row["boot"] for row in writers}
        if boots != self._boots:
            self._boots = boots  # some node is new, or has begun a new run
            await self._read_nodes()
        behind = {
            row["writer"]: self._cursors.get(row["writer"], 0)
            for row in writers
            if row["writer"] != self._joined.writer and row["seq"] > self._cursors.get(row["writer"], 0)
        }
        while behind:
            rows = await _rows(connection, "news", writers=list(behind), seqs=list(behind.values()), count=NEWS_MAX)
            has_gap, is_last = not all(map(self._take_news, rows)), len(rows) < NEWS_MAX
            if has_gap or (is_last and any(self._cursors.get(writer, 0) == at for writer, at in behind.items())):
                await self._reload()  # some rows are already gone: this node was away for too long
                self._on_cut()
                return
            behind = {} if is_last else {writer: self._cursors.get(writer, 0) for writer in behind}
        if version > self._registers.version:
            await self._refresh(connection)

    def _take_news(self, row: Any) -> bool:
        """False, and nothing is applied, if the row is not the next one of its writer."""
        writer, seq = row["writer"], row["seq"]
        if seq != self._cursors.get(writer, 0) + 1:
            return False
        self._cursors[writer] = seq
        topics = decode_topics(row["topics"])
        self._counters.add(topics.counts)
        for peer, at_ms in topics.heard:
            self._registers.note_heard(InstanceId(peer), at_ms)
        self._on_news(topics)
        return True

    async def _refresh(self, connection: asyncpg.Connection[Any]) -> None:
        self._on_registers(await refresh_registers(connection, self._registers))
        await self._send_heartbeat(connection)

    def _is_in_order(self, writers: Sequence[Any], written: int) -> bool:
        """False if a writer is behind its known seq: the database lost commits. `written`: our seq before the look."""
        own = Batch(self._joined.writer, written, self._joined.boot)
        for row in writers:
            writer = row["writer"]
            known = (
                own if writer == own.writer else Batch(writer, self._cursors.get(writer, 0), self._boots.get(writer))
            )
            if (sign := self._seen_batches.compare(row, known)) is not None:
                self.rolled_back(sign)
        return not self._seen_batches.missing

    async def _reload(self) -> None:
        """Reads counts, registers and cursors in one snapshot."""
        connection = await self._connect()
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            writers = await _rows(connection, "writers")
            counts = await _rows(connection, "counts")
            rows = await _rows(connection, "all_registers")
            heard = await _rows(connection, "heard")
        self._cursors = {row["writer"]: row["seq"] for row in writers}
        self._counters.replace((row["kind"], row["lane"], row["n"]) for row in counts)
        for seq, own in self._own:
            if seq > self._cursors.get(self._joined.writer, 0):
                self._counters.add(own)
        changes = self._registers.put(decode_row(row["kind"], row["name"], row["body"]) for row in rows)
        self._registers.version = max(writers[0]["version"] if writers else 0, self._registers.version)
        self._on_registers(changes)
        for row in heard:
            self._registers.note_heard(InstanceId(row["peer"]), row["heard_at_ms"])
        self._on_news(Topics(peers=tuple(self._registers.peers)))  # messages from and to them may have been missed

    async def _notify_nodes(self) -> None:
        if self._notify_due and not self._connections.pooler:
            self._notify_due, self._notified_s = False, asyncio.get_running_loop().time()
            await _execute(await self._connect(), "notify", writer=str(self._joined.writer))

    async def look(self) -> None:
        """Reads the news of everything that other nodes have committed before this call."""
        async with self._lent_connection():
            await self._poll()

    @asynccontextmanager
    async def _lent_connection(self) -> AsyncIterator[asyncpg.Connection[Any]]:
        """Lends the connection to one caller at a time. A connection that failed is not used again."""
        with translated(lambda: self.trouble):
            async with self._busy:
                try:
                    with lost_if_dropped():
                        yield await self._connect()
                except UNAVAILABLE:
                    self._drop()
                    raise

    async def spread(self, version: int) -> None:
        """Returns when this node, too, has a version of the registers that no batch has made."""
        await self.look()
        await self.wait_acknowledged(version)

    async def wait_acknowledged(self, version: int) -> None:
        """Returns when every living node has this version of the registers, or has lapsed."""
        while True:
            async with self._lent_connection() as connection:
                await self._send_heartbeat(connection)
                await self._notify_nodes()
                if not await _value(connection, "behind", version=version):
                    return
            await asyncio.sleep(ACKNOWLEDGE_S)
