"""Offers from peers: accepted or rejected, canceled, and reported on until the result is sent.

Accepting an offer creates the task of its agent in the same record, and leases it if the agent is here and free: there
is no task without a delegation, and no accept without a task. The task's id is derived from the peer and the
offer's id, so one offer never starts two tasks.

The agent gets `task` as its text, then `parts`; `context` comes as a resource of that name and in the message's
metadata. The agreed terms are in the request's metadata (`covenant.peer`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any, Final

import msgspec

from covenant.exchange.catalogue import Catalogue
from covenant.exchange.tasks.builder import build_task, check_message, check_size
from covenant.exchange.tasks.reader import read_past
from covenant.ledger.machine.commands import Accept, Cancel
from covenant.ledger.machine.peer_commands import DelegationChanges, ReceivedFromPeer, ReceiveFromPeer, SendToPeer
from covenant.model.a2a_requests import Message
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.content import Content, Embedded, Resource, Text
from covenant.model.errors import Invalid, NotFound, Refusal
from covenant.model.ids import TaskId, derived_task_id
from covenant.model.peers.delegation import (
    CANCELLING,
    OFFERED,
    PEER,
    REJECTED,
    TERMS,
    Delegation,
    DelegationKey,
    DelegationRole,
    Peer,
)
from covenant.model.peers.delegation_messages import (
    PROFILES_MAX,
    DelegationCancel,
    DelegationInput,
    DelegationOffer,
    DelegationReject,
    Profile,
    RejectCode,
)
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.usage_by_day import day_of
from covenant.model.sanitizer import blocks_named_safely, unreserved_parts
from covenant.model.task import Hop, Task, weigh
from covenant.model.tenants import DEFAULT
from covenant.peers.message_redaction import Redacted, outgoing, redact_aside
from covenant.peers.peer_settings import PeerContext, PeerService, amounts_of
from covenant.peers.provider.offer_admission import (
    AgreedTerms,
    OfferedProfiles,
    OfferFacts,
    OfferRate,
    OfferRejected,
    accept_message,
    budget_max,
    daily_quota,
    is_asserted,
    is_barred,
    judge_offer,
    reject_message,
)
from covenant.peers.provider.task_reporter import TaskReporter
from covenant.peers.transport.inbox import IncomingMessage
from covenant.seal.identity import SKEW_MS
from covenant.wire import peers as wire

CONTEXT: Final = "context"
TASK_BYTES_MAX: Final = 1024 * 1024
"""As at every other door: a worker is handed a task in one frame."""
DESCRIPTION_CHARS_MAX: Final = 500
FORGOTTEN: Final = "this offer was accepted before, and its result is no longer kept"
WITHDRAWN: Final = "the offer was cancelled before it came here"
GATHER_S: Final = 0.05
"""The pause before a daemon looks for offers that other daemons on its ledger have accepted."""
RESTART_S: Final = 5.0
"""The pause before a task is reported on again, after the ledger or the reporter failed."""
_REFUSED: Final[dict[str, RejectCode]] = {
    "queue_full": "busy",
    "live_task_limit": "busy",
    "queued_bytes_limit": "busy",
    "results_undrained": "busy",
    "deadline_past": "expired",
    "duplicate_task_id": "invalid",
}
"""The code of a reject, by the code with which the ledger refuses a task."""

log = logging.getLogger(__name__)


class Provider(PeerService):
    """Must be used on one event loop. `run` reports on tasks of an earlier run; `stop` it before the ledger closes."""

    def __init__(
        self,
        context: PeerContext,
        catalogue: Catalogue,
        used: Callable[[TaskId], Mapping[str, Any] | None] = lambda _: None,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(context)
        self._catalogue, self._used, self._draining = catalogue, used, draining
        self._rate = OfferRate(context.settings, self._monotonic_ms)
        self._budgets, self._prices = amounts_of(self._settings.profile_budgets), amounts_of(self._settings.prices)
        self._accepting = asyncio.Lock() if context.shared is not None else nullcontext()
        self._reporters: dict[DelegationKey, asyncio.Task[None]] = {}
        self._repeating: set[asyncio.Task[None]] = set()
        self._stopped, self._woken = asyncio.Event(), asyncio.Event()
        self._changed_peers: set[InstanceId] = set()
        if context.shared is not None:
            context.ledger.on_peer(self._note_peer)

    # Offered agents, and messages of the requester

    async def offering(self, peer: Peer) -> OfferedProfiles:
        active = len(await self._ledger.delegations_live(DelegationRole.PROVIDER))
        agents = () if is_barred(peer, self._settings) else self._catalogue.agents(peer.tenant, away=True)
        profiles = tuple(islice(filter(None, (self._profile(peer, each) for each in agents)), PROFILES_MAX))
        return OfferedProfiles(profiles, active, max(0, self._settings.slots - active))

    def _profile(self, peer: Peer, agent: CatalogueAgent | None) -> Profile | None:
        """The agent as this peer is offered it; None if it is not."""
        tenant = self._ledger.tenant(peer.tenant)
        is_open = peer.tenant == DEFAULT or (tenant is not None and tenant.disabled_at_ms is None)
        if agent is None or not is_open or not agent.offered_to_peers(self._settings.profiles):
            return None
        most, name = max(1, budget_max(peer, self._settings)), agent.id
        return Profile(
            name=name,
            description=(agent.definition.description or agent.definition.goal)[:DESCRIPTION_CHARS_MAX],
            max_token_budget=max(1, min(most, self._budgets.get(name, most))),
            price=self._prices.get(name, msgspec.UNSET),
        )

    async def receive(self, incoming: IncomingMessage) -> ReceivedFromPeer:
        match incoming.message:
            case DelegationOffer() as offer:
                return await self._receive_offer(incoming, offer)
            case DelegationCancel() as cancel:
                return await self._receive_cancel(incoming, cancel)
            case DelegationInput() as answer:
                return await self._receive_answer(incoming, answer)
            case other:
                raise Invalid("type_not_supported", f"a provider takes no message of type {wire.type_of(other)}")

    async def _receive_offer(self, incoming: IncomingMessage, offer: DelegationOffer) -> ReceivedFromPeer:
        key = incoming.key
        known = await self._ledger.delegation(key)
        if known is not None:
            return await self._answer_repeated_offer(incoming, offer, known)
        try:
            if key in self._context.withdrawn:
                raise OfferRejected("expired", WITHDRAWN)
            agent = self._catalogue.agent(incoming.peer.tenant, offer.profile)
            async with self._accepting:  # on a shared ledger no other offer may be accepted in between
                terms = await self._judge(incoming, offer)
                received = await self._accept(incoming, offer, agent, terms)
        except OfferRejected as rejected:
            return await self._reject(incoming, offer, rejected)
        except Refusal as refusal:
            if (code := _REFUSED.get(refusal.code)) is None:
                raise
            return await self._reject(incoming, offer, OfferRejected(code, refusal.message, refusal.retry_after_ms))
        if received.known:
            forgotten = reject_message(offer, OfferRejected("expired", FORGOTTEN))
            reject = await redact_aside(forgotten, self._settings.redaction, key)
            await self._ledger.commit(
                SendToPeer(
                    key=key,
                    begin=_begin(incoming.peer, offer),
                    transitions=("offer", "reject"),
                    changes=_reject_changes(reject),
                    messages=(outgoing(reject.message),),
                )
            )
        elif received.moved is not None and received.moved.changed:
            self._start_reporter(key)
        return received

    async def _judge(self, incoming: IncomingMessage, offer: DelegationOffer) -> AgreedTerms:
        ledger, peer, now_ms = self._ledger, incoming.peer, self._now_ms()
        # The time that a message was on its way looks like skew, so skew counts no further than clocks may be apart.
        skew_ms = max(-SKEW_MS, min(SKEW_MS, now_ms - (incoming.envelope.sent_at_ms or now_ms)))
        live = await ledger.delegations_live(DelegationRole.PROVIDER)
        budgets = [each.budget for each in live if each.peer == peer.id]
        accepted, used = await self._used_today(peer, now_ms)
        facts = OfferFacts(
            active=len(live),
            active_of_peer=len(budgets),
            profile=self._profile(peer, self._catalogue.known(peer.tenant, offer.profile)),
            us=self._keyring,
            now_ms=now_ms,
            ages=ledger.clock.ages,
            skew_ms=skew_ms,
            draining=self._draining(),
            away=self._catalogue.agent(peer.tenant, offer.profile) is None,
            accepted_today=accepted,
            tokens_today=used + sum(budgets),
        )
        return judge_offer(offer, peer, facts, self._settings, rate=self._rate, revoked=ledger.token_revoked)

    async def _used_today(self, peer: Peer, now_ms: int) -> tuple[int, int]:
        """Offers accepted and tokens used today. Zeros if the peer has no quota: then nothing depends on them."""
        if daily_quota(peer, self._settings) == (None, None):
            return 0, 0
        found = await self._ledger.peer_usage(day_of(now_ms), peer.id)
        ours = [each for each in found if each.role is DelegationRole.PROVIDER]
        return sum(each.accepted for each in ours), sum(each.tokens for each in ours)

    async def _accept(
        self, incoming: IncomingMessage, offer: DelegationOffer, agent: CatalogueAgent | None, terms: AgreedTerms
    ) -> ReceivedFromPeer:
        begin = msgspec.structs.replace(
            _begin(incoming.peer, offer),
            budget=terms.budget,
            timeout_ms=terms.timeout_ms,
            depth_remaining=terms.depth_remaining,
            status_interval_ms=terms.status_interval_ms,
        )
        task = self._task(incoming.peer, offer, terms, agent)
        size, digest = self._check(task, agent), _digest(incoming.peer, offer)
        return await self._context.writer.begin(
            task,
            lambda starter: ReceiveFromPeer(
                envelope=incoming.envelope,
                key=begin.key,
                by=incoming.peer.agent,
                begin=begin,
                transitions=("offer", "accept"),
                messages=(outgoing(accept_message(begin)),),
                accept=Accept(task=task, digest=digest, starter=starter, body_bytes=size),
            ),
        )

    async def _reject(
        self, incoming: IncomingMessage, offer: DelegationOffer, rejected: OfferRejected
    ) -> ReceivedFromPeer:
        begin = _begin(incoming.peer, offer)
        reject = await redact_aside(reject_message(offer, rejected), self._settings.redaction, begin.key)
        return await self._ledger.commit(
            ReceiveFromPeer(
                envelope=incoming.envelope,
                key=begin.key,
                by=incoming.peer.agent,
                begin=begin,
                transitions=("offer", "reject"),
                changes=_reject_changes(reject),
                messages=(outgoing(reject.message),),
            )
        )

    async def _answer_repeated_offer(
        self, incoming: IncomingMessage, offer: DelegationOffer, known: Delegation
    ) -> ReceivedFromPeer:
        """Answers an offer that is known, as before.

        The outcome of a delegation that has ended was sent already, or waits in the outbox. It is sent again only if
        one of the two ledgers was restored since. A restored requester may have made the offer again: then the proof
        must be about the offer that the requester has now.
        """
        envelope = incoming.envelope
        restored = (envelope.epoch, envelope.our_epoch) != (known.peer_epoch, known.epoch)
        rejected = await self._rejection(incoming.peer, offer, known)
        budget, timeout_ms = min(known.budget, offer.max_token_budget), min(known.timeout_ms, offer.timeout)
        known = msgspec.structs.replace(known, budget=budget, timeout_ms=timeout_ms)
        if rejected is None and not known.ended:
            received = await self._ledger.commit(
                ReceiveFromPeer(
                    envelope=envelope,
                    key=known.key,
                    transitions=("offer",),
                    changes=DelegationChanges(offer=offer, budget=budget, timeout_ms=timeout_ms),
                    messages=(outgoing(accept_message(known)),),
                )
            )
            if restored and received.moved is not None and received.moved.delegation.ended:
                self._repeat_result(known, offer)  # its result was sent meanwhile, with a proof for the offer before
            else:
                self._start_reporter(known.key)
            return received
        received = await self._ledger.commit(ReceiveFromPeer(envelope=envelope, key=known.key))
        if rejected is not None and (restored or envelope.seq is None or envelope.seq > known.received_seq):
            reject = await redact_aside(reject_message(offer, rejected), self._settings.redaction, known.key)
            await self._ledger.commit(SendToPeer(key=known.key, messages=(outgoing(reject.message),)))
        elif rejected is None and restored:
            self._repeat_result(known, offer)
        return received

    async def _rejection(self, peer: Peer, offer: DelegationOffer, known: Delegation) -> OfferRejected | None:
        """Why an offer whose id is known is not answered as before: it was rejected, or is about other work."""
        if known.state is REJECTED:
            return OfferRejected(msgspec.convert(known.code, RejectCode), known.reason or "", known.retry_after_ms)
        view = (await read_past(self._ledger, known.task_id, 1)).view()
        if view is None:
            return OfferRejected("expired", FORGOTTEN)
        asked = (known.profile, view.task.parts or (Text(view.task.intent_text),))
        if asked != (offer.profile, _parts(offer)) or not is_asserted(offer, peer, self._keyring):
            return OfferRejected("invalid", "an offer of this id was for other work, or this one is not signed by you")
        return None

    async def _receive_cancel(self, incoming: IncomingMessage, cancel: DelegationCancel) -> ReceivedFromPeer:
        if await self._ledger.delegation(incoming.key) is None:
            return await self._refuse_withdrawn(incoming)
        cancels = ReceiveFromPeer(envelope=incoming.envelope, key=incoming.key, transitions=("cancel",))
        received = await self._ledger.commit(cancels)
        delegation = received.moved.delegation if received.moved is not None else None
        if delegation is not None and delegation.state is CANCELLING:
            reason = cancel.reason or "cancelled by the peer"
            # The reporter sees the task end and sends the result. After a crash, the next reporter cancels the task.
            with suppress(NotFound):
                await self._ledger.commit(Cancel(task_id=delegation.task_id, by=incoming.peer.agent, reason=reason))
            self._start_reporter(incoming.key)
        return received

    async def _receive_answer(self, incoming: IncomingMessage, answer: DelegationInput) -> ReceivedFromPeer:
        """The answer is stored with the delegation first. After a crash, the next run hands it to the task."""
        key = incoming.key
        known = await self._ledger.delegation(key)
        changes = DelegationChanges(answer=answer) if known is not None and not known.ended else DelegationChanges()
        received = await self._ledger.commit(ReceiveFromPeer(envelope=incoming.envelope, key=key, changes=changes))
        delegation = received.moved.delegation if received.moved is not None and received.moved.changed else None
        if delegation is not None and delegation.answer is not None:
            await TaskReporter(self._context, key, self._used).take_answer(delegation)
            self._start_reporter(key)
        return received

    async def _refuse_withdrawn(self, incoming: IncomingMessage) -> ReceivedFromPeer:
        """A cancel came before its offer. Tells the requester that the work was not begun and never will be."""
        key = incoming.key
        work = work_id(incoming.peer, key.offer_id)
        begin = Delegation(
            role=key.role,
            peer=key.peer,
            offer_id=key.offer_id,
            task_id=work,
            profile="",
            state=OFFERED,
            budget=0,
            timeout_ms=0,
            delegation_id=work,
        )
        reject = DelegationReject(offer_id=key.offer_id, code="expired", reason=WITHDRAWN)
        return await self._ledger.commit(
            ReceiveFromPeer(
                envelope=incoming.envelope,
                key=key,
                begin=begin,
                transitions=("offer", "reject"),
                changes=DelegationChanges(code=reject.code, reason=reject.reason),
                messages=(outgoing(reject),),
            )
        )

    # The task

    def _task(self, peer: Peer, offer: DelegationOffer, terms: AgreedTerms, agent: CatalogueAgent | None) -> Task:
        return build_task(
            work_id(peer, offer.offer_id),
            sender=peer.agent,
            recipient=self._catalogue.identity(peer.tenant, terms.profile),
            intent_text=offer.task,
            deadline_ms=terms.deadline_ms,
            parts=_parts(offer),
            definition=agent.definition if agent is not None else None,
            timeout_ms=terms.timeout_ms,
            tenant=peer.tenant,
            origin=PEER,
            # Calls of this task are one deeper. The depth leaves as many of them as the offer allows.
            hop=Hop(depth=max(0, self._context.depth_max - terms.depth_remaining), traceparent=offer.traceparent),
            metadata={CONTEXT: offer.context} if offer.context else None,
            request_metadata={
                TERMS: {
                    "peer": peer.id,
                    "offer_id": offer.offer_id,
                    "budget": terms.budget,
                    "depth_remaining": terms.depth_remaining,
                    "via": list(offer.via),
                    "correlation_id": offer.correlation_id,
                }
            },
        )

    def _check(self, task: Task, agent: CatalogueAgent | None) -> int:
        """The checks of every other door. Returns the task's bytes, or raises `OfferRejected`."""
        size, parts = weigh(task), task.parts or (Text(task.intent_text),)
        try:
            check_size(size, TASK_BYTES_MAX)
            if agent is not None:
                check_message(Message(message_id=task.id, parts=parts), agent, agent.definition.extensions)
        except Refusal as refusal:
            raise OfferRejected("invalid", refusal.message) from None
        return size

    # Reports on tasks

    async def run(self) -> None:
        if self._context.shared is None:
            await self.resume()
        while not self._stopped.is_set():
            await self._woken.wait()
            self._woken.clear()
            await asyncio.sleep(GATHER_S)
            changed_peers, self._changed_peers = self._changed_peers, set()
            try:
                for peer in filter(self._context.serves, changed_peers):
                    for delegation in await self._ledger.delegations_live(DelegationRole.PROVIDER, peer):
                        self._start_reporter(delegation.key)
            except Refusal as refusal:  # `resume`, which looks at all peers that are served, finds them later
                log.warning("peer.report_failed", extra={"code": refusal.code})

    async def resume(self) -> None:
        """Reports on the tasks of the peers that this daemon serves, and stops reporting on those of other peers."""
        for key, task in tuple(self._reporters.items()):
            if not self._context.serves(key.peer):
                task.cancel()
        for delegation in await self._ledger.delegations_live(DelegationRole.PROVIDER):
            self._start_reporter(delegation.key)

    def _note_peer(self, peer: InstanceId) -> None:
        """Another daemon of this instance may have accepted an offer."""
        self._changed_peers.add(peer)
        self._woken.set()

    async def stop(self) -> None:
        """Reports stop here; the next run goes on with them."""
        self._stopped.set()
        self._woken.set()
        tasks = (*self._reporters.values(), *self._repeating)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_reporter(self, key: DelegationKey) -> None:
        if key not in self._reporters and not self._stopped.is_set() and self._context.serves(key.peer):
            self._reporters[key] = task = asyncio.ensure_future(self._run_reporter(key))
            task.add_done_callback(lambda _: self._reporters.pop(key, None))

    def _repeat_result(self, known: Delegation, offer: DelegationOffer) -> None:
        """Sends the result of a delegation that has ended, built again from its task: the requester has lost it."""
        accept = outgoing(accept_message(known))
        reporter = TaskReporter(self._context, known.key, self._used)
        task = asyncio.ensure_future(reporter.repeat_result(msgspec.structs.replace(known, offer=offer), accept))
        self._repeating.add(task)
        task.add_done_callback(self._note_repeated)

    def _note_repeated(self, task: asyncio.Task[None]) -> None:
        self._repeating.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.warning("peer.result_not_repeated", extra={"reason": str(failure)})

    async def _run_reporter(self, key: DelegationKey) -> None:
        task_id: TaskId | None = None
        while True:
            reporter = TaskReporter(self._context, key, self._used, task_id)
            try:
                return await reporter.run()
            except Refusal as refusal:
                log.warning("peer.report_failed", extra={"offer_id": key.offer_id, "code": refusal.code})
            except Exception:
                log.exception("peer.report_failed", extra={"offer_id": key.offer_id})
            task_id = reporter.task_id  # the peer may have another identity, and the delegation another key
            await asyncio.sleep(RESTART_S)


