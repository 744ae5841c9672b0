"""Who is let in, by which grant, at which cost: the rules of one check, without a ledger around it."""

from typing import Any

import pytest

from covenant.ledger.machine.commands import Access
from covenant.ledger.machine.decisions.context import CommandRefused, DecisionContext, authorize
from covenant.ledger.machine.events import AnyEvent, Audited, GrantUsed
from covenant.ledger.machine.identity_commands import MakeGrant, RevokeGrant, WriteAuditRow
from covenant.model.clock_steps import STEADY
from covenant.model.errors import Invalid, Refusal
from covenant.model.grant import Scope, read_scope
from tests.ledger.machine.pure import Pure
from tests.ledger_contract.samples import ALICE, BOB, OPERATOR, make_grant

ACTION = "a2a.send.bob@here"
ASKED = {"peer": BOB.pubkey, "task_id": "t1", "lease_id": "l1", "duplicate_risk": "idempotent"}
PINS = {"peer_pubkey_b58": BOB.pubkey, "task_id": "t1", "lease_id": "l1", "duplicate_risk": "idempotent"}


def context(pure: Pure) -> DecisionContext:
    events: list[AnyEvent] = []
    return DecisionContext(pure.state, pure.now_ms, pure.new_id, STEADY, events, events.append)


def check(pure: Pure, **asked: Any) -> list[str]:
    """The kinds of the events that a check leaves, whether it lets the caller in or not."""
    deciding = context(pure)
    access = Access(caller=ALICE, actions=(ACTION, "a2a.send.key"), scope_id="a2a-send:bob", what="send", **asked)
    try:
        authorize(deciding, access)
    except Refusal as refusal:
        raise CommandRefused(refusal, deciding.events) from None
    return [str(event.__struct_config__.tag) for event in deciding.events]


def granted(**how: Any) -> Pure:
    pure = Pure()
    pure.do(MakeGrant(by=OPERATOR, grant=make_grant(ALICE, ACTION, **how)))
    return pure


def test_no_access_is_asked_of_the_process_itself() -> None:
    deciding = context(Pure())
    authorize(deciding, None)
    assert deciding.events == []


def test_a_passed_check_leaves_one_row_and_counts_only_where_uses_are_counted() -> None:
    assert check(granted()) == ["audited"]
    assert check(granted(max_uses=1)) == ["grant_used", "audited"]


@pytest.mark.parametrize("pin", PINS)
@pytest.mark.parametrize("given", ["same", "other", "left out"])
def test_a_pin_is_met_by_the_same_value_and_by_nothing_else(pin: str, given: str) -> None:
    pure = granted(pins=Scope(**{pin: PINS[pin]}))
    field = "peer" if pin == "peer_pubkey_b58" else pin
    asked: dict[str, str | None] = {**ASKED, field: {"same": PINS[pin], "other": "x", "left out": None}[given]}
    if given == "same":
        assert check(pure, **asked) == ["audited"]
        return
    with pytest.raises(CommandRefused) as refused:
        check(pure, **asked)
    assert refused.value.refusal.code == "scope_rejected"
    assert pin in refused.value.refusal.message
    assert [type(event) for event in refused.value.events] == [Audited]


def test_all_pins_must_be_met_at_once() -> None:
    pure = granted(pins=Scope(**PINS))
    assert check(pure, **ASKED) == ["audited"]
    for field in ASKED:
        with pytest.raises(CommandRefused):
            check(pure, **{**ASKED, field: "x"})


def test_a_refusal_by_scope_never_counts_a_use() -> None:
    pure = granted(pins=Scope(task_id="t2"), max_uses=1)
    with pytest.raises(CommandRefused) as refused:
        check(pure, **ASKED)
    assert not any(isinstance(event, GrantUsed) for event in refused.value.events)


def test_a_spent_grant_is_named_in_the_audit_before_the_check_that_failed() -> None:
    pure = granted(max_uses=1)
    pure.apply([GrantUsed(next(iter(pure.state.grants_by_signature)))])
    with pytest.raises(CommandRefused) as refused:
        check(pure)
    assert refused.value.refusal.code == "capability_missing"
    rows = [event.row for event in refused.value.events if isinstance(event, Audited)]
    assert ["capability_budget_exhausted" in row for row in rows] == [True, False]


def test_the_rows_of_one_decision_are_linked_to_each_other_and_to_what_was_before() -> None:
    pure = granted(max_uses=1)
    pure.apply([GrantUsed(next(iter(pure.state.grants_by_signature)))])
    with pytest.raises(CommandRefused) as refused:
        check(pure)
    assert [event.index for event in refused.value.events if isinstance(event, Audited)] == [2, 3]


@pytest.mark.parametrize(("expires_in_ms", "live"), [(-1, False), (0, True), (1, True)])
def test_a_grant_lives_up_to_its_last_millisecond(expires_in_ms: int, live: bool) -> None:
    pure = Pure()
    pure.do(MakeGrant(by=OPERATOR, grant=make_grant(ALICE, ACTION, expires_at=pure.now_ms + expires_in_ms)))
    if live:
        assert check(pure) == ["audited"]
    else:
        with pytest.raises(CommandRefused):
            check(pure)


def test_a_revoked_grant_is_none() -> None:
    pure = granted()
    pure.do(RevokeGrant(by=OPERATOR, signature_b58=next(iter(pure.state.grants_by_signature))))
    with pytest.raises(CommandRefused) as refused:
        check(pure)
    assert refused.value.refusal.code == "capability_missing"


def test_a_refusal_says_what_is_missing_and_how_to_get_it() -> None:
    with pytest.raises(CommandRefused) as refused:
        check(Pure())
    message = refused.value.refusal.message
    assert f"covenant capabilities grant {ACTION} --to {ALICE.display}" in message


@pytest.mark.parametrize(
    "scope",
    [
        {"version": 2},
        {"version": True},
        {"task_id": 7},
        {"task_id": ""},
        {"lease_id": []},
        {"duplicate_risk": "whatever"},
        {"max_uses": 0},
        {"max_uses": None},
        {"task_id": None},
        {"max_uses": -1},
        {"max_uses": True},
        {"max_uses": "3"},
    ],
    ids=str,
)
def test_a_scope_that_cannot_be_meant_is_refused_when_it_is_granted(scope: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as refused:
        read_scope(scope)
    assert refused.value.code == "invalid_scope"


def test_a_scope_is_read_with_either_spelling() -> None:
    pins, max_uses = read_scope({"duplicate_risk": "operator-accepted", "max_uses": 3})
    assert (pins.duplicate_risk, max_uses) == ("operator_accepted", 3)
    assert read_scope({}) == (Scope(), None)


def test_a_refused_command_keeps_its_rows_and_changes_nothing_else() -> None:
    pure = Pure()
    access = Access(caller=ALICE, actions=(ACTION,), scope_id="s", what="grant")
    with pytest.raises(Refusal):
        pure.do(WriteAuditRow(by=ALICE, row={"type": "noted"}, access=access))
    assert pure.state.audit_head.index == 1
