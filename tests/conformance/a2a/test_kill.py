"""A real daemon, killed while clients of every binding read its streams; then started again on the same home.

What a client has read before and after is one story without a gap or a repeat, and ends as the stored task does.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import grpc  # type: ignore[import-untyped]
import httpx2
import pytest

from tests.cli.daemons import Daemon
from tests.conformance.a2a.bindings import Binding, Refused
from tests.conformance.a2a.client_answers import Frame, Told, folded, known
from tests.conformance.a2a.gate_server import Gatekeeper, open_gatekeeper
from tests.conformance.a2a.http_bindings import NewRpc
from tests.conformance.a2a.served_agents import CHUNKS, FLOW
from tests.conformance.a2a.spoken import BINDINGS
from tests.conformance.a2a.table import HERE, ROOT
from tests.waits import BOUND_S

MOMENTS: Final = ("0", "3", "end")
"""Before the first word; in the middle; with everything said but that it is done."""


@dataclass
class Reading:
    """One client and the stream it reads, over however many connections."""

    name: str
    binding: type[Binding]
    frames: list[Frame] = field(default_factory=list)
    wanted: int = 0
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def task_id(self) -> str:
        assert self.frames[0].task is not None
        return self.frames[0].task.id

    async def read(self, frames: AsyncIterator[Frame]) -> None:
        """Until the stream ends or breaks; `enough` is set as soon as it has read what is wanted."""
        with suppress(httpx2.HTTPError):
            async for frame in frames:
                self.frames.append(frame)
                if len(self.frames) >= self.wanted:
                    self.enough.set()

    def want(self, more: int) -> None:
        self.wanted = len(self.frames) + more
        self.enough.clear()


@dataclass
class KilledDaemon:
    home: Path
    gates: Path
    keeper: Gatekeeper
    http: httpx2.AsyncClient
    daemon: Daemon = field(init=False)
    channel: Any = None

    async def start(self) -> None:
        agents = str(HERE / "served_agents.py")
        env = {"GATES": str(self.gates), "PYTHONPATH": str(ROOT)}
        flags = ("--daemon-grace-ms", "500", "--grpc-enabled", "true", "--grpc-port", "0")
        self.daemon = await asyncio.to_thread(Daemon, self.home, agents, *flags, env=env)
        card = await self.operator("GET", "/v1/a2a/agents/held/agent-card.json")
        (place,) = [each["url"] for each in card["supportedInterfaces"] if each["protocolBinding"] == "GRPC"]
        self.channel = grpc.aio.insecure_channel(place)

    async def end(self, number: int = signal.SIGTERM) -> None:
        if number == signal.SIGTERM:
            await self.channel.close()
        await asyncio.to_thread(self.daemon.stop, number)

    def client(self, kind: type[Binding], agent: str = "held") -> Binding:
        token = (self.home / "operator.token").read_text().strip()
        return kind(base_url=self.daemon.url, http=self.http, agent=agent, token=token, channel=self.channel)

    async def operator(self, method: str, path: str, body: Any = None) -> Any:
        said = {"authorization": f"Bearer {self.client(NewRpc).token}"}
        reply = await self.http.request(method, self.daemon.url + path, json=body, headers=said)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def requeue(self, task_id: str) -> None:
        command = {"action": "requeue", "duplicate_risk": "operator_accepted"}
        await self.operator("POST", "/a2a/repair", {"task_id": task_id, "command": command, "reason": "it was killed"})

    async def until(self, client: Binding, task_id: str, *states: str) -> Told:
        async with asyncio.timeout(BOUND_S):
            while (task := await client.get(task_id)).state not in states:
                pass
        return task


@asynccontextmanager
async def a_daemon(folder: Path) -> AsyncIterator[KilledDaemon]:
    gates = folder / "gates"
    async with open_gatekeeper(gates) as keeper, httpx2.AsyncClient(timeout=BOUND_S) as http:
        killed = KilledDaemon(folder / "home", gates, keeper, http)
        await killed.start()
        try:
            await asyncio.to_thread(killed.daemon.json, "capabilities", "grant", "a2a.repair.requeue")
            yield killed
        finally:
            await killed.end()


def is_one_story(frames: list[Frame]) -> bool:
    """Each number after the other. A resumed stream begins with the task at the number that was read last."""
    numbers = [frame.number for frame in frames]
    return all(
        later == before + 1 or (later == before and frame.kind == "task")
        for (before, later), frame in zip(pairwise(numbers), frames[1:], strict=True)
    )


async def test_streams_go_on_after_a_kill_at_any_moment_and_repair_runs_the_next_attempt(short_path: Path) -> None:
    async with a_daemon(short_path) as killed:
        readings = [Reading(f"{name}@{at}", kind) for name, kind in BINDINGS.items() for at in MOMENTS]
        queued = await held_and_killed(killed, readings)
        await killed.start()
        await still_there(killed, readings)
        await queued_work_runs(killed, queued)
        resumed = [resume(killed, reading) for reading in readings]
        for reading in readings:
            await killed.requeue(reading.task_id)
        await killed.keeper.open(None)
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*resumed)
        for reading in readings:
            task = await killed.client(reading.binding).get(reading.task_id)
            assert is_one_story(reading.frames)
            assert folded(reading.frames) == known(task)
            # What the first attempt had said of it is replaced.
            assert (task.state, task.text) == ("completed", "".join(f"2.{number} " for number in range(CHUNKS)))
            whole = await killed.client(reading.binding).followed(reading.task_id, after=0)
            assert [frame.number for frame in whole] == list(range(1, task.generation + 1))
            assert folded(whole) == known(task)
            assert "covenant.holder_lost" not in task.notes


async def held_and_killed(killed: KilledDaemon, readings: list[Reading]) -> list[str]:
    """Everybody reads until its agent has come to its gate; the ids of tasks that nobody had begun."""

    async def stream(reading: Reading) -> None:
        async with killed.client(reading.binding).stream(reading.name) as frames:
            await reading.read(frames)

    reading_tasks = [asyncio.create_task(stream(reading)) for reading in readings]
    for reading in readings:
        stop = reading.name.partition("@")[2]
        passed = range(CHUNKS if stop == "end" else int(stop))
        await killed.keeper.open(*(f"{reading.name} 1.{number}" for number in passed))
        await killed.keeper.reached(f"{reading.name} 1.{stop}")
    single = killed.client(NewRpc, "single")
    await single.task("first", blocking=False)
    await killed.keeper.reached("first 1.0")
    queued = [(await single.task(f"later-{number}", blocking=False)).id for number in range(2)]
    await killed.end(signal.SIGKILL)
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*reading_tasks)
    return queued


async def still_there(killed: KilledDaemon, readings: list[Reading]) -> None:
    """What was begun waits for an operator, and says so to the operator, to readers, and to who would cancel."""
    tasks = (await killed.operator("GET", "/a2a/queue?limit=100"))["tasks"]
    lost = {row["task"]["id"] for row in tasks[: len(readings) + 1] if row.get("holder_lost")}
    assert {reading.task_id for reading in readings} <= lost
    for reading in readings:
        client = killed.client(reading.binding)
        task = await client.get(reading.task_id)
        assert task.state == "working"
        assert "repair" in task.notes["covenant.holder_lost"]
        assert task.history is not None
        assert task.history[0].text == reading.name
        at = reading.name.partition("@")[2]
        said = "".join(f"1.{number} " for number in range(CHUNKS if at == "end" else int(at)))
        assert task.text == said


async def queued_work_runs(killed: KilledDaemon, queued: list[str]) -> None:
    single = killed.client(NewRpc, "single")
    for number, task_id in enumerate(queued):
        await killed.keeper.open(*(f"later-{number} 1.{at}" for at in (*range(CHUNKS), "end")))
        task = await killed.until(single, task_id, "completed")
        assert task.text == "".join(f"1.{at} " for at in range(CHUNKS))


def resume(killed: KilledDaemon, reading: Reading) -> asyncio.Task[None]:
    async def follow() -> None:
        client = killed.client(reading.binding)
        async with client.subscribe(reading.task_id, after=reading.frames[-1].number) as frames:
            await reading.read(frames)

    return asyncio.create_task(follow())


async def test_a_stream_that_flows_when_it_is_killed_loses_and_repeats_nothing(short_path: Path) -> None:
    async with a_daemon(short_path) as killed:
        await flow(killed, kills=(30, 200))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_stream_that_is_killed_again_and_again_is_one_story(short_path: Path) -> None:
    async with a_daemon(short_path) as killed:
        await flow(killed, kills=(2, 5, 17, 60, 111, 150, 222, 280, 333, 390))


async def flow(killed: KilledDaemon, kills: tuple[int, ...]) -> None:
    """Kill the daemon in each attempt when a client has read so much of it; then let one attempt come to its end."""
    readings = [Reading(name, kind) for name, kind in BINDINGS.items()]
    for attempt, enough in enumerate(kills, start=1):
        async with asyncio.timeout(BOUND_S):
            for reading in readings:
                # Whoever has read nothing does not know what to come back to.
                reading.want(enough if reading is readings[0] else 1)
            reading_tasks = [asyncio.create_task(begin_or_go_on(killed, reading)) for reading in readings]
            if attempt > 1:
                await asyncio.gather(*(killed.requeue(reading.task_id) for reading in readings))
            await asyncio.gather(*(reading.enough.wait() for reading in readings))
            await killed.end(signal.SIGKILL)
            await asyncio.gather(*reading_tasks)
        await killed.start()
    await killed.keeper.open(None)
    ends = [asyncio.create_task(begin_or_go_on(killed, reading)) for reading in readings]
    for reading in readings:
        await killed.requeue(reading.task_id)
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*ends)
    for reading in readings:
        task = await killed.client(reading.binding, "flowing").get(reading.task_id)
        assert is_one_story(reading.frames)
        assert folded(reading.frames) == known(task)
        assert task.text == "".join(f"{len(kills) + 1}.{number} " for number in range(FLOW))


async def begin_or_go_on(killed: KilledDaemon, reading: Reading) -> None:
    client = killed.client(reading.binding, "flowing")
    if not reading.frames:
        async with client.stream("go") as frames:
            await reading.read(frames)
    else:
        async with client.subscribe(reading.task_id, after=reading.frames[-1].number) as frames:
            await reading.read(frames)


async def test_what_waits_for_repair_can_be_canceled_and_what_has_ended_is_read_whole(short_path: Path) -> None:
    async with a_daemon(short_path) as killed:
        client = killed.client(NewRpc)
        task = await client.task("lost", blocking=False)
        await killed.keeper.open(*(f"done 1.{at}" for at in (*range(CHUNKS), "end")))
        done = await client.task("done")
        await killed.keeper.reached("lost 1.0")
        await killed.end(signal.SIGKILL)
        await killed.start()
        client = killed.client(NewRpc)
        assert await client.get(done.id) == done
        assert (await client.get(done.id, 1)).history == (done.history or ())[-1:]
        canceled = await client.cancel(task.id)
        assert canceled.state == "canceled"
        with pytest.raises(Refused, match=r"TASK_NOT_CANCELABLE.*canceled"):
            await client.cancel(task.id)
        assert [each.state for each in (await client.page()).tasks] == ["canceled", "completed"]
        assert json.dumps(await killed.operator("GET", "/a2a/queue?limit=10")).count(task.id) == 0
