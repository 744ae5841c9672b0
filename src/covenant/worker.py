"""A worker: takes the tasks of its identity from a daemon, wherever it runs, and keeps their leases fresh.

    worker = Worker("http://127.0.0.1:8421", token)

    @worker
    async def summarize(job):                     # a task under a lease
        await job.say("Working on it… ")          # an update that watchers see
        return summary_of(job.text)               # the result; raising makes it an error

    asyncio.run(worker.run())

What fails on its way is repeated, within bounds, under the same ids. A worker whose lease is lost (the task was
canceled, timed out or repaired) hears of it with its next update or heartbeat, and its work is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final

from covenant.client import Client, Posted, Taken, insisted
from covenant.model.content import Content, Text
from covenant.model.errors import Refusal
from covenant.model.folding import first_message
from covenant.model.ids import TaskId
from covenant.model.result import Result, error_result
from covenant.model.update import ArtifactUpdate, StatusUpdate, Update

WAIT_MS: Final = 20_000
RENEW_S: Final = 30.0
OVER: Final = frozenset({"canceled", "already_settled", "stale_lease", "unknown_task", "not_lessee", "not_leased"})
"""Refusals that tell a holder to stop."""

log = logging.getLogger(__name__)


class Job:
    """A turn of a task, under a lease of yours."""

    def __init__(self, client: Client, taken: Taken) -> None:
        self._client = client
        self._update_no = 0
        self._chunks = 0
        self.task = taken.task
        self.lease_id = taken.lease.lease_id
        self.attempt = taken.lease.attempt
        self.turn = taken.turn
        self.messages = taken.messages or (first_message(taken.task),)
        """What this turn is about."""

    @property
    def text(self) -> str:
        return "\n".join(part.text for message in self.messages for part in message.parts if isinstance(part, Text))

    @property
    def parts(self) -> tuple[Content, ...]:
        return tuple(part for message in self.messages for part in message.parts)

    async def update(self, update: Update) -> None:
        self._update_no += 1
        await insisted(lambda: self._client.update(self.task.id, self.lease_id, update, self._update_no))

    async def say(self, text: str) -> None:
        """More of the answer, as it is made."""
        self._chunks += 1
        parts = (Text(text),)
        await self.update(ArtifactUpdate(f"{self.task.id}-text-0", parts, "response", append=self._chunks > 1))

    async def status(self, text: str) -> None:
        await self.update(StatusUpdate(text))

    async def ask(self, question: str) -> None:
        """Park the task until its sender answers: that will be another turn, and this job is over."""
        await self.update(StatusUpdate(question, state="input-required"))

    async def finish(self, result: Result) -> Posted:
        return await insisted(lambda: self._client.settle(result, self.lease_id))

    async def renew(self) -> None:
        await self._client.renew(self.task.id, self.lease_id)

    async def release(self, reason: str) -> None:
        """Give the task back, if nothing was done for it."""
        await self._client.release(self.task.id, self.lease_id, reason)


Handler = Callable[[Job], Awaitable[str | Content | Result | None]]


class Worker:
    """Takes the tasks of its identity, as many at once as it is told, and keeps their leases fresh."""

    def __init__(self, url: str, token: str, *, concurrency: int = 1, renew_s: float = RENEW_S) -> None:
        self._url = url
        self._token = token
        self._concurrency = concurrency
        self._renew_s = renew_s
        self._handler: Handler | None = None
        self._stopping = asyncio.Event()

    def __call__(self, handler: Handler) -> Handler:
        self._handler = handler
        return handler

    def stop(self) -> None:
        """Take nothing more; `run` returns when what is under way is done."""
        self._stopping.set()

    async def run(self) -> None:
        if self._handler is None:
            raise RuntimeError("give the worker something to do: @worker above an async function")
        free = asyncio.Semaphore(self._concurrency)
        async with Client(self._url, self._token) as client, asyncio.TaskGroup() as jobs:
            while not self._stopping.is_set():
                await free.acquire()
                job = await self._next(client)
                if job is None:
                    free.release()
                else:
                    jobs.create_task(self._do(job)).add_done_callback(lambda _: free.release())

    async def _next(self, client: Client) -> Job | None:
        # Under one request id, so that a lost reply costs no lease.
        request_id = str(uuid.uuid4())
        taking = asyncio.ensure_future(insisted(lambda: client.take(wait_ms=WAIT_MS, request_id=request_id)))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((taking, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not taking.done():
            # The daemon gives back what a caller who has left was about to get.
            taking.cancel()
            await asyncio.wait((taking,))
            return None
        return next((Job(client, taken) for taken in taking.result()), None)

    async def _do(self, job: Job) -> None:
        assert self._handler is not None
        work = asyncio.ensure_future(self._handler(job))
        renewing = asyncio.ensure_future(self._keep(job, work))
        try:
            result = _result_of(job.task.id, await work)
        except asyncio.CancelledError:
            if not renewing.done():
                raise
            return  # the lease is lost, and with it the work
        except Refusal as refusal:
            if refusal.code in OVER:
                return
            raise
        except Exception:
            log.exception("worker.failed", extra={"task_id": job.task.id})
            result = error_result(job.task.id, "the worker failed")
        finally:
            renewing.cancel()
        try:
            await job.finish(result)
        except Refusal as refusal:
            if refusal.code not in OVER:
                raise

    async def _keep(self, job: Job, work: asyncio.Future[Any]) -> None:
        """A heartbeat, by which a holder also hears that its lease is lost."""
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                await insisted(job.renew)
            except Refusal as refusal:
                if refusal.code in OVER:
                    work.cancel()
                    return
                log.warning("worker.not_renewed", extra={"task_id": job.task.id, "code": refusal.code})


def _result_of(task_id: TaskId, said: str | Content | Result | None) -> Result:
    if isinstance(said, Result):
        return said
    return Result.ok(task_id) if said is None else Result.ok(task_id, said)
