"""The A2A verbs for a tenant's caller at one agent: send, stream, subscribe, get, list, cancel.

Whichever dialect and binding a client came by, it ends up here. Everything is scoped to the tenant and the agent
first: a task of another is not found. A caller that goes away ends nothing; a task that was accepted goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from typing import Final

import msgspec

from covenant.exchange.access.tenants import Caller
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.tasks.builder import (
    ORIGIN,
    UNGUESSABLE_LENGTH_MIN,
    IdempotencyKey,
    KeyedIds,
    check_message,
    check_size,
    first_task,
    next_message,
    read_idempotency,
    unkeyed_id,
    within_chain,
    within_deadline,
    without_reserved_keys,
    without_way,
)
from covenant.exchange.tasks.reader import TaskReader, parse_known_id
from covenant.exchange.tasks.task_start import LocalWorkers, TaskAcceptor
from covenant.exchange.tasks.task_stream import KEEP_ALIVE_S, TaskStream
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import ListQuery, Watch
from covenant.ledger.machine.commands import Cancel, Continue, PutPush
from covenant.ledger.machine.decisions.context import key_reused
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
from covenant.model.call_context import DEFAULT_DEPTH_MAX, Hop, check_hop
from covenant.model.errors import Conflict, Invalid, InvalidParams, Refusal, Unauthenticated
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.task import Task, fingerprint
from covenant.model.task_event import Began, Ended, Started, Step
from covenant.model.task_view import TaskState, TaskView, TaskViewBuilder, fold
from covenant.model.tracing import OFF, Tracer, trace_of

ANONYMOUS: Final = "anonymous"
"""As whom callers without a token send, at an agent that is published for everybody."""
REPLY_S: Final = 0.01
"""How long the first frame of a stream waits to see whether the whole answer is a bare message."""

_encode = msgspec.json.Encoder().encode


class A2ALimits(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    message_bytes_max: int = 1024 * 1024
    blocking_ms_max: int = 10 * 60_000
    """After this long a blocking send answers with the task as it is; the task goes on."""
    depth_max: int = DEFAULT_DEPTH_MAX
    """How deep in a chain of calls a message may come."""


class A2ARequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Who asks, at which agent, and what came beside the request."""

    caller: Caller
    agent: CatalogueAgent
    extensions: tuple[str, ...] = ()
    idempotency_key: str | None = None
    hop: Hop | None = None
    """What the caller says of the calls before this one."""


class _Saying(msgspec.Struct, frozen=True, gc=False):
    """A message that was checked, and the task it is for: `task` if it begins one."""

    task_id: TaskId
    task: Task | None
    said: IdempotencyKey | None


class _Said(msgspec.Struct, frozen=True, gc=False):
    """A message that is durable. `from_watch`: the watch tells the task from its first step on.

    Otherwise the past is to be read, and `through` is as far as it matters.
    """

    from_watch: bool = False
    through: int | None = None
    again: bool = False
    """It was said before: what came of it since may be older than the watch."""


