"""The file of a home that says which commits its database has lost, so that a restarted daemon still refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from covenant.ledger.embedded.disk import replace_private, sync_dir
from covenant.model.errors import HomeUnusable

LOST_COMMITS_NAME: Final = "lost_commits.json"


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


def save_lost_commits(path: Path, lost: LostCommits | None) -> None:
    """Writes the file, or removes it if nothing is lost. Both are durable when this returns."""
    if lost is not None:
        replace_private(path, msgspec.json.encode(lost))
    elif path.exists():
        path.unlink()
        sync_dir(path.parent)
