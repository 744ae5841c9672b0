"""remote: turns of a daemon whose remote agents are all dead, and many long calls from one daemon to another.

The turns go to two daemons in turns, one of which has remote agents that nobody answers for; their addresses are
changed again and again, so that they are always just being looked for. The long calls are made in rounds, all at once:
what the first round leaves is what is kept in any case, and what the later ones add is what grows.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import httpx2

from bench import children, machine
from bench.http import port_of
from bench.report import Level, Table, at_most, fact

NAME: Final = "remote"
ADDED_MS: Final = 5.0
GROWN_MIB: Final = 10.0
AGENTS: Final = Path(__file__).with_name("remote_agents.py")
DEAD_PORT: Final = 20_000
"""And those after it. Nobody listens there."""
LOOKING_S: Final = 1.25
"""For each look at all of them: they are asked one after the other, 20 ms apart."""
ANSWER_CHARACTERS: Final = len("begun ") + 1_000


class Scale(NamedTuple):
    dead: int
    seconds: float
    calls: int
    call_s: float
    rounds: int


SCALES: Final[dict[Level, Scale]] = {
    "full": Scale(50, 30.0, 200, 10.0, 4),
    "quick": Scale(50, 5.0, 100, 1.0, 2),
    "smoke": Scale(5, 0.1, 3, 0.05, 2),
}


class Daemon(NamedTuple):
    home: Path
    port: int
    pid: int

    @property
    def token(self) -> str:
        return (self.home / "operator.token").read_text(encoding="ascii").strip()

    def set_remote_agents(self, **agents: dict[str, Any]) -> None:
        (self.home / "a2a_agents.json").write_text(json.dumps({"agents": agents}), encoding="utf-8")


def run(level: Level, workspace: Path) -> Table:
    scale = SCALES[level]
    pairs = _turns(workspace, scale)
    peaks, longest_s = asyncio.run(_held(workspace, scale))
    added = sorted(beside - alone for alone, beside in pairs)
    alone_ms, beside_ms = (sorted(times) for times in zip(*pairs, strict=True))
    return Table(
        part=NAME,
        title=f"{scale.dead} dead remote agents; {scale.calls} calls of {scale.call_s:g} s at once",
        rows=[
            at_most("dead remotes add to a turn, at the median of pairs", median(added), ADDED_MS, "ms"),
            at_most("and to the 95th of a hundred turns", _at(beside_ms, 0.95) - _at(alone_ms, 0.95), ADDED_MS, "ms"),
            fact("a turn beside none: p50", _at(alone_ms, 0.5), "ms"),
            fact("a turn beside dead ones: p50", _at(beside_ms, 0.5), "ms"),
            at_most("the caller grows from the first round to the last", peaks[-1] - peaks[0], GROWN_MIB, "MiB"),
            fact("the caller in the last round, at most", peaks[-1], "MiB"),
            fact("the longest of the calls", longest_s, "s"),
        ],
        notes=[f"{len(pairs)} pairs of turns; {scale.rounds} rounds of calls"],
    )


def _at(times: list[float], share: float) -> float:
    return times[min(len(times) - 1, int(len(times) * share))]


def _turns(workspace: Path, scale: Scale) -> list[tuple[float, float]]:
    """Milliseconds of a turn, alone and beside dead remotes, always one after the other."""
    with _daemon(workspace, "n") as alone, _daemon(workspace, "d") as beside:
        connections = [HTTPConnection("127.0.0.1", each.port) for each in (alone, beside)]
        tokens = [alone.token, beside.token]

        def turn(which: int) -> float:
            begun = time.perf_counter()
            headers = {"authorization": f"Bearer {tokens[which]}", "content-type": "application/json"}
            connections[which].request("POST", "/v1/a2a/agents/index", _send_body("What is the forecast?"), headers)
            if b"sunny" not in connections[which].getresponse().read():
                raise children.ChildFailedError("a turn was not answered")
            return (time.perf_counter() - begun) * 1e3

        pairs: list[tuple[float, float]] = []
        looks, look_at = 0, 0.0
        until = time.perf_counter() + scale.seconds
        while not pairs or time.perf_counter() < until:
            if time.perf_counter() >= look_at:
                looks, look_at = looks + 1, time.perf_counter() + LOOKING_S
                places = {f"dead{n}": f"http://127.0.0.1:{DEAD_PORT + n}/{looks}" for n in range(scale.dead)}
                beside.set_remote_agents(**{name: {"url": url} for name, url in places.items()})
            first = len(pairs) % 2
            times = {first: turn(first), 1 - first: turn(1 - first)}
            pairs.append((times[0], times[1]))
        for connection in connections:
            connection.close()
        return pairs


async def _held(workspace: Path, scale: Scale) -> tuple[list[float], float]:
    """The memory of the caller at its highest, in each round; and how long the slowest call took."""
    with _daemon(workspace, "w") as working, _daemon(workspace, "c") as calling:
        place = {"url": f"http://127.0.0.1:{working.port}/v1/a2a/agents/sleeper", "auth": {"token": working.token}}
        calling.set_remote_agents(there=place)
        peaks: list[float] = []
        slowest: list[float] = []
        limits = httpx2.Limits(max_connections=scale.calls)
        headers = {"authorization": f"Bearer {calling.token}"}
        async with httpx2.AsyncClient(headers=headers, timeout=120.0, limits=limits, trust_env=False) as client:
            for number in range(scale.rounds):
                peaks.append(0.0)
                sampling = asyncio.create_task(_highest(calling.pid, peaks))
                texts = [f"{scale.call_s} {number} {each}" for each in range(scale.calls)]
                slowest.append(max(await asyncio.gather(*(_call(client, calling, words) for words in texts))))
                sampling.cancel()
        return peaks, max(slowest)


async def _highest(pid: int, peaks: list[float]) -> None:
    while True:
        peaks[-1] = max(peaks[-1], machine.resident_mib(pid))
        await asyncio.sleep(0.25)


async def _call(client: httpx2.AsyncClient, daemon: Daemon, words: str) -> float:
    begun = time.perf_counter()
    url = f"http://127.0.0.1:{daemon.port}/v1/a2a/agents/relay"
    answer = await client.post(url, content=_send_body(words), headers={"content-type": "application/json"})
    if len(answer.json()["result"]["task"]["artifacts"][0]["parts"][0]["text"]) != ANSWER_CHARACTERS:
        raise children.ChildFailedError(f"a call was not answered: {answer.text[:500]}")
    return time.perf_counter() - begun


def _send_body(words: str) -> bytes:
    message = {"messageId": words, "role": "ROLE_USER", "parts": [{"text": words}]}
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}).encode()


@contextmanager
def _daemon(workspace: Path, name: str) -> Iterator[Daemon]:
    home = workspace / name  # the socket's path must stay under 108 bytes
    command = [children.COVENANT, "serve", "--home", str(home), "--http-port", "0", str(AGENTS)]
    environment = {**os.environ, "COVENANT_DELEGATION_REMOTE_CONCURRENCY": "1000"}
    with children.server(command, workspace / f"{name}.log", environment) as process:
        yield Daemon(home, port_of(process), process.pid)
