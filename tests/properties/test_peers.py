"""What goes on between peers, in any order: whatever is decided can be applied, read back and restored.

After every step the indexes agree with each other, what waits for a peer is numbered without a gap, and nothing that
was heard is heard again. In the end the journal and a snapshot tell the same as what is in memory.
"""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covenant.ledger.embedded.journal import snapshot
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.commands import Command
from covenant.ledger.machine.event_codec import decode_events
from covenant.ledger.machine.events import AnyEvent
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
from covenant.model.peers.delegation import DelegationRole, OutboxMove
from covenant.model.settings import Limits
from tests.ledger.machine.peer_commands import (
    CHALLENGE,
    add,
    begun,
    bundle_of,
    envelope,
    held,
    id_of,
    key_of,
    offered,
    result_of,
    said,
    verifying,
)
from tests.ledger.machine.pure import Pure
from tests.ledger_contract.fake_clock import START_MS
from tests.ledger_contract.samples import OPERATOR, task_id

LIMITS = Limits(delegations_kept_max=2, peers_max=3)
# Mostly about the same few things: what is said of one delegation is what can go wrong.
PEERS = st.sampled_from([1, 1, 1, 1, 2, 3, 4])
NUMBERS = st.sampled_from([1, 1, 1, 2, 3])
SEQS = st.sampled_from([1, 1, 2, 2, 3, 4, 5])
ROLES = st.sampled_from([DelegationRole.REQUESTER, DelegationRole.REQUESTER, DelegationRole.PROVIDER])
TRANSITION_NAMES = st.sampled_from(
    ["offer", "accept", "reject", "status", "cancel", "silence", "force_error", "timeout", "start", "result_completed"]
)


@st.composite
def said_and_heard(draw: st.DrawFn) -> Command[Any]:
    peer, number = draw(PEERS), draw(NUMBERS)
    key = key_of(number, role=draw(ROLES), peer=peer)
    transitions = tuple(draw(st.lists(TRANSITION_NAMES, max_size=1)))
    typ = st.sampled_from(["delegation_status", "delegation_result"])
    words = tuple(said(draw(typ), latest=draw(st.booleans())) for _ in range(draw(st.integers(0, 3))))
    changes = draw(
        st.sampled_from(
            [
                DelegationChanges(),
                DelegationChanges(reason="x"),
                DelegationChanges(result=result_of()),
                DelegationChanges(result=None),
            ]
        )
    )
    heard = envelope(f"j{draw(st.integers(1, 30))}", seq=draw(SEQS), peer=peer)
    match draw(st.sampled_from(["begin", "begin", "tell", "tell", "hear", "hear", "take", "alone"])):
        case "begin":
            begin = begun(key, work=task_id(1_000 * peer + 100 * (key.role is DelegationRole.PROVIDER) + number))
            return SendToPeer(
                key=key, begin=begin, transitions=("offer", *transitions), changes=changes, messages=words
            )
        case "tell":
            return SendToPeer(key=key, transitions=transitions, changes=changes, messages=words)
        case "hear":
            return ReceiveFromPeer(envelope=heard, key=key, transitions=transitions, changes=changes, messages=words)
        case "take":
            return offered(number, jti=heard.jti, seq=heard.seq or 1)
        case _:
            return ReceiveFromPeer(envelope=heard)


@st.composite
def deliveries(draw: st.DrawFn) -> Command[Any]:
    moves = st.builds(
        OutboxMove,
        delegation=st.builds(lambda number, role, peer: key_of(number, role=role, peer=peer), NUMBERS, ROLES, PEERS),
        seq=SEQS,
        delivered=st.booleans(),
    )
    return MoveOutbox(moves=tuple(draw(st.lists(moves, min_size=1, max_size=4))))


@st.composite
def acquaintance(draw: st.DrawFn) -> Command[Any]:
    peer, number = draw(PEERS), draw(NUMBERS)
    return draw(
        st.sampled_from(
            [
                add(peer),
                add(peer, name=f"peer-{number}"),
                ChangePeer(id=id_of(peer), by=OPERATOR, name=f"peer-{number}"),
                RemovePeer(id=id_of(peer), by=OPERATOR),
                LearnPeer(id=id_of(peer), by=OPERATOR, challenge=CHALLENGE),
                verifying(peer),
                SucceedPeer(by=OPERATOR, old=id_of(peer), keys_shown=bundle_of(number), vouched=draw(st.booleans())),
                RevokeToken(by=OPERATOR, token_id=f"t{number}", until_ms=START_MS + draw(SEQS)),
            ]
        )
    )


COMMANDS = st.one_of(said_and_heard(), said_and_heard(), deliveries(), acquaintance())


class Journaled(Pure):
    """Keeps each record as the journal would, and reads it back at once."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.replayed = LedgerState(LIMITS)

    def apply(self, events: list[AnyEvent]) -> None:
        super().apply(events)
        self.replayed.apply(decode_events(msgspec.json.encode(events)), self.now_ms, self.seq)


def check(state: LedgerState) -> None:
    delegations = list(state.delegations())
    live = [each for role in DelegationRole for each in state.delegations_live(role)]
    assert {each.key for each in live} == {each.key for each in delegations if not each.ended}
    assert state.delegations_ended_count() == len(delegations) - len(live)
    assert all(state.peer(each.peer) is not None for each in live)
    for peer in state.peers_by_id.values():
        assert state.peer_named(peer.name) == peer
    waiting: dict[Any, list[int]] = {}
    for message in state.all_outbox_messages():
        waiting.setdefault(message.delegation, []).append(message.seq)
    for key, numbers in waiting.items():
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        delegation = state.delegation(key)
        assert delegation is None or numbers[-1] == delegation.sent_seq
    for each in delegations:
        assert state.delegation_of(each.task_id) == each


@pytest.mark.matrix
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(COMMANDS, st.sampled_from([0, 0, 1, 200_000])), min_size=20, max_size=60))
def test_whatever_happens_between_peers_can_be_applied_read_back_and_restored(
    steps: list[tuple[Command[Any], int]],
) -> None:
    pure = Journaled()
    for command, passes_ms in [(add(1), 0), (add(2), 0), *steps]:
        pure.now_ms += passes_ms
        with suppress(Refusal):
            pure.do(command)
        check(pure.state)
    assert held(pure.replayed) == held(pure.state)
    with tempfile.TemporaryDirectory() as folder:
        restored = LedgerState(LIMITS)
        snapshot.load(snapshot.write(Path(folder), 1, pure.state), restored)
    assert held(restored) == held(pure.state)
