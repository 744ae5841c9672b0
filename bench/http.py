"""http: `POST /a2a/tasks` of the real daemon, beside the same server answering a bare JSON echo.

The echo is uvicorn as it comes. A second one is on the daemon's own server: that is for looking at, since to make the
server under both faster would make the promise harder to keep.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple
from urllib.request import urlopen

import msgspec

from bench import children
from bench.echo import PLAIN
from bench.load import Loaded, Spec
from bench.report import Level, Table, at_least, fact
from bench.workload import PAYLOAD, PAYLOAD_BYTES
from covenant.cli.daemon_client import DaemonClient, read_token

NAME: Final = "http"
RATIO: Final = 0.4
CONNECTIONS: Final = 64
SENDER: Final = "sender@bench"
# A queue takes 100,000 tasks; nobody takes them out here.
RECIPIENTS: Final = tuple(f"recipient-{number}@bench" for number in range(8))
# Nor do they end: a sender may have 100,000 that have not, which is fewer than five rounds send.
LIMITS: Final = {"COVENANT_TENANTS_LIVE_TASKS": "1000000", "COVENANT_TENANTS_QUEUED_BYTES": str(4 << 30)}
CAUGHT_UP_S: Final = 60.0

_LAG: Final = re.compile(r"^covenant_archive_lag_records (\S+)$", re.MULTILINE)
_URL: Final = re.compile(r"http://127\.0\.0\.1:(\d+)")


class Scale(NamedTuple):
    rounds: int
    seconds: float


SCALES: Final[dict[Level, Scale]] = {"full": Scale(5, 3.0), "quick": Scale(2, 1.0), "smoke": Scale(1, 0.1)}


class Target(NamedTuple):
    """A server under load, and what its requests look like."""

    process: children.Server
    port: int
    token: str
    bodies: tuple[str, ...]


def run(level: Level, workspace: Path) -> Table:
    scale = SCALES[level]
    sent: list[Loaded] = []
    echoed: list[Loaded] = []
    behind_s: list[float] = []
    gathered: list[Loaded] = []
    with _daemon(workspace) as daemon, _echo(workspace, daemon, PLAIN) as echo, _echo(workspace, daemon) as ours:
        for round_no in range(scale.rounds):
            sent.append(_round(daemon, scale, round_no))
            # What the daemon still does for this round must not slow the other's.
            behind_s.append(caught_up(daemon.port))
            echoed.append(_round(echo, scale, round_no))
            gathered.append(_round(ours, scale, round_no))
    rate = _median(sent, "per_s")
    return Table(
        part=NAME,
        title=f"POST /a2a/tasks of {PAYLOAD_BYTES} bytes, fsynced before the answer, {CONNECTIONS} connections",
        rows=[
            fact("tasks", rate, "requests/s"),
            fact("echo", _median(echoed, "per_s"), "requests/s"),
            fact("echo on our own server", _median(gathered, "per_s"), "requests/s"),
            at_least("tasks / echo", rate / _median(echoed, "per_s"), RATIO, "×"),
            fact("tasks / echo on our own server", rate / _median(gathered, "per_s"), "×"),
            fact("tasks: server CPU a request", _median(sent, "cpu_us"), "µs"),
            fact("echo: server CPU a request", _median(echoed, "cpu_us"), "µs"),
            fact("tasks: p50", _median(sent, "p50_ms"), "ms"),
            fact("tasks: p99", _median(sent, "p99_ms"), "ms"),
            fact("tasks: longest of all", max(one.longest_ms for one in sent), "ms"),
            fact("echo: p50", _median(echoed, "p50_ms"), "ms"),
            fact("echo: p99", _median(echoed, "p99_ms"), "ms"),
            fact("echo: longest of all", max(one.longest_ms for one in echoed), "ms"),
            fact("tasks: archive behind at the end of a round", median(behind_s) * 1e3, "ms"),
        ],
        notes=[
            f"medians of {scale.rounds} interleaved rounds of {scale.seconds:g} s",
            f"the load took {_load(sent, scale)} of a core with tasks and {_load(echoed, scale)} with echo",
        ],
    )


def _load(found: list[Loaded], scale: Scale) -> str:
    return f"{_median(found, 'load_cpu_s') / scale.seconds:.0%}"


def _median(found: list[Loaded], name: str) -> float:
    return float(median(getattr(one, name) for one in found))


def _round(target: Target, scale: Scale, round_no: int) -> Loaded:
    spec = Spec(
        port=target.port,
        path="/a2a/tasks",
        token=target.token,
        bodies=target.bodies,
        connections=CONNECTIONS,
        seconds=scale.seconds,
        server_pid=target.process.pid,
        round_no=round_no,
    )
    loaded = children.ours("load", Loaded, timeout_s=60.0, given=msgspec.json.encode(spec))
    if loaded.failed:
        raise children.ChildFailedError(f"a request was not answered with 200: {loaded.failed}")
    return loaded


@contextmanager
def _daemon(workspace: Path) -> Iterator[Target]:
    home = workspace / "d"  # the socket's path must stay under 108 bytes
    command = [children.COVENANT, "serve", "--home", str(home), "--http-port", "0"]
    with children.server(command, workspace / "daemon.log", {**os.environ, **LIMITS}) as process:
        port = port_of(process)
        with DaemonClient(home, read_token(home, None, {})) as operator:
            recipients = [operator.ask("enroll_identity", display=display, actions=[]) for display in RECIPIENTS]
            actions = [f"a2a.send.{display}" for display in RECIPIENTS]
            sender = operator.ask("enroll_identity", display=SENDER, actions=actions)
        bodies = tuple(
            json.dumps(
                {
                    "id": "{}",
                    "sender": {"display": SENDER, "pubkey": sender["pubkey_b58"]},
                    "recipient": {"display": recipient["display"], "pubkey": recipient["pubkey_b58"]},
                    "intent_text": PAYLOAD,
                }
            )
            for recipient in recipients
        )
        yield Target(process, port, sender["token_b58"], bodies)


@contextmanager
def _echo(workspace: Path, like: Target, *how: str) -> Iterator[Target]:
    with children.server([sys.executable, "-m", "bench.echo", *how], workspace / "echo.log") as process:
        yield Target(process, port_of(process), like.token, like.bodies)


def port_of(process: children.Server) -> int:
    found = _URL.search(process.line())
    assert found is not None
    return int(found[1])


def caught_up(port: int) -> float:
    """How long the daemon's archive still needed."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < CAUGHT_UP_S:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            found = _LAG.search(answer.read().decode())
        assert found is not None
        if float(found[1]) == 0:
            return time.perf_counter() - begun
        time.sleep(0.02)
    raise children.ChildFailedError(f"the archive did not catch up within {CAUGHT_UP_S:g} s")
