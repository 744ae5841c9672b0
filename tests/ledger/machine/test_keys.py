"""A command names what its decision reads and changes: an engine that locks just that, locks enough.

A key stands for an entity and for what hangs on it, as `covenant.ledger.machine.commands` says.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import pytest

from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine import commands as c
from covenant.ledger.machine import identity_commands as t
from covenant.ledger.machine.decisions import DECISIONS
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import TaskEvent
from covenant.ledger.machine.view import Account, Archived, Cached, Remembered, View
from covenant.model.a2a_requests import PushConfig
from covenant.model.agent_definition import AgentDefinition, CatalogueAgent
from covenant.model.clock_steps import Ages
from covenant.model.errors import Refusal
from covenant.model.grant import COMPACT_ACTION, REQUEUE_ACTION, AuditHead, Grant, Identity, send_actions
from covenant.model.ids import PublicKey, TaskId
from covenant.model.peers.delegation import Delegation, DelegationKey, OutboxMessage, Peer
from covenant.model.peers.instance import InstanceId
from covenant.model.push import Push, PushMove
from covenant.model.retry_policy import ForceError, Posture, Requeue, RetryPolicy
from covenant.model.settings import Limits
from covenant.model.task import DELEGATION, CacheKey, Task, account_of, fingerprint
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

A = TypeVar("A")


class Recording:
    """A view that lets a decision read only what the keys of its command name."""

    def __init__(self, state: LedgerState, keys: Iterable[c.Key]) -> None:
        self._state = state
        self._keys = set(keys)
        self.tasks: set[str] = {key[1] for key in self._keys if key[0] == "task"}
        self.accounts: set[str] = {key[1] for key in self._keys if key[0] == "account"}
        self._groups: set[CacheKey] = {CacheKey(*key[1:]) for key in self._keys if key[0] == "cache"}

    def _need(self, *names: c.Key) -> None:
        assert self._keys & set(names), f"reads {names[0]}, and names only {sorted(self._keys)}"

    def _found(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        for entry in entries:
            self.tasks.add(entry.task.id)
            self._group_of(entry)
            yield entry

    def _group_of(self, entry: Entry) -> None:
        self.accounts.add(account_of(entry.task))
        key = entry.cache_key
        if key is not None:
            self._groups.add(key)

    @property
    def limits(self) -> Limits:
        return self._state.limits

    @property
    def audit_head(self) -> AuditHead:
        self._need(("audit",))
        return self._state.audit_head

    def entry(self, task_id: TaskId) -> Entry | None:
        assert task_id in self.tasks, f"reads task {task_id}"
        entry = self._state.entry(task_id)
        if entry is not None:
            self._group_of(entry)
        return entry

    def task(self, entry: Entry) -> Task | None:
        assert entry.task.id in self.tasks, f"reads the body of task {entry.task.id}"
        return self._state.task(entry)

    def account(self, name: str) -> Account:
        assert name in self.accounts, f"reads the account {name}"
        return self._state.account(name)

    def archived(self, task_id: TaskId) -> Archived | None:
        assert task_id in self.tasks, f"reads task {task_id} in the archive"
        return self._state.archived(task_id)

    def is_erased(self, task_id: TaskId) -> bool:
        assert task_id in self.tasks, f"reads task {task_id} in the archive"
        return self._state.is_erased(task_id)

    def queued(self, recipient: PublicKey | None, count: int) -> Sequence[Entry]:
        self._need(("queue", recipient) if recipient else ("queue",), ("queue",))
        return list(self._found(self._state.queued(recipient, count)))

    def queued_count(self, recipient: PublicKey) -> int:
        self._need(("queue", recipient), ("queue",))
        return self._state.queued_count(recipient)

    def settled(self, sender: PublicKey | None, count: int) -> Sequence[Entry]:
        self._need(("results", sender) if sender else ("results",), ("results",))
        return list(self._found(self._state.settled(sender, count)))

    def settled_count(self, sender: PublicKey) -> int:
        self._need(("results", sender), ("results",))
        return self._state.settled_count(sender)

    def undrained_bytes(self, sender: PublicKey) -> int:
        self._need(("results", sender), ("results",))
        return self._state.undrained_bytes(sender)

    def leases(self) -> Iterable[Entry]:
        self._need(("leases",))
        return self._found(self._state.leases())

    def due(self, now_ms: int, count: int, ages: Ages) -> Sequence[Entry]:
        self._need(("due",))
        return list(self._found(self._state.due(now_ms, count, ages)))

    def forgettable(self, now_ms: int, count: int, ages: Ages) -> Sequence[Entry]:
        self._need(("due",))
        return list(self._found(self._state.forgettable(now_ms, count, ages)))

    def orphans(self, count: int) -> Sequence[Entry]:
        self._need(("orphans",))
        return list(self._found(self._state.orphans(count)))

    def pushes(self, task_id: TaskId) -> Sequence[Push]:
        assert task_id in self.tasks, f"reads the pushes of {task_id}"
        return self._state.pushes(task_id)

    def push(self, task_id: TaskId, push_id: str) -> Push | None:
        assert task_id in self.tasks, f"reads a push of {task_id}"
        return self._state.push(task_id, push_id)

    def push_count(self) -> int:
        self._need(("pushes",))
        return self._state.push_count()

    def push_count_of(self, tenant: str) -> int:
        self._need(("pushes",))
        return self._state.push_count_of(tenant)

    def pushes_idle(self, now_ms: int, count: int, ages: Ages) -> Sequence[Push]:
        self._need(("due",))
        return self._state.pushes_idle(now_ms, count, ages)

    def cached(self, key: CacheKey) -> Cached | None:
        assert key in self._groups, f"reads the cache at {key}"
        return self._state.cached(key)

    def cache_overflow(self, now_ms: int, count: int, ages: Ages) -> Sequence[CacheKey]:
        self._need(("due",))
        return self._state.cache_overflow(now_ms, count, ages)

    def leader(self, key: CacheKey) -> TaskId | None:
        assert key in self._groups, f"reads the leader of {key}"
        return self._state.leader(key)

    def followers(self, key: CacheKey) -> Sequence[TaskId]:
        assert key in self._groups, f"reads the followers of {key}"
        followers = self._state.followers(key)
        self.tasks.update(followers)
        return followers

    def remembered(self, verb: str, holder: PublicKey, request_id: str) -> Remembered | None:
        self._need(("request", verb, holder, request_id))
        remembered = self._state.remembered(verb, holder, request_id)
        self.tasks.update(remembered.task_ids if remembered else ())
        return remembered

    def grants(self, subject: PublicKey, action: str) -> Sequence[Grant]:
        self._need(("grants", subject, action), ("grants",))
        return self._state.grants(subject, action)

    def grant(self, signature_b58: str) -> Grant | None:
        self._need(("grant", signature_b58))
        return self._state.grant(signature_b58)

    def identity(self, token_sha256: str) -> Identity | None:
        self._need(("identity", token_sha256))
        return self._state.identity(token_sha256)

    def identities(self, name: str) -> Sequence[Identity]:
        self._need(("agent", name))
        return self._state.identities(name)

    def identities_revoked_before(self, before_ms: int) -> int:
        self._need(("identities",))
        return self._state.identities_revoked_before(before_ms)

    def grants_revoked_before(self, before_ms: int) -> int:
        self._need(("grants",))
        return self._state.grants_revoked_before(before_ms)

    def tenant(self, name: str) -> Tenant | None:
        if name not in self.accounts:  # a task stands for the account that it counts against
            self._need(("tenant", name))
        return self._state.tenant(name)

    def tenant_count(self) -> int:
        self._need(("tenants",))
        return self._state.tenant_count()

    def agent(self, tenant: str, agent_id: str) -> CatalogueAgent | None:
        self._need(("catalogue", tenant))
        return self._state.agent(tenant, agent_id)

    def agent_count(self, tenant: str) -> int:
        self._need(("catalogue", tenant))
        return self._state.agent_count(tenant)

    def peer(self, peer_id: InstanceId) -> Peer | None:
        self._need(("peer", peer_id))
        return self._state.peer(peer_id)

    def peer_named(self, name: str) -> Peer | None:
        self._need(("peers",))
        return self._state.peer_named(name)

    def peer_count(self) -> int:
        self._need(("peers",))
        return self._state.peer_count()

    def delegation(self, key: DelegationKey) -> Delegation | None:
        self._need(_delegation(key))
        return self._state.delegation(key)

    def usage_so_far(self, task_id: TaskId) -> dict[str, Any] | None:
        assert task_id in self.tasks, f"reads the usage of {task_id}"
        return self._state.usage_so_far(task_id)

    def delegations_live_count(self, peer: InstanceId) -> int:
        self._need(("peer", peer))
        return self._state.delegations_live_count(peer)

    def delegations_ended_count(self) -> int:
        self._need(("delegations",))
        return self._state.delegations_ended_count()

    def delegation_ended_first(self) -> DelegationKey | None:
        self._need(("delegations",))
        return self._state.delegation_ended_first()

    def outbox_message(self, key: DelegationKey, seq: int) -> OutboxMessage | None:
        self._need(_delegation(key))
        return self._state.outbox_message(key, seq)

    def outbox_count(self, peer: InstanceId) -> int:
        self._need(("peer", peer))
        return self._state.outbox_count(peer)

    def outbox_first(self, key: DelegationKey) -> OutboxMessage | None:
        self._need(_delegation(key))
        return self._state.outbox_first(key)

    def outbox_last(self, key: DelegationKey) -> OutboxMessage | None:
        self._need(_delegation(key))
        return self._state.outbox_last(key)

    def envelope_taken(self, sender: InstanceId, jti: str) -> bool:
        self._need(("envelopes", sender))
        return self._state.envelope_taken(sender, jti)

    def envelope_count(self, sender: InstanceId) -> int:
        self._need(("envelopes", sender))
        return self._state.envelope_count(sender)

    def token_revoked(self, token_id: str) -> bool:
        self._need(("token", token_id))
        return self._state.token_revoked(token_id)


def _delegation(key: DelegationKey) -> c.Key:
    return "delegation", key.role.value, key.peer, key.offer_id


class Watched(Pure):
    """Decides every command through a recording view, and remembers which kinds were tried."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: set[type[Any]] = set()

    def decide(self, command: c.Command[A]) -> Any:
        recording = Recording(self.state, command.keys())
        view: View = recording
        self.view = lambda _: view
        self.tried.add(type(command))
        events, answer = super().decide(command)
        for event in events:
            if isinstance(event, TaskEvent):
                assert event.task_id in recording.tasks, f"{type(command).__name__} changes {event.task_id}"
        return events, answer

    def attempt(self, command: c.Command[Any]) -> None:
        """Done or refused: it must keep to its keys either way."""
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


