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
from contextlib import suppress
from typing import Any, Final

import asyncpg

from covenant.ledger.clock import Clock
from covenant.ledger.contract.identities import RegisterChange
from covenant.ledger.machine.commands import Accept, Command
from covenant.ledger.machine.decisions import decide
from covenant.ledger.machine.decisions.context import CommandRefused
from covenant.ledger.machine.event_codec import encode_events
from covenant.ledger.machine.events import AnyEvent
from covenant.ledger.machine.identity_commands import PurgeAudit
from covenant.ledger.postgres.batch_items import (
    TOGETHER,
    Committed,
    Conflict,
    Fenced,
    Item,
    RolledBack,
    hints,
    weigh_command,
)
from covenant.ledger.postgres.batch_rows import batch_values, heads_left, write_batch, write_beside, write_registers
from covenant.ledger.postgres.connections import (
    BROKEN,
    REFUSED,
    UNAVAILABLE,
    WRITER_SETTINGS,
    Connections,
    fenced,
    outcome_unknown,
    refused,
    unavailable,
)
from covenant.ledger.postgres.counters import Counters
from covenant.ledger.postgres.fast_decisions import Heads, decide_fast, decode_raws, is_simple, puts_in_line
from covenant.ledger.postgres.loader import Loader
from covenant.ledger.postgres.news import encode_topics, topics_of
from covenant.ledger.postgres.nodes import Joined, Membership, refresh_registers
from covenant.ledger.postgres.queue_head import PLACE_BITS, Floors
from covenant.ledger.postgres.recent_tasks import RECENT_MAX, RecentTasks
from covenant.ledger.postgres.registers import REGISTER_EVENTS, RegisterRow, Registers
from covenant.ledger.postgres.sql import statement
from covenant.ledger.postgres.wanted import Missing, WantTask
from covenant.ledger.postgres.working_set import WorkingSet
from covenant.model.errors import Refusal, Unavailable
from covenant.model.grant import AuditHead
from covenant.model.ids import TaskId
from covenant.model.settings import Limits

BATCH_MAX: Final = 128
BATCH_BYTES_MAX: Final = 4 << 20
UNWEIGHED: Final = 4
"""So many commands go together whatever they weigh: to weigh one takes longer than to see that there are few."""
ROUNDS_MAX: Final = 2_000
"""How often one command may ask for more before it is decided."""
TRIES_MAX: Final = 12
"""How often a batch is decided anew after a conflict."""
NUMBERS: Final = 1_000
NOTHING: Final = "{}"
"""The news of a batch that the gate did not let through."""
PAUSE_S: Final = 0.005

CONFLICTS: Final = (
    asyncpg.UniqueViolationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
    asyncpg.DivisionByZeroError,
)

log = logging.getLogger(__name__)


