"""The inputs of a node's batches: numbers and places that were drawn for them, and the tasks in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import asyncpg

from covenant.ledger.postgres.batch_items import BATCH_MAX
from covenant.ledger.postgres.batch_state import BatchState
from covenant.ledger.postgres.connections import fetch_value
from covenant.ledger.postgres.counters import Counters, CountersAhead
from covenant.ledger.postgres.fast_decisions import OpenBatch
from covenant.ledger.postgres.queue_head import PLACE_BITS, BatchPlaces, Floors
from covenant.ledger.postgres.recent_tasks import RECENT_MAX, RecentTasks
from covenant.ledger.postgres.registers import Registers
from covenant.model.grant import AuditHead
from covenant.model.ids import TaskId
from covenant.model.settings import Limits

NUMBERS: Final = 1_000
"""How many numbers for new tasks are drawn at once."""


class BatchInputs:
    """`is_alone`: whether no other node is alive."""

    def __init__(self, limits: Limits, registers: Registers, counters: Counters, is_alone: Callable[[], bool]) -> None:
        self._limits = limits
        self._is_alone = is_alone
        self._turns: dict[str, int] = {}
        self.registers = registers
        self.counters, self.ahead = counters, CountersAhead(counters)
        self.recent = RecentTasks()
        self.queue_floors, self.result_floors = Floors(alone=is_alone), Floors(alone=is_alone)
        self.places = BatchPlaces()
        self.numbers: list[int] = []
        self.head: AuditHead | None = None
        """The last row of this node's audit chain, once it is known."""
        self.used: Callable[[TaskId], dict[str, Any] | None] | None = None

    def state(self, head: AuditHead, counters: Counters, place: int) -> BatchState:
        return BatchState(
            self._limits,
            self.registers,
            counters,
            audit_head=head,
            place=place << PLACE_BITS,
            new_no=self.numbers.pop,
            turns=self._turns,
            used=self.used,
        )

    def open_batch(self, head: AuditHead, counters: Counters, *, fresh: bool = False) -> OpenBatch:
        """A batch that is decided from memory."""
        place, alone = self.places.take(), self._is_alone()
        fresh = fresh or (alone and self.places.is_next(place))
        return OpenBatch(self.state(head, counters, place), self.registers.version, place, fresh=fresh, alone=alone)

    async def draw_places(self, connection: asyncpg.Connection[Any], *, new: bool) -> None:
        """Draws a place for this batch, and one for the batch decided ahead. `new`: other nodes queue tasks, too."""
        if new:
            self.places.clear()
        wanted, alone = 1 if new else self.places.wanted, self._is_alone()
        for _ in range(wanted + 1):  # the first may show that the kept place is outdated
            if alone:
                self.places.drop_passed()
            if len(self.places) < wanted:
                self.places.draw(await fetch_value("load", connection, "place"))

    async def draw_numbers(self, connection: asyncpg.Connection[Any]) -> None:
        """Draws enough numbers for one batch."""
        if len(self.numbers) < BATCH_MAX:
            first = await fetch_value("load", connection, "numbers")
            self.numbers = [*range(first + NUMBERS - 1, first - 1, -1), *self.numbers]

    def next_place(self, place: int) -> None:
        """The database has just given this place: no earlier one is used."""
        self.places.clear()
        self.places.draw(place)

    def remember(self, work: BatchState) -> None:
        """Remembers what a batch has written."""
        self.head = work.audit_head
        self.recent.remember(work)
        if len(self._turns) > RECENT_MAX:
            self._turns.clear()  # the order of turns is lost, and the longest waiting recipients come first

    def forget(self) -> None:
        self.head = None
        self.recent.clear()
