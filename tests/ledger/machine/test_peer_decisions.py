"""Decisions about peers: who is known, what is taken in once and in order, and what waits to be said."""

from typing import Any

import msgspec
import pytest

from covenant.ledger.embedded.peer_index import REVOKED_KEPT_MS
from covenant.ledger.machine import events
from covenant.ledger.machine.commands import Command
from covenant.ledger.machine.peer_commands import (
    ChangePeer,
    DelegationChanges,
    LearnPeer,
    MoveOutbox,
    ReceiveFromPeer,
    RemovePeer,
    RevokeToken,
    SendToPeer,
    SucceedPeer,
)
from covenant.model.errors import Refusal
from covenant.model.peers.delegation import DelegationRole, DelegationState, OutboxMessage, PeerLimits
from covenant.model.peers.instance import Trust
from covenant.model.settings import Limits
from tests.ledger.machine.peer_commands import (
    CHALLENGE,
    OTHER_CHALLENGE,
    UNTIL_MS,
    add,
    begun,
    bundle_of,
    capabilities,
    delivered,
    envelope,
    heard,
    id_of,
    key_of,
    make_peer,
    offered,
    offering,
    result_of,
    said,
    undelivered,
    verifying,
)
from tests.ledger.machine.pure import Pure
from tests.ledger_contract.fake_clock import START_MS
from tests.ledger_contract.samples import OPERATOR, task_id


def known(*numbers: int, limits: Limits | None = None) -> Pure:
    pure = Pure(limits)
    for number in numbers or (1,):
        pure.do(add(number))
    return pure


def refused(pure: Pure, command: Command[Any]) -> str:
    """The code; and nothing but rows of the audit has happened."""
    before = snapshot(pure)
    with pytest.raises(Refusal) as refusal:
        pure.do(command)
    assert snapshot(pure) == before
    return refusal.value.code


def snapshot(pure: Pure) -> bytes:
    state = pure.state
    return msgspec.json.encode(
        [
            list(state.peers_by_id.values()),
            list(state.delegations_in_order()),
            list(state.all_outbox_messages()),
            list(state.all_envelopes()),
            sorted(state.tokens_revoked),
        ]
    )


def waiting(pure: Pure) -> list[tuple[int, str]]:
    return [(message.seq, bytes(message.body).decode()) for message in pure.state.outbox_of(id_of(1))]


def state_of(pure: Pure, number: int = 1, role: DelegationRole = DelegationRole.REQUESTER) -> DelegationState:
    delegation = pure.state.delegation(key_of(number, role=role))
    assert delegation is not None
    return delegation.state


