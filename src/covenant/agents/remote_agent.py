"""Remote agents: an agent of another server does the task, called over A2A.

The remote agent receives the text of the message, the depth of the call and its deadline, nothing else. Its events
become updates of the task here, and its answer the result. If it asks for something, the task waits, and the next
message goes to the same remote task.

The message has a key made from the task's id, the same in every attempt, so that an agent that supports such keys does
the work once. The remote task's id is noted as soon as it is known: a later attempt follows that task, and sends
nothing. Ending the task here ends the remote task. A daemon that stops leaves the remote task at work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from covenant.agents.runtime.agent_calls import REMOTE_FAILURE, RemoteFailure
from covenant.agents.runtime.agent_spans import trace_call
from covenant.agents.runtime.job import DAEMON_STOPS, Job
from covenant.exchange.tasks.builder import IDEMPOTENCY, text_of
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import ListQuery, QueueQuery, TaskLedger
from covenant.ledger.machine.states import LEASED, PARKED
from covenant.model.agent_card import RemoteCard
from covenant.model.content import Content, Text
from covenant.model.errors import CovenantError, NotFound, Refusal
from covenant.model.ids import AgentId, TaskId
from covenant.model.rate_limits import Backoff
from covenant.model.sanitizer import unreserved_parts, unreserved_update
from covenant.model.task import DELEGATION, REMOTE, DuplicateSafety, Ending, Hop, Target, Task, target_of
from covenant.model.task_event import Ended, StatusUpdate, Step
from covenant.model.task_view import (
    RemoteArtifact,
    RemoteEvent,
    RemoteMessage,
    RemoteStatus,
    RemoteTask,
    TaskState,
    fold,
)
from covenant.model.tenants import host_of
from covenant.model.usage import USAGE, read_usage, usage_beyond
from covenant.outbound.call_errors import CallFailed, NoCard, RemoteError, RemoteRefused, RemoteTimedOut
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.remote.card_lookup import CardCache, card_or_none, choose_interfaces, find_card, verified
from covenant.outbound.remote.remote_client import Remote, RemoteOptions, RemoteStream
from covenant.outbound.remote.remote_registry import Credentials, RemoteEntry, RemoteRegistry
from covenant.outbound.remote.remote_task import RemoteTaskView, Reply, reply_of

POLL_BACKOFF: Final = Backoff(0.25, 3.0)
FAILURES_MAX: Final = 20
RENEW_S: Final = 60.0

log = logging.getLogger(__name__)
WATCHED_MAX: Final = 10_000
FOUND_MAX: Final = 100
"""The most tasks of each state that are looked up at a start."""
RECENTLY_MS: Final = 3_600_000
CANCEL_BACKOFF: Final = Backoff(1.0, 81.0, 3)
CANCELS_MAX: Final = 6
WATCH_S: Final = 600.0
CANCEL_S: Final = 10.0
CARDS_MAX: Final = 1_000
FETCHERS_MAX: Final = 1_000
CALL_S_MAX: Final = 24 * 3600.0


class RemoteAgent:
    def __init__(
        self, open_remote: OpenRemote, target: Target | None = None, *, depth_max: int, cancels: RemoteCancels
    ) -> None:
        """`target`: the agent's address, for tasks that name none."""
        self._cancels = cancels
        self._open = open_remote
        self._target = target
        self._depth_max = depth_max

    async def run(self, job: Job) -> None:
        target = target_of(job.task) or self._target
        if target is None or not target.label:
            job.fail("neither the task nor the agent has a remote agent's name or URL")
            return
        renewal = asyncio.ensure_future(renew_lease(job))
        try:
            await self._call(job, target)
        except (Refusal, RemoteError, CallFailed) as failure:
            _fail(job, failure)
        finally:
            renewal.cancel()

    async def _call(self, job: Job, target: Target) -> None:
        hop, tenant = hop_of(job.task), host_of(job.holder.display)
        if hop.depth > self._depth_max:
            job.fail(f"depth_exceeded: a chain may have at most {self._depth_max} calls")
            return
        leased = job.leased
        again = leased.turn > 1 or leased.lease.attempt > 1
        noted = await job.stored_note(REMOTE) if again else None
        known = noted if isinstance(noted, dict) else {}
        ids = _RemoteIds(job, known)
        remote = await self._open(tenant, target)
        try:
            with trace_call(job, remote, hop) as hop_there:
                if known.get("task_id") and known.get("turn") == leased.turn:
                    reply = await _follow(job, remote, ids)
                else:
                    reply = await self._send(job, remote, hop_there, ids)
        except asyncio.CancelledError:
            if job.stopping != DAEMON_STOPS and ids.task_id is not None:
                # The remote task was canceled already if it could be reached just now. Otherwise this keeps trying.
                self._cancels.cancel(tenant, target, ids.task_id)
            raise
        finally:
            job.spend(job.spending.end_running())
            await remote.close()
        _conclude(job, reply)
        if reply.waits and ids.task_id is not None:
            self._cancels.watch(tenant, job.task.id, target, ids.task_id)

    async def _send(self, job: Job, remote: Remote, hop: Hop, ids: _RemoteIds) -> Reply:
        task, turn = job.task, job.leased.turn
        key = task.id if turn == 1 else f"{task.id}.{turn}"
        idempotent = task.idempotency is not None and task.idempotency.duplicate_safety is DuplicateSafety.IDEMPOTENT
        safety = DuplicateSafety.IDEMPOTENT if idempotent else DuplicateSafety.UNSAFE
        stream = remote.stream(
            _message_text(job),
            task_id=ids.task_id,
            context_id=ids.context_id,
            metadata={IDEMPOTENCY: {"key": key, "duplicate_safety": safety.value}},
            message_id=key,
            # Without a key the message is sent once: an agent that ignores such keys might do the work twice.
            idempotency_key=key if idempotent else None,
            hop=hop,
            stays=lambda: job.stopping == DAEMON_STOPS,
        )
        _count_usage(job, stream, ids.task_id)
        async for event in stream:
            ids.note(stream.task_id, stream.reply.context_id)
            await _report_event(job, event)
        return stream.reply


