"""The writer of a node: commands gather while the last batch commits, and are decided and written together.

A batch is one transaction. It holds the writer's row from its beginning to its end, so the batches of a boot are in
order, and none of a boot that was declared lost goes through. When the connection breaks in a commit, the row tells
whether it happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import asyncpg
import msgspec

from covenant.ledger.clock import Clock
from covenant.ledger.contract.identities import RegisterChange
from covenant.ledger.machine.commands import (
    Accept,
    Advance,
    Cancel,
    Command,
    Continue,
    Drain,
    DropPush,
    Interrupt,
    MovePushes,
    PutPush,
    Release,
    Renew,
    Report,
    RetryPush,
    Settle,
    Take,
    TaskCommand,
)
from covenant.ledger.machine.decisions import decide
from covenant.ledger.machine.decisions.context import CommandRefused
from covenant.ledger.machine.events import AnyEvent, encode_events
from covenant.ledger.machine.identity_commands import PurgeAudit, WriteAuditRow
from covenant.ledger.postgres.batch_rows import batch_values, write_batch, write_beside, write_registers
from covenant.ledger.postgres.connections import BROKEN, UNAVAILABLE, WRITER_SETTINGS, Connections, unavailable
from covenant.ledger.postgres.counters import Counters
from covenant.ledger.postgres.loader import Loader
from covenant.ledger.postgres.news import Topics, encode_topics, topics_of
from covenant.ledger.postgres.nodes import refresh_registers
from covenant.ledger.postgres.registers import REGISTER_EVENTS, RegisterRow, Registers
from covenant.ledger.postgres.sql import statement
from covenant.ledger.postgres.wanted import (
    Missing,
    Want,
    WantQueue,
    WantRequest,
    WantResults,
    WantShared,
    WantTask,
)
from covenant.ledger.postgres.working_set import WorkingSet
from covenant.model.errors import Refusal, Unavailable
from covenant.model.grant import AuditHead
from covenant.model.ids import PublicKey, TaskId
from covenant.model.settings import Limits
from covenant.model.task import DELEGATION, cache_key

BATCH_MAX: Final = 128
PLACE_BITS: Final = 20
ROUNDS_MAX: Final = 2_000
"""How often one command may ask for more before it is decided."""
TRIES_MAX: Final = 12
"""How often a batch is decided anew after a conflict."""
NUMBERS: Final = 1_000
PAUSE_S: Final = 0.005

CONFLICTS: Final = (
    asyncpg.UniqueViolationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
)

# Whatever is not here is rare, and is a batch of its own.
_TOGETHER: Final = (
    Accept,
    Take,
    Renew,
    Release,
    Interrupt,
    Report,
    Advance,
    Continue,
    Settle,
    Cancel,
    Drain,
    PutPush,
    DropPush,
    MovePushes,
    RetryPush,
    WriteAuditRow,
)

log = logging.getLogger(__name__)

_raws: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Fenced(Exception):
    """This boot was declared lost: whatever it decides is not written."""


class Conflict(Exception):
    """Somebody else was faster: nothing was written, and the batch is decided anew."""


class Item:
    """One command, and whoever waits for its answer."""

    __slots__ = ("answer", "begun", "command", "done", "error", "events", "registers_version", "ts_ms")

    def __init__(self, command: Command[Any], done: asyncio.Future[Any]) -> None:
        self.command = command
        self.done = done
        self.begun = False
        self.answer: Any = None
        self.error: BaseException | None = None
        self.events: list[AnyEvent] = []
        self.ts_ms = 0
        self.registers_version = 0
        """Which version of the registers it made, if it changed one."""

    def finish(self) -> None:
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.answer)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Committed(msgspec.Struct, frozen=True):
    """A batch that is durable."""

    seq: int
    work: WorkingSet
    records: Sequence[tuple[Sequence[AnyEvent], int]]
    topics: Topics
    registers: Sequence[RegisterRow]


class BatchWriter:
    def __init__(
        self,
        connections: Connections,
        *,
        writer: int,
        seq: int,
        node: str,
        boot: str,
        clock: Clock,
        limits: Limits,
        registers: Registers,
        counters: Counters,
        new_id: Callable[[], str],
        on_committed: Callable[[Committed], None],
        on_registers: Callable[[Iterable[RegisterChange]], None],
    ) -> None:
        self._connections = connections
        self.writer = writer
        self.seq = seq
        self._node = node
        self._boot = boot
        self._clock = clock
        self._limits = limits
        self._registers = registers
        self._counters = counters
        self._new_id = new_id
        self._on_committed = on_committed
        self._on_registers = on_registers
        self.used: Callable[[TaskId], dict[str, Any] | None] | None = None
        self.failure: str | None = None
        self.conflicts = 0
        self._waiting: deque[Item] = deque()
        self._turns: dict[str, int] = {}
        self._numbers: list[int] = []
        self._connection: asyncpg.Connection[Any] | None = None
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def submit(self, command: Command[Any]) -> Item:
        if self.failure is not None:
            raise Unavailable("ledger_fenced", self.failure)
        item = Item(command, asyncio.get_running_loop().create_future())
        self._waiting.append(item)
        self._wake.set()
        return item

    async def close(self) -> None:
        """End after the batch that is under way; what waits is refused."""
        self.failure = self.failure or "the ledger is closed"
        self._wake.set()
        await self._task
        if self._connection is not None:
            await self._connection.close()

    def terminate(self) -> None:
        self._task.cancel()
        if self._connection is not None:
            self._connection.terminate()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting and self.failure is None:
                batch = self._next()
                try:
                    await self._process(batch)
                except Exception as error:
                    log.exception("ledger.batch_failed")
                    for item in batch:
                        item.fail(error)
            if self.failure is not None:
                for item in self._waiting:
                    item.fail(Unavailable("ledger_fenced", self.failure))
                self._waiting.clear()
                return

    def _next(self) -> list[Item]:
        """What is decided together: as much as there is, or one that is a batch of its own."""
        batch: list[Item] = []
        while self._waiting and len(batch) < BATCH_MAX:
            together = isinstance(self._waiting[0].command, _TOGETHER)
            if not together and batch:
                break
            item = self._waiting.popleft()
            if not item.done.done():
                item.begun = True
                batch.append(item)
            if not together:
                break
        return batch

    async def _process(self, batch: list[Item]) -> None:
        for tried in range(TRIES_MAX):
            try:
                await self._try(batch, careful=tried > 0)
            except (Conflict, *CONFLICTS) as conflict:
                self.conflicts += 1
                log.debug("ledger.conflict", extra={"reason": str(conflict), "commands": len(batch)})
                if len(batch) > 1 and tried:
                    half = len(batch) // 2
                    await self._process(batch[:half])
                    await self._process(batch[half:])
                    return
                await asyncio.sleep(PAUSE_S * tried)
            except Fenced:
                self.failure = "this daemon was declared lost by another one, and takes nothing more; restart it"
                for item in batch:
                    item.fail(Unavailable("ledger_fenced", self.failure))
                return
            except UNAVAILABLE as error:
                await self._drop_connection()
                if tried == TRIES_MAX - 1 or not isinstance(error, BROKEN):
                    for item in batch:
                        item.fail(unavailable(error))
                    return
                await asyncio.sleep(PAUSE_S * 2**tried)
            else:
                return
        for item in batch:
            item.fail(Unavailable("busy", "too many others change the same; repeat the request", retry_after_ms=1_000))

    async def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def _connected(self) -> asyncpg.Connection[Any]:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connections.connect(WRITER_SETTINGS)
        return self._connection

    async def _try(self, batch: list[Item], *, careful: bool) -> None:
        """One transaction. `careful`: nothing is taken for new without looking."""
        connection = await self._connected()
        await connection.execute("BEGIN")
        try:
            committed = await self._transact(connection, batch, careful=careful)
        except BaseException:
            if not connection.is_closed():
                await connection.execute("ROLLBACK")
            raise
        if committed is None:
            await connection.execute("ROLLBACK")
        else:
            await self._commit(connection, committed.seq)
            self.seq = committed.seq
            self._on_committed(committed)
        for item in batch:
            item.finish()

    async def _commit(self, connection: asyncpg.Connection[Any], seq: int) -> None:
        try:
            await connection.execute("COMMIT")
        except BROKEN as error:
            log.warning("ledger.commit_unknown", extra={"reason": str(error)})
            if not await self._happened(seq):
                raise

    async def _happened(self, seq: int) -> bool:
        """Whether the batch with this number was committed. Waits until its transaction is over, either way."""
        await self._drop_connection()
        connection = await self._connected()
        asked = statement("nodes", "writer_seq")
        found = await connection.fetchval(asked.text, *asked.values({"writer": self.writer, "boot": self._boot}))
        if found is None:
            raise Fenced
        return bool(found == seq)

    async def _transact(
        self, connection: asyncpg.Connection[Any], batch: list[Item], *, careful: bool
    ) -> Committed | None:
        work, loader, version = await self._begin(connection, batch)
        if careful:
            wanted = [item.command.task.id for item in batch if isinstance(item.command, Accept)]
            await loader.load(work, map(WantTask, wanted))
        await loader.load(work, _hints(batch))
        for item in batch:
            await self._decide(work, loader, item)
        records = [(item.events, item.ts_ms) for item in batch if item.events]
        if not records:
            return None
        events = [event for of_item, _ in records for event in of_item]
        rows = self._registers.changes(events) if any(type(event) in REGISTER_EVENTS for event in events) else []
        if rows:
            (item,) = batch
            item.registers_version = version + 1
            await write_registers(connection, rows, version + 1, work)
        chain = next((item.command.chain for item in batch if isinstance(item.command, PurgeAudit)), "") or self._node
        await write_beside(connection, work, chain)
        topics = topics_of(work, records)
        seq = self.seq + 1
        written = await write_batch(
            connection,
            batch_values(work)
            | {
                "seq": seq,
                "writer": self.writer,
                "boot": self._boot,
                "audit_index": work.audit_head.index,
                "audit_hash": work.audit_head.chain_hash,
                "chain": self._node,
                "version": version + 1 if rows else version,
                "started": list(work.started),
                "topics": encode_topics(topics),
            },
        )
        if not written.writer:
            raise Fenced
        if not written.rows:
            raise Conflict("the rows were changed by somebody else")
        return Committed(seq, work, records, topics, rows)

    async def _begin(self, connection: asyncpg.Connection[Any], batch: list[Item]) -> tuple[WorkingSet, Loader, int]:
        asked = statement("load", "begin")
        row = await connection.fetchrow(asked.text, *asked.values({"writer": self.writer, "boot": self._boot}))
        if row is None:
            raise Fenced
        if row["seq"] != self.seq:
            raise AssertionError(f"the writer's row is at {row['seq']}, and this writer at {self.seq}")
        version: int = row["version"]
        if not isinstance(batch[0].command, _TOGETHER):
            # It may change a register: then one after the other, on the newest version.
            version = await connection.fetchval(statement("nodes", "lock_registers").text)
        if version != self._registers.version:
            self._on_registers(await refresh_registers(connection, self._registers))
        if len(self._numbers) < BATCH_MAX:
            first = await connection.fetchval(statement("load", "numbers").text)
            self._numbers = [*range(first + NUMBERS - 1, first - 1, -1), *self._numbers]
        work = WorkingSet(
            self._limits,
            self._registers,
            self._counters,
            audit_head=AuditHead(row["audit_index"], row["audit_hash"]),
            place=row["place"] << PLACE_BITS,
            new_no=self._numbers.pop,
            turns=self._turns,
            used=self.used,
        )
        for item in batch:
            if isinstance(item.command, Accept) and item.command.minted:
                work.new_task(item.command.task.id)
        return work, Loader(connection, self._clock.now_ms()), version

    async def _decide(self, work: WorkingSet, loader: Loader, item: Item) -> None:
        item.answer, item.error, item.events = None, None, []
        for _ in range(ROUNDS_MAX):
            item.ts_ms = self._clock.now_ms()
            events: list[AnyEvent]
            try:
                try:
                    decision = decide(work, item.command, item.ts_ms, self._new_id, self._clock.ages)
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
                work.apply(events, [bytes(raw) for raw in _raws(encoded)], item.ts_ms)
            item.answer, item.error, item.events = answer, refusal, events
            return
        raise AssertionError(f"{type(item.command).__name__} asks for more and more")


def _hints(batch: Sequence[Item]) -> list[Want]:
    """What these commands will ask for first: loaded at once instead of one after the other."""
    wants: list[Want] = []
    queues: dict[PublicKey, int] = {}
    results: dict[PublicKey | None, int] = {}
    for item in batch:
        command = item.command
        if isinstance(command, TaskCommand):
            wants.append(WantTask(command.task_id))
        elif isinstance(command, Accept):
            task, key = command.task, cache_key(command.task)
            if not command.minted:
                wants.append(WantTask(task.id))
            if task.origin == DELEGATION and task.parent is not None:
                wants.append(WantTask(task.parent))
            if key is not None:
                wants.append(WantShared(key))
        elif isinstance(command, Take):
            if command.request_id is not None and command.asker is not None:
                wants.append(WantRequest("take", command.asker.pubkey, command.request_id))
            elif command.recipient is not None:
                queues[command.recipient] = queues.get(command.recipient, 0) + command.count
        elif isinstance(command, Drain):
            if command.request_id is not None:
                wants.append(WantRequest("drain", command.by.pubkey, command.request_id))
            elif command.task_id is None:
                results[command.sender] = results.get(command.sender, 0) + command.count
    wants += [WantQueue(recipient, count) for recipient, count in queues.items()]
    wants += [WantResults(sender, count) for sender, count in results.items()]
    return wants
