"""The mark of a home whose ledger is in a database: where the ledger is, and what a start without it says."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from covenant.ledger.embedded.disk import replace_private, sync_dir
from covenant.model.errors import HomeUnusable

MARK_NAME: Final = "moved.json"
IN_DATABASE: Final = frozenset({"served", "moved"})


class MovedMark(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of a home whose ledger is in a database, or is being moved there or back: such a home does not open.

    `id` names the move: the database has it once the move is committed there. `served`: the home never had a ledger of
    its own.
    """

    id: str
    state: Literal["served", "moving", "moved", "returning"]
    database: str
    """The database's URL without its password."""
    at_ms: int


def read_mark(home: Path) -> MovedMark | None:
    try:
        return msgspec.json.decode((home / MARK_NAME).read_bytes(), type=MovedMark)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise HomeUnusable(f"{home / MARK_NAME} cannot be read ({error}); put it back from a backup", None) from error


def name_database(url: str) -> str:
    """The database's URL without its password."""
    parts = urlsplit(url)
    credentials, _, host = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    query = urlencode([each for each in parse_qsl(parts.query) if each[0] in ("host", "port")], safe="/")
    return urlunsplit((parts.scheme, f"{user}@{host}" if user else host, parts.path, query, ""))


def mark_served(home: Path, url: str, now_ms: int) -> None:
    """Marks the home as served from a database, unless the home has a ledger of its own, or a move's mark."""
    mark, database = read_mark(home), name_database(url)
    own_ledger = mark is None and (home / "journal").exists()
    moves = mark is not None and mark.state != "served"
    if not own_ledger and not moves and (mark is None or mark.database != database):
        write_mark(home, MovedMark(id="", state="served", database=database, at_ms=now_ms))


def write_mark(home: Path, mark: MovedMark) -> None:
    replace_private(home / MARK_NAME, msgspec.json.encode(mark))


def remove_mark(home: Path) -> None:
    (home / MARK_NAME).unlink(missing_ok=True)
    sync_dir(home)


def check_mark(home: Path) -> None:
    """Raises HomeUnusable if the ledger is in a database, or is incomplete."""
    mark = read_mark(home)
    if mark is not None:
        place, next_step = _explain(mark)
        if mark.state in IN_DATABASE:
            next_step += ", or bring it here with `covenant ledger move --out`"
        raise HomeUnusable(
            f"{home} does not hold a ledger that can be opened: its ledger is {place}; {next_step}", None
        )


class OwnLedger(NamedTuple):
    place: str
    """Where the ledger is, as a part of a sentence: `in its files`."""
    next_step: str
    """What the operator does to go on."""


def find_own_ledger(home: Path, url: str) -> OwnLedger | None:
    """The home's ledger, if that is not in the database that is named."""
    mark = read_mark(home)
    if mark is not None:
        return None if mark.database == name_database(url) and mark.state in IN_DATABASE else _explain(mark)
    if (home / "journal").exists():
        return OwnLedger("in its files", "move that into an empty database with `covenant ledger move`")
    return None


def _explain(mark: MovedMark) -> OwnLedger:
    if mark.state in IN_DATABASE:
        return OwnLedger(f"in {mark.database}", "start the daemon with that database as --ledger")
    direction = " --out" if mark.state == "returning" else ""
    return OwnLedger(
        f"partly in {mark.database}, since a move was cut off",
        f"finish it with `covenant ledger move{direction} --ledger {mark.database}`",
    )
