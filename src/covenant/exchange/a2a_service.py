"""The A2A verbs for a tenant's caller at one agent: send, stream, subscribe, get, list, cancel.

Whichever dialect and binding a client came by, it ends up here. Everything is scoped to the tenant and the agent
first: a task of another is not found. A caller that goes away ends nothing; a task that was accepted goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import CLIENT, Catalogue
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.tasks.builder import (
    UNGUESSABLE_LENGTH_MIN,
    IdempotencyKey,
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
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import ListQuery, TaskScope, Watch
from covenant.ledger.machine.commands import Continue, PutPush
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
from covenant.model.errors import Conflict, Invalid, InvalidParams, Unauthenticated
from covenant.model.ids import AgentId, TaskId
from covenant.model.settings import DEPTH_MAX, A2aSettings
from covenant.model.task import A2A, Hop, Task, account_of, check_hop
from covenant.model.task_event import Began, Ended, MessageUpdate, Started, Step
from covenant.model.task_view import TaskView, TaskViewBuilder, fold
from covenant.model.tracing import OFF, Tracer

ANONYMOUS: Final = "anonymous"
"""As whom callers without a token send, at an agent that is published for everybody."""
REPLY_S: Final = 0.01
"""How long the first frame of a stream waits to see whether the whole answer is a bare message."""

_encode = msgspec.json.Encoder().encode


class A2ARequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Who asks, at which agent, and what came beside the request."""

    caller: Caller
    agent: CatalogueAgent
    extensions: tuple[str, ...] = ()
    idempotency_key: str | None = None
    hop: Hop | None = None
    """What the caller says of the calls before this one."""


_Prepared = tuple[TaskId, Task | None, IdempotencyKey | None]
"""The task that a message is for; the task itself, unless the message continues one; and the idempotency key."""


