"""Searches every table of the archive and every file of the journal for traces of a removed tenant.

    python -m covenant.ledger.embedded.byte_search <archive> <journal folder> <tenant> <keys as JSON>

It runs as a process of its own, since it reads everything, and only reads. A trace is one of the tenant's markers
(`tenant_markers`): its name after that of an agent, or the public key of one of its agents or callers. Finished tasks
are compressed: each is unpacked and searched.

Traces that stay on purpose are counted apart: audit rows, which their chain needs, and the journal's records of the
removal itself.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec

from covenant.ledger.contract.retention import SearchedPlace, tenant_markers
from covenant.ledger.embedded.archive.task_packs import define_functions
from covenant.model.errors import Unavailable

NICE: Final = 10
CHUNK_BYTES: Final = 1 << 20
BUSY_S: Final = 30.0
AUDIT: Final = "audit"
OF_THE_REMOVAL: Final = frozenset({"audited", "tenant_put", "tenant_erased", "tenant_removed"})
"""Events and snapshot lines that record the removal."""
_PACKED: Final = ("packed_task", "packed_result", "packed_updates", "packed_handovers")

_places = msgspec.json.Decoder(tuple[SearchedPlace, ...]).decode


async def search_in_process(archive: Path, folder: Path, tenant: str, keys: Sequence[str]) -> Sequence[SearchedPlace]:
    output, failure = await run_module(__name__, str(archive), str(folder), tenant, msgspec.json.encode(keys).decode())
    if failure:
        raise Unavailable("search_failed", f"the ledger could not be searched {failure}")
    return _places(output)


async def run_module(module: str, *arguments: str) -> tuple[bytes, str]:
    """Runs a module of ours as a process. Returns its output, and why it failed, if it did. Cancelling kills it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    last = errors.decode(errors="replace").strip().rpartition("\n")[2]
    return output, f"({process.returncode}): {last}" if process.returncode else ""


def search_ledger(archive: Path, folder: Path, tenant: str, keys: Sequence[str]) -> Iterator[SearchedPlace]:
    markers = tuple(marker.encode() for marker in tenant_markers(tenant, keys))
    yield from _search_tables(archive, tenant, markers)
    # A deleted row that was not overwritten has a display and its key side by side; the audit never has.
    side_by_side = tuple(f"@{tenant}{key}".encode() for key in keys)
    for path in (archive, archive.with_name(archive.name + "-wal")):
        if path.exists():
            yield SearchedPlace(place=f"{path.name}, its bytes", found=count_in_file(path, side_by_side))
    for path in sorted(folder.glob("*.jsonl")):
        yield _search_journal(path, markers)
    for path in sorted(each for each in folder.iterdir() if each.suffix != ".jsonl" and each.is_file()):
        if not path.name.startswith(archive.name):
            yield SearchedPlace(place=f"{folder.name}/{path.name}", found=count_in_file(path, markers))


def _search_tables(archive: Path, tenant: str, markers: Sequence[bytes]) -> Iterator[SearchedPlace]:
    with closing(sqlite3.connect(f"{archive.absolute().as_uri()}?mode=ro", timeout=BUSY_S, uri=True)) as db:
        define_functions(db)
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")]
        for name in names:
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({name})")]
            wanted = ", ".join([*columns, *(f"{each}(pack)" for each in _PACKED)] if name == "packs" else columns)
            found = 0
            for row in db.execute(f"SELECT {wanted} FROM {name}"):  # noqa: S608  (names of the schema)
                own = any(column == "tenant_id" and cell == tenant for column, cell in zip(columns, row, strict=False))
                found += own or any(_has(cell, markers) for cell in row)
            yield SearchedPlace(place=f"{archive.name}: {name}", found=found, kept=found if name == AUDIT else 0)


def _has(cell: Any, markers: Sequence[bytes]) -> bool:
    if isinstance(cell, str):
        cell = cell.encode(errors="surrogatepass")
    return isinstance(cell, bytes) and any(marker in cell for marker in markers)


def _search_journal(path: Path, markers: Sequence[bytes]) -> SearchedPlace:
    found = kept = 0
    with path.open("rb") as lines:
        for line in lines:
            if any(marker in line for marker in markers):
                found += 1
                kept += not any(marker in rest for rest in _rest_of(line) for marker in markers)
    return SearchedPlace(place=f"{path.parent.name}/{path.name}", found=found, kept=kept)


def _rest_of(line: bytes) -> Iterator[bytes]:
    """The parts of a segment's or snapshot's line that do not record the removal; all of an unreadable line."""
    try:
        read: dict[str, Any] = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        yield line
        return
    for event in read.get("events", [read]):
        if event.get("type") not in OF_THE_REMOVAL and not (event.get("type") == "tenant" and _is_removed(event)):
            yield msgspec.json.encode(event)


def _is_removed(line: dict[str, Any]) -> bool:
    return bool(line.get("tenant", {}).get("removal"))


def count_in_file(path: Path, markers: Sequence[bytes]) -> int:
    """How often any of the markers occurs. Reads the file in pieces."""
    if not markers:
        return 0
    found, rest, overlap = 0, b"", max(map(len, markers)) - 1
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            data = rest + piece
            for marker in markers:
                # Markers that lie wholly in the earlier piece were counted before.
                found += data.count(marker) - rest.count(marker)
            rest = data[-overlap:] if overlap else b""
    return found


def main(arguments: list[str]) -> int:
    os.nice(NICE)
    archive, folder, tenant, keys = arguments
    found = tuple(search_ledger(Path(archive), Path(folder), tenant, msgspec.json.decode(keys, type=list[str])))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
