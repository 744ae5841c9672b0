"""A worker: leases the tasks of its identity from a daemon, on any machine, and renews their leases.

    worker = Worker("http://127.0.0.1:8421", token)

    @worker
    async def summarize(job):                     # a task under a lease
        await job.say("Working on it… ")          # an update that watchers see
        facts = await job.call("search@acme", job.text)   # a task of its own, found again after a kill
        await job.file("sources.pdf", Path("sources.pdf"))
        job.spend(tokens=1_200)
        return summary_of(job.text)               # the result; raising makes it an error

    asyncio.run(worker.run())

A call that fails in transit is repeated under the same ids, for up to a day. A worker that lost its lease (the task was
canceled, timed out or repaired) learns of it at its next update or heartbeat, and its work is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from os import PathLike
from typing import Any, Final

from covenant.client import WITHDRAW_S, Client, Posted, Taken, finish_despite_cancel, retry
from covenant.exchange.argument_checks import checks_arguments, checks_methods
from covenant.exchange.file_source import FileSource
from covenant.model.content import Content, Json, Text
from covenant.model.errors import Conflict, NotFound, Refusal, Unauthenticated, WrongType
from covenant.model.ids import TaskId
from covenant.model.task import Result, error_result
from covenant.model.task_event import TEXT_ARTIFACT, ArtifactUpdate, StatusUpdate, Update
from covenant.model.task_view import first_message
from covenant.model.usage import USAGE, add_usage, read_usage
from covenant.wire.validation import checked

WAIT_MS: Final = 20_000
RENEW_S: Final = 30.0
LEASE_OVER: Final = frozenset(
    {"canceled", "already_settled", "stale_lease", "unknown_task", "not_lessee", "not_leased"}
)
"""Refusals after which the holder of a lease must stop."""

log = logging.getLogger(__name__)


@checks_methods
class WorkerJob:
    """A turn of a task, under your lease."""

    def __init__(self, client: Client, taken: Taken) -> None:
        self._client = client
        self._update_no = 0
        self._chunks = 0
        self._update_lock = asyncio.Lock()
        self._artifacts = 0
        self._calls = 0
        self._usage: dict[str, float] = {}
        self._unacknowledged: Update | None = None
        """An update that is being sent, or whose sender was canceled before the daemon had acknowledged it."""
        self.task = taken.task
        self.lease_id = taken.lease.lease_id
        self.attempt = taken.lease.attempt
        self.turn = taken.turn
        self._text_id = TEXT_ARTIFACT % (taken.task.id, taken.turn - 1)
        self.messages = taken.messages or (first_message(taken.task),)
        """The messages of this turn."""

    @property
    def text(self) -> str:
        return "\n".join(part.text for message in self.messages for part in message.parts if isinstance(part, Text))

    @property
    def parts(self) -> tuple[Content, ...]:
        return tuple(part for message in self.messages for part in message.parts)

    async def update(self, update: Update) -> None:
        """Sends an update to watchers, one at a time: updates are numbered, and the daemon takes them in order."""
        async with self._update_lock:
            if self._unacknowledged is not None:
                await self._send_update(self._unacknowledged)  # it may have arrived under its number, so it goes first
            self._update_no += 1
            self._unacknowledged = update
            await self._send_update(update)

    async def _send_update(self, update: Update) -> None:
        try:
            await retry(lambda: self._client.update(self.task.id, self.lease_id, update, self._update_no))
        except (Refusal, TypeError, ValueError):  # the daemon does not have it, or it cannot be written
            self._unacknowledged = None
            self._update_no -= 1
            raise
        self._unacknowledged = None

    async def say(self, text: str) -> None:
        """Streams a piece of the answer."""
        self._chunks += 1
        try:
            await self.update(ArtifactUpdate(self._text_id, (Text(text),), "response", append=self._chunks > 1))
        except (Refusal, TypeError, ValueError):  # the answer does not have this piece
            self._chunks -= 1
            raise

    async def data(self, value: Any, name: str = "data") -> None:
        """Adds an artifact with a JSON value."""
        await self._add_artifact(Json(value), name)

    async def file(self, name: str, source: FileSource, *, media_type: str | None = None) -> None:
        """Adds an artifact with a file, from its bytes, its path or its pieces. The file is uploaded first."""
        upload = partial(self._client.upload_file, name, source, media_type=media_type)
        # Pieces can be read only once, so their upload is not repeated.
        repeatable = isinstance(source, bytes | bytearray | memoryview | str | PathLike)
        await self._add_artifact(await (retry(upload) if repeatable else upload()), name)

    async def _add_artifact(self, part: Content, name: str) -> None:
        """Adds an artifact, numbered within the turn: another attempt that adds the same artifacts replaces them."""
        self._artifacts += 1
        artifact_id = f"{self._text_id}-{self._artifacts}"
        await self.update(ArtifactUpdate(artifact_id, (part,), name, last_chunk=True))

    async def call(self, agent: str, text: str, *parts: Content) -> Result:
        """Sends a task to another agent (`name@host`) and waits for its result; you need a grant to send to it.

        The call is a child task of this one. Its id is derived from this task, the turn and the number of earlier
        calls: another attempt with the same call finds the same task and its result. Cancelling the call cancels it.
        """
        self._calls += 1
        called = TaskId(str(uuid.uuid5(uuid.UUID(self.task.id), f"{self.turn}.{self._calls}.{agent}\n{text}")))
        try:
            await retry(
                lambda: self._client.send_to(agent, text, task_id=called, parent=self.task.id, parts=tuple(parts))
            )
            while True:
                # One request id, so that a lost answer is given again. Long after the drain, the task has the result.
                found = await retry(lambda: self._client.result(called, wait_ms=WAIT_MS, request_id=f"call-{called}"))
                if found is None:
                    found = (await retry(lambda: self._client.show(called))).result
                if found is not None:
                    return found
        except asyncio.CancelledError:
            await finish_despite_cancel(self._cancel_call(called))
            raise

    async def _cancel_call(self, called: TaskId) -> None:
        with suppress(Refusal, TimeoutError):
            async with asyncio.timeout(WITHDRAW_S):
                await self._client.cancel(called, f"task {self.task.id} does not wait for it any more")

    def spend(self, tokens: float = 0, **more: float) -> None:
        """Adds to the turn's usage, which is sent with its result or question and added to that of earlier turns."""
        add_usage(self._usage, read_usage({"tokens": tokens, **more} if tokens else more))

    async def reject(self, reason: str) -> Posted:
        """Ends the task as rejected, for this reason. The job is over."""
        return await self.finish(error_result(self.task.id, reason), rejected=True)

    async def status(self, text: str) -> None:
        await self.update(StatusUpdate(text))

    async def ask(self, question: str) -> None:
        """Parks the task until its sender answers. The answer begins another turn; this job is over."""
        await self._close_text()
        used = {USAGE: dict(self._usage)} if self._usage else None
        await self.update(StatusUpdate(question, state="input-required", metadata=used))

    async def _close_text(self) -> None:
        """Marks the end of the streamed answer."""
        if self._chunks:
            self._chunks = 0
            await self.update(ArtifactUpdate(self._text_id, (Text(""),), append=True, last_chunk=True))

    async def finish(self, result: Result, *, rejected: bool = False) -> Posted:
        await self._close_text()
        usage = dict(self._usage)
        return await retry(lambda: self._client.settle(result, self.lease_id, rejected=rejected, usage=usage))

    async def renew(self) -> None:
        await self._client.renew(self.task.id, self.lease_id)

    async def release(self, reason: str) -> None:
        """Gives the task back, if no work was done on it."""
        await self._client.release(self.task.id, self.lease_id, reason)