class _RemoteIds:
    """The ids of the remote task and its context. A status of the task has them, once in each turn."""

    def __init__(self, job: Job, known: Mapping[str, Any]) -> None:
        self._job = job
        self._announced = False
        self.task_id: str | None = known.get("task_id")
        self.context_id: str | None = known.get("context_id")

    def note(self, task_id: str | None, context_id: str | None) -> None:
        if task_id is not None and not self._announced:
            self._announced = True
            self.task_id, self.context_id = task_id, context_id
            noted = {"task_id": task_id, "context_id": context_id, "turn": self._job.leased.turn}
            self._job.add_update(StatusUpdate(metadata={REMOTE: noted}))


def _count_usage(job: Job, source: RemoteStream | RemoteTaskView, earlier: str | None) -> None:
    """Counts the usage that `source` reports until the call is over. `earlier`: the remote task of earlier turns.

    Many agents report the usage of all turns of a task. The usage of earlier turns of the same task is counted already.
    """
    before = read_usage(job.notes.get(USAGE)) if earlier is not None else {}
    job.spending.running = lambda: usage_beyond(source.usage, before if source.task_id == earlier else {})


async def _follow(job: Job, remote: Remote, ids: _RemoteIds) -> Reply:
    """Polls a remote task that an earlier attempt began, until it is over."""
    assert ids.task_id is not None
    view, failures, polls, task_id = RemoteTaskView(), 0, 0, ids.task_id
    _count_usage(job, view, task_id)
    while True:
        try:
            for event in view.take(await remote.get(task_id)):
                await _report_event(job, event)
            failures = 0
        except (RemoteError, CallFailed) as failure:
            failures += 1
            if not failure.transient or failures >= FAILURES_MAX:
                raise
        if view.stopped:
            return reply_of(view, remote)
        polls += 1
        await asyncio.sleep(POLL_BACKOFF.pause(polls))


