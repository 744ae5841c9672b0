"""queues: durable send → lease → result → drain in process, beside litequeue and huey on SQLite with fsync."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from bench import children
from bench.callers import Round
from bench.report import Level, Row, Table, at_least, fact
from bench.workload import PAYLOAD_BYTES, Measured

NAME: Final = "queues"
PEERS: Final = ("litequeue", "huey")
# What is owed at each number of callers, against each peer.
RATIOS: Final = {1: 0.7, 16: 3.0, 256: 5.0}


class Scale(NamedTuple):
    rounds: int
    seconds: float
    peers: tuple[str, ...] = PEERS


# The peers' environment is made by `make bench` alone: a test must do without it.
SCALES: Final[dict[Level, Scale]] = {"full": Scale(5, 1.5), "quick": Scale(1, 0.4), "smoke": Scale(1, 0.05, ())}


class Found(NamedTuple):
    rounds: list[Measured]
    archived_s: list[float]

    @property
    def per_s(self) -> float:
        return median(measured.per_s for measured in self.rounds)

    @property
    def cpu_us(self) -> float:
        return median(measured.cpu_us for measured in self.rounds)


def run(level: Level, workspace: Path) -> Table:
    scale = SCALES[level]
    rows: list[Row] = []
    for callers in RATIOS:
        rows += _compare(callers, scale, workspace)
    return Table(
        part=NAME,
        title=f"cycles of {PAYLOAD_BYTES} bytes in process, each step synced before the next",
        rows=rows,
        notes=[
            f"medians of {scale.rounds} interleaved rounds of {scale.seconds:g} s; every round is a process of its own",
            "litequeue syncs 3 times a cycle (put, pop, done), huey 4 times, Covenant 4 times (shared by callers)",
        ],
    )


def _compare(callers: int, scale: Scale, workspace: Path) -> list[Row]:
    found = {name: Found([], []) for name in ("covenant", *scale.peers)}
    for _ in range(scale.rounds):
        for name, into in found.items():
            folder = workspace / name
            folder.mkdir()
            _round(name, folder, callers, scale, into)
            shutil.rmtree(folder)
    ours = found["covenant"]
    rows = [fact(f"{callers} callers: {name}", one.per_s, "cycles/s") for name, one in found.items()]
    rows += [fact(f"{callers} callers: {name}, CPU a cycle", one.cpu_us, "µs") for name, one in found.items()]
    rows.append(fact(f"{callers} callers: archive behind at the end", median(ours.archived_s) * 1e3, "ms"))
    rows += [
        at_least(f"{callers} callers: Covenant / {name}", ours.per_s / found[name].per_s, RATIOS[callers], "×")
        for name in scale.peers
    ]
    return rows


def _round(name: str, folder: Path, callers: int, scale: Scale, into: Found) -> None:
    timeout_s = 60.0
    if name in PEERS:
        file = folder / "queue.db"
        into.rounds.append(
            children.peer(f"{name}_peer", Measured, file, callers, float(scale.seconds), timeout_s=timeout_s)
        )
        return
    found = children.ours("callers", Round, folder, callers, float(scale.seconds), timeout_s=timeout_s)
    into.rounds.append(found.measured)
    into.archived_s.append(found.archived_s)
