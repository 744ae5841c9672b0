"""Every command about a task × every state it can be in: done, or refused with this code. And what deciding is not."""

from typing import Any

import msgspec
import pytest

from covenant.ledger.machine import commands as c
from covenant.ledger.machine.decisions import decide
from covenant.ledger.machine.decisions.context import CommandRefused
from covenant.ledger.machine.view import Archived
from covenant.model.errors import Refusal
from covenant.model.ids import LeaseId
from covenant.model.retry_policy import ForceError, Posture, Requeue
from covenant.model.task import Cause, Ending, fingerprint
from covenant.model.task_event import MessageUpdate, StatusUpdate
from tests.ledger.machine.pure import Pure
from tests.ledger_contract.samples import ALICE, BOB, CAROL, OPERATOR, ok, same_work, task_id

ID = task_id(1)
NO_LEASE = LeaseId("99999999-9999-4999-8999-999999999999")
STATES = (
    "queued",
    "leased",
    "requeued",
    "parked",
    "next turn",
    "following",
    "settled",
    "canceled",
    "drained",
    "archived",
)


def place(state: str) -> tuple[Pure, LeaseId]:
    """A ledger whose task 1 has come to this state, and the lease it had last."""
    pure = Pure()
    if state == "following":
        pure.send(same_work(2))
    pure.send(same_work(1))
    if state in ("queued", "following"):
        return pure, NO_LEASE
    lease_id = pure.take().lease.lease_id
    if state == "requeued":
        pure.do(c.Repair(task_id=ID, by=OPERATOR, command=Requeue(Posture.IDEMPOTENT), reason="gone"))
    elif state in ("parked", "next turn"):
        pure.do(c.Report(task_id=ID, holder=BOB, lease_id=lease_id, update=StatusUpdate(state="input-required")))
        if state == "next turn":
            pure.do(c.Continue(task_id=ID, message=MessageUpdate(), message_id="m0"))
    elif state == "canceled":
        pure.do(c.Cancel(task_id=ID, by=ALICE, reason="not wanted"))
    elif state != "leased":
        pure.do(c.Settle(task_id=ID, holder=BOB, result=ok(ID, "first"), lease_id=lease_id))
    if state in ("drained", "archived"):
        pure.do(c.Drain(by=ALICE, sender=ALICE.pubkey))
    if state == "archived":
        _archive(pure)
    return pure, lease_id


def _archive(pure: Pure) -> None:
    """Out of memory, as the archive would answer for it."""
    entry = pure.state.entries[ID]
    assert pure.state.evict(pure.seq) == [ID]
    assert entry.lease is not None
    assert entry.result is not None
    pure.state.recalled = {
        ID: Archived(
            digest=entry.digest,
            sender=ALICE,
            recipient=BOB,
            leased_to=entry.lease.leased_to.pubkey,
            ending=Ending.COMPLETED,
            cause=Cause.RESULT,
            result=entry.result,
        )
    }


def command(name: str, lease_id: LeaseId) -> c.Command[Any]:
    holder: dict[str, Any] = {"task_id": ID, "holder": BOB, "lease_id": lease_id}
    task = same_work(1)
    all_commands: dict[str, c.Command[Any]] = {
        "send": c.Accept(task=task, digest=fingerprint(task)[0]),
        "send other": c.Accept(task=task, digest="other"),
        "renew": c.Renew(**holder),
        "release": c.Release(**holder, reason="no room"),
        "interrupt": c.Interrupt(**holder, reason="stopping"),
        "report": c.Report(**holder, update=StatusUpdate("on it")),
        "settle": c.Settle(**holder, result=ok(ID, "second")),
        "settle same": c.Settle(**holder, result=ok(ID, "first")),
        "settle by another": c.Settle(task_id=ID, holder=CAROL, lease_id=lease_id, result=ok(ID)),
        "advance": c.Advance(**holder, updates=(StatusUpdate("on it"),), result=ok(ID, "second")),
        "continue": c.Continue(task_id=ID, message=MessageUpdate(), message_id="m1"),
        "requeue": c.Repair(task_id=ID, by=OPERATOR, command=Requeue(Posture.IDEMPOTENT), reason="gone"),
        "force error": c.Repair(task_id=ID, by=OPERATOR, command=ForceError("given up"), reason="gone"),
        "cancel": c.Cancel(task_id=ID, viewer=ALICE.pubkey, by=ALICE, reason="not wanted"),
        "drain it": c.Drain(by=ALICE, sender=ALICE.pubkey, task_id=ID),
    }
    return all_commands[name]


