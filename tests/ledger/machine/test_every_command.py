"""Every command is decided or refused, wherever its task is: no decision fails."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest

from covenant.ledger.machine import commands as c
from covenant.ledger.machine import identity_commands as t
from covenant.ledger.machine.decisions import DECISIONS
from covenant.model.a2a_requests import PushConfig
from covenant.model.agent_definition import AgentDefinition
from covenant.model.errors import Refusal
from covenant.model.grant import COMPACT_ACTION, REQUEUE_ACTION, send_actions
from covenant.model.ids import TaskId
from covenant.model.push import PushMove
from covenant.model.retry_policy import ForceError, Posture, Requeue, RetryPolicy
from covenant.model.task import DELEGATION, CacheKey, Task, fingerprint
from covenant.model.task_event import MessageUpdate, Signal, StatusUpdate, Wait
from covenant.model.tenants import Tenant, TenantLimits, TenantRemoval
from tests.ledger.machine.peer_commands import peer_commands
from tests.ledger.machine.pure import Pure
from tests.ledger_contract.grants import responding, sending
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
    task_id,
)


class Tried(Pure):
    """Tries commands, and remembers which kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: set[type[Any]] = set()

    def attempt(self, command: c.Command[Any]) -> None:
        """Done or refused, and nothing else."""
        self.tried.add(type(command))
        with suppress(Refusal):
            self.do(command)


def accept(task: Task, *, access: c.Access | None = None) -> c.Accept:
    return c.Accept(task=task, digest=fingerprint(task)[0], access=access)


def holder_commands(leased: c.LeasedTask) -> list[c.Command[Any]]:
    which, lease_id = leased.task.id, leased.lease.lease_id
    parking = StatusUpdate(state="input-required")
    return [
        c.Renew(task_id=which, holder=BOB, lease_id=lease_id),
        c.Interrupt(task_id=which, holder=BOB, lease_id=lease_id, reason="stopping"),
        c.Report(task_id=which, holder=BOB, lease_id=lease_id, update=StatusUpdate("on it"), update_no=1),
        c.Report(task_id=which, holder=BOB, lease_id=lease_id, update=StatusUpdate("on it"), update_no=1),
        c.Report(task_id=which, holder=BOB, lease_id=lease_id, update=parking),
        c.Continue(task_id=which, message=MessageUpdate(), message_id="m1"),
        c.Advance(task_id=which, holder=BOB, lease_id=lease_id, updates=(StatusUpdate("on it"),)),
        c.SignalTask(task_id=which, signal=Signal("paid", "s1", 1)),
        c.Advance(task_id=which, holder=BOB, lease_id=lease_id, wait=Wait(since_ms=1, signal="paid", step=1)),
        c.Advance(task_id=which, holder=BOB, lease_id=lease_id, wait=Wait(since_ms=1, signal="sent", step=2)),
        c.SignalTask(task_id=which, signal=Signal("sent", "s2", 1)),
        c.Release(task_id=which, holder=BOB, lease_id=lease_id, reason="no room"),
    ]


def ending_commands(which: TaskId) -> list[c.Command[Any]]:
    task = make_task()
    return [
        c.Settle(task_id=which, holder=BOB, result=ok(which), access=responding(task, BOB)),
        c.Settle(task_id=which, holder=BOB, result=ok(which)),
        c.Settle(task_id=which, holder=CAROL, viewer=CAROL.pubkey, result=ok(which)),
        c.Repair(task_id=which, by=OPERATOR, command=Requeue(Posture.IDEMPOTENT), reason="gone"),
        c.Repair(task_id=which, by=OPERATOR, command=ForceError("given up"), reason="gone"),
        c.Cancel(task_id=which, by=ALICE, viewer=ALICE.pubkey, reason="not wanted"),
        c.Cancel(task_id=which, by=CAROL, viewer=CAROL.pubkey, reason="not wanted"),
    ]


def everywhere() -> list[tuple[str, Tried]]:
    """A ledger for each place that a leader with two followers can have come to."""
    places = []
    for place in ("queued", "leased", "requeued", "parked", "settled", "drained", "expired", "unknown"):
        pure = Tried()
        if place != "unknown":
            for number in (1, 2, 3):
                pure.send(same_work(number, deadline_ms=pure.now_ms + 10))
        if place in ("leased", "requeued", "parked", "settled", "drained"):
            leased = pure.take()
            for command in {
                "requeued": [ending_commands(task_id(1))[3]],
                "parked": [holder_commands(leased)[4]],
                "settled": [ending_commands(task_id(1))[1]],
                "drained": [ending_commands(task_id(1))[1], c.Drain(by=ALICE, sender=ALICE.pubkey, count=9)],
            }.get(place, []):
                pure.do(command)
        if place == "expired":
            pure.now_ms += 10
        places.append((place, pure))
    return places


