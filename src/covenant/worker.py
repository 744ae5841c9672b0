"""A worker: takes the tasks of its identity from a daemon, wherever it runs, and keeps their leases fresh.

    worker = Worker("http://127.0.0.1:8421", token)

    @worker
    async def summarize(job):                     # a task under a lease
        await job.say("Working on it… ")          # an update that watchers see
        return summary_of(job.text)               # the result; raising makes it an error

    asyncio.run(worker.run())

A call that fails on its way is repeated under the same ids, for up to a day. A worker whose lease is lost (the task was
canceled, timed out or repaired) hears of it with its next update or heartbeat, and its work is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final

from covenant.client import Client, Posted, Taken, finish_despite_cancel, retry
from covenant.exchange.argument_checks import checks_arguments, checks_methods
from covenant.model.content import Content, Text
from covenant.model.errors import Invalid, Refusal, TooLarge, WrongType
from covenant.model.ids import TaskId
from covenant.model.task import Result, error_result
from covenant.model.task_event import ArtifactUpdate, StatusUpdate, Update, text_artifact
from covenant.model.task_view import first_message
from covenant.wire.validation import checked

WAIT_MS: Final = 20_000
RENEW_S: Final = 30.0
OVER: Final = frozenset({"canceled", "already_settled", "stale_lease", "unknown_task", "not_lessee", "not_leased"})
"""Refusals that tell a holder to stop."""

log = logging.getLogger(__name__)


@checks_methods
class WorkerJob:
    """A turn of a task, under a lease of yours."""

    def __init__(self, client: Client, taken: Taken) -> None:
        self._client = client
        self._update_no = 0
        self._chunks = 0
        self._telling = asyncio.Lock()
        self._untold: Update | None = None
        """An update that is on its way, or whose sender was cancelled before the daemon had acknowledged it."""
        self.task = taken.task
        self.lease_id = taken.lease.lease_id
        self.attempt = taken.lease.attempt
        self.turn = taken.turn
        self._text_id = text_artifact(taken.task.id, taken.turn)
        self.messages = taken.messages or (first_message(taken.task),)
        """What this turn is about."""

    @property
    def text(self) -> str:
        return "\n".join(part.text for message in self.messages for part in message.parts if isinstance(part, Text))

    @property
    def parts(self) -> tuple[Content, ...]:
        return tuple(part for message in self.messages for part in message.parts)

    async def update(self, update: Update) -> None:
        """Tell watchers. One at a time: each has its number, and the daemon takes them in order."""
        async with self._telling:
            if self._untold is not None:
                await self._tell(self._untold)  # its number is taken, whether or not it arrived: it goes first
            self._update_no += 1
            self._untold = update
            await self._tell(update)

    async def _tell(self, update: Update) -> None:
        try:
            await retry(lambda: self._client.update(self.task.id, self.lease_id, update, self._update_no))
        except Refusal:
            self._untold = None
            self._update_no -= 1
            raise
        self._untold = None

    async def say(self, text: str) -> None:
        """More of the answer, as it is made."""
        self._chunks += 1
        await self.update(ArtifactUpdate(self._text_id, (Text(text),), "response", append=self._chunks > 1))

    async def status(self, text: str) -> None:
        await self.update(StatusUpdate(text))

    async def ask(self, question: str) -> None:
        """Park the task until its sender answers: that will be another turn, and this job is over."""
        await self._close_text()
        await self.update(StatusUpdate(question, state="input-required"))

    async def _close_text(self) -> None:
        """Whoever streams the answer hears that nothing follows."""
        if self._chunks:
            self._chunks = 0
            await self.update(ArtifactUpdate(self._text_id, (Text(""),), append=True, last_chunk=True))

    async def finish(self, result: Result) -> Posted:
        await self._close_text()
        return await retry(lambda: self._client.settle(result, self.lease_id))

    async def renew(self) -> None:
        await self._client.renew(self.task.id, self.lease_id)

    async def release(self, reason: str) -> None:
        """Give the task back, if nothing was done for it."""
        await self._client.release(self.task.id, self.lease_id, reason)


Handler = Callable[[WorkerJob], Awaitable[str | Content | Result | None]]


@checks_methods
class Worker:
    """Takes the tasks of its identity, as many at once as it is told, and keeps their leases fresh."""

    @checks_arguments
    def __init__(self, url: str, token: str, *, concurrency: int = 1, renew_s: float = RENEW_S) -> None:
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        if renew_s <= 0:
            raise ValueError("renew_s must be more than 0")
        self._url = url
        self._token = token
        self._concurrency = concurrency
        self._renew_s = renew_s
        self._handler: Handler | None = None
        self._stopping = asyncio.Event()

    def __call__(self, handler: Handler) -> Handler:
        if not callable(handler):
            raise TypeError(f"a worker's handler must be an async function, and this is a {type(handler).__name__}")
        self._handler = handler
        return handler

    def stop(self) -> None:
        """Take nothing more; `run` returns when what is under way is done."""
        self._stopping.set()

    async def run(self) -> None:
        if self._handler is None:
            raise RuntimeError("give the worker something to do: @worker above an async function")
        free = asyncio.Semaphore(self._concurrency)
        waiting: dict[WorkerJob, str] = {}
        """Taken and not begun, with the request id."""
        async with Client(self._url, self._token) as client:
            try:
                async with asyncio.TaskGroup() as jobs:
                    while not self._stopping.is_set():
                        await free.acquire()
                        request_id = str(uuid.uuid4())
                        job = await self._next(client, request_id)
                        if job is None:
                            free.release()
                        else:
                            waiting[job] = request_id
                            doing = jobs.create_task(self._do(job, waiting))
                            doing.add_done_callback(lambda _: free.release())
            finally:
                # A worker that is cancelled may have taken tasks that it has not begun.
                for request_id in waiting.values():
                    await finish_despite_cancel(client.abandon(request_id))

    async def _next(self, client: Client, request_id: str) -> WorkerJob | None:
        # Under one request id, so that a lost reply costs no lease.
        taking = asyncio.ensure_future(retry(lambda: client.take(wait_ms=WAIT_MS, request_id=request_id)))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((taking, stopping), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await finish_despite_cancel(_call_off(client, taking, request_id))
            raise
        finally:
            stopping.cancel()
        if not taking.done():
            await finish_despite_cancel(_call_off(client, taking, request_id))
            return None
        return next((WorkerJob(client, taken) for taken in taking.result()), None)

    async def _do(self, job: WorkerJob, waiting: dict[WorkerJob, str]) -> None:
        work = asyncio.ensure_future(self._begin(job, waiting))
        renewing = asyncio.ensure_future(self._keep(job, work))
        try:
            result = _result_of(job.task.id, await work)
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                raise
            if _is_lost(renewing):
                return  # and with the lease the work
            # Nobody asked it to stop: the handler waited for something of its own that was cancelled.
            log.exception("worker.failed", extra={"task_id": job.task.id})
            result = error_result(job.task.id, "the worker failed")
        except Refusal as refusal:
            if refusal.code in OVER:
                return
            raise
        except Exception:
            log.exception("worker.failed", extra={"task_id": job.task.id})
            result = error_result(job.task.id, "the worker failed")
        finally:
            renewing.cancel()
        await self._finish(job, result)

    async def _begin(self, job: WorkerJob, waiting: dict[WorkerJob, str]) -> Any:
        """A task has begun when its handler runs: one that was cancelled before that is still given back."""
        assert self._handler is not None
        del waiting[job]
        return await self._handler(job)

    async def _finish(self, job: WorkerJob, result: Result) -> None:
        try:
            await job.finish(result)
        except (Invalid, TooLarge) as refusal:
            # What the function returned cannot be kept. That it ended must be.
            log.warning("worker.refused", extra={"task_id": job.task.id, "code": refusal.code})
            await self._finish(job, error_result(job.task.id, f"the worker's result was refused: {refusal.message}"))
        except Refusal as refusal:
            if refusal.code not in OVER:
                raise

    async def _keep(self, job: WorkerJob, work: asyncio.Future[Any]) -> None:
        """A heartbeat, by which a holder also hears that its lease is lost."""
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                await retry(job.renew)
            except Refusal as refusal:
                if refusal.code in OVER:
                    work.cancel()
                    return
                log.warning("worker.not_renewed", extra={"task_id": job.task.id, "code": refusal.code})


def _is_lost(renewing: asyncio.Future[None]) -> bool:
    """Whether the heartbeat has heard that the lease is lost: it returns for no other reason."""
    return renewing.done() and not renewing.cancelled() and renewing.exception() is None


def _result_of(task_id: TaskId, said: str | Content | Result | None) -> Result:
    try:
        said = checked("result", said, Result if isinstance(said, Result) else str | Content | None)
    except WrongType as wrong:
        log.warning("worker.refused", extra={"task_id": task_id, "code": wrong.code})
        return error_result(task_id, f"the worker returned what cannot be sent: {wrong.message}")
    if isinstance(said, Result):
        return said
    return Result.ok(task_id) if said is None else Result.ok(task_id, said)


async def _call_off(client: Client, taking: asyncio.Future[tuple[Taken, ...]], request_id: str) -> None:
    """Nobody waits for this receive any more: what it is given goes back."""
    taking.cancel()
    await asyncio.wait((taking,))
    await client.abandon(request_id)
