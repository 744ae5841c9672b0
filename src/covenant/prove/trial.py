"""One row under trial: its own server, a client, and the evidence.

A check returns if the promise was kept and raises otherwise: `Broken` with the evidence, `NotOffered` if the server
lacks the feature, `NotChecked` if the row could not be tried. Nothing is called broken on a suspicion.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Final, Literal, NamedTuple

import msgspec

from covenant.prove.a2a_client import Client, ServerUnreachable
from covenant.prove.protocol import TERMINAL, EventSeen, ServerRefused, TaskSeen
from covenant.prove.server import ServerUnderTest

LOOK_S: Final = 0.1
QUIET_S: Final = 0.4
NOT_FOUND: Final = frozenset({-32001, 404})
Outcome = Literal["kept", "broken", "not offered", "not checked"]


class Broken(Exception):
    """The promise was broken; the message is the evidence."""


class NotOffered(Exception):
    """The server does not offer the feature of the row."""


class NotChecked(Exception):
    """The row could not be tried: this says nothing about the server's promise."""


@contextmanager
def refused_as(outcome: type[Broken | NotOffered], what: str, *also: type[Exception]) -> Iterator[None]:
    """Raises `outcome` in place of the server's refusal, and of exceptions of these kinds `also`."""
    kinds: tuple[type[Exception], ...] = (ServerRefused, *also)
    try:
        yield
    except kinds as refused:
        raise outcome(f"{what}: {refused}") from None


class Extent(msgspec.Struct, frozen=True):
    """Time bounds, sizes, and what the server under test declares about itself."""

    bound_s: float = 20.0
    """The time within which a promise must be kept."""
    sends: int = 1_000
    senders: int = 16
    kills: int = 10
    idempotency_header: str | None = None
    at_least_once: bool = False
    """The agent's work is declared as safe to repeat: a second execution after a crash is allowed."""