def task_commands() -> list[c.Command[Any]]:
    lease = c.LeasedTask(same_work(1), _lease())
    return [
        accept(same_work(1)),
        accept(same_work(9)),
        accept(same_work(1, intent_text="other")),
        accept(make_task(8), access=sending(make_task(8))),
        accept(make_task(7, origin=DELEGATION, parent=task_id(1))),
        c.CancelOrphans(),
        c.Take(holder=BOB, recipient=BOB.pubkey, count=5, request_id="r1"),
        c.Take(holder=OPERATOR, recipient=None, count=5),
        c.Drain(by=ALICE, sender=ALICE.pubkey, count=2, request_id="r1"),
        c.Drain(by=OPERATOR, sender=None, count=2),
        c.Drain(by=ALICE, sender=ALICE.pubkey, task_id=task_id(1)),
        c.Drain(by=CAROL, sender=CAROL.pubkey, task_id=task_id(1), request_id="r2"),
        c.GiveBack(leases=((task_id(1), lease.lease.lease_id),), results=(task_id(1), task_id(2))),
        c.Withdraw(by=BOB, request_id="r1"),
        c.Withdraw(by=ALICE, request_id="r1"),
        c.Sweep(),
        c.RetryStale(by=OPERATOR, policy=RetryPolicy(enabled=True, min_lease_age_ms=0), scheduled=True),
        c.RetryStale(by=OPERATOR, policy=RetryPolicy(min_lease_age_ms=0), access=_requeueing()),
        c.RetryStale(by=OPERATOR, policy=RetryPolicy(enabled=True), access=_requeueing()),
        *holder_commands(lease),
        *ending_commands(task_id(1)),
        *ending_commands(task_id(2)),
    ]


def _lease() -> Any:
    return Pure().taken(same_work(1)).lease


def _requeueing() -> c.Access:
    return c.Access(caller=OPERATOR, actions=(REQUEUE_ACTION,), scope_id="gate", what="retry")


def register_commands() -> list[c.Command[Any]]:
    identity, grant = make_identity(ALICE), make_grant(ALICE, send_actions(BOB)[0], max_uses=1)
    compacting = c.Access(caller=OPERATOR, actions=(COMPACT_ACTION,), scope_id="a2a:compact", what="compact")
    new = make_identity(ALICE, number=2)
    return [
        t.Enroll(by=OPERATOR, identity=identity, grants=(make_grant(ALICE, send_actions(CAROL)[0]),)),
        t.Enroll(by=OPERATOR, identity=identity),
        t.MakeGrant(by=OPERATOR, grant=grant),
        accept(make_task(8), access=sending(make_task(8))),
        accept(make_task(7), access=sending(make_task(7))),
        t.RevokeGrant(by=OPERATOR, signature_b58=grant.signature_b58),
        t.PurgeGrants(by=OPERATOR, before_ms=1 << 50),
        t.RotateToken(
            by=OPERATOR,
            token_sha256=identity.token_sha256,
            new_token_sha256=new.token_sha256,
            new_token_prefix=new.token_prefix,
        ),
        t.RevokeIdentity(by=OPERATOR, token_sha256=new.token_sha256),
        t.PurgeIdentities(by=OPERATOR, before_ms=1 << 50),
        t.WriteAuditRow(by=OPERATOR, row={"type": "noted"}, access=compacting),
        t.WriteAuditRow(by=OPERATOR, row={"type": "noted"}),
        t.PurgeAudit(by=OPERATOR, before_ms=1, through=1, anchor_hash="0" * 64, count=1),
    ]


def push_commands() -> list[c.Command[Any]]:
    which, config = task_id(1), PushConfig(url="https://example.com/hook", id="hook")
    move = PushMove(task_id=which, id="hook", key="key", revision=1, delivered=1)
    return [
        c.PutPush(task_id=which, config=config),
        c.MovePushes(moves=(move,)),
        c.RetryPush(task_id=which, by=OPERATOR, id="hook"),
        c.DropPush(task_id=which, id="hook"),
    ]


def tenant_commands() -> list[c.Command[Any]]:
    definition = AgentDefinition(id="bob")
    cached = (CacheKey(ALICE.pubkey, BOB.pubkey, "work", "a"),)
    removal = TenantRemoval(begun_at_ms=1, reason="over", digest="0" * 64, keys=(BOB.pubkey,))
    return [
        t.PutAgent(by=OPERATOR, tenant="here", definition=definition, identity=BOB),
        t.AddTenant(by=OPERATOR, tenant=Tenant(name="here", token_sha256="1")),
        t.PutAgent(by=OPERATOR, tenant="here", definition=definition, identity=BOB),
        t.PutAgent(by=OPERATOR, tenant="here", definition=definition, identity=BOB, replace=True),
        t.PauseSchedule(by=OPERATOR, name="here", agent_id="bob", schedule_id="s"),
        t.PauseSchedule(by=OPERATOR, name="here", agent_id="bob", schedule_id="s", paused=False),
        t.RemoveAgent(by=OPERATOR, tenant="here", agent_id="bob"),
        t.ChangeTenant(by=OPERATOR, name="here", disabled=True, limits=TenantLimits(burst=1)),
        t.RotateTenant(by=OPERATOR, name="here", token_sha256="2", token_prefix="atr_2"),
        t.EraseTenant(by=OPERATOR, name="here", removal=removal, cached=cached),
        t.BeginTenantRemoval(by=OPERATOR, name="here", reason="over", cancel_live=True),
        t.EraseTenant(by=OPERATOR, name="here", removal=removal, cached=cached),
        t.FinishTenantRemoval(by=OPERATOR, name="here", places=1),
    ]


@pytest.mark.parametrize(("place", "pure"), everywhere(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_about_tasks_is_decided_wherever_its_task_is(place: str, pure: Tried) -> None:
    state = msgspec.json.encode(list(pure.state.entries.values()))
    for command in [*task_commands(), *push_commands()]:
        fresh = dict(everywhere())[place]
        assert msgspec.json.encode(list(fresh.state.entries.values())) == state
        fresh.attempt(command)
        fresh.attempt(command)


@pytest.mark.parametrize("repeats", [1, 2])
def test_every_command_there_is_was_tried(repeats: int) -> None:
    pure = Tried()
    for command in [*task_commands(), *push_commands(), *register_commands(), *tenant_commands(), *peer_commands()]:
        for _ in range(repeats):
            pure.attempt(command)
    assert pure.tried == set(DECISIONS)
