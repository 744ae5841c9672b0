"""A home in which everything has happened that a journal can tell of, and what must work in it afterwards."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from covenant.ledger.contract.tasks import QueueQuery
from covenant.ledger.embedded.journal.segments import Segment, list_segments
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.commands import DropPush, MovePushes, PutPush, Withdraw
from covenant.ledger.machine.identity_commands import (
    BeginTenantRemoval,
    Enroll,
    EraseTenant,
    FinishTenantRemoval,
    PurgeAudit,
    PurgeGrants,
    PurgeIdentities,
    RemoveAgent,
    RevokeGrant,
    RevokeIdentity,
)
from covenant.ledger.machine.states import DRAINED
from covenant.model.a2a_requests import PushConfig
from covenant.model.errors import Refusal
from covenant.model.grant import send_actions
from covenant.model.ids import TaskId
from covenant.model.push import move_of
from covenant.model.settings import Limits
from covenant.model.task import Task
from covenant.model.tenants import TenantRemoval
from tests.faults import letters
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.grants import give, sending
from tests.ledger_contract.samples import (
    ALICE,
    BOB,
    CAROL,
    OPERATOR,
    make_grant,
    make_identity,
    make_task,
    ok,
    same_work,
)
from tests.ledger_contract.samples import task_id as n
from tests.ledger_contract.suspensions import signal, suspend, wait_for
from tests.ledger_contract.tenants import add_tenant, put_agent

SEGMENT_BYTES: Final = 4_000
LIMITS: Final = Limits(cache_entries_max=1, delegations_kept_max=1)
MANY: Final = 100
WAIT_MS: Final = 5_000
"""How long a task of this home waits for a signal, or for its time."""


class HomeHistory:
    """Lived once; `tasks` are those that were sent, `copies` the home as it was at some moments."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.clock = FakeClock()
        self.tasks: dict[TaskId, Task] = {}
        self.folder = folder

    def copy(self, name: str) -> Path:
        """The home as it is now; for moments at which nobody has it open."""
        target = self.folder / name
        shutil.copytree(self.home, target, ignore=shutil.ignore_patterns("lock"))
        return target

    async def open(self, home: Path | None = None) -> LedgerDriver:
        ledger = await open_ledger(
            home or self.home, clock=self.clock, limits=LIMITS, segment_bytes=SEGMENT_BYTES, node="here", boot="boot"
        )
        return LedgerDriver(ledger, self.clock)

    async def send(self, driver: LedgerDriver, *tasks: Task) -> None:
        for task in tasks:
            self.tasks[task.id] = task
            await driver.send(task)


async def fill_home(history: HomeHistory, *, compacted: bool) -> None:
    """All of it; `compacted`: the first part is in a snapshot, and its segments are gone."""
    driver = await history.open()
    await _tasks_of_every_state(history, driver, 0)
    await _registers(driver, 1)
    await _peers(driver, letters.FIRST)
    await driver.ledger.queue(QueueQuery())
    if compacted:
        await driver.ledger.compact()
    await driver.ledger.close()
    history.copy("early")
    driver = await history.open()
    await _moves_of_earlier_tasks(driver)
    await _tasks_of_every_state(history, driver, 100)
    await _registers(driver, 2)
    await _peers(driver, (*letters.SECOND, *letters.THIRD))
    await driver.ledger.close()


