"""The services of peers, put together, run and stopped; and what an operator can ask of them, over any door."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import target_of
from covenant.exchange.tasks.builder import build_task
from covenant.exchange.tasks.reader import TaskReader, read_tree
from covenant.exchange.tasks.writer import TaskWriter
from covenant.ledger.contract.tasks import TreeNode
from covenant.ledger.machine.commands import Cancel
from covenant.ledger.machine.decisions.peers import unknown_delegation
from covenant.ledger.machine.peer_commands import ChangePeer, RevokeToken
from covenant.model.content import Text
from covenant.model.errors import Conflict, CovenantError, Invalid, NotFound, Refusal
from covenant.model.ids import AgentId, TaskId, parse_task_id
from covenant.model.peers.delegation import (
    OFFERED,
    OUTCOMES,
    PROOF,
    Delegation,
    DelegationBegun,
    DelegationEvidence,
    DelegationRole,
    LoggedMessage,
    Peer,
    PeerCapabilities,
    PendingMessages,
)
from covenant.model.peers.delegation_messages import Proof
from covenant.model.peers.instance import SUPPORTED_VERSIONS, InstanceId, Trust
from covenant.model.rate_limits import Backoff
from covenant.model.task import NATIVE, PEERS, Target, fingerprint
from covenant.model.task_event import StatusUpdate
from covenant.model.task_view import TaskState
from covenant.model.tenants import DEFAULT
from covenant.outbound.remote.remote_task import answer_text
from covenant.peers.directory.peer_directory import IDENTITY_CHANGED, PeerDirectory, read_peer_entry
from covenant.peers.discovery.candidates import Candidate
from covenant.peers.discovery.discovery_service import Discovery, DiscoveryMethod
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.provider.provider_service import Provider
from covenant.peers.requester.offers import task_outcome
from covenant.peers.requester.requester_service import Requester
from covenant.peers.transport.inbox import Inbox
from covenant.peers.transport.outbox_sender import OutboxSender
from covenant.seal.keys import from_base64url
from covenant.wire.peers import DelegateRequest

AT_ONCE_MAX: Final = 64
"""Peers that are tried at once. One that is silent takes its time, and holds up nobody."""
FIRST_MS: Final = 1_000
RETRIES: Final = Backoff(FIRST_MS, longest=300_000)
ROUND_S: Final = 1.0

log = logging.getLogger(__name__)


class _Tried(NamedTuple):
    times: int
    at_ms: int
    next_ms: int
    heard_at_ms: int
    """When it had been heard from, the last time that it was tried."""


_NEVER: Final = _Tried(0, 0, 0, 0)


class PeerMaintenance(PeerService):
    def __init__(self, context: PeerContext, directory: PeerDirectory) -> None:
        super().__init__(context)
        self._directory = directory
        self._unsettled: dict[str, None] = {}
        self._tried: dict[str, _Tried] = {}
        self._trying: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(AT_ONCE_MAX)
        self._stirred = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        context.ledger.on_peer(self._stir)

    def _stir(self, peer_id: InstanceId) -> None:
        peer = self._ledger.peer(peer_id)
        if peer is not None and self._wanting(peer):
            self._stirred.set()

    async def run(self) -> None:
        self._running = asyncio.current_task()
        while True:
            self._stirred.clear()
            await self._begin()
            with suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await self._stirred.wait()

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        trying = tuple(self._trying.values())
        for each in trying:
            each.cancel()
        await asyncio.gather(*trying, return_exceptions=True)
        await self._directory.stop()

    def add_static(self, entries: Iterable[str]) -> None:
        """The peers that the settings give (`read_peer_entry`): they are added as soon as that can be done."""
        self._unsettled = dict.fromkeys(entries)
        self._tried = {key: tried for key, tried in self._tried.items() if key not in self._unsettled}
        self._stirred.set()

    async def settle_static(self, entries: Iterable[str]) -> None:
        self.add_static(entries)
        await self.sweep()

    async def sweep(self) -> None:
        """Try all that are due, and wait until each was."""
        await self._begin()
        await asyncio.gather(*self._trying.values())

    async def _begin(self) -> None:
        """Each by itself, and no two tries of one at once."""
        await self._rotate()
        self._forget()
        entries = [entry for entry in self._unsettled if self._monotonic_ms() >= self._tried.get(entry, _NEVER).next_ms]
        due = [(entry, 0, partial(self._settle, entry)) for entry in entries]
        due += [
            (peer.id, peer.heard_at_ms, partial(self._look, peer))
            for peer in self._ledger.peers()
            if self._wanting(peer)
        ]
        for key, heard_at_ms, work in due:
            if key not in self._trying:
                self._trying[key] = asyncio.create_task(self._try(key, heard_at_ms, work))

    async def _rotate(self) -> None:
        clock = self._ledger.clock
        if clock.is_paused() and clock.ages.steps[-1].step_ms > 0:
            # By a clock that was set forward just now, no key is thrown away.
            return
        if not self._keyring.due(self._now_ms()):
            return
        try:
            await asyncio.to_thread(self._keyring.rotate, self._now_ms())
        except (OSError, CovenantError) as error:  # those that there are go on for another day
            log.warning("peers.prekeys_not_renewed", extra={"reason": str(error)})

    def _wanting(self, peer: Peer) -> bool:
        untold = self._epoch_for(peer) != peer.told_epoch
        if peer.url is None and untold and peer.challenge is None and not peer.denied:
            return True  # it hears of it when it fetches
        if peer.url is None or peer.denied or not (_unverified(peer) or peer.conflict is not None or untold):
            return False
        tried, now_ms = self._tried.get(peer.id, _NEVER), self._monotonic_ms()
        # One that is heard from knows us, and answers; one that talks without end is not called without end.
        heard = peer.heard_at_ms > tried.heard_at_ms and now_ms >= tried.at_ms + FIRST_MS
        return heard or now_ms >= tried.next_ms

    async def _try(self, key: str, heard_at_ms: int, work: Callable[[], Awaitable[None]]) -> None:
        async with self._places:
            try:
                await work()
            except Refusal as failed:
                times = self._tried.get(key, _NEVER).times
                if times == 0:
                    log.warning("peer.retried", extra={"peer": key, "reason": str(failed)})
                now_ms = self._monotonic_ms()
                next_ms = now_ms + int(RETRIES.pause(times + 1))
                self._tried[key] = _Tried(times + 1, now_ms, next_ms, heard_at_ms)
            else:
                self._tried.pop(key, None)
            finally:
                del self._trying[key]

    async def _settle(self, entry: str) -> None:
        place = read_peer_entry(entry)
        try:
            await self._directory.add(self._us, url=place.url, peer_id=place.peer_id, name=place.name, source="setting")
        except Conflict as conflict:
            if conflict.code != "peer_exists":
                raise
            # An operator has changed its name or address since: that is newer than the setting.
        self._unsettled.pop(entry, None)

    async def _look(self, peer: Peer) -> None:
        if peer.conflict is not None:
            peer = await self._directory.refresh(peer)
            if peer.conflict is not None:
                raise Conflict(peer.conflict, f"something else is at the address of {peer.name}")
        if _unverified(peer) or self._epoch_for(peer) != peer.told_epoch:
            await self._directory.verify(peer)

    def _forget(self) -> None:
        known = {*self._unsettled, *(peer.id for peer in self._ledger.peers())}
        self._tried = {key: tried for key, tried in self._tried.items() if key in known}


def _unverified(peer: Peer) -> bool:
    """Never verified. One that was, and is a mere peer, was lowered by an operator."""
    return peer.trust is Trust.PEER and peer.verified_at_ms is None


class PeerServices:
    """For one loop. `used`: what a task at work has used so far, where that is known here. `draining`: whether nothing
    new is taken any more."""

    def __init__(
        self,
        context: PeerContext,
        catalogue: Catalogue,
        used: Callable[[TaskId], Mapping[str, Any] | None] = lambda _: None,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.context = context
        self.catalogue = catalogue
        self.provider = Provider(context, catalogue, used, draining)
        self.directory = PeerDirectory(context, self.provider.offering)
        self.requester = Requester(context, self.directory)
        self.inbox = Inbox(context, self.directory, self.provider, self.requester)
        self.outbox = OutboxSender(context, self.directory, self.inbox)
        self.maintenance = PeerMaintenance(context, self.directory)

    async def run(self, static: Sequence[str]) -> None:
        async with asyncio.TaskGroup() as group:
            for run in (self.provider.run, self.requester.run, self.outbox.run):
                group.create_task(run())
            self.maintenance.add_static(static)
            await self.maintenance.run()

    async def stop(self) -> None:
        """Before the ledger closes. Work that is under way is found again by the next run."""
        self.inbox.close()
        await self.provider.stop()
        await self.requester.stop()
        await self.outbox.stop()
        await self.maintenance.stop()


STEPS_MAX: Final = 1_000


class PeerAdmin(PeerService):
    """`config`: the settings of `[peers]` as they are shown."""

    def __init__(
        self,
        services: PeerServices,
        writer: TaskWriter,
        config: dict[str, Any],
        discovery: Discovery,
        new_id: Callable[[], str],
    ) -> None:
        super().__init__(services.context)
        self.id = self._keyring.id
        self.name = self._settings.name or self.id[-8:]
        self.config = config
        self.find = services.directory.find
        self.remove = services.directory.remove
        self.change = services.directory.change
        self.succeed = services.directory.succeed
        self._services = services
        self._catalogue = services.catalogue
        self._writer = writer
        self._tasks = TaskReader(self._ledger)
        self._discovery = discovery
        self._new_id = new_id

    # Peers

    async def peers(self) -> Sequence[Peer]:
        await self._ledger.durable()
        return self._ledger.peers()

    async def waiting(self, peer: InstanceId) -> PendingMessages:
        troubles = [each for each in self._services.outbox.troubles() if each.peer == peer]
        first = min(troubles, key=lambda each: each.next_ms, default=None)
        count = len(await self._ledger.parcels(peer))
        return PendingMessages(count, first.failure, first.next_ms) if first is not None else PendingMessages(count)

    async def add(
        self, by: AgentId, *, url: str | None, peer_id: str | None, name: str | None
    ) -> tuple[Peer, str | None]:
        peer = await self._services.directory.add(by, url=url, peer_id=peer_id, name=name)
        return peer, None if peer.trust.covers(Trust.VERIFIED) else _next_step(peer, self.id)

    async def verify(self, named: str) -> Peer:
        peer = self.find(named)
        try:
            return await self._services.directory.verify(peer)
        except Conflict as conflict:
            if conflict.code != IDENTITY_CHANGED or self._ledger.peer(peer.id) is not None:
                raise
        # Its old key has just named another one: that is who is asked now.
        return await self.verify(peer.name)

    async def revoke_tokens(self, by: AgentId, named: str) -> int:
        """It is given none from here on, until the operator says again how far it is trusted."""
        peer = self.find(named)
        await self._ledger.commit(ChangePeer(id=peer.id, by=by, tokenless=True))
        for token in peer.issued:
            await self._ledger.commit(RevokeToken(by=by, token_id=token.id, until_ms=token.until_ms))
        return len(peer.issued)

    async def discover(self, timeout_s: float) -> tuple[Sequence[Candidate], Sequence[DiscoveryMethod]]:
        return await self._discovery.scan(timeout_s), self._discovery.ways()

    async def capabilities(self, named: str | None, *, fresh: bool) -> tuple[str | None, PeerCapabilities]:
        if named is None:
            return None, await self._own()
        peer = self.find(named)
        return peer.name, await self._services.directory.capabilities(peer, fresh=fresh)

    async def _own(self) -> PeerCapabilities:
        now_ms = self._ledger.now_ms()
        ours = await self._services.provider.offering(Peer(id=self.id, name=self.name, trust=Trust.TRUSTED))
        return PeerCapabilities(
            profiles=ours.profiles,
            versions=SUPPORTED_VERSIONS,
            active_delegations=ours.active,
            free_slots=ours.free,
            trust_level=Trust.TRUSTED,
            issued_at_ms=now_ms,
            expires_at_ms=now_ms + self._settings.capabilities_life_ms,
        )

    # Delegations

    async def delegate(self, by: AgentId, asked: DelegateRequest) -> DelegationBegun:
        """To an agent of this instance, if it has the profile and no peer was named; otherwise to a peer."""
        peer, profile, context = asked.peer_id, asked.profile, asked.context
        here = peer is None and profile is not None and self._catalogue.agent(DEFAULT, profile) is not None
        to, name = (None, profile or "") if here else await self._provider_of(peer, profile)
        likely = to or self._services.requester.provider(name)
        made_id = parse_task_id(asked.id) if asked.id is not None else TaskId(self._new_id())
        task = build_task(
            made_id,
            sender=by,
            recipient=self._catalogue.identity(DEFAULT, name if here else PEERS),
            parts=(Text(asked.task),),
            timeout_ms=asked.timeout,
            tenant=DEFAULT,
            origin=NATIVE,
            request_metadata={"context": context} if here and context else None,
            target=None
            if here
            else Target(
                peer=to.id if to is not None else None, profile=name, budget=asked.max_token_budget, context=context
            ),
        )
        accepted = await self._writer.accept(task, fingerprint(task)[0])
        asks = likely.id if likely is not None and not here else None
        return DelegationBegun(made_id, asks, name, accepted.duplicate, not here)

    async def _provider_of(self, named: str | None, profile: str | None) -> tuple[Peer | None, str]:
        """The peer that was named, if one was: otherwise the task goes to whichever can do it when it is offered."""
        if named is None:
            requester = self._services.requester
            if requester.provider(profile or "") is None and requester.is_introduced():
                raise NotFound("no_profile", f"no agent here and no peer offers {profile!r}; see `covenant peers list`")
            return None, profile or ""
        peer = self.find(named)
        if profile is not None:
            return peer, profile
        _, offered = await self.capabilities(peer.id, fresh=False)
        names = [each.name for each in offered.profiles]
        if len(names) != 1:
            raise Invalid("profile_needed", f"name one of what {peer.name} offers: {', '.join(names) or 'nothing'}")
        return peer, names[0]

    async def delegations(self) -> Sequence[Delegation]:
        await self._ledger.durable()
        return [await self._services.requester.shown(each) for each in await self._ledger.delegations()]

    async def find_delegation(self, named: str) -> Delegation:
        found = await self._ledger.delegation_of(TaskId(named))
        for each in (found,) if found is not None else await self._ledger.delegations():
            if each is found or named in (each.offer_id, each.delegation_id):
                return await self._services.requester.shown(each)
        raise unknown_delegation(named)

    async def standing(self, named: str) -> Delegation:
        """As `find_delegation`; and of a task that was not offered yet, or whose delegation is not kept any more."""
        try:
            return await self.find_delegation(named)
        except NotFound as unknown:
            view = (await self._tasks.past(parse_task_id(named))).view()
            if view is None or view.task.tenant != DEFAULT:
                raise unknown from None
            target = target_of(view.task) or Target(peer=self.id, profile=view.task.recipient.display.partition("@")[0])
            if not target.of_peer or (target.peer == self.id and view.task.origin != NATIVE):
                raise unknown from None
        code = (view.result.metadata or {}).get("code") if view.result is not None else None
        return Delegation(
            role=DelegationRole.REQUESTER,
            peer=InstanceId(target.peer or ""),
            offer_id=view.task.id,
            task_id=view.task.id,
            profile=target.profile or "",
            state=OUTCOMES[task_outcome(view)] if view.state.terminal else OFFERED,
            budget=target.budget or self._settings.budget_default,
            timeout_ms=view.task.timeout_ms or self._settings.timeout_ms,
            made_at_ms=view.created_at_ms,
            moved_at_ms=view.updated_at_ms,
            code=code if isinstance(code, str) else None,
        )

    async def outcome(self, delegation: Delegation) -> tuple[str | None, str | None]:
        view = (await self._tasks.past(delegation.task_id)).view()
        if view is None or not view.state.terminal:
            return None, None
        text = answer_text(view.state, view.message, view.artifacts, view.history)
        return (text, None) if view.state is TaskState.COMPLETED else (None, text or view.state.value)

    async def cancel(self, by: AgentId, named: str, reason: str) -> Delegation:
        delegation = await self.standing(named)
        if delegation.ended:
            raise Conflict("already_ended", f"this delegation has ended: {delegation.state.value}")
        if await self._ledger.delegation(delegation.key) is not None and delegation.role is DelegationRole.REQUESTER:
            await self._services.requester.cancel(delegation.task_id, reason or "canceled by the operator")
        await self._ledger.commit(
            Cancel(task_id=delegation.task_id, by=by, reason=reason or "canceled by the operator")
        )
        return await self.standing(named)

    async def offer_again(self, by: AgentId, named: str) -> Delegation:
        return await self._services.requester.offer_again(by, (await self._asked_for(named)).task_id)

    async def force_error(self, by: AgentId, named: str, reason: str) -> Delegation:
        return await self._services.requester.force_error(by, (await self._asked_for(named)).task_id, reason)

    async def _asked_for(self, named: str) -> Delegation:
        delegation = await self.find_delegation(named)
        if delegation.role is not DelegationRole.REQUESTER:
            raise Conflict("not_ours", "a peer asked for this one; cancel it instead")
        return delegation

    async def evidence(self, named: str) -> DelegationEvidence:
        task_id = await self._task_id(named)
        parts: dict[tuple[str, int], dict[int, str]] = {}
        steps = await self._ledger.steps(task_id, 0, STEPS_MAX)
        while steps:
            for step in reversed(steps):
                what = step.what
                proof = (what.metadata or {}).get(PROOF) if isinstance(what, StatusUpdate) else None
                if isinstance(proof, dict) and "sha256" in proof:
                    found = parts.setdefault((proof["sha256"], proof["of"]), {})
                    found[proof["part"]] = proof["data"]
                    proof = _joined(proof["sha256"], proof["of"], found)
                if isinstance(proof, dict):
                    signed = msgspec.convert(proof["proof"], Proof) if proof.get("proof") else None
                    return DelegationEvidence(proof.get("offer"), proof.get("result"), proof.get("transcript"), signed)
            steps = await self._ledger.steps(task_id, steps[-1].generation, STEPS_MAX)
        raise NotFound(
            "no_proof", "there is no proof: the delegation has not ended, was done here, or came without one"
        )

    async def tree(self, named: str) -> TreeNode:
        tree = await read_tree(self._ledger, await self._task_id(named), None)
        if tree.task is None and not tree.children:
            raise unknown_delegation(named)
        return tree

    async def _task_id(self, named: str) -> TaskId:
        """Of a delegation that is known, or of one so old that only its task is."""
        try:
            return (await self.find_delegation(named)).task_id
        except NotFound:
            return parse_task_id(named)

    async def messages(self) -> Sequence[LoggedMessage]:
        await self._ledger.durable()
        return await self._ledger.message_log()


def _joined(sha256: str, count: int, parts: Mapping[int, str]) -> dict[str, Any] | None:
    """Large evidence, once all its parts are there."""
    if len(parts) < count:
        return None
    whole = from_base64url("".join(parts[number] for number in range(count)))
    return msgspec.json.decode(whole, type=dict[str, Any]) if hashlib.sha256(whole).hexdigest() == sha256 else None


def _next_step(peer: Peer, us: InstanceId) -> str:
    told = f"it must know us too; on its side: covenant peers add OUR-URL --id {us}"
    if peer.url is None:
        return f"{peer.name} will be verified when it fetches. For that {told}"
    return f"{peer.name} will be verified as soon as it answers. For that {told}"
