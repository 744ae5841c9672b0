"""The A2A verbs for a tenant's caller at one agent: send, stream, subscribe, get, list, cancel.

Every dialect and binding ends up here. A request is scoped to its tenant and agent first: a task of another tenant is
not found. A caller that disconnects ends nothing; an accepted task goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import CLIENT, Catalogue
from covenant.exchange.delegation import signal_caller
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.tasks.builder import (
    UNGUESSABLE_LENGTH_MIN,
    KeyedIds,
    build_task,
    check_message,
    check_size,
    next_message,
    read_idempotency,
    read_not_before,
    read_priority,
    unkeyed_id,
)
from covenant.exchange.tasks.reader import WATCH_S, TaskReader, TaskStream, handed_over, parse_known_id
from covenant.exchange.tasks.writer import Intake, LocalWorkers, TaskWriter, refuse_ended
from covenant.exchange.worker_presence import WorkerPresence
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import ListQuery, TaskScope
from covenant.ledger.machine.commands import Cancel, Continue, PutPush
from covenant.ledger.watchers import TaskWatch
from covenant.model.a2a_requests import (
    PAGE_SIZE_MAX,
    CancelTask,
    GetTask,
    ListTasks,
    PushConfig,
    SendMessage,
    Subscribe,
    TaskPage,
)
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.content import Text
from covenant.model.errors import Conflict, Invalid, InvalidParams, Unauthenticated
from covenant.model.ids import AgentId, TaskId
from covenant.model.question import asks_approval
from covenant.model.settings import DEPTH_MAX, A2aSettings
from covenant.model.task import A2A, DELEGATION, Hop, Idempotency, Task, account_of, check_hop
from covenant.model.task_event import Began, Ended, MessageUpdate, Started, Step
from covenant.model.task_view import TaskState, TaskView, TaskViewBuilder, fold
from covenant.model.tracing import OFF, Tracer

ANONYMOUS: Final = "anonymous"
"""The sender's name of callers without a token, at an agent that is published for everybody."""
REPLY_S: Final = 0.01
"""How long the first frame of a stream waits to see whether the whole answer is a bare message."""

_encode = msgspec.json.Encoder().encode


class A2ARequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The caller, the agent, and the values that came beside the request."""

    caller: Caller
    agent: CatalogueAgent
    away: bool = False
    """Whether no node serves the agent now: it gets no new task."""
    extensions: tuple[str, ...] = ()
    idempotency_key: str | None = None
    hop: Hop | None = None
    """The caller's chain of calls up to this one."""


_Prepared = tuple[TaskId, Task | None, Idempotency | None]
"""The id of the message's task; the task itself, if the message begins one; and the idempotency key."""


class _DurableMessage(msgspec.Struct, frozen=True, gc=False):
    """Where the steps that answer a durable message are found.

    `from_watch`: the watch has the task from its first step on. Otherwise the steps up to `through` are read from the
    ledger.
    """

    from_watch: bool = False
    through: int | None = None
    repeated: bool = False
    """The message was sent before, so that steps after it may be older than the watch."""


