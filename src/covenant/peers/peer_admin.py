"""What an operator can ask of peers and delegations, over any door."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from covenant.exchange.delegation import target_of
from covenant.exchange.delegation_evidence import read_task_evidence
from covenant.exchange.id_prefixes import choose, find_task_id
from covenant.exchange.tasks.builder import build_task
from covenant.exchange.tasks.reader import TaskReader, read_tree
from covenant.exchange.tasks.writer import TaskWriter
from covenant.ledger.contract.tasks import TreeNode
from covenant.ledger.machine.commands import Cancel
from covenant.ledger.machine.decisions.peers import unknown_delegation
from covenant.ledger.machine.peer_commands import ChangePeer, RevokeToken
from covenant.model.content import Text
from covenant.model.errors import Conflict, Invalid, NotFound
from covenant.model.ids import AgentId, TaskId, parse_task_id
from covenant.model.peers.delegation import (
    OFFERED,
    OUTCOMES,
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
from covenant.model.peers.instance import InstanceId, Trust
from covenant.model.task import NATIVE, PEERS, Target, fingerprint
from covenant.model.task_view import TaskState
from covenant.model.tenants import DEFAULT
from covenant.outbound.remote.remote_task import answer_text
from covenant.peers.directory.peer_directory import IDENTITY_CHANGED
from covenant.peers.discovery.candidates import Candidate
from covenant.peers.discovery.discovery_service import Discovery, DiscoveryMethod
from covenant.peers.peer_services import PeerServices
from covenant.peers.peer_settings import PeerService
from covenant.peers.provider.offer_admission import daily_quota
from covenant.peers.requester.offers import task_outcome
from covenant.wire.peers import DelegateRequest


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
        self.quota = partial(daily_quota, settings=self._settings)
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
        self, by: AgentId, *, url: str | None, peer_id: str | None, name: str | None, tenant: str = DEFAULT
    ) -> tuple[Peer, str | None]:
        peer = await self._services.directory.add(by, url=url, peer_id=peer_id, name=name, tenant=tenant)
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
            versions=self._services.context.keyring.versions,
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
        tenant = to.tenant if to is not None else DEFAULT
        likely = to or self._services.requester.provider(name)
        made_id = parse_task_id(asked.id) if asked.id is not None else TaskId(self._new_id())
        task = build_task(
            made_id,
            sender=by,
            recipient=self._catalogue.identity(tenant, name if here else PEERS),
            parts=(Text(asked.task),),
            timeout_ms=asked.timeout,
            tenant=tenant,
            origin=NATIVE,
            request_metadata={"context": context} if here and context else None,
            target=None
            if here
            else Target(
                peer=to.id if to is not None else None, profile=name, budget=asked.max_token_budget, context=context
            ),
        )
        accepted = await self._writer.accept(await self._writer.with_files(task), fingerprint(task)[0])
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
        """By the id of its task, its offer or itself, or by how one of them begins."""
        found = await self._ledger.delegation_of(TaskId(named))
        if found is None:
            known = await self._ledger.delegations() if named else ()
            begun = [each for each in known if any(name and name.startswith(named) for name in _names(each))]
            whole = [each for each in begun if named in _names(each)]
            found = choose(named, whole[:1] or begun, "delegation", _shown)
        return await self._services.requester.shown(found)

    async def standing(self, named: str) -> Delegation:
        """As `find_delegation`; and of a task that was not offered yet, or whose delegation is not kept any more."""
        try:
            return await self.find_delegation(named)
        except NotFound as unknown:
            view = (await self._tasks.past(await self._of_task(named, unknown))).view()
            if view is None:
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
        proof = await read_task_evidence(self._ledger, await self._task_id(named))
        if proof is not None:
            signed = msgspec.convert(proof["proof"], Proof) if proof.get("proof") else None
            return DelegationEvidence(proof.get("offer"), proof.get("result"), proof.get("transcript"), signed)
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
        except NotFound as unknown:
            return await self._of_task(named, unknown)

    async def _of_task(self, named: str, unknown: NotFound) -> TaskId:
        """Of the task that begins so; where there is none, what was looked for is not known."""
        try:
            return await find_task_id(self._ledger, named)
        except NotFound:
            raise unknown from None

    async def messages(self) -> Sequence[LoggedMessage]:
        await self._ledger.durable()
        return await self._ledger.message_log()


def _names(delegation: Delegation) -> tuple[str, str, str | None]:
    return delegation.task_id, delegation.offer_id, delegation.delegation_id


def _shown(delegation: Delegation) -> str:
    return f"{delegation.task_id}  {delegation.state.value}  {delegation.profile}"


def _next_step(peer: Peer, us: InstanceId) -> str:
    told = f"it must know us too; on its side: covenant peers add OUR-URL --id {us}"
    if peer.url is None:
        return f"{peer.name} will be verified when it fetches. For that {told}"
    return f"{peer.name} will be verified as soon as it answers. For that {told}"