class Trial:
    def __init__(self, server: ServerUnderTest, client: Client, card: dict[str, Any], extent: Extent) -> None:
        self.server = server
        self.client = client
        self.card = card
        self.extent = extent
        self.evidence: list[str] = []
        self._begun_s = time.monotonic()
        self._keys = itertools.count(1)
        self.answers_late = False
        """Whether the server answers sends only when the work is done, even if they do not wait for it."""
        self._streams = AsyncExitStack()

    def note(self, line: str) -> None:
        self.evidence.append(f"{time.monotonic() - self._begun_s:7.2f} s  {line}")

    def key(self) -> str:
        """A new name for a piece of work, by which its executions are counted."""
        return f"k{next(self._keys)}"

    def runs(self, key: str) -> int:
        return self.server.runs()[key]

    async def crash(self, moment: str) -> None:
        await self.kill(moment)
        await self.restart()

    async def kill(self, moment: str) -> None:
        await self.server.kill(signal.SIGKILL)
        self.note(f"kill -9 {moment}")
        await self._drop_connections()

    async def stop(self, moment: str) -> None:
        begun_s = time.monotonic()
        status = await self.server.kill(signal.SIGTERM)
        took_s = time.monotonic() - begun_s
        self.note(f"SIGTERM {moment}: the process ended after {took_s:.1f} s with status {status}")
        await self._drop_connections()

    async def restart(self) -> None:
        await self.server.start()
        self.note(f"started again, start {self.server.starts}")

    async def find(self, task: TaskSeen) -> TaskSeen:
        """The task as the server has it. Raises `Broken` if the server acknowledged it and has it no longer."""
        try:
            return await self.client.get(task.id)
        except ServerRefused as refused:
            if self.server.starts < 2:
                raise NotChecked(f"GetTask is refused before any kill: {refused}") from None
            what = "is not found" if refused.code in NOT_FOUND else "cannot be read"
            raise Broken(f"task {task.id} was acknowledged and {what} after the restart: {refused}") from None

    async def until(self, task: TaskSeen, met: Callable[[TaskSeen], bool]) -> TaskSeen:
        """Polls the task until `met` is true or the bound has passed, and returns it."""
        end_s = time.monotonic() + self.extent.bound_s
        seen = await self.find(task)
        while not met(seen) and time.monotonic() < end_s:
            await asyncio.sleep(LOOK_S)
            seen = await self.find(task)
        return seen

    async def until_run(self, key: str) -> bool:
        """Waits, within the bound, until the agent begins this work. Returns whether it has."""
        return await self.wait_until(lambda: self.runs(key) > 0)

    async def wait_until(self, met: Callable[[], bool], most_s: float | None = None) -> bool:
        end_s = time.monotonic() + (most_s or self.extent.bound_s)
        while not met():
            if time.monotonic() >= end_s:
                return False
            await asyncio.sleep(LOOK_S / 5)
        return True

    async def quiet(self) -> None:
        """Waits until no more work begins: then all work that the agent was given has begun, and the rest is queued."""
        begun = -1
        while (now := sum(self.server.runs().values())) != begun:
            begun = now
            await asyncio.sleep(QUIET_S)

    async def begin_run(self, run_ms: int) -> tuple[str, TaskSeen]:
        """A task that the agent is certainly working on, and its key: the execution has written its line."""
        key = self.key()
        if not self.answers_late:
            task = await self._begin_at_once(key, run_ms)
            if task is not None:
                return key, task
            self.answers_late = True
            self.note("a send is answered when its work is done, so streams name the tasks")
            key = self.key()
        task = await self._begin_by_stream(key, run_ms)
        await self._wait_for_work(task, key, run_ms)
        return key, task

    async def _begin_at_once(self, key: str, run_ms: int) -> TaskSeen | None:
        """The task; None if the server answers only when the work is done, so that nobody knows the task before."""
        sending = asyncio.ensure_future(self.client.begin(f"run {key} {run_ms}"))
        try:
            await asyncio.wait({sending}, timeout=self.extent.bound_s)
            if not sending.done() or (task := sending.result()).ended:
                return None
        finally:
            sending.cancel()
        await self._wait_for_work(task, key, run_ms)
        return task

    async def _begin_by_stream(self, key: str, run_ms: int) -> TaskSeen:
        """Keeps the stream open until the server is killed: some servers cancel a task whose reader left."""
        with refused_as(NotOffered, "no answer before the work is done, and no stream"):
            events = await self._streams.enter_async_context(self.client.stream(f"run {key} {run_ms}"))
            async for event in events:
                if event.task_id:
                    return event.task or TaskSeen(event.task_id, "", event.state, "", {}, {})
        raise NotOffered("no answer before the work is done, and the stream names no task")

    async def _wait_for_work(self, task: TaskSeen, key: str, run_ms: int) -> None:
        if not await self.until_run(key):
            raise NotChecked(f"task {task.id} was acknowledged, and not begun in {self.extent.bound_s:g} s")
        self.note(f"task {task.id}: at work ({key}, {run_ms} ms)")

    async def _drop_connections(self) -> None:
        """Drops every connection: the process at the other end is gone."""
        try:
            await self._streams.aclose()
        except ServerUnreachable:
            self.note("the streams that named the tasks broke")
        await self.client.reset()


class Assembly:
    """The artifacts that a client has assembled from the events of a stream."""

    def __init__(self) -> None:
        self.artifacts: dict[str, str] = {}
        self.state = ""
        self.task_id = ""
        self.last_number = ""

    def add(self, event: EventSeen) -> None:
        self.task_id = event.task_id or self.task_id
        self.state = event.state or self.state
        self.last_number = event.number or self.last_number
        if event.kind == "task" and event.task is not None:
            self.artifacts = dict(event.task.artifacts)
        elif event.kind == "artifact":
            text = self.artifacts.get(event.artifact_id, "") if event.append else ""
            self.artifacts[event.artifact_id] = text + event.text

    @property
    def text(self) -> str:
        return "".join(self.artifacts.values())

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL


def counted(text: str) -> list[int]:
    """The numbers that the scenario `stream` counts up."""
    return [int(word) for word in text.split() if word.isdigit()]


def gap_or_repeat(text: str) -> str | None:
    """The first error in a count from 0; None if there is none."""
    numbers = counted(text)
    for expected, number in enumerate(numbers):
        if number != expected:
            what = "comes again" if number < expected else f"comes after {expected - 1}"
            return f"{number} {what} (chunk {expected} of {len(numbers)})"
    return None


class Row(NamedTuple):
    name: str
    promise: str
    how: str
    check: Callable[[Trial], Awaitable[None]]
