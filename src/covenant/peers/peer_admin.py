"""The operator's operations on peers and delegations, for every door.

The `status` of a delegation is that of its task here. Its `state` is the state at the peer, which can be behind: a
canceled task has ended, even while its peer is down and does not know it.

The ledger has a record of a delegation once it is offered. A task that no peer has accepted yet, or that ended before
that, is shown from the task alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import peer_target
from covenant.exchange.delegation_outcome import by_task, read_task_evidence, view_outcome
from covenant.exchange.id_prefixes import choose, find_task_id
from covenant.exchange.tasks.builder import build_task
from covenant.exchange.tasks.reader import TaskReader, read_tree
from covenant.ledger.contract.task_query import PAGE_MAX, FoundTask, TaskQuery
from covenant.ledger.contract.tasks import TreeNode
from covenant.ledger.machine.commands import Cancel
from covenant.ledger.machine.decisions.peers import unknown_delegation
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.ledger.machine.peer_commands import ChangePeer, RevokeToken
from covenant.ledger.machine.states import FINISHED, State
from covenant.model.content import Text
from covenant.model.errors import Conflict, Invalid, NotFound, Unavailable
from covenant.model.ids import AgentId, TaskId, parse_task_id
from covenant.model.peers.delegation import (
    OFFERED,
    OUTCOMES,
    Delegation,
    DelegationBegun,
    DelegationEvidence,
    DelegationRole,
    DelegationView,
    LoggedMessage,
    Peer,
    PeerCapabilities,
    PendingMessages,
)
from covenant.model.peers.delegation_messages import Proof
from covenant.model.peers.instance import InstanceId, KeyCertificate, Trust
from covenant.model.task import NATIVE, PEER_RECIPIENT, Ending, Target, Task, fingerprint, target_of
from covenant.model.task_view import TaskState, TaskView, answer_text
from covenant.model.tenants import DEFAULT
from covenant.peers.directory.peer_directory import IDENTITY_CHANGED, read_peer_entry
from covenant.peers.discovery.candidates import Candidate
from covenant.peers.discovery.discovery_service import Discovery, DiscoveryMethod
from covenant.peers.peer_services import PeerServices
from covenant.peers.peer_settings import PeerContext, PeerService
from covenant.peers.provider.offer_admission import daily_quota
from covenant.peers.requester.placement import INTRODUCTION_MS
from covenant.peers.requester.requester_service import Requester
from covenant.wire.peers import DelegateRequest

INTRODUCTION_POLL_MS: Final = 200
SEARCHED_MAX: Final = 2_000
"""How many tasks for peers a list looks through, the last moved first: live ones, and those that did not complete."""
_LIVE: Final = tuple(state for state in State if state not in FINISHED)
_NOT_COMPLETED: Final = tuple(ending for ending in Ending if ending is not Ending.COMPLETED)


class PeerAdmin(PeerService):
    """`config`: the settings of `[peers]` as they are shown."""

    def __init__(
        self,
        services: PeerServices,
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
        self._writer = services.context.writer
        self._lookup = DelegationLookup(services.context, services.catalogue, services.requester)
        self.delegations = self._lookup.all
        self.delegation = self._lookup.view
        self.task_id = self._lookup.task_id
        self._discovery = discovery
        self._new_id = new_id

    # Peers

    async def peers(self) -> Sequence[Peer]:
        await self._ledger.durable()
        return self._ledger.peers()

    async def waiting(self, peer: InstanceId) -> PendingMessages:
        troubles = [each for each in self._services.outbox.troubles() if each.peer == peer]
        first = min(troubles, key=lambda each: each.next_ms, default=None)
        count = len(await self._ledger.peer_outbox(peer))
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
        # The peer's old key has just named its successor, which is asked now.
        return await self.verify(peer.name)

    async def revoke_tokens(self, by: AgentId, named: str) -> int:
        """Revokes all tokens of a peer. It gets no new one until the operator sets its trust again."""
        peer = self.find(named)
        await self._ledger.commit(ChangePeer(id=peer.id, by=by, tokenless=True))
        for token in peer.issued:
            await self._ledger.commit(RevokeToken(by=by, token_id=token.id, until_ms=token.until_ms))
        return len(peer.issued)

    async def rotate_keys(self, by: AgentId, *, compromised: bool) -> tuple[KeyCertificate, ...]:
        """Makes new purpose keys, and tells peers of them. Work under way goes on."""
        await self._replace_keys(compromised=compromised)
        made = self._keyring.certificates()
        keys = {str(each.purpose): each.key for each in made}
        row: dict[str, object] = {"type": "purpose_keys_rotated", "compromised": compromised, "keys": keys}
        await self._ledger.commit(WriteAuditRow(by=by, row=row))
        self._services.maintenance.announce_keys()
        return made

    async def discover(self, timeout_s: float) -> tuple[Sequence[Candidate], Sequence[DiscoveryMethod]]:
        return await self._discovery.scan(timeout_s), self._discovery.methods()

    async def capabilities(self, named: str | None, *, fresh: bool) -> tuple[str | None, PeerCapabilities]:
        if named is None:
            return None, await self._own_capabilities()
        peer = self.find(named)
        return peer.name, await self._services.directory.capabilities(peer, fresh=fresh)

    async def _own_capabilities(self) -> PeerCapabilities:
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

    async def delegate(self, by: AgentId, request: DelegateRequest) -> DelegationBegun:
        """Delegates to an agent of this instance if it has the profile and no peer was named; otherwise to a peer."""
        peer, profile, context = request.peer_id, request.profile, request.context
        here = peer is None and profile is not None and self._catalogue.agent(DEFAULT, profile) is not None
        to, name = (None, profile or "") if here else await self._provider_of(peer, profile)
        tenant = to.tenant if to is not None else DEFAULT
        likely = to or self._services.requester.placement.provider(name)
        task_id = parse_task_id(request.id) if request.id is not None else TaskId(self._new_id())
        task = build_task(
            task_id,
            sender=by,
            recipient=self._catalogue.identity(tenant, name if here else PEER_RECIPIENT),
            parts=(Text(request.task),),
            timeout_ms=request.timeout,
            tenant=tenant,
            origin=NATIVE,
            request_metadata={"context": context} if here and context else None,
            target=None
            if here
            else Target(
                peer=to.id if to is not None else None, profile=name, budget=request.max_token_budget, context=context
            ),
        )
        accepted = await self._writer.accept(await self._writer.with_files(task), fingerprint(task)[0])
        asked_peer = likely.id if likely is not None and not here else None
        return DelegationBegun(task_id, asked_peer, name, accepted.duplicate, not here)

    async def _provider_of(self, named: str | None, profile: str | None) -> tuple[Peer | None, str]:
        """The peer, if one was named, and the profile.

        Without a named peer, one that can do the task is chosen when the task is offered.
        """
        if named is None:
            placement = self._services.requester.placement
            if placement.provider(profile or "") is None and placement.is_introduced():
                raise NotFound("no_profile", f"no agent here and no peer offers {profile!r}; see `covenant peers list`")
            return None, profile or ""
        peer = await self._find_introduced(named)
        if profile is not None:
            return peer, profile
        _, offered = await self.capabilities(peer.id, fresh=False)
        names = [each.name for each in offered.profiles]
        if len(names) != 1:
            raise Invalid("profile_needed", f"name a profile that {peer.name} offers: {', '.join(names) or 'nothing'}")
        return peer, names[0]

    async def _find_introduced(self, named: str) -> Peer:
        """Finds a peer. Waits for a peer of the settings that has not shown its id yet."""
        for _ in range(INTRODUCTION_MS // INTRODUCTION_POLL_MS):
            try:
                return self.find(named)
            except NotFound:
                is_new = named in {read_peer_entry(each).name for each in self._settings.static}
                if not is_new or not any(pending() for pending in self._context.introducing):
                    raise
            await asyncio.sleep(INTRODUCTION_POLL_MS / 1000)
        raise Unavailable(
            "not_met", f"{named} has not shown its id yet; start it, and try again", retry_after_ms=INTRODUCTION_POLL_MS
        )

    async def cancel(self, by: AgentId, named: str, reason: str) -> Delegation:
        delegation = (await self.delegation(named)).delegation
        if delegation.status in OUTCOMES:
            raise Conflict("already_ended", f"this delegation has ended: {delegation.status}")
        if await self._ledger.delegation(delegation.key) is not None and delegation.role is DelegationRole.REQUESTER:
            await self._services.requester.cancel(delegation.task_id, reason or "canceled by the operator")
        await self._ledger.commit(
            Cancel(task_id=delegation.task_id, by=by, reason=reason or "canceled by the operator")
        )
        return (await self.delegation(named)).delegation

    async def offer_again(self, by: AgentId, named: str) -> Delegation:
        return await self._services.requester.offer_again(by, (await self._requested(named)).task_id)

    async def force_error(self, by: AgentId, named: str, reason: str) -> Delegation:
        return await self._services.requester.force_error(by, (await self._requested(named)).task_id, reason)

    async def _requested(self, named: str) -> Delegation:
        delegation = (await self.delegation(named)).delegation
        if delegation.role is not DelegationRole.REQUESTER:
            raise Conflict("not_ours", "a peer asked for this one; cancel it instead")
        if await self._ledger.delegation(delegation.key) is None:
            raise Conflict("not_lost", "this delegation was not offered to a peer; cancel it instead")
        return delegation

    async def evidence(self, named: str) -> DelegationEvidence:
        proof = await read_task_evidence(self._ledger, await self.task_id(named))
        if proof is not None:
            signed = msgspec.convert(proof["proof"], Proof) if proof.get("proof") else None
            return DelegationEvidence(proof.get("offer"), proof.get("result"), proof.get("transcript"), signed)
        raise NotFound(
            "no_proof", "there is no proof: the delegation has not ended, was done here, or came without one"
        )

    async def tree(self, named: str) -> TreeNode:
        tree = await read_tree(self._ledger, await self.task_id(named), None)
        if tree.task is None and not tree.children:
            raise unknown_delegation(named)
        return tree

    async def messages(self) -> Sequence[LoggedMessage]:
        await self._ledger.durable()
        return await self._ledger.message_log()


def _next_step(peer: Peer, us: InstanceId) -> str:
    hint = f"it must know us too; on its side: covenant peers add OUR-URL --id {us}"
    if peer.url is None:
        return f"{peer.name} will be verified when it fetches. For that {hint}"
    return f"{peer.name} will be verified as soon as it answers. For that {hint}"


class DelegationLookup(PeerService):
    def __init__(self, context: PeerContext, catalogue: Catalogue, requester: Requester) -> None:
        super().__init__(context)
        self._catalogue = catalogue
        self._requester = requester
        self._tasks = TaskReader(context.ledger)

    async def all(self) -> Sequence[Delegation]:
        """All delegations, the last moved first."""
        await self._ledger.durable()
        searched = [each async for each in self._searched(TaskQuery(states=_LIVE))]
        live = {each.task_id for each in searched}
        kept = await self._ledger.delegations()
        ended = [each.moved_at_ms for each in kept if each.ended]
        # A task that ended before the oldest kept record may have been offered: its record was dropped.
        full = len(ended) >= self._ledger.limits.delegations_kept_max
        not_completed = TaskQuery(outcomes=_NOT_COMPLETED, moved_since_ms=min(ended) if full else None)
        with suppress(Unavailable):
            searched += [each async for each in self._searched(not_completed)]
        known = {each.task_id for each in kept}
        found = [
            each if each.task_id in live and not each.ended else await self._requester.shown(each) for each in kept
        ]
        for task_id in {each.task_id: None for each in searched if each.task_id not in known}:
            view = (await self._tasks.past(task_id)).view()
            unsent = self._unsent(view) if view is not None else None
            if unsent is not None:
                found.append(unsent)
        return sorted(found, key=lambda each: each.moved_at_ms, reverse=True)

    async def _searched(self, query: TaskQuery) -> AsyncIterator[FoundTask]:
        left = SEARCHED_MAX
        for display in self._recipients():
            of_agent = msgspec.structs.replace(query, agent=display, order="moved", limit=PAGE_MAX)
            after: str | None = ""
            while after is not None and left > 0:
                page = await self._ledger.find(msgspec.structs.replace(of_agent, after=after))
                for each in page.tasks[:left]:
                    yield each
                left, after = left - len(page.tasks), page.next

    def _recipients(self) -> Sequence[str]:
        """The agents that stand for peers: one for each tenant with peers, and those of the catalogue."""
        tenants = dict.fromkeys((DEFAULT, *(peer.tenant for peer in self._ledger.peers())))
        return [
            f"{agent_id}@{tenant}"
            for tenant in tenants
            for agent_id in (
                PEER_RECIPIENT,
                *(each.id for each in self._catalogue.agents(tenant) if peer_target(each.definition)),
            )
        ]

    async def _record(self, named: str) -> Delegation:
        """The record of a delegation, by the id of its task, its offer or itself, or the beginning of one."""
        found = await self._ledger.delegation_of(TaskId(named))
        if found is None:
            known = await self._ledger.delegations() if named else ()
            matches = [each for each in known if any(name and name.startswith(named) for name in _names(each))]
            exact = [each for each in matches if named in _names(each)]
            found = choose(named, exact[:1] or matches, "delegation", _shown)
        return found

    async def view(self, named: str) -> DelegationView:
        """Also shows a task that was not offered yet, or whose record is not kept any more."""
        try:
            record = await self._record(named)
        except NotFound as unknown:
            view = (await self._tasks.past(await self._find_task(named, unknown))).view()
            found = self._unsent(view) or self._done_here(view) if view is not None else None
            if found is None:
                raise unknown from None
        else:
            ours = record.role is DelegationRole.REQUESTER
            if ours and not record.settled and await self._requester.is_awaited(record):
                return DelegationView(by_task(record, None))
            view = (await self._tasks.past(record.task_id)).view()
            # Both may have ended since the record was read: the task ends after its delegation.
            found = by_task(await self._ledger.delegation_of(record.task_id) or record, view_outcome(view))
        if view is None or not view.state.terminal:
            return DelegationView(found)
        text = answer_text(view.state, view.message, view.artifacts, view.history)
        if view.state is TaskState.COMPLETED:
            return DelegationView(found, result=text)
        return DelegationView(found, error=text or view.state.value)

    async def task_id(self, named: str) -> TaskId:
        """The task of a delegation, also of one so old that only its task is known."""
        try:
            return (await self._record(named)).task_id
        except NotFound as unknown:
            return await self._find_task(named, unknown)

    async def _find_task(self, named: str, unknown: NotFound) -> TaskId:
        """The task whose id begins with this. Raises `unknown` if there is none."""
        try:
            return await find_task_id(self._ledger, named)
        except NotFound:
            raise unknown from None

    # Tasks without a record

    def _unsent(self, view: TaskView) -> Delegation | None:
        """The delegation of a task that has no record; None if the task is not for a peer."""
        target = target_of(view.task) or self._target(view.task)
        if target is None or not target.of_peer:
            return None
        asked = InstanceId(target.peer or "")
        peer = self._ledger.peer(asked) or self._ledger.peer_named(asked)
        # A peer of another tenant is not shown as the one that is asked.
        of_tenant = peer is not None and peer.tenant == (view.task.tenant or DEFAULT)
        return self._delegation_from_task(view, target, peer.id if peer is not None and of_tenant else asked)

    def _target(self, task: Task) -> Target | None:
        """The peer and profile that the task's recipient stands for."""
        name, _, tenant = task.recipient.display.partition("@")
        agent = self._catalogue.agent(tenant, name)
        return peer_target(agent.definition) if agent is not None else None

    def _done_here(self, view: TaskView) -> Delegation | None:
        """The delegation of a task that an operator delegated to an agent here; None for any other task."""
        if view.task.origin != NATIVE or target_of(view.task) is not None:
            return None
        target = Target(profile=view.task.recipient.display.partition("@")[0])
        return self._delegation_from_task(view, target, self._keyring.id)

    def _delegation_from_task(self, view: TaskView, target: Target, peer: InstanceId) -> Delegation:
        ended = view_outcome(view) if view.state.terminal else None
        code = (view.result.metadata or {}).get("code") if view.result is not None else None
        return Delegation(
            role=DelegationRole.REQUESTER,
            peer=peer,
            offer_id=view.task.id,
            task_id=view.task.id,
            profile=target.profile or "",
            state=OUTCOMES[ended] if ended is not None else OFFERED,
            budget=target.budget or self._settings.budget_default,
            timeout_ms=view.task.timeout_ms or self._settings.timeout_ms,
            made_at_ms=view.created_at_ms,
            moved_at_ms=view.updated_at_ms,
            code=code if isinstance(code, str) else None,
        )


def _names(delegation: Delegation) -> tuple[str, str, str | None]:
    return delegation.task_id, delegation.offer_id, delegation.delegation_id


def _shown(delegation: Delegation) -> str:
    return f"{delegation.task_id}  {delegation.state.value}  {delegation.profile}"
