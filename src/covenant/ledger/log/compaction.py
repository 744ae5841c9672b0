"""Compaction: sealed segments become a snapshot, in a process of its own, so that nobody waits for it.

    python -m covenant.ledger.log.compaction <journal folder> <through seq> <limits as JSON>

Reads the newest snapshot and the sealed segments after it, folds them with the same `apply` as everybody, and writes
the snapshot of the last sealed record. It deletes nothing: dropping what is covered is for the engine, once the archive
covers it too. A run that is killed leaves a file without a name, which the next run overwrites.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import msgspec

from covenant.ledger.log import snapshot
from covenant.ledger.log.replay import EVICT_EVERY, records
from covenant.ledger.log.state import LedgerState
from covenant.ledger.machine.view import Limits

NICE: Final = 10
"""Nobody waits for it, and whoever sends a task does."""


class Compacted(msgspec.Struct, frozen=True, gc=False):
    """`dropped` counts the events of tasks that are resolved: what the snapshot no longer holds."""

    seq: int
    dropped: int


def compact(folder: Path, through_seq: int, limits: Limits) -> Compacted:
    state = LedgerState(limits)
    found = snapshot.newest(folder)
    seq = snapshot.load(found[1], state) if found is not None else 0
    if seq >= through_seq:
        return Compacted(seq, 0)
    for record in records(folder, seq, through_seq):
        state.apply(record.events, record.ts_ms, record.seq)
        if not record.seq % EVICT_EVERY:
            state.evict(record.seq)
    state.evict(through_seq)
    snapshot.write(folder, through_seq, state)
    return Compacted(through_seq, state.resolved_events)


def main(arguments: list[str]) -> int:
    os.nice(NICE)
    folder, through_seq, limits = arguments
    compacted = compact(Path(folder), int(through_seq), msgspec.json.decode(limits, type=Limits))
    sys.stdout.write(msgspec.json.encode(compacted).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
