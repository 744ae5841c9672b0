"""The shape of cost: what a decision does is the same however much else there is. Counted in calls, not in seconds."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from covenant.ledger.machine import commands as c
from covenant.ledger.machine.commands import LeasedTask
from covenant.ledger.machine.identity_commands import MakeGrant, WriteAuditRow
from covenant.model.grant import send_actions
from covenant.model.retry_policy import RetryPolicy
from covenant.model.task import fingerprint
from tests.ledger.machine.pure import Pure
from tests.ledger_contract.grants import sending
from tests.ledger_contract.samples import ALICE, BOB, CAROL, OPERATOR, agent, make_grant, make_task, ok, task_id

FEW, MANY = 150, 4_000  # few are more than any bound on one step


def calls(action: Callable[[], object]) -> int:
    """How many functions were called, of ours and of the interpreter's."""
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def with_queued(count: int) -> Pure:
    pure = Pure()
    for number in range(count):
        pure.send(make_task(number))
    return pure


def with_leases(count: int) -> Pure:
    pure = with_queued(count)
    for _ in range(count):
        pure.take()
    return pure


def with_results(count: int) -> Pure:
    pure = Pure()
    for number in range(count):
        leased = pure.taken(make_task(number))
        settle(pure, leased)
    return pure


def settle(pure: Pure, leased: LeasedTask) -> None:
    pure.do(
        c.Settle(
            task_id=leased.task.id,
            holder=leased.lease.leased_to,
            lease_id=leased.lease.lease_id,
            result=ok(leased.task.id),
        )
    )


def with_rows(count: int) -> Pure:
    pure = Pure()
    for number in range(count):
        pure.do(WriteAuditRow(by=OPERATOR, row={"type": "noted", "text": f"{number:06d}"}))
    return pure


def with_grants(count: int) -> Pure:
    pure = Pure()
    for number in range(count):
        subject = agent(f"other-{number:06d}@here")
        pure.do(MakeGrant(by=OPERATOR, grant=make_grant(subject, send_actions(BOB)[0])))
    pure.do(MakeGrant(by=OPERATOR, grant=make_grant(ALICE, send_actions(BOB)[0])))
    return pure


def send_another(pure: Pure) -> None:
    pure.send(make_task(90_000, recipient=CAROL))


def receive_ones_own(pure: Pure) -> None:
    send_another(pure)
    assert pure.take(CAROL).task.id == task_id(90_000)


def answer_one(pure: Pure) -> None:
    settle(pure, pure.taken(make_task(90_000, recipient=CAROL)))


def drain_ones_own(pure: Pure) -> None:
    settle(pure, pure.taken(make_task(90_000, sender=CAROL)))
    assert len(pure.do(c.Drain(by=CAROL, sender=CAROL.pubkey)).results) == 1


def renew_one(pure: Pure) -> None:
    lease = pure.state.entries[task_id(7)].lease
    assert lease is not None
    pure.do(c.Renew(task_id=task_id(7), holder=BOB, lease_id=lease.lease_id))


def add_a_row(pure: Pure) -> None:
    pure.do(WriteAuditRow(by=OPERATOR, row={"type": "noted", "text": "one more"}))


def be_checked(pure: Pure) -> None:
    task = make_task(90_000)
    pure.do(c.Accept(task=task, digest=fingerprint(task)[0], access=sending(task)))


def scan_some_leases(pure: Pure) -> None:
    assert pure.do(c.RetryStale(by=OPERATOR, policy=RetryPolicy(scan_limit=10))).considered == 10


def sweep_nothing(pure: Pure) -> None:
    assert pure.do(c.Sweep()).expired == ()


@pytest.mark.parametrize(
    ("fill", "action"),
    [
        (with_queued, send_another),
        (with_queued, receive_ones_own),
        (with_queued, answer_one),
        (with_queued, sweep_nothing),
        (with_leases, renew_one),
        (with_leases, receive_ones_own),
        (with_leases, scan_some_leases),
        (with_results, drain_ones_own),
        (with_results, send_another),
        (with_results, sweep_nothing),
        (with_rows, add_a_row),
        (with_grants, be_checked),
    ],
    ids=lambda function: function.__name__,
)
def test_it_costs_the_same_with_few_and_with_many(fill: Callable[[int], Pure], action: Callable[[Pure], None]) -> None:
    few, many = fill(FEW), fill(MANY)
    cost = calls(lambda: action(few))
    assert calls(lambda: action(many)) <= cost * 1.2 + 5


def test_replaying_costs_in_proportion_to_what_is_replayed() -> None:
    def life(count: int) -> None:
        with_results(count).do(c.Drain(by=ALICE, sender=ALICE.pubkey, count=count))

    assert calls(lambda: life(1_000)) <= calls(lambda: life(500)) * 2.2
