"""Delegation: an agent that works on a task gives part of it to another agent, local or remote, and waits.

A delegated part is a task of its own, a child of the caller's task: queued, leased, worked on and settled like any
other, wherever the callee is served. Its id is derived from its parent and its request, so the same request again
(after a crash, in the next attempt) finds the existing task. It is one deeper than its parent, ends when its parent
ends, and has no more time than its parent has left.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from covenant.exchange.catalogue import Catalogue
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.tasks.builder import build_task, check_message, check_size, within_deadline
from covenant.exchange.tasks.reader import TaskReader
from covenant.exchange.tasks.writer import LocalWorkers, TaskWriter
from covenant.exchange.worker_presence import WorkerPresence
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import TaskLedger
from covenant.ledger.machine.commands import Cancel, CancelOrphans, Continue, SignalTask
from covenant.ledger.machine.decisions.identities import unknown_agent
from covenant.ledger.machine.states import LEASED
from covenant.model.a2a_requests import Message
from covenant.model.agent_definition import AgentDefinition, CatalogueAgent
from covenant.model.content import Content, Text
from covenant.model.errors import Conflict, Invalid, Refusal
from covenant.model.ids import AgentId, TaskId
from covenant.model.question import PersonDecision
from covenant.model.settings import MESSAGE_BYTES_MAX, DelegationSettings
from covenant.model.task import (
    DELEGATION,
    PEER_RECIPIENT,
    URL_RECIPIENT,
    DuplicateSafety,
    Hop,
    Idempotency,
    Result,
    Target,
    Task,
    check_chain,
    fingerprint,
)
from covenant.model.task_event import MessageUpdate, Signal
from covenant.model.task_view import TaskView, TaskViewBuilder
from covenant.model.tenants import host_of
from covenant.model.tracing import OFF, Tracer, trace_of, traced

ORPHANS_WAIT_MS: Final = 60_000
RETRY_S: Final = 10.0

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class Callee(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The called agent. `remote`: its address; None if it works here."""

    identity: AgentId
    agent: CatalogueAgent | None = None
    remote: Target | None = None

    @property
    def name(self) -> str:
        return self.identity.pubkey + (self.remote.label if self.remote is not None else "")


class DelegatedTask(msgspec.Struct, frozen=True, gc=False):
    """A task to be delegated, and the digest that the same request always has."""

    task: Task
    digest: str


