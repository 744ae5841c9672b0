"""Peers and the messages between them: known peers, received messages, and messages that wait for delivery."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.ledger.machine.decisions import acceptance
from covenant.ledger.machine.decisions.context import DecisionContext
from covenant.ledger.machine.events import (
    DelegationDropped,
    DelegationPut,
    EnvelopeTaken,
    OutboxDropped,
    OutboxMoved,
    OutboxPut,
    PeerPut,
    PeerRemoved,
    PeerSucceeded,
    TokenRevoked,
)
from covenant.ledger.machine.peer_commands import (
    AddPeer,
    ChangePeer,
    DelegationChanges,
    DelegationMoved,
    LearnPeer,
    MoveOutbox,
    PeerMessage,
    ReceivedFromPeer,
    ReceiveFromPeer,
    RemovePeer,
    RevokeToken,
    SendToPeer,
    SucceedPeer,
)
from covenant.model.errors import Conflict, Forbidden, NotFound, OverLimit
from covenant.model.ids import AgentId
from covenant.model.peers.delegation import (
    Delegation,
    DelegationKey,
    DelegationState,
    OutboxMessage,
    OutboxMove,
    Peer,
    move,
)
from covenant.model.peers.instance import CHANGES_MAX, InstanceId, Trust
from covenant.model.tenants import DEFAULT

replace = msgspec.structs.replace

BUSY_RETRY_MS = 60_000
OFFER = "delegation_offer"
ISSUED_MAX = 32
"""The most tokens of a peer that are remembered; a token is reused while it is valid, so there are few."""
_LEARNED_FIELDS: Final = ("epoch", "told_epoch", "told_id", "end", "void_before_ms", "former")


def add_peer(decide: DecisionContext, command: AddPeer) -> Peer:
    wanted, view = command.peer, decide.view
    known = view.peer(wanted.id)
    if known is not None:
        if (known.name, known.url, known.tenant) == (wanted.name, wanted.url, wanted.tenant):
            return known
        raise Conflict(
            "peer_exists", f"{wanted.id} is a peer already, called {known.name}; change it, or remove it first"
        )
    _check_name(decide, wanted.id, wanted.name)
    most = view.limits.peers_max
    if view.peer_count() >= most:
        raise OverLimit("too_many_peers", f"there may be at most {most} peers; remove one first")
    _check_tenant(decide, wanted.tenant)
    peer = replace(wanted, added_at_ms=decide.now_ms)
    decide.add(PeerPut(peer))
    _audit_peer(decide, command.by, "peer_added", peer, url=peer.url)
    return peer


def _audit_peer(decide: DecisionContext, by: AgentId, kind: str, peer: Peer, **facts: Any) -> None:
    decide.audit(by, {"type": kind, "peer": peer.id, "name": peer.name, **facts})


def _check_name(decide: DecisionContext, peer_id: InstanceId, name: str) -> None:
    """Refuses a name that another peer has: people identify peers by name."""
    other = decide.view.peer_named(name)
    if other is not None and other.id != peer_id:
        raise Conflict("name_taken", f"another peer is called {name!r}; choose another name")


def _check_tenant(decide: DecisionContext, name: str) -> None:
    if name == DEFAULT:
        return
    tenant = decide.view.tenant(name)
    if tenant is None or tenant.removal is not None:
        raise NotFound("unknown_tenant", f"there is no tenant {name!r}")


def change_peer(decide: DecisionContext, command: ChangePeer) -> Peer:
    peer = _peer(decide, command.id)
    if command.name is not None:
        _check_name(decide, peer.id, command.name)
    tokenless = command.tokenless if command.tokenless is not None else peer.tokenless and command.trust is None
    changed = replace(
        peer,
        name=command.name if command.name is not None else peer.name,
        url=(command.url or None) if command.url is not None else peer.url,
        trust=command.trust if command.trust is not None else peer.trust,
        denied=command.denied if command.denied is not None else peer.denied,
        limits=command.limits if command.limits is not None else peer.limits,
        tokenless=tokenless,
    )
    if changed == peer:
        return peer
    decide.add(PeerPut(changed))
    trust, denied = changed.trust.value, changed.denied
    _audit_peer(decide, command.by, "peer_changed", changed, url=changed.url, trust=trust, denied=denied)
    return changed


def remove_peer(decide: DecisionContext, command: RemovePeer) -> Peer:
    peer = _peer(decide, command.id)
    live = decide.view.delegations_live_count(peer.id)
    if live:
        raise Conflict("peer_busy", f"{live} delegations with {peer.name} have not ended; cancel or force them first")
    decide.add(PeerRemoved(peer.id))
    _audit_peer(decide, command.by, "peer_removed", peer)
    return peer


def learn_peer(decide: DecisionContext, command: LearnPeer) -> Peer:
    peer = _peer(decide, command.id)
    learned: dict[str, Any] = {}
    if command.keys_shown is not None:
        learned["keys"] = command.keys_shown
    if command.capabilities is not None:
        learned["capabilities"] = command.capabilities
    if command.conflict is not None:
        learned["conflict"] = command.conflict or None
    learned |= {name: value for name in _LEARNED_FIELDS if (value := getattr(command, name)) is not msgspec.UNSET}
    if command.issued is not None:
        good = [token for token in peer.issued if token.until_ms > decide.now_ms]
        learned["issued"] = (*good[-(ISSUED_MAX - 1) :], command.issued)
    if command.verified:
        if command.challenge is None or peer.challenge != command.challenge:
            raise Conflict("challenge_over", "this is not the answer to the last challenge; ask again")
        learned |= {
            "challenge": None,
            "verified_at_ms": decide.now_ms,
            # A peer that was verified before and is only a peer now was lowered by an operator: that stands.
            "trust": Trust.VERIFIED if peer.trust is Trust.PEER and peer.verified_at_ms is None else peer.trust,
        }
    elif command.challenge is not None:
        learned["challenge"] = command.challenge
    changed = replace(peer, **learned)
    if changed == peer:
        return peer
    decide.add(PeerPut(changed))
    if changed.trust is not peer.trust:
        _audit_peer(decide, command.by, "peer_verified", peer)
    return changed


def succeed_peer(decide: DecisionContext, command: SucceedPeer) -> Peer:
    peer, keys = _peer(decide, command.old), command.keys_shown
    new_id = InstanceId(keys.id)
    if decide.view.peer(new_id) is not None:
        raise Conflict("peer_exists", f"{new_id} is a peer already; remove it first")
    changed = replace(
        peer,
        id=new_id,
        keys=keys,
        trust=peer.trust if command.vouched else Trust.PEER,
        challenge=None,
        verified_at_ms=peer.verified_at_ms if command.vouched else None,
        capabilities=None,
        conflict=None,
        former=(*peer.former, *command.former)[-CHANGES_MAX:],
    )
    decide.add(PeerSucceeded(peer.id, changed))
    decide.audit(
        command.by,
        {"type": "peer_succeeded", "peer": new_id, "before": peer.id, "name": peer.name, "vouched": command.vouched},
    )
    return changed


def revoke_token(decide: DecisionContext, command: RevokeToken) -> bool:
    if decide.view.token_revoked(command.token_id):
        return False
    decide.add(TokenRevoked(command.token_id, command.by, decide.now_ms, command.until_ms))
    decide.audit(command.by, {"type": "peer_token_revoked", "token_id": command.token_id})
    return True


def send_to_peer(decide: DecisionContext, command: SendToPeer) -> DelegationMoved:
    record = decide.view.delegation(command.key)
    if record is None and command.begin is None:
        raise unknown_delegation(command.key.offer_id)
    if record is not None and command.about is not None and record.offer not in (None, command.about):
        raise Conflict("offer_changed", "the peer has made this offer anew; answer the new one")
    if record is None or command.messages:
        _peer(decide, command.key.peer)  # nothing could be delivered to a removed peer
    if record is None:
        _check_outbox(decide, command.key.peer)
    if command.replaces is not None and decide.view.delegation(command.replaces) is not None:
        decide.add(DelegationDropped(command.replaces))
    before = record or _begun(decide, command.begin)
    state = record.state if record is not None else None
    transitions, messages = command.transitions, command.messages
    if record is not None and command.withdraws and _withdraw(decide, record, command):
        transitions, messages = tuple("withdraw" if each == "cancel" else each for each in transitions), ()
    after = _moved(decide, before, state, transitions, command.changes)
    return _put_messages(decide, after, messages, command.by)


def _withdraw(decide: DecisionContext, record: Delegation, command: SendToPeer) -> bool:
    """Drops the offer, if it waits. Returns whether nobody has begun to send it, so that the peer needs no cancel.

    Otherwise the peer may have the offer: the cancel has the next number, and is understood without the offer too. An
    offer that was made again and waits becomes the cancel, since no number may be left out.
    """
    view, key = decide.view, record.key
    first = view.outbox_first(key)
    if first is None:
        return False
    since_ms, is_offer = command.unsent_since_ms, first.typ == OFFER and first.seq == 1
    if is_offer:
        # An offer that was answered was sent, even if its receipt has not arrived.
        decide.add(OutboxDropped(key, first.seq, sent=record.received_seq > 0))
        if (
            record.sent_seq == first.seq
            and first.attempts == 0
            and since_ms is not None
            and first.made_at_ms >= since_ms
        ):
            return True
    (cancel,) = command.messages
    for seq in range(first.seq + (1 if is_offer else 0), record.sent_seq + 1):
        again = view.outbox_message(key, seq)
        if again is not None and again.typ == OFFER:
            decide.add(OutboxPut(replace(again, typ=cancel.typ, body=cancel.body)))
    return False


def receive_from_peer(decide: DecisionContext, command: ReceiveFromPeer) -> ReceivedFromPeer:
    envelope, view, key = command.envelope, decide.view, command.key
    if view.envelope_taken(envelope.sender, envelope.jti):
        raise Conflict("replayed", f"envelope {envelope.jti} was received before")
    if view.peer(envelope.sender) is None:
        raise Forbidden("unknown_sender", f"{envelope.sender} is not a peer")
    if view.envelope_count(envelope.sender) >= view.limits.envelopes_per_peer_max:
        raise OverLimit("rate_limited", "too many messages at once; slow down", retry_after_ms=BUSY_RETRY_MS)
    record = view.delegation(key) if key is not None else None
    if command.messages:
        _check_outbox(decide, envelope.sender)
    decide.add(EnvelopeTaken(envelope, key.offer_id if key is not None else None))
    before = record or (_begun(decide, command.begin) if command.begin is not None else None)
    if key is None or before is None:
        return ReceivedFromPeer()
    if envelope.seq is not None:
        # A restored peer numbers its messages anew. If we were restored, we may not know its last number.
        counts_anew = record is not None and envelope.epoch != before.peer_epoch
        forgot = record is None or envelope.our_epoch != before.epoch
        if envelope.seq <= before.received_seq and not counts_anew:
            return ReceivedFromPeer(moved=DelegationMoved(delegation=before, changed=False), repeated=True)
        if envelope.seq > before.received_seq + 1 and not counts_anew and not forgot:
            raise Conflict("out_of_order", f"number {before.received_seq + 1} is missing; send the messages in order")
        before = replace(before, received_seq=envelope.seq, epoch=envelope.our_epoch, peer_epoch=envelope.epoch)
    before = replace(before, heard_at_ms=decide.now_ms)
    if record is not None and record.ended:
        decide.add(DelegationPut(before))
        return ReceivedFromPeer(moved=DelegationMoved(delegation=before, changed=False))
    accepted = acceptance.accept(decide, command.accept) if command.accept is not None and record is None else None
    if accepted is not None and accepted.duplicate:
        return ReceivedFromPeer(known=True)
    state = record.state if record is not None else None
    after = _moved(decide, before, state, command.transitions, command.changes)
    leased = accepted.leased if accepted is not None else None
    return ReceivedFromPeer(moved=_put_messages(decide, after, command.messages, command.by), leased=leased)


def _check_outbox(decide: DecisionContext, peer: InstanceId) -> None:
    """Refuses more messages for a peer that does not take them, so that the outbox stays bounded."""
    most = decide.view.limits.outbox_per_peer_max
    if decide.view.outbox_count(peer) >= most:
        raise OverLimit(
            "outbox_full",
            f"{most} messages wait to be taken already; send again when the peer has taken some",
            retry_after_ms=BUSY_RETRY_MS,
        )


def _begun(decide: DecisionContext, begin: Delegation | None) -> Delegation:
    assert begin is not None
    return replace(begin, made_at_ms=decide.now_ms, moved_at_ms=decide.now_ms, sent_seq=0, received_seq=0)


def _moved(
    decide: DecisionContext,
    before: Delegation,
    state: DelegationState | None,
    transitions: tuple[str, ...],
    changes: DelegationChanges,
) -> Delegation:
    for transition in transitions:
        state = move(before.role, state, transition)
    assert state is not None, "the first thing that happens to a delegation begins it"
    learned = {
        name: value for name in changes.__struct_fields__ if (value := getattr(changes, name)) is not msgspec.UNSET
    }
    if "accept" in transitions and 0 < before.doubted == before.answered:
        # The restored provider has got the offer, and all answers before the offer that it did not have. If it still
        # asks, its ledger has lost the answer.
        learned |= {"answered": 0, "doubted": 0}
    question = learned.get("question")
    if question is not None and question.number == before.answered:
        # The question was answered after the report was read and before it was received: it is no longer open.
        learned["question"] = None
    return replace(before, state=state, moved_at_ms=decide.now_ms, **learned)


def _put_messages(
    decide: DecisionContext, delegation: Delegation, messages: tuple[PeerMessage, ...], by: AgentId | None
) -> DelegationMoved:
    for each in messages:
        delegation = _put_outbox_message(decide, delegation, each)
    known = decide.view.delegation(delegation.key)
    if delegation.ended:
        if delegation.result is None:
            # A result that nobody has taken yet must still be shown with its offer.
            delegation = replace(delegation, offer=None)
        if known is None or not known.ended:
            _make_room(decide, delegation.key)
    # An offer can be large, and a delegation's record is written often.
    again = known is not None and not delegation.ended and delegation.offer == known.offer
    decide.add(DelegationPut(replace(delegation, offer=None) if again else delegation))
    if by is not None:
        decide.audit(
            by,
            {
                "type": "delegation",
                "role": delegation.role.value,
                "peer": delegation.peer,
                "offer_id": delegation.offer_id,
                "task_id": delegation.task_id,
                "profile": delegation.profile,
                "state": delegation.state.value,
                "code": delegation.code,
            },
        )
    return DelegationMoved(delegation=delegation)


def _put_outbox_message(decide: DecisionContext, delegation: Delegation, message: PeerMessage) -> Delegation:
    last = decide.view.outbox_last(delegation.key)
    seq = delegation.sent_seq + 1
    if (
        message.latest
        and last is not None
        and (last.typ, last.seq, last.attempts) == (message.typ, delegation.sent_seq, 0)
    ):
        seq = last.seq
    decide.add(
        OutboxPut(
            OutboxMessage(
                role=delegation.role,
                peer=delegation.peer,
                offer_id=delegation.offer_id,
                seq=seq,
                typ=message.typ,
                body=message.body,
                made_at_ms=decide.now_ms,
            )
        )
    )
    return replace(delegation, sent_seq=seq)


def _make_room(decide: DecisionContext, ending: DelegationKey) -> None:
    view = decide.view
    oldest = view.delegation_ended_first()
    if oldest is not None and view.delegations_ended_count() >= view.limits.delegations_kept_max and oldest != ending:
        decide.add(DelegationDropped(oldest))


def move_outbox(decide: DecisionContext, command: MoveOutbox) -> tuple[OutboxMessage, ...]:
    through: dict[DelegationKey, int] = {}
    failed: dict[tuple[DelegationKey, int], OutboxMove] = {}
    for each in command.moves:
        if each.delivered:
            through[each.delegation] = max(each.seq, through.get(each.delegation, 0))
        else:
            failed[each.delegation, each.seq] = each
    for key, seq in through.items():
        first = decide.view.outbox_first(key)
        if first is not None and first.seq <= seq:
            decide.add(OutboxDropped(key, seq))
    left: list[OutboxMessage] = []
    for (key, seq), each in failed.items():
        if seq > through.get(key, 0) and (message := decide.view.outbox_message(key, seq)) is not None:
            decide.add(OutboxMoved(each))
            left.append(message)
    return tuple(left)


def _peer(decide: DecisionContext, peer_id: InstanceId) -> Peer:
    peer = decide.view.peer(peer_id)
    if peer is None:
        raise unknown_peer(peer_id)
    return peer


def unknown_peer(named: str) -> NotFound:
    return NotFound("unknown_peer", f"no peer {named[:80]!r}; `covenant peers list` shows those there are")


def unknown_delegation(named: str) -> NotFound:
    return NotFound("unknown_delegation", f"no delegation {named[:80]!r}")
