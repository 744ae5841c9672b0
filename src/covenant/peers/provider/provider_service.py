"""Offers from peers: accepted or rejected, canceled, and reported on until the result is sent.

Accepting an offer creates the task of its agent in the same record: there is no task without a delegation, and no
accept without a task. The task's id is derived from the peer and the offer's id, so one offer never starts two tasks.

The agent gets `task` as its text, then `parts`; `context` comes as a resource of that name and in the message's
metadata. The agreed terms are in the request's metadata (`covenant.peer`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import call_id
from covenant.exchange.tasks.builder import build_task, check_message, check_size
from covenant.ledger.machine.commands import Accept as Begin
from covenant.ledger.machine.commands import Cancel as EndTask
from covenant.ledger.machine.peer_commands import DelegationChanges, ReceivedFromPeer, ReceiveFromPeer, SendToPeer
from covenant.model.a2a_requests import Message
from covenant.model.content import Content, Embedded, Resource, Text
from covenant.model.errors import Invalid, NotFound, Refusal
from covenant.model.ids import TaskId
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
    DelegationAccept,
    DelegationCancel,
    DelegationInput,
    DelegationOffer,
    DelegationReject,
    Profile,
    RejectCode,
)
from covenant.model.peers.instance import SUPPORTED_VERSIONS
from covenant.model.peers.usage_by_day import day_of
from covenant.model.sanitizer import blocks_named_safely, unreserved_parts
from covenant.model.task import Hop, Task, fingerprint
from covenant.model.task_view import first_message
from covenant.model.tenants import DEFAULT
from covenant.peers.directory.peer_directory import as_agent
from covenant.peers.message_redaction import Redacted, outgoing, redact_aside
from covenant.peers.peer_settings import PeerContext, PeerService, amounts_of
from covenant.peers.provider.offer_admission import (
    BUSY_RETRY_MS,
    AgreedTerms,
    OfferedProfiles,
    OfferFacts,
    OfferRate,
    OfferRejected,
    budget_max,
    daily_quota,
    is_barred,
    judge_offer,
)
from covenant.peers.provider.task_reporter import TaskReporter
from covenant.peers.transport.inbox import IncomingMessage
from covenant.seal.identity import SKEW_MS
from covenant.wire import peers as wire

CONTEXT: Final = "context"
TASK_BYTES_MAX: Final = 1024 * 1024
"""What any other door takes; a worker is handed it in one frame."""
DESCRIPTION_CHARS_MAX: Final = 500
WITHDRAWN: Final = "the offer was cancelled before it came here"
RESTART_S: Final = 5.0
"""After the disk, or we ourselves, failed."""
_REFUSED: Final[dict[str, RejectCode]] = {
    "queue_full": "busy",
    "live_task_limit": "busy",
    "queued_bytes_limit": "busy",
    "results_undrained": "busy",
    "deadline_past": "expired",
    "duplicate_task_id": "invalid",
}
"""What the ledger says of work that it does not begin, and how that is told."""

log = logging.getLogger(__name__)


class Provider(PeerService):
    """Lives on one loop. `run` it to attend to what an earlier run has left; `stop` it before the ledger closes."""

    def __init__(
        self,
        context: PeerContext,
        catalogue: Catalogue,
        used: Callable[[TaskId], Mapping[str, Any] | None] = lambda _: None,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(context)
        self._draining = draining
        self._catalogue = catalogue
        self._used = used
        self._rate = OfferRate(context.settings, self._monotonic_ms)
        self._attending: dict[DelegationKey, asyncio.Task[None]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()

    # What we offer

    async def offering(self, peer: Peer) -> OfferedProfiles:
        active = len(await self._ledger.delegations_live(DelegationRole.PROVIDER))
        profiles = tuple(self._profiles(peer).values()) if not is_barred(peer, self._settings) else ()
        return OfferedProfiles(profiles, active, max(0, self._settings.slots - active))

    def _profiles(self, peer: Peer) -> dict[str, Profile]:
        most = max(1, budget_max(peer, self._settings))
        budgets, prices = amounts_of(self._settings.profile_budgets), amounts_of(self._settings.prices)
        found: dict[str, Profile] = {}
        tenant = self._ledger.tenant(peer.tenant)
        if peer.tenant != DEFAULT and (tenant is None or tenant.disabled_at_ms is not None):
            return found
        for agent in self._catalogue.agents(peer.tenant):
            if agent.offered_to_peers(self._settings.profiles) and len(found) < PROFILES_MAX:
                about = agent.definition.description or agent.definition.goal
                found[agent.id] = Profile(
                    name=agent.id,
                    description=about[:DESCRIPTION_CHARS_MAX],
                    max_token_budget=max(1, min(most, budgets.get(agent.id, most))),
                    price=prices.get(agent.id, msgspec.UNSET),
                )
        return found

    # What is heard

    async def hear(self, incoming: IncomingMessage) -> ReceivedFromPeer:
        match incoming.message:
            case DelegationOffer() as offer:
                return await self._hear_offer(incoming, offer)
            case DelegationCancel() as cancel:
                return await self._hear_cancel(incoming, cancel)
            case DelegationInput() as answer:
                return await self._hear_answer(incoming, answer)
            case other:
                raise Invalid("type_not_supported", f"a provider is not sent a {wire.type_of(other)}")

    async def _hear_offer(self, incoming: IncomingMessage, offer: DelegationOffer) -> ReceivedFromPeer:
        key = DelegationKey(DelegationRole.PROVIDER, incoming.peer.id, offer.offer_id)
        known = await self._ledger.delegation(key)
        if known is not None:
            return await self._answer_again(incoming, offer, known)
        try:
            terms = await self._judge(offer, incoming)
            heard = await self._accept(incoming, offer, terms)
        except OfferRejected as rejected:
            return await self._reject(incoming, offer, rejected)
        except Refusal as refusal:
            code = _REFUSED.get(refusal.code)
            if code is None:
                raise
            return await self._reject(incoming, offer, OfferRejected(code, refusal.message, refusal.retry_after_ms))
        if heard.known:
            over = OfferRejected("expired", "this offer was accepted before, and its result is no longer kept")
            reject = await redact_aside(_rejecting(offer, over), self._settings.redaction, key)
            await self._ledger.commit(
                SendToPeer(
                    key=key,
                    begin=_begin(incoming.peer, offer),
                    happenings=("offer", "reject"),
                    changes=_why(reject),
                    said=(outgoing(reject.message),),
                )
            )
        elif heard.moved is not None and heard.moved.changed:
            self._attend(key)
        return heard

    async def _judge(self, offer: DelegationOffer, incoming: IncomingMessage) -> AgreedTerms:
        ledger, peer, now_ms = self._ledger, incoming.peer, self._now_ms()
        # What was on its way for long counts as skew too: no more than clocks may be apart.
        skew_ms = max(-SKEW_MS, min(SKEW_MS, now_ms - (incoming.envelope.sent_at_ms or now_ms)))
        live = await ledger.delegations_live(DelegationRole.PROVIDER, peer.id)
        accepted, used = await self._used_today(peer, now_ms)
        facts = OfferFacts(
            active=len(await ledger.delegations_live(DelegationRole.PROVIDER)),
            active_of_peer=len(live),
            profiles=self._profiles(peer),
            us=self._keyring,
            now_ms=now_ms,
            ages=ledger.clock.ages,
            skew_ms=skew_ms,
            draining=self._draining(),
            accepted_today=accepted,
            tokens_today=used + sum(each.budget for each in live),
        )
        return judge_offer(offer, peer, facts, self._settings, rate=self._rate, revoked=ledger.token_revoked)

    async def _used_today(self, peer: Peer, now_ms: int) -> tuple[int, int]:
        """Offers accepted and tokens used; not looked up where nothing depends on them."""
        if daily_quota(peer, self._settings) == (None, None):
            return 0, 0
        found = await self._ledger.peer_usage(day_of(now_ms), peer.id)
        ours = [each for each in found if each.role is DelegationRole.PROVIDER]
        return sum(each.accepted for each in ours), sum(each.tokens for each in ours)

    async def _accept(self, incoming: IncomingMessage, offer: DelegationOffer, terms: AgreedTerms) -> ReceivedFromPeer:
        begin = msgspec.structs.replace(
            _begin(incoming.peer, offer),
            budget=terms.budget,
            timeout_ms=terms.timeout_ms,
            depth_remaining=terms.depth_remaining,
            status_interval_ms=terms.status_interval_ms,
        )
        task = self._task(incoming.peer, offer, terms)
        self._check(task, terms.profile)
        return await self._ledger.commit(
            ReceiveFromPeer(
                envelope=incoming.envelope,
                key=begin.key,
                by=as_agent(incoming.peer),
                begin=begin,
                happenings=("offer", "accept"),
                said=(outgoing(_accepting(begin)),),
                accept=Begin(task=task, digest=_digest(incoming.peer, offer)),
            )
        )

    async def _reject(
        self, incoming: IncomingMessage, offer: DelegationOffer, rejected: OfferRejected
    ) -> ReceivedFromPeer:
        begin = _begin(incoming.peer, offer)
        reject = await redact_aside(_rejecting(offer, rejected), self._settings.redaction, begin.key)
        return await self._ledger.commit(
            ReceiveFromPeer(
                envelope=incoming.envelope,
                key=begin.key,
                by=as_agent(incoming.peer),
                begin=begin,
                happenings=("offer", "reject"),
                changes=_why(reject),
                said=(outgoing(reject.message),),
            )
        )

    async def _answer_again(
        self, incoming: IncomingMessage, offer: DelegationOffer, known: Delegation
    ) -> ReceivedFromPeer:
        """As before. What has ended is told already, or is on its way, unless a ledger was restored since."""
        if not known.ended:
            heard = await self._ledger.commit(
                ReceiveFromPeer(
                    envelope=incoming.envelope,
                    key=known.key,
                    happenings=("offer",),
                    said=(outgoing(_accepting(known)),),
                )
            )
            self._attend(known.key)
            return heard
        heard = await self._ledger.commit(ReceiveFromPeer(envelope=incoming.envelope, key=known.key))
        envelope = incoming.envelope
        restored = (envelope.epoch, envelope.our_epoch) != (known.peer_epoch, known.epoch)
        anew = restored or envelope.seq is None or envelope.seq > known.heard
        if restored and known.state is not REJECTED:
            self._tell_again(known, offer)
        if anew and known.state is REJECTED:
            reject = DelegationReject(
                offer_id=known.offer_id,
                code=msgspec.convert(known.code, RejectCode),
                reason=known.reason or "",
                retry_after=known.retry_after_ms,
            )
            cleared = await redact_aside(reject, self._settings.redaction, known.key)
            await self._ledger.commit(SendToPeer(key=known.key, said=(outgoing(cleared.message),)))
        return heard

    async def _hear_cancel(self, incoming: IncomingMessage, cancel: DelegationCancel) -> ReceivedFromPeer:
        key = DelegationKey(DelegationRole.PROVIDER, incoming.peer.id, cancel.offer_id)
        if await self._ledger.delegation(key) is None:
            return await self._refuse_withdrawn(incoming, key)
        heard = await self._ledger.commit(ReceiveFromPeer(envelope=incoming.envelope, key=key, happenings=("cancel",)))
        delegation = heard.moved.delegation if heard.moved is not None else None
        if delegation is not None and delegation.state is CANCELLING:
            reason = cancel.reason or "cancelled by the peer"
            # The attendant sees it end, and says so. If this does not come to it, the attendant of the next run does.
            with suppress(NotFound):
                await self._ledger.commit(
                    EndTask(task_id=delegation.task_id, by=as_agent(incoming.peer), reason=reason)
                )
            self._attend(key)
        return heard

    async def _hear_answer(self, incoming: IncomingMessage, answer: DelegationInput) -> ReceivedFromPeer:
        """Kept with the delegation first: if this does not come to its task, the attendant of the next run does."""
        key = DelegationKey(DelegationRole.PROVIDER, incoming.peer.id, answer.offer_id)
        known = await self._ledger.delegation(key)
        changes = DelegationChanges(answer=answer) if known is not None and not known.ended else DelegationChanges()
        heard = await self._ledger.commit(ReceiveFromPeer(envelope=incoming.envelope, key=key, changes=changes))
        delegation = heard.moved.delegation if heard.moved is not None and heard.moved.changed else None
        if delegation is not None and delegation.answer is not None:
            await TaskReporter(self._context, key, self._used).take_answer(delegation)
            self._attend(key)
        return heard

    async def _refuse_withdrawn(self, incoming: IncomingMessage, key: DelegationKey) -> ReceivedFromPeer:
        """The cancel came without its offer. The requester is told that nothing was begun, and nothing ever will be."""
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
                happenings=("offer", "reject"),
                changes=DelegationChanges(code=reject.code, reason=reject.reason),
                said=(outgoing(reject),),
            )
        )

    # The work

    def _task(self, peer: Peer, offer: DelegationOffer, terms: AgreedTerms) -> Task:
        agent = self._catalogue.agent(peer.tenant, terms.profile)
        parts: list[Content] = [Text(offer.task)]
        if offer.context:
            parts.append(Resource(Embedded(uri="", mimeType="text/plain", text=offer.context), filename=CONTEXT))
        parts += blocks_named_safely(unreserved_parts(offer.parts))
        return build_task(
            work_id(peer, offer.offer_id),
            sender=as_agent(peer),
            recipient=self._catalogue.identity(peer.tenant, terms.profile),
            intent_text=offer.task,
            deadline_ms=terms.deadline_ms,
            parts=tuple(parts),
            definition=agent.definition if agent is not None else None,
            timeout_ms=terms.timeout_ms,
            tenant=peer.tenant,
            origin=PEER,
            # What it delegates is one deeper, and may be so as often as is left.
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

    def _check(self, task: Task, profile: str) -> None:
        """As at every other door. `OfferRejected` says what the agent cannot take."""
        agent = self._catalogue.agent(task.tenant or DEFAULT, profile)
        message = first_message(task)
        try:
            check_size(fingerprint(task)[1], TASK_BYTES_MAX)
            if agent is not None:
                asked = Message(message_id=task.id, parts=message.parts)
                check_message(asked, agent, agent.definition.extensions)
        except Refusal as refusal:
            raise OfferRejected("invalid", refusal.message) from None

    # Attending

    async def run(self) -> None:
        for delegation in await self._ledger.delegations_live(DelegationRole.PROVIDER):
            self._attend(delegation.key)
        await self._stopped.wait()

    async def stop(self) -> None:
        """What is under way is attended to by the next run."""
        self._stopped.set()
        attending = (*self._attending.values(), *self._telling)
        for each in attending:
            each.cancel()
        await asyncio.gather(*attending, return_exceptions=True)

    def _attend(self, key: DelegationKey) -> None:
        if key not in self._attending and not self._stopped.is_set():
            self._attending[key] = attending = asyncio.ensure_future(self._see_through(key))
            attending.add_done_callback(lambda _: self._attending.pop(key, None))

    def _tell_again(self, known: Delegation, offer: DelegationOffer) -> None:
        """The result of what has ended, made again from its task: whoever asks has forgotten it, or never had it."""
        accept = outgoing(_accepting(known))
        reporter = TaskReporter(self._context, known.key, self._used)
        telling = asyncio.ensure_future(reporter.tell_again(msgspec.structs.replace(known, offer=offer), accept))
        self._telling.add(telling)
        telling.add_done_callback(self._told_again)

    def _told_again(self, telling: asyncio.Task[None]) -> None:
        self._telling.discard(telling)
        if not telling.cancelled() and (failure := telling.exception()) is not None:
            log.warning("peer.not_told_again", extra={"reason": str(failure)})

    async def _see_through(self, key: DelegationKey) -> None:
        while True:
            try:
                await TaskReporter(self._context, key, self._used).run()
                return
            except Refusal as refusal:
                log.warning("peer.unattended", extra={"offer_id": key.offer_id, "code": refusal.code})
            except Exception:
                log.exception("peer.unattended", extra={"offer_id": key.offer_id})
            await asyncio.sleep(RESTART_S)


def work_id(peer: Peer, offer_id: str) -> TaskId:
    """The task that this offer of this peer is done as: what the provider calls the delegation."""
    return call_id(TaskId(peer.id), "offer", offer_id)


def _begin(peer: Peer, offer: DelegationOffer) -> Delegation:
    work = work_id(peer, offer.offer_id)
    return Delegation.offered(DelegationRole.PROVIDER, peer.id, work, offer, delegation_id=work)


def _digest(peer: Peer, offer: DelegationOffer) -> str:
    """Equal for the same offer, whatever is agreed each time."""
    return hashlib.sha256(peer.id.encode() + b"\n" + wire.encode(offer)).hexdigest()


def _accepting(delegation: Delegation) -> DelegationAccept:
    return DelegationAccept(
        offer_id=delegation.offer_id,
        delegation_id=delegation.delegation_id or delegation.task_id,
        max_token_budget=delegation.budget,
        timeout=delegation.timeout_ms,
        status_interval=max(100, delegation.status_interval_ms),
    )


def _rejecting(offer: DelegationOffer, rejected: OfferRejected) -> DelegationReject:
    return DelegationReject(
        offer_id=offer.offer_id,
        code=rejected.code,
        reason=rejected.reason,
        retry_after=rejected.retry_after_ms if rejected.code != "busy" else rejected.retry_after_ms or BUSY_RETRY_MS,
        versions=SUPPORTED_VERSIONS if rejected.code == "version" else None,
    )


def _why(reject: Redacted[DelegationReject]) -> DelegationChanges:
    """In the words that the peer is told: whoever asks again is told the same."""
    told = reject.message
    return DelegationChanges(code=told.code, reason=told.reason, retry_after_ms=told.retry_after, redacted=reject.found)