class Delegations:
    def __init__(
        self,
        ledger: Ledger,
        catalogue: Catalogue,
        workers: LocalWorkers,
        limits: DelegationSettings | None = None,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        registered: Callable[[str, str], str | None] = lambda _tenant, _name: None,
        peers: Callable[[str, str], Target | None] = lambda _tenant, _name: None,
        tracer: Tracer = OFF,
        files: StoredFiles | None = None,
        presence: WorkerPresence | None = None,
    ) -> None:
        """`registered`: the URL of a remote agent that a tenant knows by this name, beside those of the catalogue.

        `peers`: the peer that has this name or profile for a tenant.
        """
        self.limits = limits or DelegationSettings()
        self._message_bytes_max = message_bytes_max
        self.ledger = ledger
        self._catalogue = catalogue
        self._writer = TaskWriter(ledger, workers, tracer, files=files)
        self._reader = TaskReader(ledger)
        self._registered = registered
        self._peers = peers
        self._presence = presence

    def absence(self, callee: Callee) -> str:
        """Why a call to this agent waits for a worker that is not there; empty if it may be taken at once."""
        if self._presence is None or callee.agent is None or not callee.agent.definition.kind_rules.enrolled:
            return ""
        return self._presence.absence(callee.identity)

    def callee(self, caller: AgentId, named: str) -> Callee:
        """An agent of the caller's tenant, a remote agent by its URL or registered name, or an agent of a peer."""
        tenant = host_of(caller.display)
        if named.startswith(("http://", "https://")):
            return Callee(identity=self._catalogue.identity(tenant, URL_RECIPIENT), remote=Target(url=named))
        agent = self._catalogue.agent(tenant, named)
        if agent is not None:
            identity = self._catalogue.identity(tenant, named)
            if agent.definition.kind_rules.place == "peer":
                who, _, profile = agent.definition.peer.partition("/")
                remote = self._peers(tenant, f"{who}/{profile or named}" if who else named)
                if remote is None:
                    raise unknown_agent(named)
                return Callee(identity=identity, agent=agent, remote=remote)
            if agent.definition.kind_rules.place == "here":
                return Callee(identity=identity, agent=agent)
            if agent.definition.url:
                return Callee(identity=identity, agent=agent, remote=Target(url=agent.definition.url))
        else:
            identity = self._catalogue.identity(tenant, URL_RECIPIENT)
        url = self._registered(tenant, named)
        if url is not None:
            return Callee(identity=identity, agent=agent, remote=Target(name=named, url=url))
        peer = self._peers(tenant, named) if agent is None else None
        if peer is None:
            raise self._catalogue.missing(tenant, named)
        return Callee(identity=self._catalogue.identity(tenant, PEER_RECIPIENT), remote=peer)

    def build(
        self,
        parent: Task,
        caller: AgentId,
        callee: Callee,
        parts: tuple[Content, ...],
        *,
        task_id: TaskId,
        until_ms: int | None,
        idempotent: bool | None = None,
    ) -> DelegatedTask:
        """Builds the task. Refuses content that the callee does not take, and calls that are too deep or circular."""
        definition = callee.agent.definition if callee.agent is not None else None
        depth, chain = parent.depth + 1, (*parent.chain, caller.pubkey)
        check_chain(depth, chain, callee.identity, self.limits.depth_max)
        if callee.agent is not None:
            check_message(Message(message_id=task_id, parts=parts), callee.agent, callee.agent.definition.extensions)
        if callee.remote is not None and not callee.remote.of_peer and not all(isinstance(p, Text) for p in parts):
            raise Invalid("text_only", "a remote agent takes only text; leave out the other parts")
        if idempotent is None:
            idempotent = definition is not None and definition.idempotent
        task = build_task(
            task_id,
            sender=caller,
            recipient=callee.identity,
            parts=parts,
            tenant=host_of(caller.display),
            origin=DELEGATION,
            hop=Hop(depth=depth, chain=chain),
            context_id=parent.context_id or parent.id,
            parent=parent.id,
            key=Idempotency(DuplicateSafety.IDEMPOTENT, task_id) if idempotent else None,
        )
        digest, size = fingerprint(task)
        digest = hashlib.sha256(f"{digest}{callee.name}".encode()).hexdigest()
        check_size(size, self._message_bytes_max)
        # These fields are not part of the request: a later repeat is the same request.
        own_ms = definition.turn_timeout_ms if definition is not None else None
        task = msgspec.structs.replace(
            task, deadline_ms=until_ms, timeout_ms=own_ms, target=callee.remote, priority=parent.priority
        )
        task = within_deadline(task, None if until_ms is None else until_ms - self.ledger.now_ms())
        return DelegatedTask(traced(task, trace_of(parent)), digest)

    async def perform(self, delegated: DelegatedTask) -> TaskView:
        """Accepts the task, or finds it accepted before. Returns it when it has ended or waits for more.

        When the caller's time is over, the task is canceled.
        """
        task = delegated.task
        with self.ledger.watch(task.id) as watch:
            try:
                kept = await self._writer.with_files(task)
                known = (await self._writer.accept(kept, delegated.digest)).duplicate
            except Refusal as refusal:
                if refusal.code == "duplicate_task_id":
                    raise Conflict(
                        "key_reused", "this key was used for another call of this task; give each call its own key"
                    ) from None
                raise
            builder = await self._reader.past(task.id) if known else TaskViewBuilder()
            wait_ms = give_up_ms = None
            if task.deadline_ms is not None:
                # The wall-clock deadline becomes one of the monotonic clock, which nobody can set.
                wait_ms = task.deadline_ms - self.ledger.now_ms()
                give_up_ms = self.ledger.clock.monotonic_ms() + wait_ms
            view = await self._reader.at_rest(task.id, watch, builder, wait_ms)
        return await self._wait_until_rest(view, give_up_ms)

    async def _wait_until_rest(self, view: TaskView, give_up_ms: int | None) -> TaskView:
        """Keeps waiting after the watch was cut. When the caller's time is over, the task is canceled."""
        task, monotonic_ms = view.task, self.ledger.clock.monotonic_ms
        while not view.state.rests:
            left_ms = ORPHANS_WAIT_MS if give_up_ms is None else min(ORPHANS_WAIT_MS, give_up_ms - monotonic_ms())
            if left_ms > 0:
                await self.ledger.finished(task.id, left_ms)
            else:
                await self.cancel(task, "its caller's time is over")
            view = (await self._reader.past(task.id)).existing_view()
        return view

    async def answer(self, child: TaskId, parent: Task, parts: tuple[Content, ...], message_id: str) -> TaskView:
        """Sends the next message to a child that waits for one; then waits like `perform`."""
        view = (await self._reader.past(child)).view()
        if view is None or view.task.parent != parent.id or view.task.origin != DELEGATION:
            raise Invalid("unknown_call", f"task {child} was not called by this task")
        parts = (await self._writer.with_files(msgspec.structs.replace(view.task, parts=parts))).parts
        update = MessageUpdate(role="user", parts=parts, message_id=message_id)
        with self.ledger.watch(child) as watch:
            await self.ledger.commit(
                Continue(task_id=child, message=update, message_id=message_id, by=parent.recipient)
            )
            view = await self._reader.at_rest(child, watch, await self._reader.past(child))
        return await self._wait_until_rest(view, None)

    async def pass_on(self, child: TaskId, parent: Task, decision: PersonDecision | None, message_id: str) -> TaskView:
        """Sends a person's decision to a child, unless it is None or too late; then waits until the child rests."""
        if decision is not None:
            with suppress(Conflict):
                return await self.answer(child, parent, decision.as_parts(), message_id)
        return await self._wait_until_rest((await self._reader.past(child)).existing_view(), None)

    async def cancel(self, task: Task, reason: str) -> Result:
        """Cancels a task; returns its result: that of the cancel, or the one that it had ended with before."""
        return (await self.ledger.commit(Cancel(task_id=task.id, by=task.sender, reason=reason))).result

    async def until_ms(self, parent: Task, timeout_ms: int | None, left_ms: float | None) -> int | None:
        """The moment after which an answer is useless. `left_ms`: the time that the parent's holder has, if known."""
        entry = await self.ledger.entry(parent.id)
        now_ms, ages = self.ledger.now_ms(), self.ledger.clock.ages
        deadline_ms = parent.deadline_ms
        deadline_counts = deadline_ms is not None and self.ledger.clock.left_ms(deadline_ms) is not None
        moments = [
            deadline_ms if deadline_counts else None,
            entry.times_out_at_ms(now_ms, ages) if entry is not None else None,
            now_ms + timeout_ms if timeout_ms is not None else None,
            now_ms + int(left_ms) if left_ms is not None else None,
        ]
        known = [moment for moment in moments if moment is not None]
        if known and min(known) <= now_ms:
            raise Conflict("deadline_exceeded", "there is no time left for another call")
        return min(known) if known else None