async def _tasks_of_every_state(history: HomeHistory, driver: LedgerDriver, base: int) -> None:
    def task(number: int, **fields: Any) -> Task:
        return make_task(base + number, **fields)

    await history.send(driver, *(task(number) for number in range(1, 8)))
    tenants = {"tenant": "acme", "context_id": f"context {base}", "origin": "a2a"}
    await history.send(driver, task(10, **tenants), task(11, **tenants), task(12, parent=n(base + 1)))
    leased = {each.task.id: each for each in await driver.take(count=10)}
    await driver.renew(leased[n(base + 1)])
    await driver.report(leased[n(base + 1)], "one")
    await driver.report(leased[n(base + 1)], "two")
    await driver.release(leased[n(base + 2)])
    await driver.interrupt(leased[n(base + 3)])
    await driver.requeue(n(base + 3))
    await driver.park(leased[n(base + 4)])
    await driver.say(n(base + 4), "that one")
    await driver.park(leased[n(base + 5)])
    await driver.say(n(base + 6), "and another thing")
    await driver.finish(leased[n(base + 6)], ok(n(base + 6)))
    await driver.finish(leased[n(base + 7)], ok(n(base + 7)))
    await driver.finish(leased[n(base + 10)], ok(n(base + 10)))
    await driver.drain(count=1, request_id=f"given up {base}")
    await driver.ledger.commit(Withdraw(by=ALICE, request_id=f"given up {base}"))
    await driver.drain(count=1)
    for number, key in ((20, "a"), (21, "a"), (22, "a"), (23, "b")):
        await history.send(driver, same_work(base + number, f"{key} {base}"))
    shared = {each.task.id: each for each in await driver.take(count=MANY)}
    await driver.cancel(n(base + 20))
    await driver.finish(shared[n(base + 23)], ok(n(base + 23)))
    (promoted,) = await driver.take(count=1)
    await driver.finish(promoted, ok(promoted.task.id))
    await driver.sweep()
    await _waits(history, driver, base)
    pushed = await driver.ledger.commit(PutPush(task_id=n(base + 1), config=PushConfig(url="https://hooks.example/")))
    await driver.ledger.commit(MovePushes(moves=(msgspec.structs.replace(move_of(pushed), delivered=2),)))
    gone = PushConfig(url="https://hooks.example/", id="gone")
    await driver.ledger.commit(PutPush(task_id=n(base + 1), config=gone))
    await driver.ledger.commit(DropPush(task_id=n(base + 1), id="gone"))


async def _waits(history: HomeHistory, driver: LedgerDriver, base: int) -> None:
    """Tasks that wait for a moment and for signals: some of them still do."""
    await history.send(driver, *(make_task(base + number) for number in (30, 31, 32)))
    waiting = {each.task.id: each for each in await driver.take(count=MANY)}
    await wait_for(driver, waiting[n(base + 30)], "paid", for_ms=WAIT_MS)
    await signal(driver, n(base + 30), "paid", {"amount": 3})
    await signal(driver, n(base + 31), "paid", 1)
    await wait_for(driver, waiting[n(base + 31)], "paid")
    await signal(driver, n(base + 31), "later", 2, "s2")
    await suspend(driver, waiting[n(base + 32)], for_ms=WAIT_MS, step=1, name="sleep")
    await history.send(driver, make_task(base + 33, not_before_ms=driver.clock() + WAIT_MS))


async def _moves_of_earlier_tasks(driver: LedgerDriver) -> None:
    """What was live in the first part goes on in the second."""
    for leased in await driver.take(count=3):
        await driver.report(leased, "at last")
        await driver.finish(leased, ok(leased.task.id))
    await driver.drain(count=2)


async def _registers(driver: LedgerDriver, number: int) -> None:
    identity = make_identity(CAROL, number=number)
    await driver.ledger.commit(Enroll(by=OPERATOR, identity=identity))
    await driver.ledger.commit(RevokeIdentity(by=OPERATOR, token_sha256=identity.token_sha256))
    grant = make_grant(ALICE, send_actions(BOB)[0], nonce=str(number), max_uses=2)
    await give(driver, grant)
    task = make_task(90 + 100 * (number - 1))
    await driver.send(task, access=sending(task))
    await driver.ledger.commit(RevokeGrant(by=OPERATOR, signature_b58=grant.signature_b58))
    driver.clock.advance(10)
    await driver.ledger.commit(PurgeGrants(by=OPERATOR, before_ms=driver.clock()))
    await driver.ledger.commit(PurgeIdentities(by=OPERATOR, before_ms=driver.clock()))
    await add_tenant(driver, f"tenant-{number}")
    await put_agent(driver, f"tenant-{number}", "writer")
    await driver.ledger.commit(RemoveAgent(by=OPERATOR, tenant=f"tenant-{number}", agent_id="writer"))
    await _remove_tenant(driver, f"tenant-{number}")
    found = await driver.ledger.audit_before(driver.clock())
    ((count, through, anchor_hash, _),) = found
    await driver.ledger.commit(
        PurgeAudit(by=OPERATOR, before_ms=driver.clock(), through=through, anchor_hash=anchor_hash, count=count)
    )