class TestWhoIsKnown:
    def test_a_peer_is_added_once_and_the_same_again_changes_nothing(self) -> None:
        pure = Pure()
        pure.now_ms = START_MS + 7
        first = pure.do(add())
        assert first.added_at_ms == START_MS + 7
        pure.now_ms += 5
        assert pure.do(add()) == first
        assert pure.state.peer(id_of(1)) == pure.state.peer_named("peer-1") == first

    @pytest.mark.parametrize("changes", [{"name": "another"}, {"url": "https://elsewhere.example"}])
    def test_an_id_that_is_there_with_another_name_or_address_is_a_conflict(self, changes: dict[str, Any]) -> None:
        assert refused(known(), add(1, **changes)) == "peer_exists"

    def test_no_two_peers_have_one_name(self) -> None:
        pure = known(1, 2)
        assert refused(pure, add(3, name="peer-2")) == "name_taken"
        assert refused(pure, ChangePeer(id=id_of(1), by=OPERATOR, name="peer-2")) == "name_taken"

    def test_a_name_is_free_again_once_its_peer_has_another_or_is_gone(self) -> None:
        pure = known(1, 2)
        pure.do(ChangePeer(id=id_of(1), by=OPERATOR, name="first"))
        pure.do(RemovePeer(id=id_of(2), by=OPERATOR))
        assert pure.do(ChangePeer(id=id_of(1), by=OPERATOR, name="peer-2")).name == "peer-2"
        assert pure.do(add(3, name="peer-1")).name == "peer-1"

    def test_there_are_only_so_many_peers(self) -> None:
        assert refused(known(1, 2, limits=Limits(peers_max=2)), add(3)) == "too_many_peers"

    def test_an_operator_changes_what_is_said_and_leaves_the_rest(self) -> None:
        pure = known()
        limits = PeerLimits(budget_max=5)
        changed = pure.do(ChangePeer(id=id_of(1), by=OPERATOR, trust=Trust.TRUSTED, denied=True, limits=limits))
        assert changed == make_peer(1, trust=Trust.TRUSTED, denied=True, limits=limits, added_at_ms=changed.added_at_ms)
        assert pure.do(ChangePeer(id=id_of(1), by=OPERATOR, url="")).url is None
        head = pure.state.audit_head
        pure.do(ChangePeer(id=id_of(1), by=OPERATOR, denied=True))
        assert pure.state.audit_head == head

    def test_a_peer_with_delegations_that_have_not_ended_is_not_removed(self) -> None:
        pure = known()
        pure.do(offering())
        assert refused(pure, RemovePeer(id=id_of(1), by=OPERATOR)) == "peer_busy"

    def test_what_waits_for_a_peer_goes_with_it_and_what_it_sent_stays_known(self) -> None:
        pure = known()
        pure.do(offering())
        pure.do(heard("result_completed", seq=1))
        pure.do(RemovePeer(id=id_of(1), by=OPERATOR))
        assert (list(pure.state.addressees()), list(pure.state.peers_by_id)) == ([], [])
        pure.do(add())
        assert refused(pure, heard("status", seq=2, jti="j1")) == "replayed"

    @pytest.mark.parametrize(
        "command",
        [
            ChangePeer(id=id_of(9), by=OPERATOR, name="x"),
            RemovePeer(id=id_of(9), by=OPERATOR),
            LearnPeer(id=id_of(9), by=OPERATOR, challenge=CHALLENGE),
            SucceedPeer(by=OPERATOR, old=id_of(9), keys_shown=bundle_of(8), vouched=True),
            SendToPeer(key=key_of(1, peer=9), begin=begun(key_of(1, peer=9)), transitions=("offer",)),
        ],
        ids=lambda command: type(command).__name__,
    )
    def test_nothing_is_done_about_a_peer_that_is_not_known(self, command: Command[Any]) -> None:
        assert refused(known(), command) == "unknown_peer"