Handler = Callable[[WorkerJob], Awaitable[str | Content | Result | None]]


@checks_methods
class Worker:
    """Leases the tasks of its identity, up to `concurrency` at once, and renews their leases."""

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
        """Stops taking tasks. `run` returns when the running ones are done."""
        self._stopping.set()

    async def run(self) -> None:
        if self._handler is None:
            raise RuntimeError("give the worker something to do: @worker above an async function")
        free = asyncio.Semaphore(self._concurrency)
        waiting: dict[WorkerJob, str] = {}
        """Tasks that were taken but not begun, with their request ids."""
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
                            running = jobs.create_task(self._run_job(job, waiting))
                            running.add_done_callback(lambda _: free.release())
            finally:
                # A canceled worker may have taken tasks that it has not begun.
                for request_id in waiting.values():
                    await finish_despite_cancel(client.abandon(request_id))

    async def _next(self, client: Client, request_id: str) -> WorkerJob | None:
        # One request id, so that a lost reply costs no lease.
        taking = asyncio.ensure_future(retry(lambda: client.take(wait_ms=WAIT_MS, request_id=request_id)))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((taking, stopping), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await finish_despite_cancel(_cancel_receive(client, taking, request_id))
            raise
        finally:
            stopping.cancel()
        if not taking.done():
            await finish_despite_cancel(_cancel_receive(client, taking, request_id))
            return None
        return next((WorkerJob(client, taken) for taken in taking.result()), None)

    async def _run_job(self, job: WorkerJob, waiting: dict[WorkerJob, str]) -> None:
        work = asyncio.ensure_future(self._call_handler(job, waiting))
        renewing = asyncio.ensure_future(self._renew_until_lost(job, work))
        try:
            result = _result_of(job.task.id, await work)
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                raise
            if _is_lost(renewing):
                return  # the lease is lost, and the work is canceled with it
            # Neither a stop nor a lost lease: the handler awaited something of its own that was canceled.
            log.exception("worker.failed", extra={"task_id": job.task.id})
            result = error_result(job.task.id, "the worker failed")
        except Refusal as refusal:
            if refusal.code in LEASE_OVER:
                return
            # The refusal concerns this task. A refusal of the worker itself (a revoked token) meets the result, too.
            log.warning("worker.refused", exc_info=True, extra={"task_id": job.task.id, "code": refusal.code})
            result = error_result(job.task.id, f"the worker failed: {refusal.message or refusal.code}")
        except Exception:
            log.exception("worker.failed", extra={"task_id": job.task.id})
            result = error_result(job.task.id, "the worker failed")
        finally:
            renewing.cancel()
        await self._finish(job, result)

    async def _call_handler(self, job: WorkerJob, waiting: dict[WorkerJob, str]) -> Any:
        """Calls the handler. From here on the task has begun: one that is canceled earlier is given back."""
        assert self._handler is not None
        del waiting[job]
        return await self._handler(job)

    async def _finish(self, job: WorkerJob, result: Result) -> None:
        try:
            try:
                await job.finish(result)
            except (Unauthenticated, Conflict, NotFound):
                raise
            except Refusal as refusal:
                # The daemon refused the returned result. The task must end nevertheless.
                log.warning("worker.refused", extra={"task_id": job.task.id, "code": refusal.code})
                why = f"the worker's result was refused: {refusal.message or refusal.code}"
                await job.finish(error_result(job.task.id, why))
        except Refusal as refusal:
            if refusal.code not in LEASE_OVER:
                raise

    async def _renew_until_lost(self, job: WorkerJob, work: asyncio.Future[Any]) -> None:
        """Renews the lease at intervals, and cancels the work when the daemon says that the lease is lost."""
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                await retry(job.renew)
            except Refusal as refusal:
                if refusal.code in LEASE_OVER:
                    work.cancel()
                    return
                log.warning("worker.not_renewed", extra={"task_id": job.task.id, "code": refusal.code})


def _is_lost(renewing: asyncio.Future[None]) -> bool:
    """Whether the heartbeat has learned that the lease is lost: it returns for no other reason."""
    return renewing.done() and not renewing.cancelled() and renewing.exception() is None


def _result_of(task_id: TaskId, value: str | Content | Result | None) -> Result:
    try:
        value = checked("result", value, Result if isinstance(value, Result) else str | Content | None)
    except WrongType as wrong:
        log.warning("worker.refused", extra={"task_id": task_id, "code": wrong.code})
        return error_result(task_id, f"the worker returned a value that cannot be sent: {wrong.message}")
    if isinstance(value, Result):
        return value
    return Result.ok(task_id) if value is None else Result.ok(task_id, value)


async def _cancel_receive(client: Client, taking: asyncio.Future[tuple[Taken, ...]], request_id: str) -> None:
    """Cancels a receive that nobody waits for, and gives back its tasks."""
    taking.cancel()
    await asyncio.wait((taking,))
    await client.abandon(request_id)