class A2AExchange:
    def __init__(
        self,
        ledger: Ledger,
        catalogue: Catalogue,
        workers: LocalWorkers,
        new_id: Callable[[], str],
        settings: A2aSettings,
        *,
        depth_max: int = DEPTH_MAX,
        check_push: Callable[[PushConfig], None] | None = None,
        tracer: Tracer = OFF,
        intake: Intake | None = None,
        files: StoredFiles | None = None,
        presence: WorkerPresence | None = None,
    ) -> None:
        """`check_push` refuses an invalid push configuration. None: push notifications are switched off."""
        self._ledger = ledger
        self._catalogue = catalogue
        self._new_id = new_id
        self._check_push = check_push
        self.reader = TaskReader(ledger)
        self.writer = TaskWriter(ledger, workers, tracer, intake, files)
        self.ids = KeyedIds(ledger, catalogue)
        self.settings = settings
        self.depth_max = depth_max
        self._presence = presence

    async def send(self, call: A2ARequest, sent: SendMessage) -> TaskView:
        """The task when it has ended or waits for its sender; right after acceptance if the request does not block."""
        task_id, task, key = await self._prepare(call, sent)
        with self._ledger.watch(task_id, new=key is None and task is not None) as watch:
            if task is None:
                durable = await self._continue(call, sent, task_id, key)
            else:
                # Inlined: an extra coroutine costs time at every suspension of the ones that it awaits.
                bytes_max = self.settings.message_bytes_max
                accepted = await self.writer.submit(task, bytes_max=bytes_max, push=sent.push, minted=key is None)
                durable = _REPEATED if accepted.duplicate else _NEW
            builder = None
            if not durable.from_watch:
                builder = await self.reader.past(task_id, None if durable.repeated else durable.through)
            if sent.blocking:
                view = await self.reader.at_rest(task_id, watch, builder, self.settings.blocking_ms_max)
            else:
                view = (builder or await self.reader.accepted(task_id, watch)).existing_view()
            return view if view.state is not TaskState.SUBMITTED else self._with_absence(call.agent, view)

    async def stream(self, call: A2ARequest, sent: SendMessage) -> TaskStream:
        """Streams the task's steps until it ends or waits for its sender."""
        task_id, task, key = await self._prepare(call, sent)
        with handed_over(self._ledger.watch(task_id, new=key is None and task is not None)) as watch:
            if task is None:
                durable = await self._continue(call, sent, task_id, key)
            else:
                bytes_max = self.settings.message_bytes_max
                accepted = await self.writer.submit(task, bytes_max=bytes_max, push=sent.push, minted=key is None)
                durable = _REPEATED if accepted.duplicate else _NEW
            if not durable.from_watch:
                view = (await self.reader.past(task_id, durable.through or 1)).existing_view()
                return TaskStream(self._ledger, watch, view, ends_when_parked=True)
            opening = await self._opening(watch)
            if not opening:  # the watch was cut
                view = (await self.reader.past(task_id, 1)).existing_view()
                return TaskStream(self._ledger, watch, view, ends_when_parked=True)
            first, *steps = opening
            builder = TaskViewBuilder()
            builder.add(first)
            view, reply = self._with_absence(call.agent, builder.existing_view()), None
            if steps and isinstance(last := steps[-1].what, Ended) and last.result.reply is True:
                builder.catch_up(steps)
                reply = builder.existing_view()
            return TaskStream(self._ledger, watch, view, backlog=steps, reply=reply, ends_when_parked=True)

    async def subscribe(self, call: A2ARequest, request: Subscribe, *, from_start: bool, finished: bool) -> TaskStream:
        """`from_start`: without a cursor, begin at the first step. `finished`: an ended task may be replayed."""
        return await self.reader.follow(
            parse_known_id(request.task_id),
            self.scope(call),
            1 if request.after is None and from_start else request.after,
            ends_when_parked=False,
            live_only=request.after is None and not finished,
        )

    def get(self, call: A2ARequest, request: GetTask) -> Awaitable[TaskView]:
        if call.agent.definition.kind_rules.enrolled:
            return self._get_of_worker(call, request)
        return self.reader.get(parse_known_id(request.task_id), self.scope(call))

    async def _get_of_worker(self, call: A2ARequest, request: GetTask) -> TaskView:
        return self._with_absence(call.agent, await self.reader.get(parse_known_id(request.task_id), self.scope(call)))

    def explain_wait(self, view: TaskView) -> TaskView:
        """The task with the reason why it waits, as `get` shows it, for callers that found it by its id alone."""
        agent_id, _, tenant = view.task.recipient.display.partition("@")
        agent = self._catalogue.agent(tenant, agent_id) if view.state is TaskState.SUBMITTED else None
        return view if agent is None else self._with_absence(agent, view)

    def _with_absence(self, agent: CatalogueAgent, view: TaskView) -> TaskView:
        """Adds a status message to a task that waits for a worker while no worker is there."""
        later = view.task.not_before_ms is not None and view.task.not_before_ms > self._ledger.now_ms()
        if self._presence is None or view.state is not TaskState.SUBMITTED or view.message is not None or later:
            return view
        if not agent.definition.kind_rules.enrolled:
            return view
        why = self._presence.absence(view.task.recipient)
        return msgspec.structs.replace(view, message=MessageUpdate(parts=(Text(why),))) if why else view

    async def list_tasks(self, call: A2ARequest, request: ListTasks) -> TaskPage:
        if call.caller.anonymous and not self.settings.anonymous_lists:
            # All callers without a token share one sender: each may read the tasks whose ids it has.
            raise Unauthenticated("token_needed", "listing tasks needs a token; without one, ask for a task by its id")
        if not 1 <= request.page_size <= PAGE_SIZE_MAX:
            raise InvalidParams("pageSize", f"1 to {PAGE_SIZE_MAX}")
        scope = self.scope(call)
        assert scope.recipient is not None
        tenant, catalogue = call.caller.tenant.name, self._catalogue
        listing = await self._ledger.listing(
            ListQuery(
                recipient=scope.recipient,
                sender=scope.sender,
                context_id=request.context_id,
                state=request.state,
                moved_since_ms=request.updated_after_ms,
                after=catalogue.cursors.open(tenant, request.page_token),
                limit=request.page_size,
                artifacts=request.include_artifacts,
            )
        )
        views = tuple(view for steps in listing.tasks if (view := fold(steps)) is not None)
        token = catalogue.cursors.seal(tenant, listing.next)
        return TaskPage(tasks=views, total_size=listing.total, page_size=len(views), next_page_token=token)

    async def cancel(self, call: A2ARequest, request: CancelTask) -> TaskView:
        task_id, scope = parse_known_id(request.task_id), self.scope(call)
        by, reason = self._sender(call), f"by {call.caller.name}"
        command = Cancel(task_id=task_id, viewer=scope.sender, recipient=scope.recipient, by=by, reason=reason)
        refuse_ended(task_id, await self._ledger.commit(command))
        return await self.reader.get(task_id, scope)

    def _recipient(self, call: A2ARequest) -> AgentId:
        agent = call.agent
        return self._catalogue.identity(agent.tenant, agent.definition.id)

    def _sender(self, call: A2ARequest) -> AgentId:
        return self._catalogue.identity(call.agent.tenant, ANONYMOUS if call.caller.anonymous else CLIENT)

    def scope(self, call: A2ARequest) -> TaskScope:
        """The tasks that a caller sees: its tenant's at this agent; without a token, only those sent without one."""
        sender = self._sender(call).pubkey if call.caller.anonymous else None
        return TaskScope(recipient=self._recipient(call).pubkey, sender=sender)

    async def _prepare(self, call: A2ARequest, sent: SendMessage) -> _Prepared:
        """Checks a message, and builds the task that it begins."""
        message, agent, anonymous = sent.message, call.agent, not call.caller.token_sha256
        identities, tenant, sends_as = self._catalogue.identities, agent.tenant, ANONYMOUS if anonymous else CLIENT
        recipient = identities.get((tenant, agent.definition.id)) or self._recipient(call)
        sender = identities.get((tenant, sends_as)) or self._sender(call)
        if call.hop is not None:
            check_hop(call.hop, recipient, self.depth_max)
        check_message(message, agent, call.extensions)
        if sent.push is not None:
            if self._check_push is None:
                raise Conflict(
                    "push_not_supported",
                    "push notifications are switched off;"
                    " the operator turns them on with the setting a2a.push_notifications",
                )
            self._check_push(sent.push)
        key = None
        if call.idempotency_key is not None or sent.metadata or message.metadata:
            key = read_idempotency(sent, call.idempotency_key)
        if message.task_id is not None:
            return parse_known_id(message.task_id), None, key
        if call.away:
            raise self._catalogue.missing(tenant, agent.id)
        if anonymous and message.context_id is not None:
            await self._check_context(message.context_id, recipient, sender)
        if key is None:
            task_id = TaskId(self._new_id())
        else:
            task_id = await self.ids.find(call.caller, agent.id, key.key, sender=sender, recipient=recipient)
        task = build_task(
            task_id,
            sender=sender,
            recipient=recipient,
            parts=message.parts,
            tenant=agent.tenant,
            origin=A2A,
            definition=agent.definition,
            hop=call.hop,
            context_id=message.context_id,
            key=key,
            message=message,
            output_modes=sent.output_modes,
            request_metadata=sent.metadata,
            not_before_ms=read_not_before(sent.metadata) if sent.metadata else None,
            priority=read_priority(sent.metadata) if sent.metadata else 0,
        )
        return task_id, task, key

    async def _check_context(self, context_id: str, recipient: AgentId, sender: AgentId) -> None:
        """Without a token, a context must be one of the caller's own, or too long to be guessed."""
        if len(context_id) < UNGUESSABLE_LENGTH_MIN:
            raise Invalid(
                "guessable_context",
                f"message.contextId: without a token, it must have at least {UNGUESSABLE_LENGTH_MIN} characters; "
                "leave it out, or use a random UUID",
            )
        all_senders = ListQuery(recipient=recipient.pubkey, context_id=context_id, limit=1)
        own = msgspec.structs.replace(all_senders, sender=sender.pubkey)
        if (await self._ledger.listing(all_senders)).total > (await self._ledger.listing(own)).total:
            raise Invalid("unknown_context", "message.contextId: you have no such context; leave it out")

    async def _continue(
        self, call: A2ARequest, sent: SendMessage, task_id: TaskId, key: Idempotency | None
    ) -> _DurableMessage:
        """Makes a message to a known task durable. The caller watches the task already."""
        message, scope = sent.message, self.scope(call)
        update = next_message(message)
        view = await self.reader.get(task_id, scope)
        prefix = None if key is None else f"{unkeyed_id(call.caller, call.agent.id, key.key)}."
        ids = (self._new_id(),) if prefix is None else self._message_ids(update, prefix)
        if key is not None and self._has_message(update, view):
            return _DurableMessage(through=view.generation)
        if update.parts and (files := self.writer.files) is not None and files.may_store(update.parts):
            entry = await self._ledger.entry(task_id) if key is not None else None
            if entry is None or all(message_id not in ids for message_id, _ in entry.recent_ids):
                # A repeated message is not stored again: the URLs of its files may have expired.
                parts = await files.store(update.parts, account_of(view.task), task_id)
                update = msgspec.structs.replace(update, parts=parts)
                check_size(len(_encode(update)), self.settings.message_bytes_max)
            if key is not None and self._has_message(update, view):
                return _DurableMessage(through=view.generation)
        else:
            check_size(len(_encode(update)), self.settings.message_bytes_max)
        if message.context_id not in (None, view.task.context_id):
            raise InvalidParams("message.contextId", f"task {task_id} is in another context; leave contextId out")
        recipient = view.task.recipient.pubkey
        if sent.push is not None and not view.state.terminal:
            # Before the message, so that its step is pushed too; once, since many clients repeat it.
            await self._ledger.commit(PutPush(task_id=task_id, recipient=recipient, config=sent.push, once=True))
        reported = await self._ledger.commit(
            Continue(
                task_id=task_id,
                viewer=scope.sender,
                recipient=recipient,
                message=update,
                message_id=ids[0],
                former=ids[1:],
                key=prefix,
                by=self._sender(call),
            )
        )
        if view.task.origin == DELEGATION and view.message is not None and asks_approval(view.message.metadata):
            await signal_caller(self._ledger, view.task, reported.generation)
        # Steps before this message are no answer to it; steps after it are.
        return _DurableMessage(through=reported.generation, repeated=reported.duplicate)

    def _message_ids(self, update: MessageUpdate, prefix: str) -> tuple[str, ...]:
        """The message's id, derived from its idempotency key and content; then its id by an earlier rule, if another.

        The client's own message id is no part of the content: clients make a new one for each try. Nor is a file's URL,
        which differs each time.
        """
        plain = msgspec.structs.replace(update, message_id=None)
        forms = (plain,) if (named := self._by_hash(plain)) is plain else (named, plain)
        return tuple(prefix + hashlib.sha256(_encode(form)).hexdigest()[:32] for form in forms)

    def _by_hash(self, update: MessageUpdate) -> MessageUpdate:
        parts = self.writer.files.named_by_hash(update.parts) if self.writer.files is not None else update.parts
        return update if parts is update.parts else msgspec.structs.replace(update, parts=parts)

    def _has_message(self, update: MessageUpdate, view: TaskView) -> bool:
        """Whether a task that has ended already has this message."""
        named = self._by_hash(update)
        return view.state.terminal and any(
            msgspec.structs.replace(named, message_id=message.message_id) == self._by_hash(message)
            for message in view.history
        )

    async def _opening(self, watch: TaskWatch) -> list[Step]:
        """The first steps of a new task.

        A stream is a task's or one bare message. The first frame must know which: it waits a little for the agent's
        output.
        """
        steps = list(await watch.next(WATCH_S))
        while steps and not watch.cut and isinstance(steps[-1].what, (Began, Started)):
            more = await watch.next(REPLY_S)
            if not more:
                break
            steps += more
        return steps


_NEW: Final = _DurableMessage(from_watch=True)
_REPEATED: Final = _DurableMessage()
