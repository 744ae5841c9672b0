"""A webhook on loopback that answers as a test tells it, and a ledger whose outbox is at work."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pytest

from covenant.daemon.environment import now_ms
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import Accept, Advance, LeasedTask, PutPush, Starter
from covenant.model.a2a_requests import PushConfig
from covenant.model.content import Text
from covenant.model.ids import AgentId, TaskId
from covenant.model.push import Push
from covenant.model.settings import PushSettings
from covenant.model.task import Result, ResultStatus, Task, fingerprint
from covenant.model.task_event import ArtifactUpdate, StatusUpdate, Update
from covenant.outbound import push_sender
from covenant.outbound.push_sender import PushSender, WebhookClient
from covenant.seal.keys import WebhookSigner, new_private_key
from tests.ledger_contract.samples import ALICE, agent, task_id
from tests.outbound.http_servers import HERE, Request, Served, fetcher, http_server, reply
from tests.waits import BOUND_S

BOB: Final = agent("bob@default")
KEY: Final = new_private_key()
QUICK: Final = PushSettings(attempts_max=3, pause_ms=1, pause_ms_max=2_000)
SLOW: Final = PushSettings(attempts_max=8, pause_ms=60_000)


@dataclass
class Receiver:
    """`script` are the answers to come, the last one for all after it. `held` keeps the answer back."""

    served: Served
    script: list[bytes] = field(default_factory=lambda: [reply(200)])
    taken: list[Request] = field(default_factory=list)
    """What was answered with success."""
    held: asyncio.Event | None = None
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        async with self._news:
            self._news.notify_all()
        if self.held is not None:
            waits = [asyncio.ensure_future(self.held.wait()), asyncio.ensure_future(request.reader.read(1))]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        said = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if said.startswith(b"HTTP/1.1 2"):
            self.taken.append(request)
        writer.write(said)
        await writer.drain()
        async with self._news:
            self._news.notify_all()

    async def until(self, so: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S), self._news:
            await self._news.wait_for(so)

    async def got(self, count: int) -> None:
        await self.until(lambda: len(self.taken) >= count)

    async def asked(self, count: int) -> None:
        await self.until(lambda: len(self.served.requests) >= count)

    @property
    def generations(self) -> list[int]:
        return [int(request.headers["covenant-generation"]) for request in self.taken]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(request.body) for request in self.taken]

    def url(self, path: str = "/hook") -> str:
        return self.served.url(path)


@asynccontextmanager
async def receiver(*script: bytes, port: int = 0, host: str = HERE) -> AsyncIterator[Receiver]:
    made: list[Receiver] = []

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        await made[0].answer(request, writer)

    async with http_server(answer, host=host, port=port) as served:
        made.append(Receiver(served, list(script) or [reply(200)]))
        yield made[0]


@asynccontextmanager
async def pushing(
    ledger: Ledger,
    limits: PushSettings = QUICK,
    *,
    allow: Sequence[str] = (HERE,),
    tally: list[str] | None = None,
    leave_s: float = BOUND_S,
) -> AsyncIterator[PushSender]:
    """The outbox at work for as long as this lasts. `leave_s`: how long its stop waits for deliveries under way."""
    async with fetcher(*allow) as calls:
        webhooks = WebhookClient(calls, WebhookSigner(KEY), now_ms)
        told = tally if tally is not None else []
        runner = PushSender(ledger, webhooks, limits, chance=lambda: 0.5, tally=told.append, disabled_look_ms=10)
        running = asyncio.create_task(runner.run())
        try:
            yield runner
        finally:
            running.cancel()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(push_sender, "STOP_S", leave_s)
                await asyncio.gather(running, return_exceptions=True)
            assert running.cancelled() or running.exception() is None, running.exception()


def make_task(number: int = 1, *, recipient: AgentId = BOB) -> Task:
    return Task(id=task_id(number), sender=ALICE, recipient=recipient, intent_text="work", origin="a2a")


async def begin(ledger: Ledger, number: int = 1, config: PushConfig | None = None, **who: AgentId) -> LeasedTask:
    """A task that somebody works on: generations 1 and 2."""
    task = make_task(number, **who)
    accepted = await ledger.commit(
        Accept(
            task=task,
            digest=fingerprint(task)[0],
            starter=Starter(task.recipient, ledger.node, ledger.boot),
            push=config,
        )
    )
    assert accepted.leased is not None
    return accepted.leased


async def advance(ledger: Ledger, leased: LeasedTask, *updates: Update, end: bool = False) -> None:
    task, lease = leased.task, leased.lease
    result = Result(task_id=task.id, status=ResultStatus.OK, content=(Text("done"),)) if end else None
    await ledger.commit(
        Advance(task_id=task.id, holder=lease.leased_to, lease_id=lease.lease_id, updates=updates, result=result)
    )


def chunk(text: str) -> ArtifactUpdate:
    return ArtifactUpdate("answer", (Text(text),), append=True)


def status(text: str) -> StatusUpdate:
    return StatusUpdate(text)


async def put(ledger: Ledger, which: TaskId, url: str, **fields: Any) -> Push:
    return await ledger.commit(PutPush(task_id=which, config=PushConfig(url=url, **fields)))


async def owed(runner: PushSender, ledger: Ledger, so: Callable[[Sequence[Push]], bool]) -> Sequence[Push]:
    """The outbox, once it is so."""
    async with asyncio.timeout(BOUND_S):
        while True:
            runner.saved.clear()
            if so(found := await ledger.outbox()):
                return found
            await runner.saved.wait()