OK = ""
OVER = "already_settled"
# In the order of STATES; "" is done (or told as done before).
TABLE: dict[str, tuple[str, ...]] = {
    "send": (OK,) * 10,
    "send other": ("duplicate_task_id",) * 10,
    "renew": ("not_leased", OK, "not_leased", "not_leased", "not_leased", "not_leased", OVER, "canceled", OVER, OVER),
    "release": ("not_leased", OK, "not_leased", "not_leased", "not_leased", "not_leased", OVER, "canceled", OVER, OVER),
    "interrupt": (
        "not_leased",
        OK,
        "not_leased",
        "not_leased",
        "not_leased",
        "not_leased",
        OVER,
        "canceled",
        OVER,
        OVER,
    ),
    "report": ("not_leased", OK, "not_leased", "not_leased", "not_leased", "not_leased", OVER, "canceled", OVER, OVER),
    "settle": ("not_leased", OK, OK, "not_leased", "not_leased", "not_leased", OVER, "canceled", OVER, OVER),
    "settle same": ("not_leased", OK, OK, "not_leased", "not_leased", "not_leased", OK, "canceled", OK, OK),
    "settle by another": (
        "not_leased",
        "not_lessee",
        "not_lessee",
        "not_leased",
        "not_leased",
        "not_leased",
        "not_lessee",
        "not_lessee",
        "not_lessee",
        "not_lessee",
    ),
    "continue": (OK, OK, OK, OK, OK, "following", OVER, "canceled", OVER, OVER),
    "advance": ("not_leased", OK, "not_leased", "not_leased", "not_leased", "not_leased", OVER, "canceled", OVER, OVER),
    "requeue": ("not_leased", OK, *("not_leased",) * 8),
    "force error": ("not_leased", OK, *("not_leased",) * 8),
    "cancel": (OK,) * 10,
    "drain it": (OK, OK, OK, OK, OK, OK, OK, OK, "already_drained", "already_drained"),
}
CASES = [(name, state, code) for name, row in TABLE.items() for state, code in zip(STATES, row, strict=True)]


@pytest.mark.parametrize(("name", "state", "code"), CASES, ids=[f"{name}-{state}" for name, state, _ in CASES])
def test_a_command_about_a_task_is_done_or_refused_as_the_table_says(name: str, state: str, code: str) -> None:
    pure, lease_id = place(state)
    before = snapshot(pure)
    try:
        pure.do(command(name, lease_id))
    except Refusal as refusal:
        told = refusal.code
    else:
        told = OK
    assert told == code
    assert not code or snapshot(pure) == before, "refused, and changed all the same"


@pytest.mark.parametrize("name", [name for name in TABLE if name not in ("send", "send other")])
def test_a_task_that_nobody_sent_is_unknown_to_every_command(name: str) -> None:
    with pytest.raises(Refusal) as refused:
        Pure().do(command(name, NO_LEASE))
    assert (refused.value.code, refused.value.status) == ("unknown_task", 404)


@pytest.mark.parametrize("name", ["renew", "settle", "requeue", "continue", "cancel"])
@pytest.mark.parametrize("state", STATES)
def test_a_task_is_unknown_to_a_viewer_without_part_in_it_in_every_state(name: str, state: str) -> None:
    pure, lease_id = place(state)
    with pytest.raises(Refusal) as refused:
        pure.do(msgspec.structs.replace(command(name, lease_id), viewer=CAROL.pubkey))
    assert (refused.value.code, refused.value.status) == ("unknown_task", 404)


@pytest.mark.parametrize(("name", "state", "code"), CASES, ids=[f"{name}-{state}" for name, state, _ in CASES])
def test_deciding_changes_nothing_and_decides_the_same_again(name: str, state: str, code: str) -> None:
    pure, lease_id = place(state)
    before = snapshot(pure)
    outcomes = []
    for _ in range(2):
        ids = iter(f"id-{number}" for number in range(10))
        try:
            outcomes.append(decide(pure.state, command(name, lease_id), pure.now_ms, ids.__next__).events)
        except CommandRefused as refused:
            outcomes.append(refused.events)
    assert outcomes[0] == outcomes[1]
    assert snapshot(pure) == before


def snapshot(pure: Pure) -> Any:
    """Everything about tasks; the audit goes on with refusals too."""
    state = pure.state
    return (
        dict(state.entries),
        list(state.queue),
        list(state.results),
        list(state.leased),
        dict(state.leaders),
        {key: list(group) for key, group in state.groups.items()},
        dict(state.cache.items()),
    )