async def _remove_tenant(driver: LedgerDriver, name: str) -> None:
    await driver.ledger.commit(BeginTenantRemoval(by=OPERATOR, name=name, reason="over"))
    removal = TenantRemoval(begun_at_ms=driver.clock(), reason="over", digest="0" * 64)
    await driver.ledger.commit(EraseTenant(by=OPERATOR, name=name, removal=removal))
    await driver.ledger.commit(FinishTenantRemoval(by=OPERATOR, name=name, places=1))


async def _peers(driver: LedgerDriver, commands: Any) -> None:
    for command in commands:
        try:
            await driver.ledger.commit(command)
        except Refusal as refusal:
            if refusal.status >= 500:
                raise


def records(home: Path) -> Mapping[int, tuple[Segment, bytes]]:
    """Every record of the journal by its number: its segment and its line."""
    found: dict[int, tuple[Segment, bytes]] = {}
    for segment in list_segments(home / "journal"):
        for line in segment.path.read_bytes().splitlines(keepends=True):
            if line.startswith(b"{"):
                found[msgspec.json.decode(line)["seq"]] = (segment, line)
    return found


def kinds_of(line: bytes) -> list[str]:
    return [event["type"] for event in msgspec.json.decode(line)["events"]]


def begun_in(line: bytes) -> list[TaskId]:
    begins = ("task_sent", "task_followed")
    return [event["task_id"] for event in msgspec.json.decode(line)["events"] if event["type"] in begins]


async def check_agreement(driver: LedgerDriver, tasks: Mapping[TaskId, Task]) -> dict[TaskId, str]:
    """Memory and archive say the same of every task; the states of those that are known."""
    states: dict[TaskId, str] = {}
    live: set[TaskId] = set()
    for which in tasks:
        shown, entry = await driver.ledger.show(which, None, 1_000), await driver.ledger.entry(which)
        if entry is not None and entry.state is not DRAINED:
            assert shown is not None, f"the archive does not know {which}"
            assert (shown.state, shown.generation, shown.turn, shown.attempt) == (
                entry.state.wire_name,
                entry.generation,
                entry.turn,
                entry.attempt,
            )
            assert shown.result == entry.result
            live.update([which] if not entry.finished else [])
        if shown is not None:
            states[which] = shown.state
            steps = await driver.ledger.steps(which, 0, 1_000)
            assert steps[0].generation == 1
            numbers = [step.generation for step in steps]
            assert numbers == sorted(set(numbers))
            assert numbers[-1] <= shown.generation
            assert entry is not None or shown.state == "resolved"
    queue = await driver.ledger.queue(QueueQuery(limit=1_000))
    assert {line.task.id for line in queue.tasks} & set(tasks) == live
    return states


async def exercise(history: HomeHistory, home: Path) -> None:
    """Every verb, on everything that is there, and the same again after a restart."""
    driver = await history.open(home)
    try:
        before = await check_agreement(driver, history.tasks)
        for task in history.tasks.values():
            await driver.send(task)
        assert set(await check_agreement(driver, history.tasks)) == set(history.tasks)
        for which, state in before.items():
            assert state != "resolved" or (await driver.show(which)).state == "resolved", "an ended task began again"
        await _finish_everything(driver)
        await check_agreement(driver, history.tasks)
        await driver.ledger.compact()
        await check_agreement(driver, history.tasks)
    finally:
        await driver.ledger.close()
    driver = await history.open(home)
    try:
        await check_agreement(driver, history.tasks)
        await driver.send(make_task(999))
        await _finish_everything(driver)
        assert (await driver.show(n(999))).state == "resolved"
        counts = await driver.ledger.counts()
        assert (counts.rejected, counts.queued, counts.leased) == (0, 0, 0)
        await driver.ledger.audit_verify()
    finally:
        await driver.ledger.close()


async def _finish_everything(driver: LedgerDriver) -> None:
    driver.clock.advance(WAIT_MS)
    await driver.sweep()
    for queued in await driver.queue(limit=1_000, state_filter="in_flight"):
        await driver.requeue(queued.task.id)
    for queued in await driver.queue(limit=1_000, state_filter="parked"):
        await driver.say(queued.task.id, "go on")
    while leased := await driver.take(everyone=True, count=MANY):
        for each in leased:
            await driver.finish(each, ok(each.task.id))
    while await driver.drain(everyone=True, count=MANY):
        pass