def work_id(peer: Peer, offer_id: str) -> TaskId:
    """The id of the task that does the work of this offer. It is the delegation's id, too."""
    return derived_task_id(TaskId(peer.id), "offer", offer_id)


def _begin(peer: Peer, offer: DelegationOffer) -> Delegation:
    work = work_id(peer, offer.offer_id)
    return Delegation.offered(DelegationRole.PROVIDER, peer.id, work, offer, delegation_id=work)


def _parts(offer: DelegationOffer) -> tuple[Content, ...]:
    """The offer's contents as parts of its task."""
    context = Resource(Embedded(uri="", mimeType="text/plain", text=offer.context or ""), filename=CONTEXT)
    return Text(offer.task), *((context,) if offer.context else ()), *blocks_named_safely(unreserved_parts(offer.parts))


def _digest(peer: Peer, offer: DelegationOffer) -> str:
    """The digest covers the offer alone, and not the agreed terms, so it is equal for the same offer."""
    return hashlib.sha256(peer.id.encode() + b"\n" + wire.encode(offer)).hexdigest()


def _reject_changes(reject: Redacted[DelegationReject]) -> DelegationChanges:
    """Keeps the text of the reject, so that a repeated offer gets the same answer."""
    sent = reject.message
    return DelegationChanges(code=sent.code, reason=sent.reason, retry_after_ms=sent.retry_after, redacted=reject.found)