async def renew_lease(job: Job) -> None:
    """Renews the lease while a call runs, perhaps for hours: the retry gate may requeue work with an old lease."""
    with suppress(Refusal):
        while True:
            await asyncio.sleep(RENEW_S)
            await job.renew()


async def _report_event(job: Job, event: RemoteEvent) -> None:
    match event:
        case RemoteArtifact(update=update):
            job.add_update(unreserved_update(update))
        case RemoteStatus(state=TaskState.WORKING) | RemoteTask(state=TaskState.WORKING) if event.text:
            job.add_update(StatusUpdate(event.text))
        case RemoteStatus() | RemoteTask() | RemoteMessage():
            pass
    if job.full:
        await job.room()


def _conclude(job: Job, reply: Reply) -> None:
    content: tuple[Content, ...] = unreserved_parts(reply.message.parts) if reply.message is not None else ()
    match reply.state:
        case TaskState.COMPLETED:
            job.complete(*(content or ((Text(reply.text),) if reply.text and not reply.artifacts else ())))
        case TaskState.INPUT_REQUIRED | TaskState.AUTH_REQUIRED as state:
            job.park(StatusUpdate(reply.text, state.value))
        case TaskState.REJECTED:
            job.reject(reply.text or "the remote agent rejected the task", *content)
        case TaskState.CANCELED:
            job.end_canceled(reply.text or "the remote agent canceled the task", *content)
        case _:
            job.fail(reply.text or "the remote agent failed", *content)


def _fail(job: Job, failure: Refusal | RemoteError | CallFailed) -> None:
    code, message = failure.code, failure.message
    log.info("remote.failed", extra=job.fields(code=code, reason=message))
    if isinstance(failure, RemoteTimedOut):
        job.fail(message)
        return
    remote_failure = RemoteFailure(code=code, message=message)
    if isinstance(failure, RemoteRefused):
        text = failure.remote_message or message
        remote_failure = RemoteFailure(code=code, message=text, rpc_code=failure.rpc_code, status=failure.status)
    job.notes[REMOTE_FAILURE] = msgspec.to_builtins(remote_failure)
    job.fail(f"the call of the remote agent failed: {message}")


def _message_text(job: Job) -> str:
    return "\n".join(text_of(message.parts) for message in job.messages)


def hop_of(task: Task) -> Hop:
    """The chain of calls up to this one. A delegated task already is the call itself."""
    hop = Hop(**{name: getattr(task, name) for name in Hop.__struct_fields__})
    return hop if task.origin == DELEGATION else hop.next(task.recipient.pubkey)


OpenRemote = Callable[[str, Target], Awaitable[Remote]]
"""Opens a remote agent for a tenant, by its URL or by its name among those that the tenant may call."""


