"""The order in which the retry gate finds reasons to leave a lease alone: the first that holds is the one told."""

from typing import Any

import msgspec
import pytest

from covenant.ledger.machine.commands import Access, RetryStale
from covenant.ledger.machine.decisions.repairs import judge
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.identity_commands import MakeGrant
from covenant.ledger.machine.states import LEASED, QUEUED, State
from covenant.model.errors import Refusal
from covenant.model.grant import REQUEUE_ACTION, Scope
from covenant.model.ids import LeaseId
from covenant.model.retry_policy import RetryPolicy, SkipReason
from covenant.model.task import Lease
from tests.ledger.machine.pure import Pure
from tests.ledger_contract.fake_clock import START_MS
from tests.ledger_contract.samples import BOB, OPERATOR, idempotent, make_grant, make_task, same_work, task_id, unsafe

POLICY = RetryPolicy(enabled=True, min_lease_age_ms=100, max_attempts=3)
LEASE = Lease(lease_id=LeaseId("l1"), leased_to=BOB, leased_at_ms=0, attempt=1)
ELIGIBLE = Entry(same_work(1), "d", LEASED, 0, 0, attempt=1, lease=LEASE)

# Each change makes the eligible entry fail one check; in the order of the checks.
CHECKS: list[tuple[SkipReason, dict[str, Any]]] = [
    (SkipReason.NOT_IN_FLIGHT, {"state": QUEUED}),
    (SkipReason.MISSING_LEASE, {"lease": None}),
    (SkipReason.LEASE_TOO_YOUNG, {"lease": msgspec.structs.replace(LEASE, renewed_at_ms=901)}),
    (SkipReason.MISSING_IDEMPOTENCY, {"task": make_task()}),
    (SkipReason.UNSAFE_DUPLICATE_SAFETY, {"task": make_task(idempotency=unsafe())}),
    (SkipReason.MAX_ATTEMPTS_REACHED, {"attempt": 3}),
]


def test_what_passes_every_check_may_be_requeued() -> None:
    assert judge(ELIGIBLE, POLICY, 1_000) is None


@pytest.mark.parametrize(("reason", "change"), CHECKS, ids=lambda value: str(value) if isinstance(value, str) else "")
def test_each_check_has_its_reason(reason: SkipReason, change: dict[str, Any]) -> None:
    assert judge(msgspec.structs.replace(ELIGIBLE, **change), POLICY, 1_000) is reason


@pytest.mark.parametrize("first", range(len(CHECKS)))
def test_the_first_check_that_fails_is_the_one_told(first: int) -> None:
    reason, _ = CHECKS[first]
    changes: dict[str, Any] = {}
    for _, change in reversed(CHECKS[first:]):
        changes |= change
    assert judge(msgspec.structs.replace(ELIGIBLE, **changes), POLICY, 1_000) is reason


@pytest.mark.parametrize(("age_ms", "reason"), [(99, SkipReason.LEASE_TOO_YOUNG), (100, None), (101, None)])
def test_a_lease_is_old_enough_at_exactly_the_bound(age_ms: int, reason: SkipReason | None) -> None:
    assert judge(ELIGIBLE, POLICY, age_ms) is reason


def test_a_lease_from_the_future_is_young() -> None:
    assert judge(ELIGIBLE, POLICY, -5_000) is SkipReason.LEASE_TOO_YOUNG


@pytest.mark.parametrize("key", ["", "   "])
def test_a_blank_key_is_none(key: str) -> None:
    entry = msgspec.structs.replace(ELIGIBLE, task=make_task(idempotency=idempotent(key)))
    assert judge(entry, POLICY, 1_000) is SkipReason.MISSING_IDEMPOTENCY


@pytest.mark.parametrize("state", [state for state in State if state is not LEASED], ids=str)
def test_only_leased_work_is_in_flight(state: State) -> None:
    entry = msgspec.structs.replace(ELIGIBLE, state=state)
    assert judge(entry, POLICY, 1_000) is SkipReason.NOT_IN_FLIGHT


def gate(pure: Pure, pins: Scope | None, **policy: Any) -> dict[str, SkipReason]:
    access = Access(caller=OPERATOR, actions=(REQUEUE_ACTION,), scope_id="gate", what="retry")
    if pins is not None:
        pure.do(MakeGrant(by=OPERATOR, grant=make_grant(OPERATOR, REQUEUE_ACTION, pins=pins)))
    bounds = RetryPolicy(**{"enabled": True, "min_lease_age_ms": 0, "max_requeues": 10, **policy})
    report = pure.do(RetryStale(by=OPERATOR, policy=bounds, access=access))
    assert report.considered == len(report.skipped) + len(report.requeued)
    return {skip.task_id: skip.reason for skip in report.skipped}


def leases(count: int) -> Pure:
    pure = Pure()
    for number in range(1, count + 1):
        pure.taken(same_work(number, f"key-{number}"))
    return pure


def test_the_limit_on_requeues_is_told_before_the_scope() -> None:
    skipped = gate(leases(3), Scope(task_id=task_id(1)), max_requeues=1)
    assert skipped == {task_id(2): SkipReason.LIMIT_REACHED, task_id(3): SkipReason.LIMIT_REACHED}


def test_what_the_grant_does_not_reach_is_told_as_such() -> None:
    skipped = gate(leases(3), Scope(task_id=task_id(3)))
    assert set(skipped.values()) == {SkipReason.CAPABILITY_SCOPE_MISMATCH}
    assert set(skipped) == {task_id(1), task_id(2)}


@pytest.mark.parametrize(
    "pins",
    [Scope(peer_pubkey_b58=BOB.pubkey), Scope(duplicate_risk="idempotent"), Scope()],
    ids=["peer", "risk", "nothing"],
)
def test_a_grant_pinned_to_what_the_gate_does_reaches_every_lease(pins: Scope) -> None:
    assert gate(leases(2), pins) == {}


def test_a_grant_pinned_to_the_other_posture_reaches_none() -> None:
    skipped = gate(leases(2), Scope(duplicate_risk="operator_accepted"))
    assert set(skipped.values()) == {SkipReason.CAPABILITY_SCOPE_MISMATCH}


def test_a_grant_with_few_uses_lets_the_gate_requeue_that_many() -> None:
    pure = leases(3)
    pure.do(MakeGrant(by=OPERATOR, grant=make_grant(OPERATOR, REQUEUE_ACTION, max_uses=2)))
    assert len(gate(pure, None)) == 1
    with pytest.raises(Refusal, match="requires capability"):
        gate(pure, None)


def test_without_any_grant_the_gate_is_refused_and_leaves_a_row() -> None:
    pure = leases(1)
    with pytest.raises(Refusal, match="requires capability"):
        gate(pure, None)
    assert pure.state.audit_head.index == 1


def test_a_dry_run_changes_nothing_and_needs_no_capability() -> None:
    pure = leases(2)
    command = RetryStale(
        by=OPERATOR,
        policy=RetryPolicy(min_lease_age_ms=0),
        access=Access(caller=OPERATOR, actions=(REQUEUE_ACTION,), scope_id="gate", what="retry"),
    )
    pure.do(MakeGrant(by=OPERATOR, grant=make_grant(OPERATOR, REQUEUE_ACTION)))
    events, report = pure.decide(command)
    assert events == []
    assert [would.task_id for would in report.would_requeue] == [task_id(1)]
    assert [skip.reason for skip in report.skipped] == [SkipReason.DISABLED, SkipReason.LIMIT_REACHED]


def test_the_clock_of_the_suite_starts_where_it_says() -> None:
    assert Pure().now_ms == START_MS
