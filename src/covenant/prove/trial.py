"""One row being tried: a server of its own, a client, and the evidence.

A check returns when the promise was kept and raises otherwise: `Broken` with what was seen, `NotOffered` when the
server does not have the thing, `NotChecked` when the row could not be tried. Nothing is called broken on a suspicion.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, NamedTuple

import msgspec

from covenant.prove.client import Client
from covenant.prove.protocol import EventSeen, Refused, TaskSeen
from covenant.prove.server import ServerUnderTest

LOOK_S: Final = 0.1
Outcome = Literal["kept", "broken", "not offered", "not checked"]


class Broken(Exception):
    """The promise was broken, and the message is the evidence."""


class NotOffered(Exception):
    """The server does not offer what the row is about."""


class NotChecked(Exception):
    """The row could not be tried: this says nothing about the server's promise."""


class Extent(msgspec.Struct, frozen=True):
    """How long, how much, and what the server under test says of itself."""

    bound_s: float = 20.0
    """Within this time whatever is promised has to be so."""
    sends: int = 1_000
    senders: int = 16
    kills: int = 10
    idempotency_header: str | None = None
    at_least_once: bool = False
    """The agent's work is declared as safe to repeat: a second execution after a crash is no surprise."""


class Trial:
    def __init__(self, server: ServerUnderTest, client: Client, card: dict[str, Any], extent: Extent) -> None:
        self.server = server
        self.client = client
        self.card = card
        self.extent = extent
        self.evidence: list[str] = []
        self._begun_s = time.monotonic()
        self._keys = itertools.count(1)

    def note(self, said: str) -> None:
        self.evidence.append(f"{time.monotonic() - self._begun_s:7.2f} s  {said}")

    def key(self) -> str:
        """A name for one piece of work: its executions are counted by it."""
        return f"k{next(self._keys)}"

    def runs(self, key: str) -> int:
        return self.server.runs()[key]

    async def crash(self, moment: str) -> None:
        await self.kill(moment)
        await self.restart()

    async def kill(self, moment: str) -> None:
        await self.server.kill(signal.SIGKILL)
        self.note(f"kill -9 {moment}")
        await self.client.reset()

    async def stop(self, moment: str) -> None:
        begun_s = time.monotonic()
        status = await self.server.kill(signal.SIGTERM)
        took_s = time.monotonic() - begun_s
        self.note(f"SIGTERM {moment}: the process ended after {took_s:.1f} s with status {status}")
        await self.client.reset()

    async def restart(self) -> None:
        await self.server.start()
        self.note(f"started again, start {self.server.starts}")

    async def find(self, task: TaskSeen, after: str = "after kill -9") -> TaskSeen:
        """The task as the server has it. Raises `Broken` for a task that it has acknowledged and no longer knows."""
        try:
            return await self.client.get(task.id)
        except Refused as refused:
            raise Broken(f"task {task.id} was acknowledged and is not found {after}: {refused}") from None

    async def until(self, task: TaskSeen, met: Callable[[TaskSeen], bool]) -> TaskSeen:
        """The task when it is so, or as it is when the bound has passed."""
        end_s = time.monotonic() + self.extent.bound_s
        seen = await self.find(task)
        while not met(seen) and time.monotonic() < end_s:
            await asyncio.sleep(LOOK_S)
            seen = await self.find(task)
        return seen

    async def until_run(self, key: str, times: int = 1) -> bool:
        """Whether the agent has begun this work so often, within the bound."""
        end_s = time.monotonic() + self.extent.bound_s
        while self.runs(key) < times:
            if time.monotonic() >= end_s:
                return False
            await asyncio.sleep(LOOK_S / 5)
        return True

    async def begin_run(self, key: str, run_ms: int) -> TaskSeen:
        """A task that the agent is at work on, for certain: it has said so in the file of executions."""
        task = await self.client.begin(f"run {key} {run_ms}")
        if not await self.until_run(key):
            raise NotChecked(
                f"task {task.id} was acknowledged, and its work did not begin in {self.extent.bound_s:g} s"
            )
        self.note(f"task {task.id}: at work ({key}, {run_ms} ms)")
        return task


class Assembly:
    """What a client of a stream has put together from its events."""

    def __init__(self) -> None:
        self.artifacts: dict[str, str] = {}
        self.state = ""
        self.task_id = ""
        self.last_number = ""
        self.numbers: list[int] = []

    def add(self, event: EventSeen) -> None:
        self.task_id = event.task_id or self.task_id
        self.state = event.state or self.state
        self.last_number = event.number or self.last_number
        if event.kind == "task" and event.task is not None:
            self.artifacts = dict(event.task.artifacts)
        elif event.kind == "artifact":
            told = self.artifacts.get(event.artifact_id, "") if event.append else ""
            self.artifacts[event.artifact_id] = told + event.text

    @property
    def text(self) -> str:
        return "".join(self.artifacts.values())

    @property
    def ended(self) -> bool:
        return self.state in {"completed", "failed", "canceled", "rejected"}


def counted(text: str) -> list[int]:
    """The numbers that the scenario `stream` counts up."""
    return [int(word) for word in text.split() if word.isdigit()]


def gap_or_repeat(text: str) -> str | None:
    """What is wrong with a count from 0, or nothing."""
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
