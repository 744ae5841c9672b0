"""Remote agents: a body that has a task done elsewhere, by an agent that is called over A2A.

What is told there is the words of the message, how deep the call is and until when it is wanted; nothing else of ours.
What it says comes back as updates of the task at hand, and its answer as the result. If it asks for something, the task
waits, and the next message goes to the same task there.

The message goes under a key made from the task's id, the same in every attempt, so that an agent that knows such keys
does it once. Its task there is noted as soon as it is known: an attempt that finds the note follows that task, and
sends nothing. Whoever ends the task here ends it there. A daemon that stops leaves it at work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from covenant.agents.budget import USAGE
from covenant.agents.job import DAEMON_STOPS, Job
from covenant.agents.tracing import calling
from covenant.agents.withdrawing import Open, Withdrawals
from covenant.exchange.delegation import REMOTE, target_of, tenant_of
from covenant.exchange.tasks.builder import IDEMPOTENCY, text_of
from covenant.model.content import Content, Text
from covenant.model.errors import Refusal
from covenant.model.task_view import TaskState
from covenant.model.call_context import Hop
from covenant.model.sanitizer import unreserved_parts, unreserved_update
from covenant.model.task_view import RemoteEvent, RemoteArtifact, RemoteMessage, RemoteStatus, RemoteTask
from covenant.model.task import Target
from covenant.model.task import DELEGATION, DuplicateSafety, Task
from covenant.model.task_event import StatusUpdate
from covenant.model.usage import read_usage, usage_beyond
from covenant.outbound.assembly import Assembly
from covenant.outbound.failures import CallFailed
from covenant.outbound.remote import Remote, RemoteStream
from covenant.outbound.remote_errors import PASSING, RemoteError
from covenant.outbound.reply import Reply, reply_of

POLLS_S: Final = (0.25, 0.5, 1.0, 2.0, 3.0)
FAILURES_MAX: Final = 20
BEAT_S: Final = 60.0
NOT_ASKED: Final = "the remote agent could not be asked: "
"""What the sender is told where it was not the remote agent that failed."""

log = logging.getLogger(__name__)


class RemoteBody:
    def __init__(
        self,
        open_remote: Open,
        target: Target | None = None,
        *,
        depth_max: int,
        withdrawals: Withdrawals,
    ) -> None:
        """`target`: where it is, for tasks that do not say so. `withdrawals`: who ends there what has ended here."""
        self._withdrawals = withdrawals
        self._open = open_remote
        self._target = target
        self._depth_max = depth_max

    async def run(self, job: Job) -> None:
        target = target_of(job.task) or self._target
        if target is None or not target.label:
            job.fail("nobody knows where this agent is")
            return
        beating = asyncio.ensure_future(beat(job))
        try:
            await self._talk(job, target)
        except Refusal as refusal:
            _tell(job, refusal.message, refusal.code)
        except (RemoteError, CallFailed) as failure:
            _tell(job, failure.message, failure.code)
        finally:
            beating.cancel()

    async def _talk(self, job: Job, target: Target) -> None:
        hop, tenant = hop_of(job.task), tenant_of(job.holder)
        if hop.depth > self._depth_max:
            job.fail(f"depth_exceeded: at most {self._depth_max} calls may follow from one another")
            return
        leased = job.leased
        again = leased.turn > 1 or leased.lease.attempt > 1
        noted = await job.noted(REMOTE) if again else None
        known = noted if isinstance(noted, dict) else {}
        note = _Note(job, known)
        remote = await self._open(tenant, target)
        try:
            with calling(job, remote, hop) as hop_there:
                if known.get("task_id") and known.get("turn") == leased.turn:
                    reply = await _follow(job, remote, note)
                else:
                    reply = await self._send(job, remote, hop_there, note)
        except asyncio.CancelledError:
            if job.stopping != DAEMON_STOPS and note.task_id is not None:
                # It was told already, if it could be reached just now. Otherwise it is told until it can be.
                self._withdrawals.tell(tenant, target, note.task_id)
            raise
        finally:
            job.spend(job.spending.end_running())
            await remote.close()
        _conclude(job, reply)
        if reply.waits and note.task_id is not None:
            self._withdrawals.watch(tenant, job.task.id, target, note.task_id)

    async def _send(self, job: Job, remote: Remote, hop: Hop, note: _Note) -> Reply:
        task, turn = job.task, job.leased.turn
        key = task.id if turn == 1 else f"{task.id}.{turn}"
        idempotent = task.idempotency is not None and task.idempotency.duplicate_safety is DuplicateSafety.IDEMPOTENT
        safety = DuplicateSafety.IDEMPOTENT if idempotent else DuplicateSafety.UNSAFE
        stream = remote.stream(
            _words(job),
            task_id=note.task_id,
            context_id=note.context_id,
            metadata={IDEMPOTENCY: {"key": key, "duplicate_safety": safety.value}},
            message_id=key,
            # Without it the message is posted once: an agent that does not know such keys might do it twice.
            idempotency_key=key if idempotent else None,
            hop=hop,
            stays=lambda: job.stopping == DAEMON_STOPS,
        )
        _count(job, stream, note.task_id)
        async for heard in stream:
            note.take(stream.task_id, stream.reply.context_id)
            await _say(job, heard)
        return stream.reply


class _Note:
    """Which task it is there: as it was noted before, or as it is learned, and then said once in a turn."""

    def __init__(self, job: Job, known: Mapping[str, Any]) -> None:
        self._job = job
        self._said = False
        self.task_id: str | None = known.get("task_id")
        self.context_id: str | None = known.get("context_id")

    def take(self, task_id: str | None, context_id: str | None) -> None:
        if task_id is not None and not self._said:
            self._said = True
            self.task_id, self.context_id = task_id, context_id
            noted = {"task_id": task_id, "context_id": context_id, "turn": self._job.leased.turn}
            self._job.say(StatusUpdate(metadata={REMOTE: noted}))


def _count(job: Job, heard: RemoteStream | Assembly, earlier: str | None) -> None:
    """Until the call is over, `heard` says what it uses. `earlier`: the task there that earlier turns talked to.

    Many agents report what all turns of a task used. What earlier turns of the same task used is counted already.
    """
    before = read_usage(job.notes.get(USAGE)) if earlier is not None else {}
    job.spending.running = lambda: usage_beyond(heard.usage, before if heard.task_id == earlier else {})


async def _follow(job: Job, remote: Remote, note: _Note) -> Reply:
    """A task there that an earlier attempt began: look at it until it is over."""
    assert note.task_id is not None
    known, failures, looks, task_id = Assembly(), 0, 0, note.task_id
    _count(job, known, task_id)
    while True:
        try:
            for heard in known.take(await remote.get(task_id)):
                await _say(job, heard)
            failures = 0
        except (RemoteError, CallFailed) as failure:
            failures += 1
            passing = failure.transient if isinstance(failure, CallFailed) else failure.code in PASSING
            if not passing or failures >= FAILURES_MAX:
                raise
        if known.stopped:
            return reply_of(known, remote)
        await asyncio.sleep(POLLS_S[min(looks, len(POLLS_S) - 1)])
        looks += 1


async def beat(job: Job) -> None:
    """A call may take hours. The retry gate takes an old lease for one that was lost."""
    with suppress(Refusal):
        while True:
            await asyncio.sleep(BEAT_S)
            await job.renew()


async def _say(job: Job, heard: RemoteEvent) -> None:
    match heard:
        case RemoteArtifact(update=update):
            job.say(unreserved_update(update))
        case RemoteStatus(state=TaskState.WORKING) | RemoteTask(state=TaskState.WORKING) if heard.text:
            job.say(StatusUpdate(heard.text))
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
            job.reject(reply.text or "the remote agent rejected it", *content)
        case TaskState.CANCELED:
            job.give_up(reply.text or "it was canceled where it was done", *content)
        case _:
            job.fail(reply.text or "the remote agent failed", *content)


def _tell(job: Job, message: str, code: str) -> None:
    log.info("remote.failed", extra=job.fields(code=code, reason=message))
    job.fail(f"{NOT_ASKED}{message}" if code != "timed_out" else message)


def _words(job: Job) -> str:
    return "\n".join(text_of(message.parts) for message in job.messages)


def hop_of(task: Task) -> Hop:
    """What is said of the calls before this one. A task that was delegated is that call already."""
    hop = Hop(
        depth=task.depth,
        chain=task.chain,
        deadline_ms=task.deadline_ms,
        traceparent=task.traceparent,
        tracestate=task.tracestate,
    )
    return hop if task.origin == DELEGATION else hop.next(task.recipient.pubkey)
