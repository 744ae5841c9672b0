"""`python -m bench [PART…] [--quick] [--json FILE]`: measure, print a table for each part, and sum up."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from bench import (
    a2a,
    cold_start,
    feed,
    history,
    http,
    machine,
    pauses,
    postgres,
    queues,
    remote_calls,
    scaling,
    sealed,
    steps,
    task_search,
)
from bench.report import Level, Table, show, summary

PARTS: Final[dict[str, Callable[[Level, Path], Table]]] = {
    part.NAME: part.run
    for part in (
        queues,
        http,
        a2a,
        cold_start,
        history,
        task_search,
        pauses,
        sealed,
        remote_calls,
        steps,
        feed,
        postgres,
        scaling,
    )
}
# Not the system's folder for such things: that one may be memory, where a sync costs nothing.
RESULTS: Final = Path(__file__).parent / "results"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure what Covenant promises about speed.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="under a minute in all; too short to quote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    given = parser.parse_args(arguments)
    unknown = set(given.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    level: Level = "quick" if given.quick else "full"
    RESULTS.mkdir(exist_ok=True)
    tables = measure(given.parts or list(PARTS), level, Console(width=118), RESULTS)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(tables), indent=2) + b"\n")
    return 0


def measure(parts: Sequence[str], level: Level, console: Console, folder: Path) -> list[Table]:
    """Works in a new folder inside `folder`, which is removed at the end."""
    tables: list[Table] = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="w") as made:
        workspace = Path(made)
        console.print(machine.described(workspace), highlight=False)
        console.print()
        for part in parts:
            table = _measure(part, level, workspace / part[0])
            tables.append(table)
            show(console, table)
    sentence, missed = summary(tables)
    console.print(sentence, style="bold", highlight=False)
    for line in missed:
        console.print(f"  missed: {line}", highlight=False)
    return tables


def _measure(part: str, level: Level, place: Path) -> Table:
    begun, noise = time.perf_counter(), machine.Noise()
    place.mkdir()
    table = PARTS[part](level, place)
    shutil.rmtree(place)
    note = (
        f"took {time.perf_counter() - begun:.0f} s; others used {noise.cores():.0%} of a core meanwhile, "
        f"load average {machine.load_average():.2f}"
    )
    return msgspec.structs.replace(table, notes=[*table.notes, note])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
