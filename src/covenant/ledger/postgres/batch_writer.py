"""The writer of a node: while a batch commits, the next one gathers, and is decided on top of it.

A batch is one transaction, or one statement. It locks the writer's row, so the batches of a run are in order, and none
of a run that was declared lost is written. When the connection breaks in a commit, the row tells whether the commit
succeeded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from typing import Any, Final

import asyncpg

from covenant.ledger.clock import Clock
from covenant.ledger.contract.identities import RegisterChange
from covenant.ledger.machine.commands import Advance, Command
from covenant.ledger.machine.identity_commands import PurgeAudit
from covenant.ledger.postgres.batch_inputs import BatchInputs
from covenant.ledger.postgres.batch_items import (
    BATCH_MAX,
    TOGETHER,
    Conflict,
    DecidedBatch,
    Fenced,
    Item,
    RolledBack,
    hints,
    next_batch,
)
from covenant.ledger.postgres.batch_rows import batch_values, taken_heads, write_rare_rows, write_registers
from covenant.ledger.postgres.batch_state import BatchState
from covenant.ledger.postgres.batch_statement import probe_batch, write_batch
from covenant.ledger.postgres.connections import Connections, fetch_rows, fetch_value
from covenant.ledger.postgres.counters import Counters
from covenant.ledger.postgres.database_errors import (
    BROKEN,
    CONFLICTS,
    REFUSED,
    UNAVAILABLE,
    busy,
    fenced,
    has_wrong_type,
    lost_if_dropped,
    refused,
    unavailable,
)
from covenant.ledger.postgres.fast_decisions import OpenBatch, adds_to_queue, is_simple
from covenant.ledger.postgres.loader import Loader, decide_loaded
from covenant.ledger.postgres.news import topics_of
from covenant.ledger.postgres.node_runs import Joined
from covenant.ledger.postgres.nodes import Membership
from covenant.ledger.postgres.registers import REGISTER_EVENTS, RegisterRow, Registers, refresh_registers
from covenant.ledger.postgres.writer_connection import WriterConnection
from covenant.model.errors import Unavailable
from covenant.model.grant import AuditHead
from covenant.model.settings import Limits

TRIES_MAX: Final = 12
"""How often a batch is decided anew after a conflict."""
PAUSE_S: Final = 0.005
LOGGED_MAX: Final = 20
QUIET_MS: Final = 3_000
"""How long after the last write that found the disk full: a small batch may find room between two that do not."""

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
        on_committed: Callable[[DecidedBatch], None],
        on_registers: Callable[[Iterable[RegisterChange]], None],
    ) -> None:
        self._connection = WriterConnection(connections)
        self._membership = membership
        self._joined = joined
        self.seq = joined.seq
        self._node = node
        self.at_rest = asyncio.Lock()
        """While it is held, nothing is decided or written."""
        self._clock = clock
        self.inputs = BatchInputs(limits, registers, counters, lambda: membership.living() == 1)
        self._new_id = new_id
        self._on_committed = on_committed
        self._on_registers = on_registers
        self.failure: str | None = None
        self.conflicts = self.fast = 0
        self._waiting: deque[Item] = deque()
        self._batch_max = BATCH_MAX
        """How many commands go together: fewer after a batch that failed, so that one of them fails alone at last."""
        self._open: OpenBatch | None = None
        """The batch that is decided on top of the one being written, and goes next."""
        self._writing = self._ahead_scheduled = self._ahead_stopped = False
        """Whether a batch is being written, whether `_decide_ahead` is scheduled, and whether it can decide no more."""
        self.trouble: Unavailable | None = None
        """Why the database takes no batches; None while it takes them."""
        self._quiet_until_ms = 0
        """Before this time a success does not end the trouble."""
        self._logged: set[str] = set()
        """The messages of troubles that are already logged."""
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def submit(self, command: Command[Any]) -> Item:
        if self.failure is not None:
            raise Unavailable("ledger_closed", self.failure)
        self._membership.check()
        item = Item(command, self._loop.create_future())
        self._waiting.append(item)
        if self._writing:
            self._schedule_ahead()
        else:
            self._wake.set()
        return item

    async def close(self) -> None:
        """Ends after the batch that is being written; waiting commands are refused."""
        self.failure = self.failure or "the ledger is closed"
        self._wake.set()
        await self._task
        await self._connection.close()

    async def abort(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._connection.drop()

    def look_again(self) -> None:
        """Tries at once, since the database answers, or checks whether it takes batches again if none waits."""
        self._connection.end_pause()
        if self.trouble is not None:
            self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (self._waiting or self._open is not None) and self.failure is None:
                batch: list[Item] = []
                try:
                    async with self.at_rest:
                        opened, self._open = self._open, None
                        batch = opened.items if opened is not None else next_batch(self._waiting, self._batch_max)
                        await self._process(batch, opened)
                except Exception as error:
                    log.exception("ledger.batch_failed")
                    self._refuse(batch, error)
            if self._may_have_recovered() and self.failure is None:
                async with self.at_rest:
                    await self._probe()
            if self.failure is not None:
                self._reopen()
                self._connection.fail(self._waiting, Unavailable("ledger_closed", self.failure))
                self._waiting.clear()
                return

    def _schedule_ahead(self) -> None:
        if not self._ahead_scheduled:
            self._ahead_scheduled = True
            self._loop.call_soon(self._decide_ahead)

    def _decide_ahead(self) -> None:
        """Decides waiting commands on top of the batch being written, up to the first that needs more than memory."""
        self._ahead_scheduled = False
        inputs = self.inputs
        if not self._writing or self.failure is not None or inputs.head is None or self._ahead_stopped:
            return
        eligible = list(islice(takewhile(lambda item: is_simple(item.command), self._waiting), BATCH_MAX))
        if self._open is None and not inputs.places:
            inputs.places.wanted, eligible = 2, []
        if not eligible or len(inputs.numbers) < len(eligible):
            return
        opened = self._open = self._open or inputs.open_batch(inputs.head, inputs.ahead)
        try:
            opened.load_heads(inputs.recent, inputs.ahead, [item.command for item in eligible])
            for item in eligible:
                if not opened.decide(item, inputs.recent, self._clock, self._new_id):
                    self._ahead_stopped = True
                    break
                self._waiting.popleft()
        except Exception:
            log.exception("ledger.batch_failed")
            self._reopen()
            self._ahead_stopped = True
        if not opened.items:
            self._open = None

    def _reopen(self) -> None:
        """Returns the commands that were decided ahead to the queue: the batch below them was not written."""
        if self._open is not None:
            self._waiting.extendleft(reversed(self._open.items))
            self._open = None

    async def _process(self, batch: list[Item], opened: OpenBatch | None = None) -> None:
        for tried in range(TRIES_MAX):
            try:
                with lost_if_dropped():
                    await self._try(batch, opened, careful=tried > 0)
            except (Conflict, *CONFLICTS) as conflict:
                self.conflicts += 1
                log.debug("ledger.conflict", extra={"reason": str(conflict), "commands": len(batch)})
                if isinstance(conflict, asyncpg.LockNotAvailableError) and self._membership.trouble is not None:
                    self._fail(batch, conflict, unavailable(conflict, self._membership.trouble))
                    return
                if len(batch) > 1 and tried:
                    self._divide(batch)
                    return
                await asyncio.sleep(PAUSE_S * tried)
            except Fenced:
                if (decided := await self._connection.resolve_when_fenced(self._joined)) is not None:
                    self._complete(decided)
                self._membership.beat_now()
                self._refuse(batch, await self._connection.why_fenced(self._joined))
                return
            except RolledBack as sign:
                self._membership.rolled_back(str(sign))
                self._refuse(batch, self._membership.refusal or fenced())
                return
            except REFUSED as error:
                self._fail(batch, error, refused(error))
                return
            except UNAVAILABLE as error:
                self._connection.drop()
                if tried == TRIES_MAX - 1 or not isinstance(error, BROKEN):
                    self._fail(batch, error, unavailable(error, self._membership.trouble))
                    return
                await self._connection.pause(PAUSE_S * 2**tried)
            except asyncpg.PostgresError as error:
                # A command that cannot be written must not fail the other commands.
                if len(batch) > 1:
                    self._divide(batch)
                else:
                    log.exception("ledger.batch_failed")
                    self._refuse(batch, refused(error) if has_wrong_type(error) else error)
                return
            else:
                self._batch_max = min(2 * self._batch_max, BATCH_MAX)
                if self._may_have_recovered():
                    await self._probe()
                return
        self._refuse(batch, busy())

    def _divide(self, batch: list[Item]) -> None:
        """Returns the commands of a batch to the queue, from which half as many go together."""
        self._waiting.extendleft(reversed(batch))
        self._batch_max = len(batch) // 2

    def _fail(self, batch: list[Item], error: BaseException, trouble: Unavailable) -> None:
        if trouble.message not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(trouble.message)
            log.error("ledger.write_refused", extra={"code": trouble.code, "reason": trouble.message})
        self.trouble = trouble
        if isinstance(error, asyncpg.DiskFullError):
            self._quiet_until_ms = self._clock.monotonic_ms() + QUIET_MS
        self._refuse(batch, trouble)

    def _refuse(self, batch: list[Item], error: Exception) -> None:
        """Fails a batch, and later records of its jobs: these must not be written before those."""
        self._reopen()
        tasks = {each.command.task_id for each in batch if isinstance(each.command, Advance) and not each.is_over}
        refused_items, others = [*batch], deque[Item]()
        for item in self._waiting:
            is_later = isinstance(item.command, Advance) and item.command.task_id in tasks
            (refused_items if is_later else others).append(item)
        self._waiting = others
        self._connection.fail(refused_items, error)

    def _may_have_recovered(self) -> bool:
        """Whether there is a trouble that a success may end."""
        return self.trouble is not None and self._clock.monotonic_ms() >= self._quiet_until_ms

    async def _probe(self) -> None:
        """Ends the trouble if every table can be written and there is room: the last batch may have needed neither."""
        try:
            with lost_if_dropped():
                await probe_batch(await self._connection.get())
        except (*UNAVAILABLE, asyncpg.LockNotAvailableError) as error:
            self._connection.drop()
            self._fail([], error, unavailable(error, self._membership.trouble))
        except asyncpg.PostgresError as error:
            self._fail([], error, refused(error))
        else:
            log.info("ledger.write_again")
            self.trouble = None
            self._logged.clear()

    async def _try(self, batch: list[Item], opened: OpenBatch | None, *, careful: bool) -> None:
        """Writes a batch. `careful`: no id is assumed to be new, and nothing is decided from memory."""
        connection = await self._connection.get()
        if self._connection.in_doubt is not None:
            in_doubt, was_committed = await self._connection.resolve(self._joined)
            self.seq = in_doubt.seq
            if was_committed:
                self._complete(in_doubt)
                self._give_back(in_doubt)
        if not careful:
            batch = await self._try_fast(connection, batch, opened)
        batch = [item for item in batch if not item.is_over]  # the first try may have written some of them
        if not batch:
            return
        self._reopen()
        await connection.execute("BEGIN")
        try:
            decided = await self._transact(connection, batch, careful=careful)
        except BaseException:
            if not connection.is_closed():
                await connection.execute("ROLLBACK")
            raise
        if decided is None:
            await connection.execute("ROLLBACK")
            for item in batch:
                item.finish()
            return
        try:
            await connection.execute("COMMIT")
        except BROKEN:
            self._connection.in_doubt = decided
            raise
        self._complete(decided)

    def _complete(self, decided: DecidedBatch) -> None:
        """Counts a durable batch, and notifies waiters, listeners and other nodes."""
        self.inputs.remember(decided.work)
        self._count(decided)
        self._notify(decided)

    def _give_back(self, decided: DecidedBatch) -> None:
        """Gives back leases and results of callers that did not get them: their outcome was reported as unknown."""
        for item in decided.items:
            is_unknown = isinstance(item.error, Unavailable) and item.answer is not None
            undo: Command[Any] | None = item.command.undo(item.answer) if is_unknown else None
            if undo is not None:
                done = asyncio.get_running_loop().create_future()
                done.add_done_callback(lambda done: done.cancelled() or done.exception())
                self._waiting.append(Item(undo, done))

    def _count(self, decided: DecidedBatch) -> None:
        self.seq = decided.seq
        self._membership.count(decided.seq, decided.topics.counts)
        self.inputs.queue_floors.note_added(decided.work.queue.added)
        self.inputs.result_floors.note_added(decided.work.results.added)

    def _notify(self, decided: DecidedBatch) -> None:
        try:
            self._on_committed(decided)
        finally:
            for item in decided.items:
                item.finish()

    def begin_anew(self, joined: Joined) -> None:
        """Begins another run, without anything in memory. The caller holds `at_rest`."""
        self._joined, self.seq = joined, joined.seq
        self._connection.in_doubt = None
        self._reopen()
        self.inputs.forget()

    async def _try_fast(
        self, connection: asyncpg.Connection[Any], batch: list[Item], opened: OpenBatch | None
    ) -> list[Item]:
        """Decides from memory and writes by one statement. Returns the items that need a transaction.

        The gate of the statement finds changes by other nodes.
        """
        inputs = self.inputs
        if opened is None:
            eligible = [item for item in batch if is_simple(item.command)]
            if not eligible or inputs.head is None or len(inputs.numbers) < len(batch):
                return batch
            fresh = self._membership.living() > 1 and any(adds_to_queue(item.command) for item in eligible)
            await inputs.draw_places(connection, new=fresh)
            opened = inputs.open_batch(inputs.head, inputs.counters, fresh=fresh)
            opened.load_heads(inputs.recent, inputs.counters, [item.command for item in eligible])
            for item in eligible:
                opened.decide(item, inputs.recent, self._clock, self._new_id)
        work = opened.work
        fresh = opened.fresh and (not opened.alone or inputs.places.is_next(opened.place))
        if not opened.items or work.has_rare_rows or ((work.queue.added or work.results.added) and not fresh):
            return batch
        await self._write_fast(connection, opened)
        return [item for item in batch if item not in opened.items] if len(opened.items) < len(batch) else []

    async def _write_fast(self, connection: asyncpg.Connection[Any], opened: OpenBatch) -> None:
        inputs, work = self.inputs, opened.work
        decided = self._decided_batch(opened.items, work)
        values = batch_values(decided, self._node, self._joined, opened.version, self._membership.level)
        if opened.alone and (work.queue.added or work.results.added):
            values["last_place"] = inputs.places.last
        values["started_from"] = [inputs.queue_floors.at(recipient) for recipient in work.started]
        values |= taken_heads("qt", "recipient", work.queue.removed, inputs.queue_floors)
        values |= taken_heads("rt", "sender", work.results.removed, inputs.result_floors)
        before = inputs.head
        self._writing, self._ahead_stopped = True, False
        if self._waiting:
            self._schedule_ahead()
        try:
            inputs.remember(work)
            inputs.ahead.changes = work.counts
            with lost_if_dropped():
                written = await write_batch(connection, values, single=len(work.moved) == 1)
            if not written.writer:
                raise Conflict("the writer's row is not where this node left it")  # the careful try finds out why
            self.seq = decided.seq
            inputs.places.draw(written.place)
            if not written.rows:
                raise Conflict("what is in memory was changed by somebody else")
        except BaseException as error:
            inputs.head = before
            self._forget(decided)
            if isinstance(error, BROKEN):
                self._connection.in_doubt = decided
            elif isinstance(error, asyncpg.DivisionByZeroError):
                raise Conflict("what is in memory was changed by somebody else; nothing was written") from None
            raise
        finally:
            self._writing = False
            inputs.ahead.changes = None
        self.fast += 1
        inputs.queue_floors.note_taken(work.queue.removed)
        inputs.result_floors.note_taken(work.results.removed)
        self._count(decided)
        if self._open is None:
            self._notify(decided)
        else:
            # The next batch goes first: the database writes while waiters are notified.
            self._loop.call_soon(self._notify, decided)

    def _forget(self, decided: DecidedBatch) -> None:
        """Forgets a batch that was not written or may not have been, and the batch decided on top of it."""
        self._reopen()
        self.inputs.recent.forget(decided.work.slots)

    def _decided_batch(self, batch: Sequence[Item], work: BatchState, rows: Sequence[RegisterRow] = ()) -> DecidedBatch:
        records = [(item.events, item.ts_ms) for item in batch if item.events]
        topics = topics_of(work, records, (self._node, self._joined.boot))
        return DecidedBatch(batch, self.seq + 1, work, records, topics, rows)

    async def _transact(
        self, connection: asyncpg.Connection[Any], batch: list[Item], *, careful: bool
    ) -> DecidedBatch | None:
        work, loader, version = await self._begin(connection, batch)
        await loader.load(work, hints(batch, work, careful=careful))
        for item in batch:
            await decide_loaded(work, loader, item, self._clock, self._new_id)
        events = [event for item in batch for event in item.events]
        if not events:
            return None
        rows = self.inputs.registers.changes(events) if any(type(event) in REGISTER_EVENTS for event in events) else []
        if rows:
            (item,) = batch
            item.registers_version = version = version + 1
            await write_registers(connection, rows, version, work)
        chain = next((item.command.chain for item in batch if isinstance(item.command, PurgeAudit)), "") or self._node
        await write_rare_rows(connection, work, chain)
        decided = self._decided_batch(batch, work, rows)
        values = batch_values(decided, self._node, self._joined, version, self._membership.level)
        written = await write_batch(connection, values, single=len(work.moved) == 1)
        if not written.writer:
            raise Fenced
        if not written.rows:
            raise Conflict("the rows were changed by somebody else")
        self.inputs.next_place(written.place)
        return decided

    async def _begin(self, connection: asyncpg.Connection[Any], batch: list[Item]) -> tuple[BatchState, Loader, int]:
        rows = await fetch_rows("load", connection, "begin", writer=self._joined.writer, boot=self._joined.boot)
        if not rows:
            raise Fenced
        row = rows[0]
        if row["seq"] != self.seq:
            raise RolledBack(f"its last batch is {row['seq']}, and this daemon's is {self.seq}")
        version: int = row["version"]
        if not isinstance(batch[0].command, TOGETHER):
            # The batch may change a register: such batches go one after the other, on the newest version.
            version = await fetch_value("nodes", connection, "lock_registers")
        inputs = self.inputs
        if version != inputs.registers.version:
            self._on_registers(await refresh_registers(connection, inputs.registers))
        await inputs.draw_numbers(connection)
        inputs.next_place(row["place"])
        work = inputs.state(AuditHead(row["audit_index"], row["audit_hash"]), inputs.counters, row["place"])
        loader = Loader(connection, self._clock.now_ms(), inputs.queue_floors, inputs.result_floors)
        return work, loader, version
