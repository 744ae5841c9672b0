"""history: whether an operation costs more with a million finished tasks behind it, and an A2A task with 600,000."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from bench import children, machine
from bench.callers import Round
from bench.history_builder import Built
from bench.report import Level, Table, at_most, fact

NAME: Final = "history"
RATIO: Final = 1.2
TASK_BYTES: Final = 2_000
CALLERS: Final = 64
SHORT: Final = 10
BUILD_S: Final = 400.0


class Scale(NamedTuple):
    tasks: int
    cycles: int
    rounds: int
    a2a_tasks: int
    """In a home of their own."""


SCALES: Final[dict[Level, Scale]] = {
    "full": Scale(1_000_000, 10_000, 5, 600_000),
    "quick": Scale(20_000, 2_000, 3, 20_000),
    "smoke": Scale(200, 100, 1, 200),
}


def run(level: Level, workspace: Path) -> Table:
    scale = SCALES[level]
    long = workspace / "long"
    built = children.ours("history_builder", Built, long, "history", scale.tasks, 0, timeout_s=BUILD_S)
    children.ours("history_builder", Built, long, "compact", 0, 0, timeout_s=BUILD_S)
    with_long: list[Round] = []
    with_short: list[Round] = []
    for number in range(scale.rounds):
        short = workspace / f"short-{number}"  # a new one each time: measuring adds to the history
        children.ours("history_builder", Built, short, "history", SHORT, 0, timeout_s=BUILD_S)
        with_short.append(_round(short, scale))
        shutil.rmtree(short)
        with_long.append(_round(long, scale))
    a2a_long_us, a2a_short_us = _a2a_cpu_us(workspace, scale)
    task_bytes = _task_bytes(workspace, scale.cycles * 10)
    return Table(
        part=NAME,
        title=f"a cycle with {SHORT} and with {scale.tasks:,} tasks in history, {CALLERS} callers",
        rows=[
            fact(f"CPU a cycle with {SHORT}", _cpu_us(with_short), "µs"),
            fact(f"CPU a cycle with {scale.tasks:,}", _cpu_us(with_long), "µs"),
            at_most("ratio", _cpu_us(with_long) / _cpu_us(with_short), RATIO, "×"),
            fact(f"cycles with {SHORT}", median(r.measured.per_s for r in with_short), "cycles/s"),
            fact(f"cycles with {scale.tasks:,}", median(r.measured.per_s for r in with_long), "cycles/s"),
            fact("recent tasks: ratio", _ratio(with_long, with_short, "recent_us"), "×"),
            fact("queue: ratio", _ratio(with_long, with_short, "queue_us"), "×"),
            fact(f"CPU an A2A task with {SHORT}", a2a_short_us, "µs"),
            fact(f"CPU an A2A task with {scale.a2a_tasks:,}", a2a_long_us, "µs"),
            at_most("A2A: ratio", a2a_long_us / a2a_short_us, RATIO, "×"),
            at_most("A2A: disk a finished task, an echo of 600 bytes", task_bytes, TASK_BYTES, "bytes"),
            fact("archive", machine.folder_bytes(long) / 2**20, "MiB"),
            fact("building it", scale.tasks / built.seconds, "tasks/s"),
        ],
        notes=[
            f"medians of {scale.rounds} interleaved rounds of {scale.cycles:,} cycles, archiving included",
        ],
    )


def _a2a_cpu_us(workspace: Path, scale: Scale) -> tuple[float, float]:
    """CPU in µs of an A2A task with a long and with a short history, archiving included."""
    long = workspace / "a2a"
    children.ours("history_builder", Built, long, "a2a", scale.a2a_tasks, 0, timeout_s=BUILD_S)
    children.ours("history_builder", Built, long, "compact", 0, 0, timeout_s=BUILD_S)
    with_long: list[float] = []
    with_short: list[float] = []
    for number in range(scale.rounds):
        short = workspace / f"a2a-{number}"
        children.ours("history_builder", Built, short, "a2a", SHORT, 0, timeout_s=BUILD_S)
        for home, found in ((short, with_short), (long, with_long)):
            built = children.ours("history_builder", Built, home, "a2a", scale.cycles, 0, timeout_s=BUILD_S)
            found.append(built.cpu_s / scale.cycles * 1e6)
        shutil.rmtree(short)
    return median(with_long), median(with_short)


def _task_bytes(workspace: Path, tasks: int) -> float:
    """On disk, of a finished echo of 600 bytes, once the journal is merged."""
    home = workspace / "echoes"
    children.ours("history_builder", Built, home, "echoes", tasks, 0, timeout_s=BUILD_S)
    children.ours("history_builder", Built, home, "compact", 0, 0, timeout_s=BUILD_S)
    return machine.folder_bytes(home) / tasks


def _round(home: Path, scale: Scale) -> Round:
    return children.ours("callers", Round, home, CALLERS, scale.cycles, timeout_s=120.0)


def _cpu_us(rounds: list[Round]) -> float:
    return median(one.measured.cpu_us for one in rounds)


def _ratio(ours: list[Round], theirs: list[Round], name: str) -> float:
    return float(median(getattr(one, name) for one in ours) / median(getattr(one, name) for one in theirs))
