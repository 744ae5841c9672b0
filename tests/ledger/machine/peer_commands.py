"""Peers, and what passes between them and us, for tests of the machine and of the log. Keys are real."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec

from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.commands import Accept, Command, Starter
from covenant.ledger.machine.peer_commands import (
    AddPeer,
    ChangePeer,
    DelegationChanges,
    LearnPeer,
    MoveOutbox,
    PeerMessage,
    ReceiveFromPeer,
    RemovePeer,
    RevokeToken,
    SendToPeer,
    SucceedPeer,
)
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import (
    Challenge,
    Delegation,
    DelegationKey,
    DelegationRole,
    DelegationState,
    OutboxMove,
    Peer,
    PeerCapabilities,
    ReceivedEnvelope,
)
from covenant.model.peers.delegation_messages import DelegationOffer, DelegationResult, Profile, TokenUsage
from covenant.model.peers.instance import InstanceId, KeyBundle, Trust
from covenant.model.task import fingerprint
from covenant.seal.identity import InstanceIdentity, new_prekey, sign_bundle
from tests.ledger_contract.fake_clock import START_MS
from tests.ledger_contract.samples import OPERATOR, make_task, task_id

CHALLENGE: Final = Challenge("n" * 43, START_MS)
OTHER_CHALLENGE: Final = Challenge("m" * 43, START_MS)
UNTIL_MS: Final = START_MS + 360_000


@cache
def bundle_of(number: int) -> KeyBundle:
    key = bytes([number]) * 32
    return sign_bundle(key, [new_prekey(key, START_MS).prekey], START_MS)


@cache
def id_of(number: int) -> InstanceId:
    return InstanceIdentity(bytes([number]) * 32).id


def make_peer(number: int = 1, **changes: Any) -> Peer:
    given: dict[str, Any] = {
        "id": id_of(number),
        "name": f"peer-{number}",
        "url": f"https://peer-{number}.example",
        "keys": bundle_of(number),
    }
    return Peer(**{**given, **changes})


def add(number: int = 1, **changes: Any) -> AddPeer:
    return AddPeer(by=OPERATOR, peer=make_peer(number, **changes))


def key_of(number: int = 1, *, role: DelegationRole = DelegationRole.REQUESTER, peer: int = 1) -> DelegationKey:
    return DelegationKey(role, id_of(peer), task_id(number))


def make_offer(number: int = 1) -> DelegationOffer:
    return DelegationOffer(
        offer_id=task_id(number), profile="coder", task="write a test", max_token_budget=1_000, timeout=60_000
    )


def begun(key: DelegationKey, *, work: TaskId | None = None) -> Delegation:
    return Delegation(
        role=key.role,
        peer=key.peer,
        offer_id=key.offer_id,
        task_id=work or TaskId(key.offer_id),
        profile="coder",
        state=DelegationState.OFFERED,
        budget=1_000,
        timeout_ms=60_000,
        offer=make_offer(),
    )


def said(typ: str = "delegation_status", body: bytes = b"{}", *, latest: bool = False) -> PeerMessage:
    return PeerMessage(typ=typ, body=msgspec.Raw(body), latest=latest)


def envelope(jti: str = "j1", *, seq: int | None = None, peer: int = 1, until_ms: int = UNTIL_MS) -> ReceivedEnvelope:
    return ReceivedEnvelope(sender=id_of(peer), jti=jti, typ="delegation_status", until_ms=until_ms, seq=seq)


def offering(number: int = 1) -> SendToPeer:
    """We offer something."""
    key = key_of(number)
    return SendToPeer(
        key=key, begin=begun(key), transitions=("offer",), messages=(said("delegation_offer"),), by=OPERATOR
    )


def offered(number: int = 1, *, jti: str = "offer", seq: int = 1, starter: Starter | None = None) -> ReceiveFromPeer:
    """We are offered something, and take it."""
    key = key_of(number, role=DelegationRole.PROVIDER)
    work = make_task(100 + number)
    return ReceiveFromPeer(
        envelope=envelope(jti, seq=seq),
        key=key,
        begin=begun(key, work=work.id),
        transitions=("offer", "accept"),
        messages=(said("delegation_accept"),),
        accept=Accept(task=work, digest=fingerprint(work)[0], starter=starter),
    )


def heard(*transitions: str, seq: int, jti: str | None = None, number: int = 1, **changes: Any) -> ReceiveFromPeer:
    """The provider says something of what we offered it."""
    return ReceiveFromPeer(
        envelope=envelope(jti or f"j{seq}", seq=seq),
        key=key_of(number),
        transitions=transitions,
        changes=DelegationChanges(**changes),
    )


def result_of(number: int = 1) -> DelegationResult:
    return DelegationResult(
        offer_id=task_id(number),
        delegation_id=task_id(50),
        profile="coder",
        status="completed",
        result="done",
        token_usage=TokenUsage(prompt=10, completion=5, total=15),
    )


def capabilities() -> PeerCapabilities:
    return PeerCapabilities(
        profiles=(Profile(name="coder", max_token_budget=1_000),),
        versions=(2,),
        active_delegations=0,
        free_slots=1,
        trust_level=Trust.VERIFIED,
        issued_at_ms=START_MS,
        expires_at_ms=START_MS + 300_000,
        token="t",
    )


def delivered(seq: int, key: DelegationKey | None = None) -> OutboxMove:
    return OutboxMove(delegation=key or key_of(), seq=seq, delivered=True)


def undelivered(seq: int, key: DelegationKey | None = None, attempts: int = 1) -> OutboxMove:
    return OutboxMove(delegation=key or key_of(), seq=seq, attempts=attempts, next_ms=START_MS + 500, failure="nobody")


def verifying(number: int = 1, challenge: Challenge = CHALLENGE) -> LearnPeer:
    return LearnPeer(
        id=id_of(number), by=OPERATOR, verified=True, challenge=challenge, capabilities=capabilities(), conflict=""
    )


def peer_commands() -> list[Command[Any]]:
    """One of each, and what is refused of them."""
    return [
        add(1),
        add(2),
        add(3, name="peer-2"),
        ChangePeer(id=id_of(1), by=OPERATOR, name="peer-2"),
        ChangePeer(id=id_of(1), by=OPERATOR, name="first", trust=Trust.TRUSTED),
        LearnPeer(id=id_of(1), by=OPERATOR, challenge=CHALLENGE),
        verifying(),
        offering(1),
        offering(1),
        heard("accept", seq=1, delegation_id="d"),
        heard("status", seq=3),
        heard("status", seq=2),
        SendToPeer(key=key_of(1), messages=(said(latest=True), said())),
        offered(2),
        offered(2, jti="again"),
        ReceiveFromPeer(envelope=envelope("alone")),
        ReceiveFromPeer(envelope=envelope("stranger", peer=9)),
        MoveOutbox(moves=(undelivered(1), delivered(1))),
        RemovePeer(id=id_of(1), by=OPERATOR),
        heard("result_completed", seq=3, jti="end", result=result_of()),
        SendToPeer(key=key_of(1), changes=DelegationChanges(result=None)),
        SucceedPeer(by=OPERATOR, old=id_of(1), keys_shown=bundle_of(4), vouched=True),
        SucceedPeer(by=OPERATOR, old=id_of(4), keys_shown=bundle_of(2), vouched=True),
        RevokeToken(by=OPERATOR, token_id="t1", until_ms=START_MS + 1),
        RemovePeer(id=id_of(2), by=OPERATOR),
    ]


def held(state: LedgerState) -> dict[str, Any]:
    """All that a state holds of peers, in an order that does not depend on how it came to hold it."""
    delegations = list(state.delegations())
    return {
        "peers": list(state.peers_by_id.values()),
        "named": [state.peer_named(peer.name) for peer in state.peers_by_id.values()],
        "delegations": delegations,
        "of task": {each.task_id: state.delegation_of(each.task_id) for each in delegations},
        "ended": (state.delegations_ended_count(), state.delegation_ended_first()),
        "live": {each.key for role in DelegationRole for each in state.delegations_live(role)},
        "parcels": sorted(
            state.all_outbox_messages(), key=lambda message: (message.peer, message.role, message.offer_id, message.seq)
        ),
        "addressees": set(state.addressees()),
        "counts": {peer: state.outbox_count(peer) for peer in state.addressees()},
        "envelopes": sorted(state.all_envelopes(), key=lambda envelope: (envelope.sender, envelope.jti)),
        "revoked": dict(state.tokens_revoked),
        "usage": list(state.peer_usage(0, None)),
        "log": list(state.messages),
    }