class A2AExchange:
    def __init__(
        self,
        ledger: Ledger,
        catalogue: Catalogue,
        hands: LocalWorkers,
        new_id: Callable[[], str],
        limits: A2ALimits,
        *,
        check_push: Callable[[PushConfig], None] | None = None,
        tracer: Tracer = OFF,
    ) -> None:
        """`check_push` refuses a push configuration that is no good. None: there are no push notifications here."""
        self._ledger = ledger
        self._catalogue = catalogue
        self._beginnings = TaskAcceptor(ledger, hands, tracer)
        self._new_id = new_id
        self._views = TaskReader(ledger)
        self._check_push = check_push
        self.ids = KeyedIds(ledger, catalogue)
        self.limits = limits

    async def send(self, ask: A2ARequest, sent: SendMessage) -> TaskView:
        """The task when it has ended or waits for its sender; as soon as it is accepted, if it should not block."""
        saying = await self._saying(ask, sent)
        with self._ledger.watch(saying.task_id) as watch:
            said = await self._say(ask, sent, saying)
            folder = TaskViewBuilder()
            if said.from_watch:
                _add(folder, await watch.next(KEEP_ALIVE_S))
            else:
                folder = await self._views.past(saying.task_id, None if said.again else said.through)
            return await self._settled(watch, folder) if sent.blocking else _viewed(folder)

    async def begin(self, task: Task) -> TaskView:
        """A task that another door has made, as soon as it is accepted; as it stands, if it was before."""
        with self._ledger.watch(task.id) as watch:
            if not (await self._accept(task)).from_watch:
                return _viewed(await self._views.past(task.id))
            folder = TaskViewBuilder()
            _add(folder, await watch.next(KEEP_ALIVE_S))
            return _viewed(folder)

    async def stream(self, ask: A2ARequest, sent: SendMessage) -> TaskStream:
        """Ends with the task, or when it waits for its sender."""
        saying = await self._saying(ask, sent)
        with ExitStack() as stack:
            watch = stack.enter_context(self._ledger.watch(saying.task_id))
            said = await self._say(ask, sent, saying)
            steps, reply = None, None
            if said.from_watch:
                first, *steps = await self._opening(watch)
                view = fold((first,))
                last = steps[-1].what if steps else None
                if isinstance(last, Ended) and last.result.reply is True:
                    reply = fold((first, *steps))
            else:
                view = (await self._views.past(saying.task_id, said.through or 1)).view()
            assert view is not None
            stack.pop_all()
            return TaskStream(self._ledger, watch, view, backlog=steps, reply=reply, ends_when_parked=True)

    async def subscribe(self, ask: A2ARequest, asked: Subscribe, *, from_start: bool, finished: bool) -> TaskStream:
        """`from_start`: without a cursor, begin at the first step. `finished`: one that has ended may be replayed."""
        task_id, me = parse_known_id(asked.task_id), self._identity(ask)
        with ExitStack() as stack:
            watch = stack.enter_context(self._ledger.watch(task_id))
            now = await self._views.get(task_id, me.pubkey, self._viewer(ask))
            if now.state.terminal and asked.after is None and not finished:
                raise Conflict("unsupported_operation", f"task {task_id} has ended; read it with GetTask")
            through = asked.after
            if through is None:
                through = 1 if from_start else now.generation
            if not 0 <= through <= now.generation:
                raise Invalid(
                    "invalid_params", f"task {task_id} has come to generation {now.generation}, not {through}"
                )
            first = now
            if through < now.generation:
                first = _viewed(await self._views.past(task_id, max(1, through)))
            stack.pop_all()
            return TaskStream(self._ledger, watch, first, ends_when_parked=False)

    async def get(self, ask: A2ARequest, asked: GetTask) -> TaskView:
        return await self._views.get(parse_known_id(asked.task_id), self._identity(ask).pubkey, self._viewer(ask))

    async def list_tasks(self, ask: A2ARequest, asked: ListTasks) -> TaskPage:
        if ask.caller.anonymous:
            # Whoever has no token is one with all others who have none: it has the ids that it was told, and no list.
            raise Unauthenticated("token_needed", "listing tasks needs a token; without one, ask for a task by its id")
        if not 1 <= asked.page_size <= PAGE_SIZE_MAX:
            raise InvalidParams("pageSize", f"1 to {PAGE_SIZE_MAX}")
        listing = await self._ledger.listing(
            ListQuery(
                recipient=self._identity(ask).pubkey,
                sender=self._viewer(ask),
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

    async def cancel(self, ask: A2ARequest, asked: CancelTask) -> TaskView:
        task_id, me = parse_known_id(asked.task_id), self._identity(ask)
        canceled = await self._ledger.commit(
            Cancel(
                task_id=task_id,
                viewer=self._viewer(ask),
                recipient=me.pubkey,
                by=self._client(ask),
                reason=f"by {ask.caller.name}",
            )
        )
        if canceled.before:
            raise Conflict("not_cancelable", f"task {task_id} has ended already: it is {canceled.ending}")
        return await self._views.get(task_id, me.pubkey)

    def _identity(self, ask: A2ARequest) -> AgentId:
        return self._catalogue.identity(ask.agent.tenant, ask.agent.id)

    def _client(self, ask: A2ARequest) -> AgentId:
        tenant = ask.agent.tenant
        return self._catalogue.identity(tenant, ANONYMOUS) if ask.caller.anonymous else self._catalogue.client(tenant)

    def _viewer(self, ask: A2ARequest) -> PublicKey | None:
        """Whose tasks a caller sees: the tenant's; without a token, those that were sent without one, by their id."""
        return self._client(ask).pubkey if ask.caller.anonymous else None

    def scope(self, ask: A2ARequest) -> tuple[PublicKey, PublicKey | None]:
        """Whose tasks are asked about, and who must have part in them."""
        return self._identity(ask).pubkey, self._viewer(ask)

    # Saying something: a new task, or the next message of one.

    async def _saying(self, ask: A2ARequest, sent: SendMessage) -> _Saying:
        me, sender = self._identity(ask), self._client(ask)
        check_hop(ask.hop, me, self.limits.depth_max)
        check_message(sent.message, ask.agent, ask.extensions)
        if sent.push is not None:
            if self._check_push is None:
                raise Conflict("push_not_supported", "push notifications are switched off here")
            self._check_push(sent.push)
        said = read_idempotency(sent, ask.idempotency_key)
        if sent.message.task_id is not None:
            return _Saying(parse_known_id(sent.message.task_id), None, said)
        if ask.caller.anonymous and sent.message.context_id is not None:
            await self._check_context(sent.message.context_id, me, sender)
        if said is None:
            task_id = TaskId(self._new_id())
        else:
            task_id = await self.ids.find(ask.caller, ask.agent.id, said.key, sender=sender, recipient=me)
        task = first_task(sent, ask.agent, task_id, sender=sender, recipient=me, said=said)
        return _Saying(task_id, task if ask.hop is None else within_chain(task, ask.hop), said)

    async def _check_context(self, context_id: str, me: AgentId, sender: AgentId) -> None:
        """Without a token, a context is one that the caller was told, or one that nobody else can have chosen."""
        if len(context_id) < UNGUESSABLE_LENGTH_MIN:
            raise Invalid(
                "guessable_context",
                f"message.contextId: without a token, it has at least {UNGUESSABLE_LENGTH_MIN} characters; "
                "leave it out, or use a random UUID",
            )
        everybodys = ListQuery(recipient=me.pubkey, context_id=context_id, limit=1)
        theirs = msgspec.structs.replace(everybodys, sender=sender.pubkey)
        if (await self._ledger.listing(everybodys)).total > (await self._ledger.listing(theirs)).total:
            raise Invalid("unknown_context", "message.contextId: there is no such context of yours; leave it out")

    def _say(self, ask: A2ARequest, sent: SendMessage, saying: _Saying) -> Awaitable[_Said]:
        """Make it durable. What follows is watched already."""
        if saying.task is None:
            return self._continue(ask, sent, saying)
        return self._accept(saying.task, sent.push, ask.hop, minted=saying.said is None)

    async def _accept(
        self, task: Task, push: PushConfig | None = None, hop: Hop | None = None, *, minted: bool = False
    ) -> _Said:
        """`minted`: its id is new, and nobody else's to have used."""
        digest, size = fingerprint(without_way(task))
        if push is not None:
            # The same key with another webhook is another request, as with another message.
            digest = hashlib.sha256(digest.encode() + _encode(push)).hexdigest()
        check_size(size, self.limits.message_bytes_max)
        if task.origin == ORIGIN:
            # After the digest: the same request has the same digest, whichever keys are reserved by now.
            task = without_reserved_keys(task)
            if task.deadline_ms is not None:
                task = within_deadline(task, self._ledger.clock.left_ms(task.deadline_ms))
        try:
            trace = None if hop is None else trace_of(hop)
            accepted = await self._beginnings.accept(task, digest, push, trace, minted=minted)
        except Refusal as refusal:
            if refusal.code == "duplicate_task_id":
                raise key_reused() from None
            raise
        return _Said(from_watch=not accepted.duplicate)

    async def _continue(self, ask: A2ARequest, sent: SendMessage, saying: _Saying) -> _Said:
        task_id, said, message, me = saying.task_id, saying.said, sent.message, self._identity(ask)
        update = next_message(message)
        check_size(len(_encode(update)), self.limits.message_bytes_max)
        view = await self._views.get(task_id, me.pubkey, self._viewer(ask))
        if message.context_id not in (None, view.task.context_id):
            raise InvalidParams("message.contextId", f"task {task_id} is in another context")
        if sent.push is not None and not view.state.terminal:
            # Before the message, so that its step is told too; once, since many clients say it with every message.
            await self._ledger.commit(PutPush(task_id=task_id, recipient=me.pubkey, config=sent.push, once=True))
        if said is not None and view.state.terminal and update in view.history:
            return _Said(through=view.generation)
        # A saying that has a key is called by it, and by what it says.
        key = None if said is None else f"{unkeyed_id(ask.caller, ask.agent.id, said.key)}."
        reported = await self._ledger.commit(
            Continue(
                task_id=task_id,
                viewer=self._viewer(ask),
                recipient=me.pubkey,
                message=update,
                message_id=self._new_id() if key is None else key + hashlib.sha256(_encode(update)).hexdigest()[:32],
                key=key,
            )
        )
        # What was true before this message is no answer to it, and what came after it is.
        return _Said(through=reported.generation, again=reported.duplicate)

    async def _settled(self, watch: Watch, folder: TaskViewBuilder) -> TaskView:
        """Wait until the task has ended or waits for its sender, within bounds."""
        monotonic_ms = self._ledger.clock.monotonic_ms
        until_ms = monotonic_ms() + self.limits.blocking_ms_max
        while not _rests(folder.state) and (left_ms := until_ms - monotonic_ms()) > 0:
            if watch.cut:
                task = _viewed(folder).task
                return await self._views.get(task.id, task.recipient.pubkey)
            # Whatever is said on the way is told when it rests: nobody reads it before.
            _add(folder, await watch.next(left_ms / 1000, until_rest=True))
        view = _viewed(folder)
        self._views.keep(view)
        return view

    async def _opening(self, watch: Watch) -> list[Step]:
        """The first steps of a new task.

        A stream tells of a task, or is one bare message. Its first frame must know which, so it waits a little for the
        agent to speak.
        """
        steps = list(await watch.next(KEEP_ALIVE_S))
        while not watch.cut and isinstance(steps[-1].what, (Began, Started)):
            more = await watch.next(REPLY_S)
            if not more:
                break
            steps += more
        return steps


def _rests(state: TaskState) -> bool:
    return state.terminal or state.waits


def _add(folder: TaskViewBuilder, steps: Iterable[Step]) -> None:
    for step in steps:
        if step.generation > folder.generation:
            folder.add(step)


def _viewed(folder: TaskViewBuilder) -> TaskView:
    view = folder.view()
    assert view is not None, "a task that was accepted has a first step"
    return view
