"""A database that has lost acknowledged commits: how a daemon notices it, and until when it refuses that database.

A file in the home keeps the loss, so that a daemon that is started again refuses the database, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import asyncpg
import msgspec

from covenant.ledger.embedded.disk import replace_private, sync_dir, unusable_by
from covenant.ledger.postgres.connections import fetch_rows
from covenant.ledger.postgres.node_runs import Joined
from covenant.model.errors import HomeUnusable, Unavailable

CODE: Final = "ledger_rolled_back"
LOST: Final = (
    "the database has lost commits that it had acknowledged ({}): a standby without them took over, or it was restored"
)
LOST_FIX: Final = "Bring back the right one, or accept the loss with `covenant ledger restored`"

log = logging.getLogger(__name__)


class Batch(msgspec.Struct, frozen=True):
    """The last batch of a writer that this daemon has seen, and the run that wrote it. None: the run is unknown."""

    writer: int
    seq: int
    boot: str | None


class LostCommits(msgspec.Struct, frozen=True, kw_only=True):
    sign: str
    """How the loss was noticed."""
    restored_at_ms: int
    """When the ledger was last marked as restored: a later mark accepts the loss."""
    batches: tuple[Batch, ...]
    """The database has lost none of its commits if it has all of these."""


def read_lost_commits(path: Path) -> LostCommits | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=LostCommits)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        fix = "delete it if the ledger's database has lost nothing, or run `covenant ledger restored` before"
        raise HomeUnusable(f"{path} cannot be read ({error}); {fix}", None) from error


def forget_lost_commits(path: Path) -> None:
    if path.exists():
        path.unlink()
        sync_dir(path.parent)


def rolled_back(sign: str) -> Unavailable:
    return Unavailable(CODE, f"{LOST.format(sign)}. {LOST_FIX}")


class SeenBatches:
    """The batches that this run has seen and the database has lost."""

    def __init__(self, path: Path | None) -> None:
        """`path`: the file in the home that keeps them; None: there is no home."""
        self._path = path
        self._saved: LostCommits | None = None
        self._failure = ""
        """Why the file could not be written."""
        self.missing: dict[int, Batch] = {}
        """By writer: the last batch that this run has seen."""

    def compare(self, row: Mapping[str, Any], known: Batch) -> str | None:
        """The sign of a loss, if the writer's row shows a new one.

        Afterwards the same run has to be there again: a new run writes other batches under the lost numbers.
        """
        writer, seq = known.writer, row["seq"]
        if seq < known.seq and writer not in self.missing:
            self.missing[writer] = known
            return f"writer {writer} is at {seq}, and was at {known.seq}"
        if writer in self.missing and _has(row, self.missing[writer]):
            del self.missing[writer]
        return None

    def save(self, sign: str, joined: Joined, written: int) -> None:
        """Writes the file, so that the next start refuses the database, too. `written`: the last batch of this run.

        Called on the loop: a loss is rare, and the file is small.
        """
        batches = {joined.writer: Batch(joined.writer, written, joined.boot)} | self.missing
        lost = LostCommits(sign=sign, restored_at_ms=joined.restored_at_ms, batches=tuple(batches.values()))
        if lost != self._saved:
            self._replace(lost)

    def forget(self) -> None:
        """Called before a new run begins: the loss was accepted, or the lost batches are there again."""
        self.missing.clear()
        self._replace(None)

    def _replace(self, lost: LostCommits | None) -> None:
        """The refusal does not depend on the file: if that cannot be written, the next heartbeat tries it again."""
        if self._path is None or lost == self._saved:
            return
        try:
            if lost is not None:
                replace_private(self._path, msgspec.json.encode(lost))
            else:
                forget_lost_commits(self._path)
        except OSError as error:
            if self._failure != (reason := str(error)):
                self._failure = reason
                log.warning("ledger.loss_not_saved", extra={"path": str(self._path), "reason": reason})
        else:
            self._saved, self._failure = lost, ""


async def check_lost_commits(connection: asyncpg.Connection[Any], path: Path) -> None:
    """Called before a run begins, which would replace the run that wrote the lost batches.

    Removes the file if the loss is over. Raises Unavailable if it is not, and HomeUnusable.
    """
    if (sign := await find_lost_commits(connection, path)) is not None:
        raise rolled_back(f"{sign}; {path} keeps that")
    try:
        await asyncio.to_thread(forget_lost_commits, path)
    except OSError as error:
        raise unusable_by(error, path) from error


async def find_lost_commits(connection: asyncpg.Connection[Any], path: Path) -> str | None:
    """The sign of a loss that the file has, unless it was accepted, or the lost batches are there again.

    A database without writers is empty: its ledger begins on purpose.
    """
    try:
        lost = await asyncio.to_thread(read_lost_commits, path)
    except OSError as error:
        raise unusable_by(error, path) from error
    if lost is None:
        return None
    writers = {row["writer"]: row for row in await fetch_rows("nodes", connection, "writers")}
    if not writers or all(each.writer in writers and _has(writers[each.writer], each) for each in lost.batches):
        return None
    (row,) = await fetch_rows("nodes", connection, "last_restore")
    return None if (row["restored_at_ms"] or 0) > lost.restored_at_ms else lost.sign


def _has(row: Mapping[str, Any], batch: Batch) -> bool:
    found: bool = row["seq"] >= batch.seq and row["boot"] == batch.boot
    return found