class TestTrust:
    def test_a_mere_peer_that_answers_the_last_challenge_is_verified(self) -> None:
        pure = known()
        pure.do(LearnPeer(id=id_of(1), by=OPERATOR, challenge=CHALLENGE))
        pure.now_ms += 3
        peer = pure.do(verifying())
        assert (peer.trust, peer.challenge, peer.verified_at_ms) == (Trust.VERIFIED, None, pure.now_ms)
        assert peer.capabilities == capabilities()

    def test_an_answer_to_another_challenge_or_to_none_verifies_nobody(self) -> None:
        pure = known()
        assert refused(pure, verifying()) == "challenge_over"
        pure.do(LearnPeer(id=id_of(1), by=OPERATOR, challenge=CHALLENGE))
        pure.do(LearnPeer(id=id_of(1), by=OPERATOR, challenge=OTHER_CHALLENGE))
        assert refused(pure, verifying()) == "challenge_over"
        pure.do(verifying(challenge=OTHER_CHALLENGE))
        assert refused(pure, verifying(challenge=OTHER_CHALLENGE)) == "challenge_over"

    def test_one_that_is_trusted_stays_trusted_when_it_answers(self) -> None:
        pure = known()
        pure.do(ChangePeer(id=id_of(1), by=OPERATOR, trust=Trust.TRUSTED))
        pure.do(LearnPeer(id=id_of(1), by=OPERATOR, challenge=CHALLENGE))
        assert pure.do(verifying()).trust is Trust.TRUSTED

    def test_one_that_an_operator_has_lowered_is_not_raised_by_answering(self) -> None:
        pure = known()
        pure.do(LearnPeer(id=id_of(1), by=OPERATOR, challenge=CHALLENGE))
        pure.do(verifying())
        pure.do(ChangePeer(id=id_of(1), by=OPERATOR, trust=Trust.PEER))
        pure.do(LearnPeer(id=id_of(1), by=OPERATOR, challenge=OTHER_CHALLENGE))
        assert pure.do(verifying(challenge=OTHER_CHALLENGE)).trust is Trust.PEER

    def test_keys_and_conflicts_that_are_learned_change_no_trust(self) -> None:
        pure = known()
        pure.do(ChangePeer(id=id_of(1), by=OPERATOR, trust=Trust.VERIFIED))
        peer = pure.do(LearnPeer(id=id_of(1), by=OPERATOR, conflict="identity_changed"))
        assert (peer.conflict, peer.trust, peer.keys) == ("identity_changed", Trust.VERIFIED, bundle_of(1))
        assert pure.do(LearnPeer(id=id_of(1), by=OPERATOR, conflict="")).conflict is None

    def test_a_successor_whom_the_old_key_vouches_for_has_all_that_the_old_one_had(self) -> None:
        pure = known()
        pure.do(ChangePeer(id=id_of(1), by=OPERATOR, trust=Trust.TRUSTED))
        pure.do(offering())
        peer = pure.do(SucceedPeer(by=OPERATOR, old=id_of(1), keys_shown=bundle_of(4), vouched=True))
        assert (peer.id, peer.trust, peer.name, peer.keys) == (id_of(4), Trust.TRUSTED, "peer-1", bundle_of(4))
        assert pure.state.peer(id_of(1)) is None
        assert pure.state.peer_named("peer-1") == peer
        delegation = pure.state.delegation(key_of(1, peer=4))
        assert delegation is not None
        assert pure.state.delegation_of(delegation.task_id) == delegation
        assert [message.delegation for message in pure.state.outbox_of(id_of(4))] == [delegation.key]
        assert list(pure.state.delegations_live(DelegationRole.REQUESTER, id_of(4))) == [delegation]
        assert (list(pure.state.outbox_of(id_of(1))), pure.state.delegations_live_count(id_of(1))) == ([], 0)

    def test_a_successor_whom_only_the_operator_vouches_for_is_a_mere_peer(self) -> None:
        pure = known()
        pure.do(LearnPeer(id=id_of(1), by=OPERATOR, challenge=CHALLENGE))
        pure.do(verifying())
        peer = pure.do(SucceedPeer(by=OPERATOR, old=id_of(1), keys_shown=bundle_of(4), vouched=False))
        assert (peer.trust, peer.verified_at_ms, peer.capabilities) == (Trust.PEER, None, None)

    def test_nobody_succeeds_as_somebody_who_is_known_already(self) -> None:
        command = SucceedPeer(by=OPERATOR, old=id_of(1), keys_shown=bundle_of(2), vouched=True)
        assert refused(known(1, 2), command) == "peer_exists"

    def test_a_token_is_revoked_once_and_forgotten_long_after_it_would_be_over(self) -> None:
        pure = known()
        revoke = RevokeToken(by=OPERATOR, token_id="t1", until_ms=pure.now_ms + 10)
        assert (pure.do(revoke), pure.do(revoke), pure.state.token_revoked("t1")) == (True, False, True)
        pure.now_ms += REVOKED_KEPT_MS + 11
        pure.do(RevokeToken(by=OPERATOR, token_id="t2", until_ms=pure.now_ms + 10))
        assert list(pure.state.tokens_revoked) == ["t2"]


