"""Facts: what a scenario tried and what it was told, as lines that outlive it, and what must be true of a ledger then.

A verb is told before it is tried and again when it is acknowledged. So what is acknowledged is known exactly, and so is
what may or may not have happened: whatever was tried and never answered.
"""

import os
from collections.abc import Iterable
from typing import Any

import msgspec

from covenant.ledger.contract.tasks import TaskDetail
from covenant.model.ids import TaskId
from covenant.model.task import Result
from tests.ledger_contract.driver import LedgerDriver, check_generations
from tests.ledger_contract.samples import ALICE

# Where a task is after the last thing that was acknowledged, if nothing else was tried since.
STATE_AFTER = {
    "sent": "queued",
    "started": "in_flight",
    "followed": "following",
    "leased": "in_flight",
    "updated": "in_flight",
    "parked": "parked",
    "continued": "queued",
    "requeued": "queued",
    "settled": "result_pending",
    "canceled": "result_pending",
    "forced": "result_pending",
    "drained": "resolved",
}
BEGINS = {"sent", "started", "followed"}
ENDS = {"settled", "canceled", "forced", "drained"}


class Fact(msgspec.Struct, frozen=True, omit_defaults=True):
    """`tasks` are those it was about, or may have been; `spared` those that it may have been about, and was not."""

    at: str
    verb: str
    tasks: tuple[TaskId, ...] = ()
    said: dict[str, Any] = {}
    spared: tuple[TaskId, ...] = ()


def tell(fd: int, fact: Fact) -> None:
    os.write(fd, msgspec.json.encode(fact) + b"\n")


def read(data: bytes) -> list[Fact]:
    return [msgspec.json.decode(line, type=Fact) for line in data.splitlines(keepends=True) if line.endswith(b"\n")]


