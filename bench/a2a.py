"""a2a: the same agents behind our daemon, the official SDK's server (in memory and on SQLite) and fasta2a (in memory).

Our daemon makes every task and every frame durable before it sends it; of the others only the SDK on SQLite does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple
from urllib.request import Request, urlopen

import msgspec

from bench import children, machine
from bench.children import COVENANT
from bench.http import caught_up, port_of
from bench.load import Loaded, Spec
from bench.report import Level, Row, Table, at_least, at_most, fact, ratio
from covenant.cli.daemon_client import read_token

NAME: Final = "a2a"
AGENTS: Final = children.ROOT / "bench" / "a2a_agents.py"
OURS, MEMORY, SQLITE, FASTA2A = "covenant", "a2a-sdk in memory", "a2a-sdk on SQLite", "fasta2a in memory"
CONNECTIONS: Final = (1, 16, 64)
STREAMS: Final = 16
READERS: Final = 64
FINISHED: Final = 10_000
WINDOW: Final = 200
"""Chunks whose time is compared: those from the first on, and those up to the 2,000th."""
NTH: Final = 2_000
LONG_STREAMS: Final = 5

SENDS: Final[dict[tuple[str, int], float]] = {
    (MEMORY, 1): 4,
    (MEMORY, 16): 20,
    (MEMORY, 64): 20,
    (SQLITE, 16): 80,
    (SQLITE, 64): 80,
    (FASTA2A, 16): 2.5,
    (FASTA2A, 64): 2.5,
}
STREAMED: Final = {MEMORY: 15.0, FASTA2A: 4.0}
READ: Final = {MEMORY: 5.0}


class Scale(NamedTuple):
    rounds: int
    seconds: float
    peers: Sequence[str]
    finished: int


SCALES: Final[dict[Level, Scale]] = {
    "full": Scale(5, 2.0, (MEMORY, SQLITE, FASTA2A), FINISHED),
    "quick": Scale(2, 1.0, (MEMORY, SQLITE, FASTA2A), 2_000),
    "smoke": Scale(1, 0.1, (), 20),
}


class Server(NamedTuple):
    process: children.Server
    port: int
    token: str = "none"
    echo: str = "/"
    words: str = "/"


Found = dict[tuple[str, str], list[Loaded]]
"""The measurements, by server and kind of request."""


def run(level: Level, workspace: Path) -> Table:
    scale = SCALES[level]
    found: Found = {}
    with ExitStack() as stack:
        servers = {OURS: stack.enter_context(daemon(workspace))}
        for peer in scale.peers:
            servers[peer] = stack.enter_context(_peer(peer, workspace))
        tasks = {name: first_task(server) for name, server in servers.items()}
        for round_no in range(scale.rounds):
            for name, server in servers.items():
                _measure(found, name, server, tasks[name], scale=scale, round_no=round_no)
                if name == OURS:
                    caught_up(server.port)
        memory_mib = _memory(servers[OURS], scale.finished)
        growth = _growth(servers[OURS]) if level != "smoke" else 1.0
    return Table(
        part=NAME,
        title="A2A over JSON-RPC: an agent that echoes, one that streams 100 chunks, and reads of a finished task",
        rows=[
            *_rows(found, scale),
            at_most("cost of the 2,000th chunk / of the first ones", growth, 1.2, "×"),
            at_most(f"memory for {FINISHED:,} finished tasks", memory_mib, 2, "MiB"),
        ],
        notes=[f"medians of {scale.rounds} interleaved rounds of {scale.seconds:g} s; tracing of a2a-sdk off"],
    )


def _measure(found: Found, name: str, server: Server, task_id: str, *, scale: Scale, round_no: int) -> None:
    for connections in CONNECTIONS:
        loaded = load(
            server,
            server.echo,
            send("SendMessage", "hello world"),
            connections,
            seconds=scale.seconds,
            round_no=round_no,
        )
        found.setdefault((name, f"send {connections}"), []).append(loaded)
    streamed = send("SendStreamingMessage", "words")
    loaded = load(server, server.words, streamed, STREAMS, streams=True, seconds=scale.seconds, round_no=round_no)
    found.setdefault((name, "stream"), []).append(loaded)
    read: dict[str, object] = {"jsonrpc": "2.0", "id": "{}", "method": "GetTask", "params": {"id": task_id}}
    loaded = load(server, server.echo, read, READERS, seconds=scale.seconds, round_no=round_no)
    found.setdefault((name, "get"), []).append(loaded)


def _rows(found: Found, scale: Scale) -> Iterator[Row]:
    for connections in CONNECTIONS:
        yield from _compared(found, f"send {connections}", "per_s", f"SendMessage, {connections} at once", scale)
    yield from _compared(found, "stream", "events_per_s", f"events of {STREAMS} streams", scale)
    yield from _compared(found, "get", "per_s", f"GetTask, {READERS} at once", scale)


def _compared(found: Found, request_kind: str, unit: str, what: str, scale: Scale) -> Iterator[Row]:
    rates = {
        name: float(median(getattr(one, unit) for one in found[name, request_kind])) for name in (OURS, *scale.peers)
    }
    for name, rate in rates.items():
        yield fact(f"{what}: {name}", rate, "/s")
    for name in scale.peers:
        faster = ratio(rates[OURS], rates[name])
        target = _target(name, request_kind)
        label = f"{what}: ours / {name}"
        yield fact(label, faster, "×") if target is None else at_least(label, faster, target, "×")


def _target(name: str, request_kind: str) -> float | None:
    if request_kind == "stream":
        return STREAMED.get(name)
    if request_kind == "get":
        return READ.get(name)
    return SENDS.get((name, int(request_kind.removeprefix("send "))))


def send(method: str, text: str) -> dict[str, object]:
    message = {"messageId": "{}", "role": "ROLE_USER", "parts": [{"text": text}]}
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"message": message}}


def load(
    server: Server,
    path: str,
    body: dict[str, object],
    connections: int,
    *,
    seconds: float,
    round_no: int,
    streams: bool = False,
) -> Loaded:
    spec = Spec(
        port=server.port,
        path=path,
        token=server.token,
        bodies=(json.dumps(body),),
        connections=connections,
        seconds=seconds,
        server_pid=server.process.pid,
        round_no=round_no,
        headers={"a2a-version": "1.0"},
        streams=streams,
    )
    loaded = children.ours("load", Loaded, timeout_s=60.0, given=msgspec.json.encode(spec))
    if loaded.failed:
        raise children.ChildFailedError(f"a request was not answered with 200: {loaded.failed}")
    return loaded


@contextmanager
def daemon(workspace: Path, name: str = "a", *options: str) -> Iterator[Server]:
    home = workspace / name
    command = [COVENANT, "serve", str(AGENTS), "--home", str(home), "--http-port", "0", *options]
    with children.server(command, workspace / f"{name}.log") as process:
        port = port_of(process)
        prefix = "/v1/a2a/agents/"
        yield Server(process, port, read_token(home, None, {}), f"{prefix}echo", f"{prefix}words")


@contextmanager
def _peer(name: str, workspace: Path) -> Iterator[Server]:
    script = "fasta2a_peer" if name == FASTA2A else "a2a_sdk_peer"
    where = [] if name == FASTA2A else [str(workspace / "sdk.db") if name == SQLITE else "memory"]
    with peer_server(script, workspace, *where) as server:
        yield server


@contextmanager
def peer_server(script: str, workspace: Path, *where: str) -> Iterator[Server]:
    with children.server(children.peer_command(script, *where), workspace / f"{script}.log") as process:
        yield Server(process, port_of(process))


def first_task(server: Server) -> str:
    """The id of a task that can be read."""
    answer = json.loads(_post(server, server.echo, send("SendMessage", "hello world")))
    task_id: str = answer["result"]["task"]["id"]
    return task_id


def _post(server: Server, path: str, body: dict[str, object]) -> bytes:
    headers = {
        "authorization": f"Bearer {server.token}",
        "content-type": "application/json",
        "a2a-version": "1.0",
    }
    url = f"http://127.0.0.1:{server.port}{path}"
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=30) as answer:
        found: bytes = answer.read()
        return found


def _memory(server: Server, count: int) -> float:
    """How much more the daemon holds after so many tasks have come and gone, for 10,000 of them."""
    _finish(server, count)
    caught_up(server.port)
    before = machine.resident_mib(server.process.pid)
    done = _finish(server, count)
    caught_up(server.port)
    return max(0.0, machine.resident_mib(server.process.pid) - before) / done * FINISHED


def _finish(server: Server, count: int) -> int:
    done = 0
    while done < count:
        done += load(server, server.echo, send("SendMessage", "hello"), 16, seconds=1.0, round_no=done).requests
    return done


def _growth(server: Server) -> float:
    """The time between chunks near the 2,000th, over that near the first, in the middle of several streams."""
    return median(_one_long_stream(server) for _ in range(LONG_STREAMS))


def _one_long_stream(server: Server) -> float:
    path = server.echo.replace("echo", "long")
    headers = {"authorization": f"Bearer {server.token}", "content-type": "application/json"}
    body = json.dumps(send("SendStreamingMessage", "go")).encode()
    request = Request(f"http://127.0.0.1:{server.port}{path}", body, headers)
    with urlopen(request, timeout=60) as answer:
        came_s = [time.perf_counter() for line in answer if line.startswith(b"data: ")]
    first, last = came_s[WINDOW] - came_s[0], came_s[NTH] - came_s[NTH - WINDOW]
    return last / first