def everywhere() -> list[tuple[str, Watched]]:
    """A ledger for each place that a leader with two followers can have come to."""
    places = []
    for place in ("queued", "leased", "requeued", "parked", "settled", "drained", "expired", "unknown"):
        pure = Watched()
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
def test_a_decision_about_tasks_reads_and_changes_only_what_its_command_names(place: str, pure: Watched) -> None:
    state = msgspec.json.encode(list(pure.state.entries.values()))
    for command in [*task_commands(), *push_commands()]:
        fresh = dict(everywhere())[place]
        assert msgspec.json.encode(list(fresh.state.entries.values())) == state
        fresh.attempt(command)
        fresh.attempt(command)


def test_a_decision_about_identities_grants_and_tenants_reads_only_what_its_command_names() -> None:
    pure = Watched()
    for command in [*register_commands(), *tenant_commands()]:
        pure.attempt(command)
        pure.attempt(command)


def test_a_decision_about_peers_reads_only_what_its_command_names() -> None:
    pure = Watched()
    for command in peer_commands():
        pure.attempt(command)
        pure.attempt(command)


def test_every_command_there_is_was_tried() -> None:
    pure = Watched()
    for command in [
        *task_commands(),
        *push_commands(),
        *register_commands(),
        *tenant_commands(),
        *peer_commands(),
    ]:
        pure.attempt(command)
    assert pure.tried == set(DECISIONS)


def test_a_decision_that_reads_what_its_command_does_not_name_is_found() -> None:
    with pytest.raises(AssertionError, match="reads task"):
        Recording(LedgerState(Limits()), ()).entry(task_id(1))
    with pytest.raises(AssertionError, match="names only"):
        Recording(LedgerState(Limits()), (("queue", BOB.pubkey),)).queued(None, 1)
