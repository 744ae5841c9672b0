"""sealed: what sealing adds to a message, beside plain HTTP; and whole delegations between two real daemons.

A round trip has two hops, each with one message that is sealed, signed, checked and opened. What is measured with the
echo has no disk in it; the delegations have all of it: four messages, each durable on both sides before it is answered.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from bench import children
from bench.http import port_of
from bench.report import Level, Table, at_most, fact
from bench.sealed_calls import Called
from covenant.cli.daemon_client import DaemonClient, read_token

NAME: Final = "sealed"
ADDED_MS: Final = 1.0
BYTES: Final = 1_024
VERIFIED_S: Final = 20.0
AGENTS: Final = Path(__file__).with_name("sealed_agents.py")
ENDED: Final = frozenset({"completed", "failed", "cancelled", "timeout"})


class Scale(NamedTuple):
    rounds: int
    seconds: float
    delegations: int


SCALES: Final[dict[Level, Scale]] = {"full": Scale(5, 3.0, 200), "quick": Scale(2, 1.0, 30), "smoke": Scale(1, 0.05, 1)}


def run(level: Level, workspace: Path) -> Table:
    scale = SCALES[level]
    found = [_round(workspace, scale) for _ in range(scale.rounds)]
    whole_ms = _delegations(workspace, scale.delegations)

    def middle(name: str) -> float:
        return float(median(getattr(one, name) for one in found))

    added_ms = median((one.sealed_us - one.plain_us) / 2 for one in found) / 1e3
    return Table(
        part=NAME,
        title=f"messages of {BYTES} bytes between two instances, one connection",
        rows=[
            at_most("sealing adds to a hop, at the median", added_ms, ADDED_MS, "ms"),
            fact("plain round trip: p50", middle("plain_us"), "µs"),
            fact("sealed round trip: p50", middle("sealed_us"), "µs"),
            fact("plain round trips", middle("plain_per_s"), "a second"),
            fact("sealed round trips", middle("sealed_per_s"), "a second"),
            fact("to seal and sign a message", middle("seal_us"), "µs"),
            fact("to check and open a message", middle("open_us"), "µs"),
            fact("an envelope", middle("envelope_bytes"), "bytes"),
            fact("a whole delegation between two daemons: p50", whole_ms, "ms"),
        ],
        notes=[f"medians of {scale.rounds} rounds of {scale.seconds:g} s; {scale.delegations} delegations one by one"],
    )


def _round(workspace: Path, scale: Scale) -> Called:
    with children.server([sys.executable, "-m", "bench.sealed_echo"], workspace / "echo.log") as process:
        return children.ours("sealed_calls", Called, port_of(process), scale.seconds, BYTES, timeout_s=60.0)


def _delegations(workspace: Path, count: int) -> float:
    with _daemon(workspace, "r") as asking, _daemon(workspace, "p", str(AGENTS)) as working:
        asking.call.ask("add_peer", url=working.url, name="p")
        working.call.ask("add_peer", url=asking.url, name="r")
        for each in (asking, working):
            _wait_until_verified(each)
        # The first asks what the other can do, and gets its token.
        return float(median([_delegate_ms(asking.call, number) for number in range(count + 1)][1:]))


class Daemon(NamedTuple):
    url: str
    call: DaemonClient


@contextmanager
def _daemon(workspace: Path, name: str, *files: str) -> Iterator[Daemon]:
    home = workspace / name  # the socket's path must stay under 108 bytes
    command = [children.COVENANT, "serve", "--home", str(home), "--http-port", "0", *files]
    rates = {"COVENANT_PEERS_OFFERS_PER_MIN": "100000", "COVENANT_PEERS_MESSAGES_PER_MIN": "1000000"}
    environment = {**os.environ, "COVENANT_PEERS_ENABLED": "1", **rates}
    with children.server(command, workspace / f"{name}.log", environment) as process:
        port = port_of(process)
        with DaemonClient(home, read_token(home, None, {})) as call:
            yield Daemon(f"http://127.0.0.1:{port}", call)


def _wait_until_verified(daemon: Daemon) -> None:
    until = time.perf_counter() + VERIFIED_S
    while daemon.call.ask("list_peers")["peers"][0]["trustLevel"] == "peer":
        if time.perf_counter() > until:
            raise children.ChildFailedError("the daemons did not verify each other")
        time.sleep(0.05)


def _delegate_ms(call: DaemonClient, number: int) -> float:
    begun = time.perf_counter()
    task = call.ask("delegate", profile="worker", task=f"number {number}", peerId="p")["delegationId"]
    while True:
        answer = call.ask("show_delegation", delegationId=task)
        if answer["delegation"]["status"] in ENDED and (answer.get("result") or answer.get("error")):
            break
        time.sleep(0.001)
    if answer["delegation"]["status"] != "completed":
        raise children.ChildFailedError(f"a delegation did not complete: {answer}")
    return (time.perf_counter() - begun) * 1e3