class Told:
    """All the facts, in their order, and what follows from them."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self.facts = list(facts)
        self.acknowledged = [fact for fact in self.facts if fact.at == "acknowledged"]

    def of(self, verb: str) -> list[Fact]:
        return [fact for fact in self.acknowledged if fact.verb == verb]

    def tried(self) -> set[TaskId]:
        return {which for fact in self.facts if fact.verb in BEGINS for which in fact.tasks}

    def known(self) -> set[TaskId]:
        return {which for fact in self.acknowledged if fact.verb in BEGINS for which in fact.tasks}

    def last(self, which: TaskId) -> tuple[str, bool]:
        """The last verb acknowledged about a task, and whether anything was tried since without an answer."""
        verb, unanswered = "", 0
        for fact in self.facts:
            if which in fact.spared:
                unanswered -= 1
            if which not in fact.tasks:
                continue
            if fact.at == "acknowledged":
                verb, unanswered = fact.verb, 0
            elif fact.at == "tried":
                unanswered += 1
            elif fact.at == "refused" and not fact.said["unknown"]:
                unanswered -= 1
        return verb, unanswered > 0


async def check_reads(driver: LedgerDriver, told: Told) -> dict[TaskId, TaskDetail]:
    """Everything acknowledged is there, and nothing twice, as far as looking can tell."""
    shown: dict[TaskId, TaskDetail] = {}
    for which in told.tried():
        found = await driver.ledger.show(which, None, 1_000)
        assert found is not None or which not in told.known(), f"acknowledged task {which} is lost"
        if found is not None:
            shown[which] = await check_generations(driver, which)
            assert [update.kind for update in found.updates].count("settled") == (found.result is not None)
            live = [lease.lease_id for lease in found.leases if lease.outcome is None]
            assert len(live) == (found.state == "in_flight"), f"task {which} is {found.state} with leases {live}"
    for which in told.known():
        verb, open_ = told.last(which)
        assert open_ or shown[which].state == STATE_AFTER[verb], f"{which} is {shown[which].state} after {verb}"
    _check_details(told, shown)
    await _check_registers(driver, told)
    await _check_pushes(driver, told)
    entries = (await driver.queue(limit=1_000)) if told.facts else ()
    assert {entry.task.id for entry in entries} <= told.tried(), "a task that nobody sent"
    return shown


def _check_details(told: Told, shown: dict[TaskId, TaskDetail]) -> None:
    for fact in told.of("leased"):
        for which, lease_id in zip(fact.tasks, fact.said["leases"], strict=True):
            leases = [lease.lease_id for lease in shown[which].leases]
            assert leases.count(lease_id) == 1, f"acknowledged lease {lease_id} of {which} is in {leases}"
    for fact in told.of("updated"):
        updates = {update.generation: update for update in shown[fact.tasks[0]].updates}
        body = msgspec.to_builtins(updates[fact.said["generation"]].body)
        assert body["text"] == fact.said["text"], "an acknowledged update is not at its generation"
    for fact in told.of("settled"):
        for which in fact.tasks:
            wanted = msgspec.convert(fact.said["result"], Result)
            assert shown[which].result == msgspec.structs.replace(wanted, task_id=which), "another result"


async def _check_registers(driver: LedgerDriver, told: Told) -> None:
    await driver.check_audit()
    rows = await driver.audit_rows()
    noted = [row["kind"]["text"] for row in rows if row["kind"]["type"] == "noted"]
    for fact in told.of("noted"):
        assert noted.count(fact.said["text"]) == 1, f"audit row {fact.said['text']} is there {noted.count} times"
    types = [row["kind"]["type"] for row in rows]
    assert types.count("capability_check") >= len(told.of("denied")), "a refusal was told and is not on record"
    for fact in told.of("enrolled"):
        assert driver.ledger.identity(fact.said["token"]) is not None, "an enrolled identity is lost"
    granted = {grant.signature_b58 for grant in await driver.ledger.grants()}
    assert {fact.said["grant"] for fact in told.of("granted")} <= granted, "a grant is lost"


async def _check_pushes(driver: LedgerDriver, told: Told) -> None:
    """A cursor may be ahead of what was acknowledged, never behind it; what was deleted stays so."""
    known = {push.id: push for push in await driver.ledger.outbox()}
    deleting = {fact.said["push"] for fact in told.facts if fact.verb == "unpushed" and "push" in fact.said}
    for fact in [*told.of("pushed"), *told.of("delivered")]:
        name = fact.said["push"]
        if name not in deleting:
            assert name in known, f"push configuration {name} is lost"
            assert known[name].delivered >= fact.said["delivered"], "a cursor went back"
    assert not {fact.said["push"] for fact in told.of("unpushed")} & set(known), "a deleted configuration is back"


async def check_all(driver: LedgerDriver, told: Told, tasks: dict[TaskId, Any]) -> None:
    """As above, and by doing: sends, receives and drains repeated give the same, and every result is drained once."""
    shown = await check_reads(driver, told)
    for which in told.known():
        assert (await driver.send(tasks[which])).duplicate, f"{which} was sent again and was new"
    for fact in told.of("leased"):
        again = await driver.take(count=len(fact.tasks), request_id=fact.said["request"])
        live = {
            which: lease
            for which, lease in zip(fact.tasks, fact.said["leases"], strict=True)
            if (entry := await driver.ledger.entry(which)) and entry.lease and entry.state == "leased"
            if entry.lease.lease_id == lease
        }
        assert {leased.task.id: leased.lease.lease_id for leased in again} == live, "a repeated receive differs"
    gone: set[TaskId] = set()
    for fact in told.of("drained"):
        if fact.said["request"] is not None:
            again_results = await driver.drain(count=100, request_id=fact.said["request"])
            assert [result.task_id for result in again_results] == list(fact.tasks), "a repeated drain differs"
        gone |= set(fact.tasks)
    drained = [result.task_id for result in await driver.drain(ALICE, 100)]
    assert len(drained) == len(set(drained)), "a result was drained twice"
    assert not gone & set(drained), "a result was drained again"
    assert set(drained) == {which for which, task in shown.items() if task.state == "result_pending"}