class TestWhatIsHeard:
    def test_an_envelope_is_taken_once(self) -> None:
        pure = known()
        pure.do(ReceiveFromPeer(envelope=envelope("j1")))
        assert refused(pure, ReceiveFromPeer(envelope=envelope("j1"))) == "replayed"
        assert pure.state.envelope_taken(id_of(1), "j1")

    def test_two_peers_may_choose_the_same_name_for_an_envelope(self) -> None:
        pure = known(1, 2)
        pure.do(ReceiveFromPeer(envelope=envelope("j1")))
        pure.do(ReceiveFromPeer(envelope=envelope("j1", peer=2)))

    def test_nothing_is_taken_from_one_who_is_not_a_peer(self) -> None:
        assert refused(known(), ReceiveFromPeer(envelope=envelope("j1", peer=9))) == "unknown_sender"

    def test_envelopes_are_forgotten_when_they_would_be_stale_and_not_before(self) -> None:
        pure = known()
        pure.do(ReceiveFromPeer(envelope=envelope("j1")))
        pure.now_ms = UNTIL_MS
        pure.do(ReceiveFromPeer(envelope=envelope("j2", until_ms=UNTIL_MS + 1)))
        assert pure.state.envelope_taken(id_of(1), "j1")
        pure.now_ms += 1
        pure.do(ReceiveFromPeer(envelope=envelope("j3", until_ms=UNTIL_MS + 9)))
        assert [each.jti for each in pure.state.all_envelopes()] == ["j2", "j3"]

    def test_a_peer_that_says_more_than_can_be_remembered_is_told_to_slow_down(self) -> None:
        pure = known(limits=Limits(envelopes_per_peer_max=2))
        for jti in ("j1", "j2"):
            pure.do(ReceiveFromPeer(envelope=envelope(jti)))
        assert refused(pure, ReceiveFromPeer(envelope=envelope("j3"))) == "rate_limited"

    def test_hearing_from_a_peer_tells_when(self) -> None:
        pure = known()
        pure.now_ms += 9
        pure.do(ReceiveFromPeer(envelope=envelope("j1")))
        peer = pure.state.peer(id_of(1))
        assert peer is not None
        assert peer.heard_at_ms == pure.now_ms

    def test_what_is_said_of_a_delegation_moves_it_in_order(self) -> None:
        pure = known()
        pure.do(offering())
        for seq, transition, after in (
            (1, "accept", DelegationState.ACCEPTED),
            (2, "status", DelegationState.RUNNING),
            (3, "result_completed", DelegationState.COMPLETED),
        ):
            moved = pure.do(heard(transition, seq=seq)).moved
            assert moved is not None
            assert (moved.changed, moved.delegation.state, moved.delegation.received_seq) == (True, after, seq)

    def test_what_leaves_a_gap_is_refused_and_may_come_again_in_the_same_envelope(self) -> None:
        pure = known()
        pure.do(offering())
        late = heard("status", seq=2, jti="late")
        assert refused(pure, late) == "out_of_order"
        pure.do(heard("accept", seq=1))
        pure.do(late)
        assert state_of(pure) is DelegationState.RUNNING

    def test_of_what_nothing_is_known_the_first_that_is_heard_is_the_first(self) -> None:
        pure = known()
        moved = pure.do(offered(2, seq=4)).moved
        assert moved is not None
        assert (moved.changed, moved.delegation.received_seq) == (True, 4)
        key = key_of(2, role=DelegationRole.PROVIDER)
        cancel = ReceiveFromPeer(envelope=envelope("j6", seq=6), key=key, transitions=("cancel",))
        assert refused(pure, cancel) == "out_of_order"

    def test_what_was_heard_before_in_another_envelope_is_taken_and_changes_nothing(self) -> None:
        pure = known()
        pure.do(offering())
        pure.do(heard("accept", seq=1))
        again = pure.do(heard("status", seq=1, jti="again")).moved
        assert again is not None
        assert (again.changed, state_of(pure)) == (False, DelegationState.ACCEPTED)
        assert pure.state.envelope_taken(id_of(1), "again")

    def test_what_is_heard_of_one_that_has_ended_is_taken_and_changes_nothing(self) -> None:
        pure = known()
        pure.do(offering())
        pure.do(heard("reject", seq=1, code="busy"))
        late = pure.do(heard("result_completed", seq=2, result=result_of())).moved
        assert late is not None
        assert (late.changed, late.delegation.received_seq, late.delegation.result) == (False, 2, None)
        assert state_of(pure) is DelegationState.REJECTED

    def test_what_cannot_happen_is_refused_and_not_taken(self) -> None:
        pure = known()
        pure.do(offered(2))
        key = key_of(2, role=DelegationRole.PROVIDER)
        assert (
            refused(pure, ReceiveFromPeer(envelope=envelope("j2", seq=2), key=key, transitions=("reject",)))
            == "illegal_move"
        )

    def test_what_is_heard_of_no_delegation_that_is_known_is_taken_and_nothing_else(self) -> None:
        pure = known()
        assert pure.do(heard("status", seq=1)).moved is None
        assert list(pure.state.delegations()) == []

    def test_an_offer_and_the_work_that_it_begins_are_one_record(self) -> None:
        pure = known()
        moved = pure.do(offered(2)).moved
        assert moved is not None
        assert (moved.delegation.state, moved.delegation.sent_seq) == (DelegationState.ACCEPTED, 1)
        assert pure.state.entry(task_id(102)) is not None
        assert waiting(pure) == [(1, "{}")]

    def test_the_same_offer_again_begins_nothing_a_second_time(self) -> None:
        pure = known()
        pure.do(offered(2))
        again = pure.do(offered(2, jti="again")).moved
        assert again is not None
        assert not again.changed
        assert len(pure.state.entries) == 1

    def test_an_offer_of_work_that_is_known_and_of_which_no_record_is_left_begins_nothing(self) -> None:
        pure = known(limits=Limits(delegations_kept_max=1))
        pure.do(offered(2))
        key = key_of(2, role=DelegationRole.PROVIDER)
        pure.do(SendToPeer(key=key, transitions=("result_completed",)))
        pure.do(offering(3))
        pure.do(heard("reject", seq=1, number=3))
        assert pure.state.delegation(key) is None
        answer = pure.do(offered(2, jti="again"))
        assert (answer.known, answer.moved) == (True, None)
        assert pure.state.delegation(key) is None


