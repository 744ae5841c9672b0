"""start: a cold start of a home with a long journal, and what a live task costs in memory."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from bench import children, machine
from bench.history_builder import Built
from bench.home_opener import Opening
from bench.report import Level, Table, at_most, fact
from bench.workload import PAYLOAD_BYTES
from covenant.ledger.embedded.journal.journal import SEGMENT_BYTES
from covenant.ledger.embedded.open import SEALED_SEGMENTS_BEFORE_COMPACTION

NAME: Final = "start"
OPEN_S: Final = 5.0
BYTES_PER_TASK: Final = 3 * 1024
EVENTS_PER_CYCLE: Final = 4
BUILD_S: Final = 400.0


class Scale(NamedTuple):
    events: int
    live: int
    rounds: int
    segments: int
    """How many of the journal follow the snapshot."""


SCALES: Final[dict[Level, Scale]] = {
    "full": Scale(1_000_000, 10_000, 5, SEALED_SEGMENTS_BEFORE_COMPACTION + 1),
    "quick": Scale(40_000, 2_000, 2, 1),
    "smoke": Scale(400, 50, 1, 0),
}


def run(level: Level, workspace: Path) -> Table:
    scale = SCALES[level]
    home, empty = workspace / "long", workspace / "empty"
    cycles = (scale.events - scale.live) // EVENTS_PER_CYCLE
    built = children.ours("history_builder", Built, home, "cycles", cycles, scale.live, timeout_s=BUILD_S)
    journal_bytes = machine.folder_bytes(home / "journal")
    replayed = _open(home)
    children.ours("history_builder", Built, home, "compact", 0, 0, timeout_s=BUILD_S)
    nothing = [_open(empty) for _ in range(scale.rounds)]
    opened = [_open(home) for _ in range(scale.rounds)]
    more = round(scale.segments * SEGMENT_BYTES / (journal_bytes / cycles))
    children.ours("history_builder", Built, home, "cycles", more, 0, timeout_s=BUILD_S)
    followed = [_open(home) for _ in range(scale.rounds)]
    grown = median(o.resident_bytes for o in opened) - median(o.resident_bytes for o in nothing)
    return Table(
        part=NAME,
        title=f"a cold open of {scale.events:,} events with {scale.live:,} live tasks of {PAYLOAD_BYTES} bytes",
        rows=[
            at_most("open, with a snapshot", median(o.open_s for o in opened), OPEN_S, "s"),
            fact("the same, until the first task is durable", median(o.first_send_s for o in opened), "s"),
            at_most(
                f"open, {more * EVENTS_PER_CYCLE:,} more events after the snapshot",
                median(o.open_s for o in followed),
                OPEN_S,
                "s",
            ),
            fact("open, all events replayed", replayed.open_s, "s"),
            fact("open, an empty home", median(o.open_s for o in nothing), "s"),
            at_most(
                "memory a live task, beside its payload", grown / scale.live - PAYLOAD_BYTES, BYTES_PER_TASK, "bytes"
            ),
            fact("journal before compaction", journal_bytes / 2**20, "MiB"),
            fact("building it", built.last_seq / built.seconds, "records/s"),
        ],
        notes=[
            f"medians of {scale.rounds} openings, each in a new process with the home's files out of the page cache",
            f"a daemon compacts when {SEALED_SEGMENTS_BEFORE_COMPACTION} segments are sealed: more seldom follows",
        ],
    )


def _open(home: Path) -> Opening:
    if home.exists():
        machine.forget_pages(home)
    return children.ours("home_opener", Opening, home, timeout_s=120.0)
