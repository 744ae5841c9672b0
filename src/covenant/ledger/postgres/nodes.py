"""The life of a node among others: its heartbeat, the news and registers of the others, and who was lost.

Whether a node lives is judged by the database's clock alone. Whoever finds one lapsed fences its writer first, which
waits for the batch that is under way, and then says that it is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import asyncpg

from covenant.ledger.contract.identities import RegisterChange
from covenant.ledger.postgres.connections import UNAVAILABLE, Connections, fenced, unavailable
from covenant.ledger.postgres.counters import Count, Counters
from covenant.ledger.postgres.migrations import LEVEL
from covenant.ledger.postgres.news import CHANNEL, KEPT_S, Topics, decode_topics
from covenant.ledger.postgres.registers import Registers, decode_row
from covenant.ledger.postgres.sql import statement
from covenant.model.errors import Unavailable
from covenant.model.grant import GENESIS
from covenant.model.peers.instance import InstanceId

LEASE_MS: Final = 3_000
"""How long a node may be silent before the others declare it lost. It beats three times in it."""
POLL_S: Final = 0.05
HINT_S: Final = 0.01
NEWS_MAX: Final = 1_000
STOP_S: Final = 0.5
TIDY_S: Final = 30.0
MESSAGES_KEPT: Final = 1_000
OWN_KEPT: Final = 10_000
VACUUMS: Final = ("vacuum_live", "vacuum_queue", "vacuum_results", "vacuum_counts", "vacuum_news", "vacuum_writers")
CUT_S: Final = 5.0
"""Without the database for so long, watches end: who watches asks again."""
ACKNOWLEDGE_S: Final = 0.01

log = logging.getLogger(__name__)


async def refresh_registers(connection: asyncpg.Connection[Any], registers: Registers) -> list[RegisterChange]:
    """Take in what changed since the version that is known here."""
    asked = statement("nodes", "registers")
    rows = await connection.fetch(asked.text, *asked.values({"version": registers.version}))
    known = registers.version
    new = [row for row in rows if row["version"] > known]
    changes = registers.put(decode_row(row["kind"], row["name"], row["body"]) for row in new)
    registers.version = max([known, *(row["version"] for row in new)])
    return changes


class Joined(NamedTuple):
    """A run of a node, as the database has it."""

    boot: str
    writer: int
    seq: int
    started_ms: int
    restored_at_ms: int


async def join(connection: asyncpg.Connection[Any], *, node: str, boot: str, lease_ms: int) -> Joined:
    """Begin a run of a node. An earlier one is fenced."""
    async with connection.transaction():
        asked = statement("nodes", "new_writer")
        given = {"node": node, "boot": boot, "genesis": GENESIS.chain_hash}
        writer = await connection.fetchrow(asked.text, *asked.values(given))
        joined = (await _rows(connection, "join", node=node, boot=boot, lease_ms=lease_ms, level=LEVEL))[0]
    assert writer is not None
    return Joined(boot, writer["writer"], writer["seq"], joined["started_ms"], joined["restored_at_ms"])


class Membership:
    """One node's place among the others, on a connection of its own.

    `on_fenced` begins a new run, after others have declared this one lost; `on_begun` is called when it is there.
    """

    def __init__(
        self,
        connections: Connections,
        *,
        node: str,
        joined: Joined,
        lease_ms: int,
        registers: Registers,
        counters: Counters,
        on_news: Callable[[Topics], None],
        on_registers: Callable[[Iterable[RegisterChange]], None],
        on_cut: Callable[[], None],
        on_fenced: Callable[[], Awaitable[None]],
        on_begun: Callable[[], Awaitable[None]],
    ) -> None:
        self._connections = connections
        self._node = node
        self._joined = joined
        self._lease_ms = lease_ms
        self._registers = registers
        self._counters = counters
        self._on_news = on_news
        self._on_registers = on_registers
        self._on_cut = on_cut
        self._on_fenced = on_fenced
        self._on_begun = on_begun
        self._tried: set[str] = set()
        """Runs that were begun here: the answer to one may have been lost."""
        self._begun_anew = False
        self._alive: dict[str, str] = {node: joined.boot}
        self._cursors: dict[int, int] = {}
        self._boots: dict[int, str] = {}
        self._connection: asyncpg.Connection[Any] | None = None
        self._look = asyncio.Event()
        self._own: deque[tuple[int, Sequence[Count]]] = deque(maxlen=OWN_KEPT)
        """What this node has written lately, for a reload that was read before."""
        self._to_tell = False
        self._told_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._busy = asyncio.Lock()
        self._fresh_s = asyncio.get_running_loop().time()
        """When the last look began that was answered: what this node knows is not older."""
        self._beat_due = False
        self._wanted: set[str] = set()
        self._led: set[str] = set()
        self.written = joined.seq
        """The number of this node's last batch."""
        self.heard_s = asyncio.get_running_loop().time()
        self.refusing: Unavailable | None = None
        """Why this node decides nothing."""
        self.trouble: str | None = None
        """Why the database was not heard, if it was not."""

    def alive(self, node: str | None, boot: str) -> bool:
        return node is None or self._alive.get(node) == boot

    def check(self) -> None:
        """Raise Unavailable if this node may have been declared lost, or knows that it was."""
        if self.refusing is not None:
            raise self.refusing
        # Also where this process itself stood still: the others have counted that time, too.
        silent_ms = (asyncio.get_running_loop().time() - self._fresh_s) * 1_000
        if silent_ms > self._lease_ms * 2 / 3:
            raise Unavailable(
                "database_unavailable",
                f"the ledger's database has not answered for {silent_ms / 1_000:.1f} s ({self.trouble or 'silence'}), "
                "so other daemons may have declared this one lost; the request can be repeated",
                retry_after_ms=1_000,
            )

    def leads(self, name: str) -> bool:
        """Whether this node does it now; it is asked for from now on."""
        self._wanted.add(name)
        return name in self._led and self.refusing is None and self.silent_ms <= self._lease_ms * 2 / 3

    async def _lead(self, connection: asyncpg.Connection[Any]) -> None:
        """Take what nobody who lives does. What this run has once, it has for its life."""
        names = list(self._wanted)
        if not self._wanted <= self._led:
            await _execute(connection, "lead", names=names, node=self._node, boot=self._joined.boot)
            rows = await _rows(connection, "led", node=self._node, boot=self._joined.boot)
            self._led = {row["name"] for row in rows}

    @property
    def silent_ms(self) -> int:
        """How long this node has not known what the others wrote."""
        return int((asyncio.get_running_loop().time() - self.heard_s) * 1_000)

    @property
    def living(self) -> int:
        return len(self._alive)

    async def begin(self) -> None:
        await self._connect()
        await self._reload()
        await self._read_nodes()
        self._task = asyncio.create_task(self._run())

    def wrote(self, seq: int, counts: Sequence[Count]) -> None:
        """This node has committed a batch: tell the others soon that it is worth looking."""
        self.written = seq
        self._own.append((seq, counts))
        self._counters.add(counts)
        if not self._to_tell and len(self._alive) > 1:
            self._to_tell = True
            self._look.set()

    async def close(self) -> None:
        await self._stop()
        with suppress(TimeoutError, *UNAVAILABLE):
            async with asyncio.timeout(self._lease_ms / 1_000):
                connection = await self._connect()
                await _execute(connection, "leave", node=self._node, boot=self._joined.boot)
                await connection.close()
        if self._connection is not None:
            self._connection.terminate()

    async def abort(self) -> None:
        await self._stop()
        if self._connection is not None:
            self._connection.terminate()

    async def _stop(self) -> None:
        """Cancel until it has ended: a cancel that comes as a bounded wait ends may be lost."""
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=STOP_S)

    async def _connect(self) -> asyncpg.Connection[Any]:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connections.connect(timeout_s=self._lease_ms / 1_000)
            if not self._connections.pooler:
                await self._connection.add_listener(CHANNEL, self._told)
        return self._connection

    def _told(self, _connection: object, _pid: int, _channel: str, writer: object) -> None:
        """Some node has written; this one knows by itself what it wrote."""
        if writer != str(self._joined.writer):
            self._look.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        beaten_s, tidied_s = 0.0, loop.time()
        self.heard_s = self._fresh_s = loop.time()
        while True:
            begun_s = loop.time()
            try:
                async with self._busy:
                    if self._beat_due or loop.time() - beaten_s >= self._lease_ms / 3_000:
                        self._beat_due = False
                        async with asyncio.timeout(self._lease_ms / 1_000):
                            await self._beat()
                        beaten_s = loop.time()
                    if self._begun_anew:
                        await self._catch_up()
                    await self._poll()
                    await self._tell()
                    if loop.time() - tidied_s >= TIDY_S:
                        await self._tidy()
                        tidied_s = loop.time()
                self.heard_s, self._fresh_s, self.trouble = loop.time(), begun_s, None
            except (*UNAVAILABLE, asyncpg.PostgresError, Unavailable) as error:
                self.trouble = str(error) or type(error).__name__
                log.warning("ledger.signals_lost", extra={"reason": self.trouble})
                if self._connection is not None:
                    self._connection.terminate()
                    self._connection = None
                if loop.time() - self.heard_s >= CUT_S:
                    self._on_cut()
                await asyncio.sleep(POLL_S)
                continue
            self._look.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), POLL_S)
            if self._to_tell:
                await asyncio.sleep(self._told_s + HINT_S - loop.time())

    def beat_now(self) -> None:
        """Somebody has found this run fenced: find out why."""
        self._beat_due = True
        self._look.set()

    async def _beat(self) -> None:
        connection = await self._connect()
        if await self._seen(connection) is None:
            await self._find_standing(connection)
            return
        if self.refusing is not None:
            await self._find_standing(connection)
        for row in await _rows(connection, "lapsed"):
            await self._fence(connection, row["node"], row["boot"])
        await self._read_nodes()
        await self._lead(connection)

    async def _seen(self, connection: asyncpg.Connection[Any]) -> int | None:
        """Say that this run lives; None if it was declared lost."""
        seen: int | None = await _value(
            connection,
            "beat",
            node=self._node,
            boot=self._joined.boot,
            lease_ms=self._lease_ms,
            registers_seen=self._registers.version,
        )
        return seen

    async def _find_standing(self, connection: asyncpg.Connection[Any]) -> None:
        """Why this run is not the node's any more, or whether what was wrong is over."""
        row, joined = (await _rows(connection, "standing", node=self._node))[0], self._joined
        is_ours = row["boot"] == joined.boot or row["boot"] in self._tried
        if row["restored_at_ms"] > joined.restored_at_ms or (
            is_ours and (row["lost_at_ms"] or row["boot"] != joined.boot)
        ):
            log.warning("ledger.fenced", extra={"node": self._node})
            self.refusing = fenced()
            await self._on_fenced()
        elif row["boot"] == joined.boot:
            pass  # it lives: what was wrong is told elsewhere, and still is
        elif row["boot"] is None or row["started_ms"] < joined.started_ms:
            self.rolled_back(f"the run of {self._node} that it knows is an earlier one")
        elif self.refusing is None:
            log.error("ledger.replaced", extra={"node": self._node})
            self.refusing = Unavailable(
                "ledger_fenced",
                f"another daemon has started under the name {self._node}; give each its own daemon.node, and restart",
            )

    def rolled_back(self, sign: str) -> None:
        """The database has lost what it had acknowledged: nothing more is decided on it until somebody says so."""
        if self.refusing is None or self.refusing.code != "ledger_rolled_back":
            log.error("ledger.rolled_back", extra={"sign": sign})
            self.refusing = Unavailable(
                "ledger_rolled_back",
                f"the database has lost commits that it had acknowledged ({sign}): a standby without them took over, "
                "or it was restored. Bring back the right one, or accept the loss with `covenant ledger restored`",
            )

    async def rejoin(self, boot: str) -> Joined:
        """Begin a new run. With the writer at rest; it decides nothing before this node has caught up."""
        self._tried.add(boot)
        connection = await self._connect()
        self._joined = joined = await join(connection, node=self._node, boot=boot, lease_ms=self._lease_ms)
        self.written, self._begun_anew, self._led = joined.seq, True, set()
        return joined

    async def _catch_up(self) -> None:
        """Know again what the database has, after a new run has begun."""
        self._registers.version = 0
        self._own.clear()
        await self._reload()
        await self._read_nodes()
        await self._on_begun()
        self._begun_anew, self.refusing = False, None

    async def _fence(self, connection: asyncpg.Connection[Any], node: str, boot: str) -> bool:
        """Its writer first, which waits for its batch; then the node, unless it has come back meanwhile."""
        fencing = connection.transaction()
        await fencing.start()
        await _execute(connection, "fence_writer", node=node, boot=boot)
        if await _value(connection, "fence_node", node=node, boot=boot) is None:
            await fencing.rollback()
            return False
        await fencing.commit()
        log.warning("ledger.node_lost", extra={"node": node})
        return True

    async def _read_nodes(self) -> None:
        connection = await self._connect()
        rows = await _rows(connection, "nodes")
        self._alive = {row["node"]: row["boot"] for row in rows if row["lost_at_ms"] is None}

    async def _poll(self) -> None:
        """Look for what other writers have written."""
        connection, written = await self._connect(), self.written
        writers = await _rows(connection, "writers")
        self._check_order(writers, written)
        version = writers[0]["version"] if writers else 0
        boots = {row["writer"]: row["boot"] for row in writers}
        if boots != self._boots:
            self._boots = boots  # somebody is new here, or has begun anew
            await self._read_nodes()
        behind = {
            row["writer"]: self._cursors.get(row["writer"], 0)
            for row in writers
            if row["writer"] != self._joined.writer and row["seq"] > self._cursors.get(row["writer"], 0)
        }
        while behind:
            rows = await _rows(connection, "news", writers=list(behind), seqs=list(behind.values()), count=NEWS_MAX)
            for row in rows:
                writer, seq = row["writer"], row["seq"]
                if seq != self._cursors.get(writer, 0) + 1:
                    await self._reload()
                    self._on_cut()
                    return
                self._cursors[writer] = seq
                topics = decode_topics(row["topics"])
                self._counters.add(topics.counts)
                for peer, at_ms in topics.heard:
                    self._registers.heard(InstanceId(peer), at_ms)
                self._on_news(topics)
            if len(rows) < NEWS_MAX:
                if any(self._cursors.get(writer, 0) == at for writer, at in behind.items()):
                    # Its rows are gone already: this node was away for too long.
                    await self._reload()
                    self._on_cut()
                return
            behind = {writer: self._cursors.get(writer, 0) for writer in behind}
        if version > self._registers.version:
            await self._refresh(connection)

    async def _refresh(self, connection: asyncpg.Connection[Any]) -> None:
        changes = await refresh_registers(connection, self._registers)
        self._on_registers(changes)
        await self._seen(connection)

    def _check_order(self, writers: Sequence[Any], written: int) -> None:
        """No writer is behind what it was seen at: `written` is what this node had written before it looked."""
        for row in writers:
            known = written if row["writer"] == self._joined.writer else self._cursors.get(row["writer"], 0)
            if row["seq"] < known:
                self.rolled_back(f"writer {row['writer']} is at {row['seq']}, and was at {known}")

    async def _reload(self) -> None:
        """Counts, registers and cursors, as of one moment."""
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
        self._registers.put(decode_row(row["kind"], row["name"], row["body"]) for row in rows)
        self._registers.version = max(writers[0]["version"] if writers else 0, self._registers.version)
        for row in heard:
            self._registers.heard(InstanceId(row["peer"]), row["heard_at_ms"])

    async def _tell(self) -> None:
        if self._to_tell and not self._connections.pooler:
            self._to_tell, self._told_s = False, asyncio.get_running_loop().time()
            connection = await self._connect()
            await _execute(connection, "tell", writer=str(self._joined.writer))

    async def _tidy(self) -> None:
        connection = await self._connect()
        await _execute(connection, "forget_news", kept_s=KEPT_S)
        await _execute(connection, "forget_messages", kept=MESSAGES_KEPT)

    async def vacuum(self) -> None:
        """Drop the dead rows of the tables that change all the time."""
        # On a connection of its own: a long one must not keep this node from saying that it lives.
        connection = await self._connections.connect()
        try:
            for name in VACUUMS:
                await _execute(connection, name)
        finally:
            await connection.close()

    async def look(self) -> None:
        """Take in what others have committed before this call."""
        async with self._busy:
            await self._poll()

    async def acknowledged(self, version: int) -> None:
        """Return when every living node has this version of the registers, or has lapsed."""
        while True:
            try:
                async with self._busy:
                    connection = await self._connect()
                    await self._seen(connection)
                    await self._tell()
                    if not await _value(connection, "behind", version=version):
                        return
            except UNAVAILABLE as error:
                raise unavailable(error) from error
            await asyncio.sleep(ACKNOWLEDGE_S)


async def _rows(connection: asyncpg.Connection[Any], name: str, **values: Any) -> list[Any]:
    asked = statement("nodes", name)
    rows: list[Any] = await connection.fetch(asked.text, *asked.values(values))
    return rows


async def _value(connection: asyncpg.Connection[Any], name: str, **values: Any) -> Any:
    asked = statement("nodes", name)
    return await connection.fetchval(asked.text, *asked.values(values))


async def _execute(connection: asyncpg.Connection[Any], name: str, **values: Any) -> None:
    asked = statement("nodes", name)
    await connection.execute(asked.text, *asked.values(values))