class TestWhatIsSaid:
    def test_what_is_said_is_numbered_and_waits_in_its_order(self) -> None:
        pure = known()
        pure.do(offering())
        moved = pure.do(SendToPeer(key=key_of(), messages=(said(body=b"2"), said(body=b"3"))))
        assert moved.delegation.sent_seq == 3
        assert waiting(pure) == [(1, "{}"), (2, "2"), (3, "3")]

    def test_the_latest_takes_the_place_of_the_last_one_that_nobody_has_tried_to_deliver(self) -> None:
        pure = known()
        pure.do(offering())
        for body in (b"2", b"3"):
            pure.do(SendToPeer(key=key_of(), messages=(said(body=body, latest=True),)))
        assert waiting(pure) == [(1, "{}"), (2, "3")]

    def test_the_latest_comes_after_one_that_was_tried_and_after_one_of_another_kind(self) -> None:
        pure = known()
        pure.do(offering())
        pure.do(SendToPeer(key=key_of(), messages=(said("delegation_status", b"2", latest=True),)))
        pure.do(MoveOutbox(moves=(undelivered(2),)))
        pure.do(SendToPeer(key=key_of(), messages=(said("delegation_status", b"3", latest=True),)))
        pure.do(SendToPeer(key=key_of(), messages=(said("delegation_cancel", b"4", latest=True),)))
        assert waiting(pure) == [(1, "{}"), (2, "2"), (3, "3"), (4, "4")]

    def test_a_number_is_never_used_again_once_it_was_delivered(self) -> None:
        pure = known()
        pure.do(offering())
        pure.do(MoveOutbox(moves=(delivered(1),)))
        pure.do(SendToPeer(key=key_of(), messages=(said(body=b"2", latest=True),)))
        assert waiting(pure) == [(2, "2")]

    def test_of_what_is_not_known_nothing_is_told(self) -> None:
        assert refused(known(), SendToPeer(key=key_of(5), transitions=("cancel",))) == "unknown_delegation"

    def test_what_is_told_must_be_able_to_happen(self) -> None:
        pure = known()
        pure.do(offering())
        pure.do(heard("reject", seq=1))
        assert refused(pure, SendToPeer(key=key_of(), transitions=("cancel",))) == "illegal_move"

    def test_nothing_is_said_to_a_peer_that_is_gone(self) -> None:
        pure = known()
        pure.do(offering())
        pure.do(heard("reject", seq=1))
        pure.do(RemovePeer(id=id_of(1), by=OPERATOR))
        pure.do(SendToPeer(key=key_of(), changes=DelegationChanges(reason="seen")))
        assert refused(pure, SendToPeer(key=key_of(), messages=(said(),))) == "unknown_peer"

    def test_an_offer_is_kept_until_nobody_needs_it(self) -> None:
        pure = known()
        pure.do(offering())
        pure.do(heard("accept", seq=1))
        live = pure.state.delegation(key_of())
        assert live is not None
        assert live.offer is not None
        pure.do(heard("result_completed", seq=2, result=result_of()))
        pure.do(SendToPeer(key=key_of(), changes=DelegationChanges(result=None)))
        taken = pure.state.delegation(key_of())
        assert taken is not None
        assert (taken.offer, taken.result) == (None, None)

    def test_of_those_that_have_ended_the_oldest_make_room(self) -> None:
        pure = known(limits=Limits(delegations_kept_max=2))
        for number in (1, 2, 3):
            pure.do(offering(number))
        for number in (2, 1, 3):
            pure.do(heard("reject", seq=1, jti=f"end{number}", number=number))
        assert [each.offer_id for each in pure.state.delegations()] == [task_id(3), task_id(1)]


