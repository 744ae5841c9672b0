"""A life of a ledger that comes by every durable step, told fact by fact to whoever survives it.

    python -m tests.faults.scenario <home> <descriptor for facts> [apart]

Ends with 0 if it came to its end, whatever was refused on the way; reads are checked even after the disk has failed.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.retention import EraseTasks
from covenant.ledger.embedded.open import CompactionFailed, open_ledger
from covenant.ledger.machine.commands import DropPush, LeasedTask, MovePushes, PutPush
from covenant.ledger.machine.identity_commands import Enroll
from covenant.model.a2a_requests import PushConfig
from covenant.model.errors import Forbidden, HomeUnusable, Refusal, Unavailable
from covenant.model.grant import send_actions
from covenant.model.ids import TaskId
from covenant.model.push import Push, move_of
from covenant.model.task import Result, Task
from tests.faults import letters
from tests.faults.facts import Fact, Told, check_reads, tell
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.grants import give, sending
from tests.ledger_contract.samples import (
    ALICE,
    BOB,
    CAROL,
    OPERATOR,
    failed,
    make_grant,
    make_identity,
    make_task,
    ok,
    same_work,
)
from tests.ledger_contract.samples import task_id as n

T = TypeVar("T")

SEGMENT_BYTES: Final = 2_500
TASKS: Final[dict[TaskId, Task]] = {
    task.id: task
    for task in [
        *(make_task(number) for number in (1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23, 30, 31, 40, 41)),
        *(same_work(number) for number in (10, 11, 12)),
        same_work(13, "other key"),
    ]
} | letters.WORK

_ENDS: Final = [0, *accumulate(map(len, (letters.FIRST, letters.SECOND, letters.THIRD)))]
FIRST, SECOND, THIRD = (range(*ends) for ends in pairwise(_ENDS))
"""The numbers of the letters that are written before, between and after."""


class Scenario:
    def __init__(self, home: Path, fd: int, *, apart: bool) -> None:
        self.home = home
        self.apart = apart
        self.fd = fd
        self.clock = FakeClock()
        self.leases: dict[TaskId, LeasedTask] = {}
        self.pushes: dict[str, Push] = {}
        self.facts: list[Fact] = []
        self.failed = False

    def tell(
        self, at: str, verb: str, tasks: tuple[TaskId, ...] = (), *, spared: tuple[TaskId, ...] = (), **said: Any
    ) -> None:
        fact = Fact(at, verb, tasks, said, spared)
        self.facts.append(fact)
        tell(self.fd, fact)

    async def open(self) -> Ledger:
        """A disk that fails while a home is opened fails the opening, and the next one is as good as the first."""
        for _ in range(2):
            try:
                return await open_ledger(
                    self.home,
                    clock=self.clock,
                    segment_bytes=SEGMENT_BYTES,
                    archive_process=self.apart,
                    node="here",
                    boot="boot-1",
                )
            except HomeUnusable as error:
                self.tell("refused", "opened", unknown=False, code=str(error.number))
        raise AssertionError("the home cannot be opened a second time either")

    async def act(
        self,
        verb: str,
        tasks: tuple[TaskId, ...],
        real: Coroutine[Any, Any, T],
        said: Callable[[T], dict[str, Any]] = lambda _: {},
    ) -> T | None:
        """Try a verb and tell what came of it."""
        self.tell("tried", verb, tasks)
        try:
            answer = await real
        except CompactionFailed as failure:
            self.tell("refused", verb, tasks, unknown=False, code=str(failure))
            return None
        except Unavailable as refusal:
            self.failed = True
            self.tell("refused", verb, tasks, unknown=refusal.code == "outcome_unknown", code=refusal.code)
            return None
        words = said(answer)
        about = words.pop("tasks", tasks)
        self.tell("acknowledged", verb, about, spared=tuple(set(tasks) - set(about)), **words)
        return answer

    def settled(self) -> tuple[TaskId, ...]:
        """Whose result may be waiting."""
        ended = {w for fact in self.facts if fact.verb in ("settled", "canceled", "forced") for w in fact.tasks}
        drained = {w for fact in self.facts if fact.verb == "drained" and fact.at == "acknowledged" for w in fact.tasks}
        return tuple(sorted(ended - drained))

    def waiting(self) -> tuple[TaskId, ...]:
        """Who may be in the queue."""
        told = Told(self.facts)
        open_ = {"sent", "requeued", "continued", ""}
        return tuple(sorted(which for which in told.tried() if told.last(which)[0] in open_))

    # The verbs, each with what it says when it is acknowledged.

    async def send(self, driver: LedgerDriver, *numbers: int, verb: str = "sent") -> None:
        await asyncio.gather(*(self.act(verb, (n(number),), driver.send(TASKS[n(number)])) for number in numbers))

    async def take(self, driver: LedgerDriver, count: int, request: str) -> None:
        def said(taken: tuple[LeasedTask, ...]) -> dict[str, Any]:
            self.leases |= {leased.task.id: leased for leased in taken}
            return {
                "tasks": tuple(leased.task.id for leased in taken),
                "leases": [leased.lease.lease_id for leased in taken],
                "request": request,
            }

        await self.act("leased", self.waiting(), driver.take(count=count, request_id=request), said)

    async def report(self, driver: LedgerDriver, number: int, text: str) -> None:
        if n(number) in self.leases:
            said = {"text": text}
            report = driver.report(self.leases[n(number)], text)
            await self.act("updated", (n(number),), report, lambda r: {**said, "generation": r.generation})

    async def park(self, driver: LedgerDriver, number: int) -> None:
        if n(number) in self.leases:
            await self.act("parked", (n(number),), driver.park(self.leases[n(number)]))
            if not self.failed:
                await self.act("continued", (n(number),), driver.say(n(number), "that one"))

    async def settle(self, driver: LedgerDriver, number: int, result: Result, *followers: int) -> None:
        which = n(number)
        if which in self.leases:
            words = {"result": msgspec.to_builtins(result)}
            tasks = (which, *map(n, followers))
            await self.act("settled", tasks, driver.finish(self.leases[which], result), lambda _: dict(words))

    async def drain(self, driver: LedgerDriver, count: int, request: str | None) -> None:
        await self.act(
            "drained",
            self.settled(),
            driver.drain(count=count, request_id=request),
            lambda results: {"tasks": tuple(result.task_id for result in results), "request": request},
        )

    async def push(self, driver: LedgerDriver, number: int, name: str) -> None:
        config = PushConfig(url="https://hooks.example/", id=name)
        made = await self.act(
            "pushed",
            (),
            driver.ledger.commit(PutPush(task_id=n(number), config=config)),
            lambda push: {"push": name, "delivered": push.delivered},
        )
        if made is not None:
            self.pushes[name] = made

    async def deliver(self, driver: LedgerDriver, name: str, delivered: int) -> None:
        if name in self.pushes:
            move = msgspec.structs.replace(move_of(self.pushes[name]), delivered=delivered)
            moved = driver.ledger.commit(MovePushes(moves=(move,)))
            await self.act("delivered", (), moved, lambda _: {"push": name, "delivered": delivered})

    async def unpush(self, driver: LedgerDriver, number: int, name: str) -> None:
        self.tell("tried", "unpushed", push=name)
        dropped = driver.ledger.commit(DropPush(task_id=n(number), id=name))
        await self.act("unpushed", (), dropped, lambda _: {"push": name})

    async def write(self, driver: LedgerDriver, numbers: range) -> None:
        """Letters, one after the other: what each comes to depends on those before it."""
        for number in numbers:
            verb, tasks = letters.work_of(number)
            self.tell("tried", verb, tasks, letter=number)
            try:
                await driver.ledger.commit(letters.ALL[number])
            except Unavailable as refusal:
                self.failed = True
                unknown = refusal.code == "outcome_unknown"
                self.tell("refused", verb, tasks, letter=number, unknown=unknown, code=refusal.code)
            except Refusal as refusal:
                self.tell("acknowledged", "written", letter=number, code=refusal.code)
            else:
                self.tell("acknowledged", verb, tasks, letter=number)

    async def erase(self, driver: LedgerDriver) -> None:
        """What there is to erase are the tasks of a tenant that has none: all that is told stays."""
        self.tell("tried", "erased")
        try:
            await driver.ledger.erase_tasks(EraseTasks(tenant="nobody", before_ms=self.clock()))
            await driver.ledger.scrub("nobody", ())
        except Unavailable as refusal:
            self.tell("refused", "erased", unknown=False, code=refusal.code)
        else:
            self.tell("acknowledged", "erased")

    async def denied(self, driver: LedgerDriver) -> None:
        """A refusal is told only when its audit row is durable."""
        task = make_task(99, sender=CAROL)
        self.tell("tried", "denied")
        try:
            await driver.send(task, access=sending(task))
        except Unavailable:
            self.tell("refused", "denied", unknown=True)
        except Forbidden:
            self.tell("acknowledged", "denied")


async def first_half(scenario: Scenario, driver: LedgerDriver) -> None:
    identity = make_identity(ALICE)
    await scenario.act(
        "enrolled",
        (),
        driver.ledger.commit(Enroll(by=OPERATOR, identity=identity)),
        lambda known: {"token": known.token_sha256},
    )
    grant = make_grant(ALICE, send_actions(BOB)[0])
    await scenario.act("granted", (), give(driver, grant), lambda made: {"grant": made.signature_b58})
    await scenario.send(driver, *range(1, 9))
    await scenario.send(driver, 10)
    await scenario.send(driver, 11, 12, verb="followed")
    await scenario.take(driver, 6, "t1")
    await scenario.take(driver, 3, "t2")
    await scenario.push(driver, 1, "kept")
    await scenario.push(driver, 8, "gone")
    await scenario.report(driver, 1, "one")
    await scenario.report(driver, 1, "two")
    await scenario.deliver(driver, "kept", 3)
    await scenario.unpush(driver, 8, "gone")
    await scenario.park(driver, 2)
    await scenario.denied(driver)
    await scenario.settle(driver, 1, ok(n(1), "done"))
    await scenario.settle(driver, 3, failed(n(3)))
    await scenario.settle(driver, 10, ok(n(10), "for all"), 11, 12)
    await scenario.act("requeued", (n(4),), driver.requeue(n(4)))
    await scenario.act("canceled", (n(5),), driver.cancel(n(5)))
    await scenario.act("forced", (n(6),), driver.force_error(n(6)))
    await scenario.drain(driver, 2, "d1")
    await scenario.erase(driver)
    await scenario.write(driver, FIRST)
    await scenario.act("noted", (), driver.note("before compaction"), lambda _: {"text": "before compaction"})


async def second_half(scenario: Scenario, driver: LedgerDriver) -> None:
    await scenario.act("compacted", (), driver.ledger.compact())
    await scenario.settle(driver, 4, ok(n(4), "late, and in time"))
    await scenario.deliver(driver, "kept", 4)
    await scenario.send(driver, 20, 21, 22, 23)
    await scenario.take(driver, 3, "t3")
    for number in (20, 21, 22):
        await scenario.settle(driver, number, ok(n(number)))
    await scenario.drain(driver, 3, "d2")
    await scenario.drain(driver, 1, None)
    await scenario.erase(driver)
    await scenario.write(driver, SECOND)
    await scenario.act("compacted", (), driver.ledger.compact())
    await scenario.act("noted", (), driver.note("after compaction"), lambda _: {"text": "after compaction"})
    await scenario.send(driver, 30, 31, 13)


async def live(home: Path, fd: int, *, apart: bool) -> None:
    scenario = Scenario(home, fd, apart=apart)
    ledger = await scenario.open()
    driver = LedgerDriver(ledger, scenario.clock)
    await first_half(scenario, driver)
    await second_half(scenario, driver)
    await check_reads(driver, Told(scenario.facts))
    await ledger.close()
    scenario.failed = False
    ledger = await scenario.open()
    driver = LedgerDriver(ledger, scenario.clock)
    await scenario.send(driver, 40, 41)
    await scenario.take(driver, 2, "t4")
    await scenario.write(driver, THIRD)
    await scenario.act("compacted", (), driver.ledger.compact())
    await check_reads(driver, Told(scenario.facts))
    await ledger.close()
    scenario.tell("ended", "lived")


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1]), int(sys.argv[2]), apart="apart" in sys.argv[3:]))