class RemoteCancels:
    """Cancels remote tasks whose local task ended while no job worked on it.

    Such a task waited for an answer, lost its holder, or ended just when the daemon died. It is watched, or found at
    the start. Canceling twice does no harm, so no record is kept: after a start, the remote tasks of tasks that ended
    in the last hour are canceled again.
    """

    def __init__(self, ledger: TaskLedger, open_remote: OpenRemote) -> None:
        self._ledger = ledger
        self._open = open_remote
        self._running: dict[asyncio.Task[None], None] = {}

    def watch(self, tenant: str, task_id: TaskId, target: Target, remote_task_id: str) -> None:
        """Cancels the remote task when the local task has ended without an answer."""
        self._begin(partial(self._watch, tenant, task_id, target, remote_task_id))

    def cancel(self, tenant: str, target: Target, remote_task_id: str) -> None:
        """Cancels the remote task now, retrying within bounds."""
        self._begin(partial(self._cancel, tenant, target, remote_task_id))

    def resume(self, identity: AgentId, target: Target | None) -> None:
        """Cancels or watches the remote tasks that an earlier run of this daemon left behind."""
        self._begin(partial(self._find, identity, target))

    async def stop(self) -> None:
        running = tuple(self._running)
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _begin(self, work: Callable[[], Awaitable[None]]) -> None:
        if len(self._running) >= WATCHED_MAX:
            log.warning("remote.unwatched", extra={"watched": len(self._running)})
            return
        task = asyncio.ensure_future(self._run_logged(work))
        self._running[task] = None
        task.add_done_callback(lambda done: self._running.pop(done, None))

    async def _run_logged(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs `work` and logs its failure. A start that fails cancels this before it calls `work`."""
        try:
            await work()
        except CovenantError as error:
            log.warning("remote.not_withdrawn", extra={"reason": str(error)})

    async def _watch(self, tenant: str, task_id: TaskId, target: Target, remote_task_id: str) -> None:
        with self._ledger.watch(task_id) as watch:
            # The task may have ended before the watch began.
            if await self._ledger.finished(task_id, 0):
                steps = await self._ledger.steps(task_id, 0, 1_000)
                ended = next((step.what for step in reversed(steps) if isinstance(step.what, Ended)), None)
            else:
                ended = None
                while ended is None and not watch.cut:
                    news = await watch.next(WATCH_S)
                    ended = next((step.what for step in news if isinstance(step.what, Ended)), None)
        if ended is None or ended.ending in (Ending.CANCELED, Ending.FAILED):
            await self._cancel(tenant, target, remote_task_id)

    async def _cancel(self, tenant: str, target: Target, remote_task_id: str) -> None:
        for attempt in range(1, CANCELS_MAX + 1):
            try:
                async with asyncio.timeout(CANCEL_S):
                    remote = await self._open(tenant, target)
                    try:
                        await remote.cancel(remote_task_id)
                    finally:
                        await remote.close()
                log.info("remote.withdrawn", extra={"remote_task": remote_task_id})
                return
            except (RemoteError, CallFailed, TimeoutError) as failure:
                transient = not isinstance(failure, RemoteError) or failure.transient or isinstance(failure, NoCard)
                if not transient or attempt == CANCELS_MAX:
                    # Most likely the remote task has ended. Otherwise it ends at its deadline.
                    code = "timed_out" if isinstance(failure, TimeoutError) else failure.code
                    log.info("remote.not_withdrawn", extra={"remote_task": remote_task_id, "code": code})
                    return
                await asyncio.sleep(CANCEL_BACKOFF.pause(attempt))

    async def _find(self, identity: AgentId, target: Target | None) -> None:
        ledger, me, tenant = self._ledger, identity.pubkey, host_of(identity.display)
        for state in (LEASED, PARKED):
            query = QueueQuery(viewer=me, limit=FOUND_MAX, state_filter=state.wire_name)
            for entry in (await ledger.queue(query)).tasks:
                if entry.task.recipient.pubkey != me or (state is LEASED and not entry.holder_lost):
                    continue
                steps = await ledger.steps(entry.task.id, 0, 1_000)
                address, remote_task_id = target_of(entry.task) or target, remote_task_id_in(steps)
                if address and remote_task_id is not None:
                    self.watch(tenant, entry.task.id, address, remote_task_id)
        since_ms = ledger.now_ms() - RECENTLY_MS
        for ended in (Ending.CANCELED, Ending.FAILED):
            query_ended = ListQuery(recipient=me, state=ended.value, moved_since_ms=since_ms, limit=FOUND_MAX)
            for steps in (await ledger.listing(query_ended)).tasks:
                view, remote_task_id = fold(steps), remote_task_id_in(steps)
                address = (target_of(view.task) if view is not None else None) or target
                if address and remote_task_id is not None:
                    self.cancel(tenant, address, remote_task_id)


def remote_task_id_in(steps: Sequence[Step]) -> str | None:
    """The id of the remote task in the newest status that names one."""
    for step in reversed(steps):
        what = step.what
        if isinstance(what, StatusUpdate) and isinstance(note := (what.metadata or {}).get(REMOTE), dict):
            with suppress(KeyError):
                return str(note["task_id"])
    return None


class RemoteAgents:
    """Remote agents, by their name in the registry or by their URL. Calls go only where the fetcher may go.

    An entry of `a2a_agents.json` is for the first tenant and for the tenants that it lists: no other tenant uses its
    token. `environment`: the variables that tokens are read from.
    """

    def __init__(
        self,
        home: Path,
        fetcher: Fetcher,
        ledger: Ledger,
        *,
        depth_max: int,
        environment: Callable[[], Mapping[str, str]],
        chance: Callable[[], float],
    ) -> None:
        self.cancels = RemoteCancels(ledger, self.open)
        self.registry = RemoteRegistry(home, on_read=self._log_problems)
        self._fetcher = fetcher
        self._left_ms = ledger.clock.left_ms
        self._depth_max = depth_max
        self._environment = environment
        self._chance = chance
        # Of the errors only `NoCard` is cached: an agent that did not answer may answer the next caller.
        self._cards = CardCache(cards_max=CARDS_MAX, keeps=lambda error: isinstance(error, NoCard))
        self._entry_fetchers: dict[str, Fetcher] = {}

    def registered(self, tenant: str, name: str) -> str | None:
        """The URL of an agent that the tenant may call by its name. Raises Invalid if its entry cannot be used."""
        try:
            return self.registry.entry_of(tenant, name).url
        except NotFound:
            return None

    async def prepare(self) -> None:
        """Imports the HTTP library now if remote calls are expected, so that no turn waits for the import."""
        if any(True for _ in self.registry):
            await self._fetcher.open()

    async def open(self, tenant: str, target: Target) -> Remote:
        name = target.name
        entry = RemoteEntry(url=target.url or "") if name is None else self.registry.entry_of(tenant, name)
        fetcher, credentials = self._fetcher_for(name, entry), self._credentials(entry)

        async def fetch() -> RemoteCard:
            return await find_card(fetcher, entry.url, credentials)

        # A card that was fetched with a token is not shown to callers without that token.
        card = await card_or_none(self._cards.get(f"{name or ''} {entry.url}", fetch), entry.url)
        # The task's timeout limits the call, unless the entry has one of its own.
        options = RemoteOptions(timeout_s=entry.timeout or CALL_S_MAX, chance=self._chance, left_ms=self._left_ms)
        interfaces = choose_interfaces(card, entry.url, credentials.covers)
        return Remote(interfaces, fetcher, credentials, card=card, options=options)

    async def card(self, url_or_name: str, *, verify: bool = False) -> RemoteCard:
        """Fetches the card. Raises NoCard, and the errors of the fetch."""
        name = None if "://" in url_or_name else url_or_name
        entry = RemoteEntry(url=url_or_name) if name is None else self.registry.entry(name)
        fetcher = self._fetcher_for(name, entry)
        card = await find_card(fetcher, entry.url, self._credentials(entry))
        return await verified(fetcher, card) if verify else card

    def body(self, target: Target | None = None) -> RemoteAgent:
        return RemoteAgent(self.open, target, depth_max=self._depth_max, cancels=self.cancels)

    async def close(self) -> None:
        await self.cancels.stop()
        for fetcher in self._entry_fetchers.values():
            await fetcher.close()

    def _fetcher_for(self, name: str | None, entry: RemoteEntry) -> Fetcher:
        """A registered agent may be called even at a private address, since the operator wrote its entry."""
        if name is None:
            return self._fetcher
        place = entry.host_and_port
        if place not in self._entry_fetchers:
            if len(self._entry_fetchers) >= FETCHERS_MAX:
                # Calls under way keep their client. Clients hold nothing open between calls.
                self._entry_fetchers.clear()
            self._entry_fetchers[place] = self._fetcher.allowing(place)
        return self._entry_fetchers[place]

    def _log_problems(self, registry: RemoteRegistry) -> None:
        """Logs once which entries of the file cannot be used, and how to correct them."""
        for name, why in registry.problems.items():
            log.warning("remotes.unusable", extra={"entry": name, "why": why})
        variables = self._environment()
        for name in registry:
            missing = registry.entry(name).missing_variable(variables)
            if missing is not None:
                why = "the variable is not set where the daemon was started; it is called without a token"
                log.warning("remotes.no_token", extra={"entry": name, "token_env": missing, "why": why})

    def _credentials(self, entry: RemoteEntry) -> Credentials:
        return Credentials(entry.url, token=entry.token(self._environment()), headers=entry.headers)