class TestDelivery:
    def started(self) -> Pure:
        pure = known()
        pure.do(offering())
        pure.do(SendToPeer(key=key_of(), messages=tuple(said(body=str(seq).encode()) for seq in (2, 3, 4))))
        return pure

    def outbox_message(self, pure: Pure, seq: int) -> OutboxMessage:
        message = pure.state.outbox_message(key_of(), seq)
        assert message is not None
        return message

    def test_a_failure_is_shown_until_it_is_delivered(self) -> None:
        pure = self.started()
        pure.do(MoveOutbox(moves=(undelivered(1, attempts=3),)))
        first = self.outbox_message(pure, 1)
        assert (first.attempts, first.failure, first.next_ms) == (3, "nobody", START_MS + 500)

    def test_whoever_has_one_has_all_before_it(self) -> None:
        pure = self.started()
        pure.do(MoveOutbox(moves=(delivered(3),)))
        assert waiting(pure) == [(4, "4")]
        assert [(each.direction, each.id) for each in pure.state.messages] == [
            ("sent", "1"),
            ("sent", "2"),
            ("sent", "3"),
        ]

    @pytest.mark.parametrize(
        ("moves", "left"),
        [
            ((delivered(4), delivered(2)), []),
            ((delivered(2), delivered(4)), []),
            ((delivered(2), delivered(2), undelivered(1)), [3, 4]),
            ((undelivered(2), delivered(2), undelivered(4)), [3, 4]),
            ((delivered(99),), []),
            ((undelivered(99),), [1, 2, 3, 4]),
        ],
    )
    def test_several_words_of_delivery_come_to_one_in_whatever_order(self, moves: Any, left: list[int]) -> None:
        pure = self.started()
        pure.do(MoveOutbox(moves=moves))
        assert [seq for seq, _ in waiting(pure)] == left

    def test_nothing_new_is_begun_with_a_peer_for_whom_too_much_waits(self) -> None:
        pure = known(limits=Limits(outbox_per_peer_max=2))
        pure.do(offering(1))
        pure.do(offering(2))
        assert refused(pure, offering(3)) == "outbox_full"
        assert refused(pure, offered(4)) == "outbox_full"
        pure.do(SendToPeer(key=key_of(), messages=(said(),)))
        for number in (1, 2):
            pure.do(MoveOutbox(moves=(delivered(2, key_of(number)),)))
        assert pure.state.outbox_count(id_of(1)) == 0
        pure.do(offering(3))
        assert pure.state.outbox_count(id_of(1)) == 1

    def test_word_of_what_is_gone_changes_nothing(self) -> None:
        pure = self.started()
        pure.do(MoveOutbox(moves=(delivered(4),)))
        before = snapshot(pure)
        pure.do(MoveOutbox(moves=(delivered(4), undelivered(3), delivered(1, key_of(9)), undelivered(1, key_of(9)))))
        assert snapshot(pure) == before
        assert list(pure.state.addressees()) == []


def test_whoever_listens_for_a_peer_hears_of_every_kind_of_event_about_one() -> None:
    told = set(events._PEER_OF)
    assert set(events.PeerEvent.__subclasses__()) - told == {events.TokenRevoked}
