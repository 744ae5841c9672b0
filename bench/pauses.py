"""pauses: how long the garbage collector stops everything, with many live tasks in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from bench import children
from bench.gc_watch import CALLERS, Pauses
from bench.report import Level, Table, at_most, fact

NAME: Final = "pauses"
PAUSE_MS: Final = 50.0


class Scale(NamedTuple):
    live: int
    sends: int


SCALES: Final[dict[Level, Scale]] = {
    "full": Scale(100_000, 100_000),
    "quick": Scale(10_000, 10_000),
    "smoke": Scale(200, 200),
}


def run(level: Level, workspace: Path) -> Table:
    scale = SCALES[level]
    found = children.ours("gc_watch", Pauses, workspace / "home", scale.live, scale.sends, timeout_s=180.0)
    young, middle, old = found.collections
    return Table(
        part=NAME,
        title=f"{CALLERS} callers sending {scale.sends:,} tasks beside {scale.live:,} live ones, as in the daemon",
        rows=[
            at_most("longest pause by the collector", max(found.longest_ms), PAUSE_MS, "ms"),
            at_most("a full collection, forced at the end", found.forced_ms, PAUSE_MS, "ms"),
            fact("send: p50", found.p50_ms, "ms"),
            fact("send: p99", found.p99_ms, "ms"),
            fact("send: longest", found.longest_send_ms, "ms"),
            fact("objects that a full collection walks", found.tracked),
        ],
        notes=[f"collections while sending: {young} of generation 0, {middle} of 1, {old} of 2"],
    )