class _Sent(msgspec.Struct, frozen=True, gc=False):
    """A message that is durable. `from_watch`: the watch tells the task from its first step on.

    Otherwise the past is to be read, and `through` is as far as it matters.
    """

    from_watch: bool = False
    through: int | None = None
    again: bool = False
    """It was sent before: what came of it since may be older than the watch."""


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
    ) -> None:
        """`check_push` refuses a push configuration that is no good. None: there are no push notifications here."""
        self._ledger = ledger
        self._catalogue = catalogue
        self._new_id = new_id
        self._check_push = check_push
        self.reader = TaskReader(ledger)
        self.writer = TaskWriter(ledger, workers, tracer, intake, files)
        self.ids = KeyedIds(ledger, catalogue)
        self.settings = settings
        self.depth_max = depth_max

    async def send(self, call: A2ARequest, sent: SendMessage) -> TaskView:
        """The task when it has ended or waits for its sender; as soon as it is accepted, if it should not block."""
        task_id, task, key = await self._prepare(call, sent)
        with self._ledger.watch(task_id, new=key is None and task is not None) as watch:
            if task is None:
                done = await self._continue(call, sent, task_id, key)
            else:
                # Not by a coroutine of its own: each one costs at every pause of what it waits for.
                bytes_max = self.settings.message_bytes_max
                accepted = await self.writer.submit(task, bytes_max=bytes_max, push=sent.push, minted=key is None)
                done = _REPEATED if accepted.duplicate else _NEW
            builder = TaskViewBuilder()
            if not done.from_watch:
                builder = await self.reader.past(task_id, None if done.again else done.through)
            if sent.blocking:
                until_ms = self._ledger.clock.monotonic_ms() + self.settings.blocking_ms_max
                return await self.reader.at_rest(task_id, watch, builder, until_ms)
            if done.from_watch:
                builder.catch_up(await watch.next(WATCH_S))
            return builder.known()

    async def stream(self, call: A2ARequest, sent: SendMessage) -> TaskStream:
        """Ends with the task, or when it waits for its sender."""
        task_id, task, key = await self._prepare(call, sent)
        with handed_over(self._ledger.watch(task_id, new=key is None and task is not None)) as watch:
            if task is None:
                done = await self._continue(call, sent, task_id, key)
            else:
                bytes_max = self.settings.message_bytes_max
                accepted = await self.writer.submit(task, bytes_max=bytes_max, push=sent.push, minted=key is None)
                done = _REPEATED if accepted.duplicate else _NEW
            if not done.from_watch:
                view = (await self.reader.past(task_id, done.through or 1)).known()
                return TaskStream(self._ledger, watch, view, ends_when_parked=True)
            first, *steps = await self._opening(watch)
            builder = TaskViewBuilder()
            builder.add(first)
            view, reply = builder.known(), None
            if steps and isinstance(last := steps[-1].what, Ended) and last.result.reply is True:
                builder.catch_up(steps)
                reply = builder.known()
            return TaskStream(self._ledger, watch, view, backlog=steps, reply=reply, ends_when_parked=True)

    async def subscribe(self, call: A2ARequest, asked: Subscribe, *, from_start: bool, finished: bool) -> TaskStream:
        """`from_start`: without a cursor, begin at the first step. `finished`: one that has ended may be replayed."""
        return await self.reader.follow(
            parse_known_id(asked.task_id),
            self.scope(call),
            1 if asked.after is None and from_start else asked.after,
            ends_when_parked=False,
            live_only=asked.after is None and not finished,
        )

    def get(self, call: A2ARequest, asked: GetTask) -> Awaitable[TaskView]:
        return self.reader.get(parse_known_id(asked.task_id), self.scope(call))

    async def list_tasks(self, call: A2ARequest, asked: ListTasks) -> TaskPage:
        if call.caller.anonymous:
            # Whoever has no token is one with all others who have none: it has the ids that it was told, and no list.
            raise Unauthenticated("token_needed", "listing tasks needs a token; without one, ask for a task by its id")
        if not 1 <= asked.page_size <= PAGE_SIZE_MAX:
            raise InvalidParams("pageSize", f"1 to {PAGE_SIZE_MAX}")
        scope = self.scope(call)
        assert scope.recipient is not None
        listing = await self._ledger.listing(
            ListQuery(
                recipient=scope.recipient,
                sender=scope.sender,
                context_id=asked.context_id,
                state=asked.state,
                moved_since_ms=asked.updated_after_ms,
                after=asked.page_token,
                limit=asked.page_size,
                artifacts=asked.include_artifacts,
            )
        )
        views = tuple(view for steps in listing.tasks if (view := fold(steps)) is not None)
        return TaskPage(tasks=views, total_size=listing.total, page_size=len(views), next_page_token=listing.next)

    async def cancel(self, call: A2ARequest, asked: CancelTask) -> TaskView:
        task_id, scope = parse_known_id(asked.task_id), self.scope(call)
        canceled = await self.writer.cancel(
            task_id,
            by=self._sender(call),
            reason=f"by {call.caller.name}",
            recipient=scope.recipient,
            viewer=scope.sender,
        )
        refuse_ended(task_id, canceled)
        return await self.reader.get(task_id, scope)

    def _recipient(self, call: A2ARequest) -> AgentId:
        agent = call.agent
        return self._catalogue.identity(agent.tenant, agent.definition.id)

    def _sender(self, call: A2ARequest) -> AgentId:
        return self._catalogue.identity(call.agent.tenant, ANONYMOUS if call.caller.anonymous else CLIENT)

    def scope(self, call: A2ARequest) -> TaskScope:
        """A caller sees the tasks of its tenant at this agent; without a token, only those sent without one."""
        sender = self._sender(call).pubkey if call.caller.anonymous else None
        return TaskScope(recipient=self._recipient(call).pubkey, sender=sender)

    async def _prepare(self, call: A2ARequest, sent: SendMessage) -> _Prepared:
        """Check a message, and build the task that it begins."""
        message, agent, anonymous = sent.message, call.agent, not call.caller.token_sha256
        identity, tenant = self._catalogue.identity, agent.tenant
        recipient, sender = identity(tenant, agent.definition.id), identity(tenant, ANONYMOUS if anonymous else CLIENT)
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
        """Without a token, a context is one that the caller was told, or one that nobody else can have chosen."""
        if len(context_id) < UNGUESSABLE_LENGTH_MIN:
            raise Invalid(
                "guessable_context",
                f"message.contextId: without a token, it has at least {UNGUESSABLE_LENGTH_MIN} characters; "
                "leave it out, or use a random UUID",
            )
        everybodys = ListQuery(recipient=recipient.pubkey, context_id=context_id, limit=1)
        theirs = msgspec.structs.replace(everybodys, sender=sender.pubkey)
        if (await self._ledger.listing(everybodys)).total > (await self._ledger.listing(theirs)).total:
            raise Invalid("unknown_context", "message.contextId: there is no such context of yours; leave it out")

    async def _continue(
        self, call: A2ARequest, sent: SendMessage, task_id: TaskId, key: IdempotencyKey | None
    ) -> _Sent:
        """Make a message to a known task durable. What follows is watched already."""
        message, scope = sent.message, self.scope(call)
        update = next_message(message)
        encoded = _encode(update)
        view = await self.reader.get(task_id, scope)
        if update.parts and (files := self.writer.files) is not None and files.concerns(update.parts):
            parts = await files.store(update.parts, account_of(view.task), task_id)
            update = msgspec.structs.replace(update, parts=parts)
            check_size(len(_encode(update)), self.settings.message_bytes_max)
        else:
            check_size(len(encoded), self.settings.message_bytes_max)
        if message.context_id not in (None, view.task.context_id):
            raise InvalidParams("message.contextId", f"task {task_id} is in another context; leave contextId out")
        recipient = view.task.recipient.pubkey
        if sent.push is not None and not view.state.terminal:
            # Before the message, so that its step is told too; once, since many clients say it with every message.
            await self._ledger.commit(PutPush(task_id=task_id, recipient=recipient, config=sent.push, once=True))
        if key is not None and view.state.terminal and any(_same_words(update, said) for said in view.history):
            return _Sent(through=view.generation)
        # A message's id is derived from its idempotency key and a digest of its content. The id that the client gave it
        # is no part of the content: clients make a new one when they try again.
        if key is not None:
            encoded = _encode(msgspec.structs.replace(next_message(message), message_id=None))
        prefix = None if key is None else f"{unkeyed_id(call.caller, call.agent.id, key.key)}."
        reported = await self._ledger.commit(
            Continue(
                task_id=task_id,
                viewer=scope.sender,
                recipient=recipient,
                message=update,
                message_id=self._new_id() if prefix is None else prefix + hashlib.sha256(encoded).hexdigest()[:32],
                key=prefix,
                by=self._sender(call),
            )
        )
        # What was true before this message is no answer to it, and what came after it is.
        return _Sent(through=reported.generation, again=reported.duplicate)

    async def _opening(self, watch: Watch) -> list[Step]:
        """The first steps of a new task.

        A stream tells of a task, or is one bare message. Its first frame must know which, so it waits a little for the
        agent to speak.
        """
        steps = list(await watch.next(WATCH_S))
        while not watch.cut and isinstance(steps[-1].what, (Began, Started)):
            more = await watch.next(REPLY_S)
            if not more:
                break
            steps += more
        return steps


def _same_words(one: MessageUpdate, other: MessageUpdate) -> bool:
    return msgspec.structs.replace(one, message_id=other.message_id) == other


_NEW: Final = _Sent(from_watch=True)
_REPEATED: Final = _Sent()
