"""The life of a node among others: its heartbeat, the news and registers of the others, and who was lost.

Whether a node lives is judged by the database's clock alone. Whoever finds one lapsed fences its writer first, which
waits for the batch that is under way, and then says that it is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import asyncpg

from covenant.ledger.contract.identities import RegisterChange
from covenant.ledger.postgres.connections import UNAVAILABLE, Connections
from covenant.ledger.postgres.counters import Count, Counters
from covenant.ledger.postgres.news import CHANNEL, KEPT_S, Topics, decode_topics
from covenant.ledger.postgres.registers import Registers, decode_row
from covenant.ledger.postgres.sql import statement
from covenant.model.peers.instance import InstanceId

LEASE_MS: Final = 3_000
BEAT_S: Final = 1.0
POLL_S: Final = 0.05
HINT_S: Final = 0.01
NEWS_MAX: Final = 1_000
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


class Membership:
    """One node's place among the others, on a connection of its own."""

    def __init__(
        self,
        connections: Connections,
        *,
        node: str,
        boot: str,
        writer: int,
        registers: Registers,
        counters: Counters,
        on_news: Callable[[Topics], None],
        on_registers: Callable[[Iterable[RegisterChange]], None],
        on_cut: Callable[[], None],
        on_lost_nodes: Callable[[], None],
    ) -> None:
        self._connections = connections
        self._node = node
        self._boot = boot
        self._writer = writer
        self._registers = registers
        self._counters = counters
        self._on_news = on_news
        self._on_registers = on_registers
        self._on_cut = on_cut
        self._on_lost_nodes = on_lost_nodes
        self._alive: dict[str, str] = {node: boot}
        self._cursors: dict[int, int] = {}
        self._boots: dict[int, str] = {}
        self._connection: asyncpg.Connection[Any] | None = None
        self._look = asyncio.Event()
        self._own: deque[tuple[int, Sequence[Count]]] = deque(maxlen=OWN_KEPT)
        """What this node has written lately, for a reload that was read before."""
        self._to_tell = False
        self._task: asyncio.Task[None] | None = None
        self._busy = asyncio.Lock()
        self.fenced = False
        self.heard_s = 0.0
        self.lag = 0

    def alive(self, node: str | None, boot: str) -> bool:
        return node is None or self._alive.get(node) == boot

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
        self._own.append((seq, counts))
        self._counters.add(counts)
        self._to_tell = True

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        with suppress(*UNAVAILABLE):
            connection = await self._connect()
            await _execute(connection, "leave", node=self._node, boot=self._boot)
            await connection.close()

    async def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._connection is not None:
            self._connection.terminate()

    async def _connect(self) -> asyncpg.Connection[Any]:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connections.connect()
            await self._connection.add_listener(CHANNEL, lambda *_: self._look.set())
        return self._connection

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        beaten_s, tidied_s, self.heard_s = 0.0, loop.time(), loop.time()
        while not self.fenced:
            try:
                async with self._busy:
                    if loop.time() - beaten_s >= BEAT_S:
                        await self._beat()
                        beaten_s = loop.time()
                    await self._poll()
                    await self._tell()
                    if loop.time() - tidied_s >= TIDY_S:
                        await self._tidy()
                        tidied_s = loop.time()
                self.heard_s = loop.time()
            except UNAVAILABLE as error:
                log.warning("ledger.signals_lost", extra={"reason": str(error)})
                if self._connection is not None:
                    self._connection.terminate()
                    self._connection = None
                if loop.time() - self.heard_s >= CUT_S:
                    self._on_cut()
                await asyncio.sleep(POLL_S)
                continue
            self._look.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), HINT_S if self._to_tell else POLL_S)

    async def _beat(self) -> None:
        connection = await self._connect()
        seen = await _value(
            connection,
            "beat",
            node=self._node,
            boot=self._boot,
            lease_ms=LEASE_MS,
            registers_seen=self._registers.version,
        )
        if seen is None:
            self.fenced = True
            log.error("ledger.fenced", extra={"node": self._node})
            return
        lost = [await self._fence(connection, row["node"], row["boot"]) for row in await _rows(connection, "lapsed")]
        await self._read_nodes()
        if any(lost):
            self._on_lost_nodes()

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
        connection = await self._connect()
        writers = await _rows(connection, "writers")
        version = writers[0]["version"] if writers else 0
        boots = {row["writer"]: row["boot"] for row in writers}
        if boots != self._boots:
            self._boots = boots  # somebody is new here, or has begun anew
            await self._read_nodes()
        behind = {
            row["writer"]: self._cursors.get(row["writer"], 0)
            for row in writers
            if row["writer"] != self._writer and row["seq"] > self._cursors.get(row["writer"], 0)
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
        await _value(
            connection,
            "beat",
            node=self._node,
            boot=self._boot,
            lease_ms=LEASE_MS,
            registers_seen=self._registers.version,
        )

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
            if seq > self._cursors.get(self._writer, 0):
                self._counters.add(own)
        self._registers.put(decode_row(row["kind"], row["name"], row["body"]) for row in rows)
        self._registers.version = max(writers[0]["version"] if writers else 0, self._registers.version)
        for row in heard:
            self._registers.heard(InstanceId(row["peer"]), row["heard_at_ms"])

    async def _tell(self) -> None:
        if self._to_tell:
            self._to_tell = False
            connection = await self._connect()
            await _execute(connection, "tell")

    async def _tidy(self) -> None:
        connection = await self._connect()
        await _execute(connection, "forget_news", kept_s=KEPT_S)
        await _execute(connection, "forget_messages", kept=MESSAGES_KEPT)

    async def vacuum(self) -> None:
        """Drop the dead rows of the tables that change all the time."""
        async with self._busy:
            connection = await self._connect()
            for name in VACUUMS:
                await _execute(connection, name)

    async def look(self) -> None:
        """Take in what others have committed before this call."""
        async with self._busy:
            await self._poll()

    async def acknowledged(self, version: int) -> None:
        """Return when every living node has this version of the registers, or has lapsed."""
        while True:
            async with self._busy:
                connection = await self._connect()
                await _value(
                    connection,
                    "beat",
                    node=self._node,
                    boot=self._boot,
                    lease_ms=LEASE_MS,
                    registers_seen=self._registers.version,
                )
                if self._to_tell:
                    await self._tell()
                if not await _value(connection, "behind", version=version):
                    return
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