def digest_of(parts: Sequence[Content]) -> str:
    return hashlib.sha256(_encode(parts)).hexdigest()


def peer_target(definition: AgentDefinition) -> Target | None:
    """The peer and profile that do an agent's work; None if the agent is not of the kind `peer`."""
    if definition.kind_rules.place != "peer":
        return None
    peer, _, profile = definition.peer.partition("/")
    return Target(peer=peer, profile=profile or definition.id)


class OrphanCanceller:
    """Cancels delegated tasks whose parent has ended: as soon as it ends, and after a crash."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def step(self) -> int:
        """Cancels all orphans; returns how many tasks were canceled, with those that they had delegated in turn."""
        count = 0
        while (orphaned := await self._ledger.commit(CancelOrphans())).more:
            count += len(orphaned.task_ids)
        return count

    async def run(self) -> None:
        while True:
            try:
                if await self._ledger.orphaned(ORPHANS_WAIT_MS):
                    await self.step()
            except Refusal as refusal:
                # Most likely the disk is full. The orphans are found again once records can be written.
                log.warning("delegation.orphans_left", extra={"code": refusal.code, "reason": refusal.message})
                await asyncio.sleep(RETRY_S)


def answered_signal(child: TaskId) -> str:
    """The name of the signal to a task whose child's question was answered."""
    return f"covenant.answered.{child}"


async def signal_caller(ledger: TaskLedger, child: Task, generation: int) -> None:
    """Signals a child's caller that the child was answered directly, if the caller waits for that or may do so soon.

    If the daemon is killed before the signal, the caller stays parked. A person can then answer the caller, too.
    """
    if child.origin != DELEGATION or child.parent is None:
        return
    entry, name = await ledger.entry(child.parent), answered_signal(child.id)
    if entry is None or not (entry.state is LEASED or (entry.wait is not None and entry.wait.signal == name)):
        return
    with suppress(Refusal):
        await ledger.commit(SignalTask(task_id=child.parent, signal=Signal(name, f"{child.id}.{generation}")))