class BatchWriter:
    def __init__(
        self,
        connections: Connections,
        *,
        joined: Joined,
        membership: Membership,
        node: str,
        clock: Clock,
        limits: Limits,
        registers: Registers,
        counters: Counters,
        new_id: Callable[[], str],
        on_committed: Callable[[Committed], None],
        on_registers: Callable[[Iterable[RegisterChange]], None],
    ) -> None:
        self._connections = connections
        self._membership = membership
        self._joined = joined
        self.seq = joined.seq
        self._node = node
        self.at_rest = asyncio.Lock()
        """Whoever has it: nothing is decided or written meanwhile."""
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
        self._recent = RecentTasks()
        self._queue_floors, self._result_floors = Floors(), Floors()
        self._head: AuditHead | None = None
        self._place = 0
        self._doubt: Committed | None = None
        """A batch whose commit was not answered: found out before anything else is written."""
        self.fast = 0
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def submit(self, command: Command[Any]) -> Item:
        if self.failure is not None:
            raise Unavailable("ledger_closed", self.failure)
        self._membership.check()
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

    async def abort(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        if self._connection is not None:
            self._connection.terminate()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting and self.failure is None:
                batch = self._next()
                try:
                    async with self.at_rest:
                        await self._process(batch)
                except Exception as error:
                    log.exception("ledger.batch_failed")
                    _fail(batch, error)
            if self.failure is not None:
                _fail(self._waiting, Unavailable("ledger_closed", self.failure))
                self._waiting.clear()
                return

    def _next(self) -> list[Item]:
        """What is decided together: as much as there is, or one that is a batch of its own."""
        batch: list[Item] = []
        size = 0
        while self._waiting and len(batch) < BATCH_MAX and size < BATCH_BYTES_MAX:
            together = isinstance(self._waiting[0].command, TOGETHER)
            if not together and batch:
                break
            item = self._waiting.popleft()
            if not item.done.done():
                item.begun = True
                batch.append(item)
                size += weigh_command(item.command) if len(batch) > UNWEIGHED else 0
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
                # Whatever was in doubt is decided by now: the fence waited for it.
                await self._settle_doubt()
                self._membership.beat_now()
                _fail(batch, fenced())
                return
            except RolledBack as sign:
                self._membership.rolled_back(str(sign))
                _fail(batch, self._membership.refusing or fenced())
                return
            except REFUSED as error:
                _fail(batch, refused(error))
                return
            except UNAVAILABLE as error:
                await self._drop_connection()
                if tried == TRIES_MAX - 1 or not isinstance(error, BROKEN):
                    in_doubt = self._doubt.items if self._doubt is not None else ()
                    for item in batch:
                        item.fail(outcome_unknown() if item in in_doubt else unavailable(error))
                    return
                await asyncio.sleep(PAUSE_S * 2**tried)
            else:
                return
        words = "too many other requests change the same data; repeat the request"
        _fail(batch, Unavailable("busy", words, retry_after_ms=1_000))

    async def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def _connected(self) -> asyncpg.Connection[Any]:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connections.connect(WRITER_SETTINGS)
        return self._connection

    async def _try(self, batch: list[Item], *, careful: bool) -> None:
        """One transaction. `careful`: nothing is taken for new, or for known, without looking."""
        connection = await self._connected()
        if self._doubt is not None:
            await self._find_out(self._doubt)
        batch = [item for item in batch if not item.done.done()]
        if batch and not careful:
            batch = await self._try_fast(connection, batch)
        if not batch:
            return
        await connection.execute("BEGIN")
        try:
            committed = await self._transact(connection, batch, careful=careful)
        except BaseException:
            if not connection.is_closed():
                await connection.execute("ROLLBACK")
            raise
        if committed is None:
            await connection.execute("ROLLBACK")
            for item in batch:
                item.finish()
            return
        try:
            await connection.execute("COMMIT")
        except BROKEN:
            self._doubt = committed
            raise
        self._land(committed)

    def _land(self, committed: Committed) -> None:
        """It is durable: tell everybody."""
        self.seq = committed.seq
        self._remember(committed.work)
        self._on_committed(committed)
        for item in committed.items:
            item.finish()

    def _remember(self, work: WorkingSet) -> None:
        self._head = work.audit_head
        self._recent.remember(work)
        self._queue_floors.entered(work.queue_in)
        if len(self._turns) > RECENT_MAX:
            self._turns.clear()  # who was served last is forgotten, and everybody's turn comes by what waits longest

    def begin_anew(self, joined: Joined) -> None:
        """As another run, which knows nothing yet. At rest."""
        self._joined, self.seq, self._head, self._doubt = joined, joined.seq, None, None
        self._recent.clear()

    async def _settle_doubt(self) -> None:
        """What became of a batch in doubt, now that this run is fenced: its news are there, or never will be."""
        doubtful, self._doubt = self._doubt, None
        if doubtful is None:
            return
        connection = await self._connected()
        asked = statement("nodes", "news_of")
        values = {"writer": self._joined.writer, "seq": doubtful.seq}
        topics = await connection.fetchval(asked.text, *asked.values(values))
        if topics is not None and topics != NOTHING:
            self._land(doubtful)

    async def _find_out(self, doubtful: Committed) -> None:
        """Whether a batch was committed: wait until its backend is done with it, then look for its news."""
        connection = await self._connected()
        values = {"writer": self._joined.writer, "boot": self._joined.boot, "seq": doubtful.seq}
        async with connection.transaction():
            asked = statement("nodes", "writer_seq")
            seq = await connection.fetchval(asked.text, *asked.values(values))
            if seq is None:
                raise Fenced
            asked = statement("nodes", "news_of")
            topics = await connection.fetchval(asked.text, *asked.values(values))
            if topics is None:
                # It may still be on its way: its number is used up, so that it comes too late.
                asked = statement("nodes", "skip")
                await connection.execute(asked.text, *asked.values(values | {"topics": NOTHING}))
        self._doubt = None
        happened = topics is not None and topics != NOTHING
        log.warning("ledger.commit_in_doubt", extra={"seq": doubtful.seq, "happened": happened})
        if happened:
            self._land(doubtful)
        else:
            self.seq = doubtful.seq

    async def _try_fast(self, connection: asyncpg.Connection[Any], batch: list[Item]) -> list[Item]:
        """One statement, on what is in memory; returns what needs more. The gate finds what others have changed."""
        simple = [item for item in batch if is_simple(item.command)]
        if not simple or self._head is None or len(self._numbers) < len(batch):
            return batch
        if fresh := any(puts_in_line(item.command) for item in simple):
            self._place = await connection.fetchval(statement("load", "place").text) << PLACE_BITS
        work = self._working_set(self._head, self._place)
        heads = Heads(simple)
        self._recent.offer(work, self._counters, heads.queues, heads.results)
        decided = [item for item in simple if decide_fast(work, item, self._recent, self._clock, self._new_id)]
        if not decided or work.beside or ((work.queue_in or work.results_in) and not fresh):
            return batch
        await self._write_fast(connection, decided, work)
        return [item for item in batch if not item.done.done()]

    async def _write_fast(self, connection: asyncpg.Connection[Any], decided: list[Item], work: WorkingSet) -> None:
        committed = self._committed(decided, work)
        values = self._values(committed, self._registers.version)
        values["started_from"] = [self._queue_floors.at(recipient) for recipient in work.started]
        values |= heads_left("qt", "recipient", work.queue_out, self._queue_floors)
        values |= heads_left("rt", "sender", work.results_out, self._result_floors)
        try:
            written = await write_batch(connection, values)
        except BROKEN:
            self._doubt = committed
            raise
        except asyncpg.DivisionByZeroError:
            self._recent.forget(work.slots)
            raise Conflict("what is in memory was changed by somebody else; nothing was written") from None
        if not written.writer:
            raise Conflict("the writer's row is not where this node left it")  # the careful way finds out why
        self.seq, self._place = committed.seq, written.place << PLACE_BITS
        if not written.rows:
            self._recent.forget(work.slots)
            raise Conflict("what is in memory was changed by somebody else")
        self.fast += 1
        self._queue_floors.left(work.queue_out)
        self._result_floors.left(work.results_out)
        self._land(committed)

    def _committed(self, batch: Sequence[Item], work: WorkingSet, rows: Sequence[RegisterRow] = ()) -> Committed:
        records = [(item.events, item.ts_ms) for item in batch if item.events]
        return Committed(batch, self.seq + 1, work, records, topics_of(work, records), rows)

    def _values(self, committed: Committed, version: int) -> dict[str, Any]:
        work = committed.work
        return batch_values(work) | {
            "seq": committed.seq,
            "writer": self._joined.writer,
            "boot": self._joined.boot,
            "audit_index": work.audit_head.index,
            "audit_hash": work.audit_head.chain_hash,
            "chain": self._node,
            "version": version,
            "topics": encode_topics(committed.topics),
        }

    def _working_set(self, head: AuditHead, place: int) -> WorkingSet:
        return WorkingSet(
            self._limits,
            self._registers,
            self._counters,
            audit_head=head,
            place=place,
            new_no=self._numbers.pop,
            turns=self._turns,
            used=self.used,
        )

    async def _transact(
        self, connection: asyncpg.Connection[Any], batch: list[Item], *, careful: bool
    ) -> Committed | None:
        work, loader, version = await self._begin(connection, batch)
        if careful:
            wanted = [item.command.task.id for item in batch if isinstance(item.command, Accept)]
            await loader.load(work, map(WantTask, wanted))
        await loader.load(work, hints(batch))
        for item in batch:
            await self._decide(work, loader, item)
        events = [event for item in batch for event in item.events]
        if not events:
            return None
        rows = self._registers.changes(events) if any(type(event) in REGISTER_EVENTS for event in events) else []
        if rows:
            (item,) = batch
            item.registers_version = version = version + 1
            await write_registers(connection, rows, version, work)
        chain = next((item.command.chain for item in batch if isinstance(item.command, PurgeAudit)), "") or self._node
        await write_beside(connection, work, chain)
        committed = self._committed(batch, work, rows)
        written = await write_batch(connection, self._values(committed, version))
        if not written.writer:
            raise Fenced
        if not written.rows:
            raise Conflict("the rows were changed by somebody else")
        self._place = written.place << PLACE_BITS
        return committed

    async def _begin(self, connection: asyncpg.Connection[Any], batch: list[Item]) -> tuple[WorkingSet, Loader, int]:
        asked = statement("load", "begin")
        row = await connection.fetchrow(
            asked.text, *asked.values({"writer": self._joined.writer, "boot": self._joined.boot})
        )
        if row is None:
            raise Fenced
        if row["seq"] != self.seq:
            raise RolledBack(f"its last batch is {row['seq']}, and this daemon's is {self.seq}")
        version: int = row["version"]
        if not isinstance(batch[0].command, TOGETHER):
            # It may change a register: then one after the other, on the newest version.
            version = await connection.fetchval(statement("nodes", "lock_registers").text)
        if version != self._registers.version:
            self._on_registers(await refresh_registers(connection, self._registers))
        if len(self._numbers) < BATCH_MAX:
            first = await connection.fetchval(statement("load", "numbers").text)
            self._numbers = [*range(first + NUMBERS - 1, first - 1, -1), *self._numbers]
        work = self._working_set(AuditHead(row["audit_index"], row["audit_hash"]), row["place"] << PLACE_BITS)
        for item in batch:
            if isinstance(item.command, Accept) and item.command.minted:
                work.new_task(item.command.task.id)
        loader = Loader(connection, self._clock.now_ms(), self._queue_floors, self._result_floors)
        return work, loader, version

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
                work.apply(events, [bytes(raw) for raw in decode_raws(encoded)], item.ts_ms)
            item.answer, item.error, item.events = answer, refusal, events
            return
        raise AssertionError(f"{type(item.command).__name__} asks for more and more")


def _fail(batch: Iterable[Item], error: Exception) -> None:
    for item in batch:
        item.fail(error)
