"""Moves a ledger from a home into an empty database, and from a database into a home.

In both directions the source is read while nobody serves it, and the target is written, read back and compared. Then
the source is marked, so that nobody serves it by accident. The database's part is one transaction. The home's mark has
the move's id and is written just before that transaction commits. So a move that is repeated after a crash finds out
whether the database has committed, and only finishes the rest. A move that is refused before that leaves the home as it
was.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import asyncpg
import msgspec

from covenant.ledger.embedded import fault_points
from covenant.ledger.embedded.archive.archive_file import ARCHIVE_NAME
from covenant.ledger.embedded.backup_file import INCARNATION_NAME, Incarnation
from covenant.ledger.embedded.blob_folder import FOLDER_NAME
from covenant.ledger.embedded.disk import make_owned_folder, replace_private, sync_dir
from covenant.ledger.embedded.journal.recovery import lock_home
from covenant.ledger.embedded.moved_mark import (
    IN_DATABASE,
    MovedMark,
    name_database,
    read_mark,
    remove_mark,
    write_mark,
)
from covenant.ledger.embedded.open import SEEN, open_ledger
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.ledger.postgres.connections import CONNECT_S, SETTINGS, connect_once, execute, fetch_rows, fetch_value
from covenant.ledger.postgres.database_errors import SESSIONLESS, UNAVAILABLE, describe_trouble
from covenant.ledger.postgres.lost_commits import check_lost_commits
from covenant.ledger.postgres.migrations import check_durability, check_tasks, migrate
from covenant.ledger.postgres.open_postgres import DatabaseUnusable
from covenant.ledger.transfer.contents import Contents, Measure, check_chains, measure
from covenant.ledger.transfer.database_contents import read_database
from covenant.ledger.transfer.database_writer import DatabaseWriter, moved_chain
from covenant.ledger.transfer.home_contents import NOTES_NAME, HomeContents, write_home
from covenant.model.errors import CovenantError
from covenant.model.ids import AgentId
from covenant.model.settings import Limits

STAGED: Final = "moving"
"""The folder of a home in which a ledger from a database is built."""
LEDGER_FILES: Final = (
    "journal",
    ARCHIVE_NAME,
    f"{ARCHIVE_NAME}-wal",
    f"{ARCHIVE_NAME}-shm",
    SEEN,
    FOLDER_NAME,
    NOTES_NAME,
)

_value = partial(fetch_value, "transfer")


class CannotMove(CovenantError):
    """Nothing was moved. The message says why, and what to do."""


def check_has_ledger(home: Path) -> None:
    """Raises CannotMove if the home has no ledger, and no mark of a move either."""
    if read_mark(home) is None and not (home / "journal").is_dir():
        raise CannotMove(f"{home} has no ledger to move; name its home with --home")


class Mover:
    """One move, or the rest of an interrupted one. `by` is the issuer of the audit row about it.

    Both directions commit to the database, and refuse one that may lose commits, unless `durability` is "os".
    `secrets`: the encrypted secrets to store in the database, by name, for a move into it. `lost_path`: the home's file
    of commits that the database has lost, for a move out of it.
    """

    def __init__(
        self,
        home: Path,
        dsn: str,
        limits: Limits,
        *,
        now_ms: Callable[[], int],
        new_id: Callable[[], str],
        by: AgentId,
        secrets: Mapping[str, str] = MappingProxyType({}),
        durability: Literal["fsync", "os"] = "fsync",
        lost_path: Path | None = None,
    ) -> None:
        self._home = home
        self._dsn = dsn
        self._limits = limits
        self._now_ms = now_ms
        self._new_id = new_id
        self._by = by
        self._secrets = secrets
        self._durability = durability
        self._lost_path = lost_path

    async def move_in(self) -> Mapping[str, Measure]:
        """Moves the home's ledger into the database. Returns what was moved, by kind.

        Raises CannotMove, HomeLocked, Damaged, NotDurable and DatabaseUnusable.
        """
        mark = read_mark(self._home)
        if mark is not None:
            self._check_mark(mark, "moving")
        else:
            check_has_ledger(self._home)
            async with self._database() as connection:
                await self._check_target(connection)
            await self._compact_home()
        with lock_home(self._home):
            mark = mark or self._new_mark("moving")
            with closing(HomeContents(self._home, self._limits)) as contents:
                await check_chains(contents)
                measures = await measure(contents)
                async with self._database() as connection:
                    if await _value(connection, "moved", id=mark.id) is None:
                        await self._fill(connection, contents, measures, mark)
            fault_points.point("move.mark")
            write_mark(self._home, msgspec.structs.replace(mark, state="moved"))
        return measures

    async def _compact_home(self) -> None:
        """Writes an audit row about the move, and compacts the home into its snapshot and archive."""
        ledger = await open_ledger(self._home, clock=self._now_ms, limits=self._limits)
        try:
            await ledger.commit(WriteAuditRow(by=self._by, row={"type": "ledger_moved", "to": self._database_name()}))
            await ledger.compact()
        finally:
            await ledger.close()

    async def _fill(
        self, connection: asyncpg.Connection[Any], contents: Contents, measures: Mapping[str, Measure], mark: MovedMark
    ) -> None:
        async with connection.transaction():
            await execute("transfer", connection, "lock")
            await self._check_target(connection)
            await DatabaseWriter(connection, contents).write(moved_chain(contents.state))
            for name, body in self._secrets.items():
                await execute("nodes", connection, "keep_secret", name=name, body=body)
            fault_points.point("move.written")
            await self._compare(measures, await read_database(connection, self._limits))
            await _value(connection, "move", id=mark.id, direction="in", home=str(self._home))
            write_mark(self._home, mark)
            fault_points.point("move.commit")

    async def move_out(self) -> Mapping[str, Measure]:
        """Moves the database's ledger into the home. Returns what was moved, by kind.

        Raises CannotMove, HomeLocked, NotDurable and DatabaseUnusable, and what a start raises for a database that has
        lost commits (Unavailable) or rows of open tasks (WrongSchema).
        """
        mark, staged = read_mark(self._home), self._home / STAGED
        if mark is None:
            found = [name for name in LEDGER_FILES if (self._home / name).exists()]
            if found:
                raise CannotMove(f"{self._home} has a ledger already ({found[0]}); name another home with --home")
        elif mark.state not in IN_DATABASE:
            self._check_mark(mark, "returning")
        with lock_home(self._home):
            if mark is None or mark.state in IN_DATABASE:
                mark = self._new_mark("returning")
            measures: Mapping[str, Measure] | None = None
            async with self._database() as connection:
                if await _value(connection, "moved", id=mark.id) is None:
                    measures = await self._write_staged(connection, staged, mark)
            fault_points.point("move.publish")
            self._publish(staged)
            if measures is None:
                with closing(HomeContents(self._home, self._limits)) as contents:
                    measures = await measure(contents)
            fault_points.point("move.unmark")
            remove_mark(self._home)
        return measures

    async def _write_staged(
        self, connection: asyncpg.Connection[Any], staged: Path, mark: MovedMark
    ) -> Mapping[str, Measure]:
        async with connection.transaction(isolation="repeatable_read"):
            await execute("transfer", connection, "lock")
            await self._check_source(connection)
            contents = await read_database(connection, self._limits)
            await check_chains(contents)
            heads = [msgspec.to_builtins(each) for each in await contents.chains()]
            measures = await measure(contents)
            shutil.rmtree(staged, ignore_errors=True)
            make_owned_folder(staged)
            await write_home(staged, contents)
            with closing(HomeContents(staged, self._limits)) as written:
                await self._compare(measures, written)
            now_ms = self._now_ms()
            incarnation = Incarnation(id=self._new_id(), restored_from="database", restored_at_ms=now_ms)
            replace_private(staged / INCARNATION_NAME, msgspec.json.encode(incarnation))
            ledger = await open_ledger(staged, clock=self._now_ms, limits=self._limits)
            try:
                row: dict[str, object] = {"type": "ledger_moved", "from": self._database_name(), "chains": heads}
                await ledger.commit(WriteAuditRow(by=self._by, row=row))
                await ledger.compact()
            finally:
                await ledger.close()
            await _value(connection, "move", id=mark.id, direction="out", home=str(self._home))
            await execute("nodes", connection, "fence_writers")
            await execute("nodes", connection, "fence_nodes")
            write_mark(self._home, mark)
            fault_points.point("move.commit")
        return measures

    def _publish(self, staged: Path) -> None:
        """Sets the home's earlier ledger files aside, and puts the new ones in their place.

        The journal comes first: once it has left the staging folder, no earlier file is left to be set aside. So the
        rest can be done by another process after a crash.
        """
        if (staged / "journal").exists():
            aside = next(each for at in range(1, 1_000) if not (each := self._home / f"moved-{at}").exists())
            make_owned_folder(aside)
            for name in LEDGER_FILES:
                if (self._home / name).exists():
                    (self._home / name).replace(aside / name)
            if not any(aside.iterdir()):
                aside.rmdir()
            sync_dir(self._home)
            (staged / "journal").replace(self._home / "journal")
            sync_dir(self._home)
        fault_points.point("move.place")
        if staged.exists():
            (staged / "lock").unlink(missing_ok=True)
            for path in tuple(staged.iterdir()):
                path.replace(self._home / path.name)
            staged.rmdir()
        sync_dir(self._home)

    async def _check_target(self, connection: asyncpg.Connection[Any]) -> None:
        await self._check_alone(connection)
        if await _value(connection, "held"):
            raise CannotMove(f"the database {self._database_name()} is not empty; name an empty one with --ledger")

    async def _check_source(self, connection: asyncpg.Connection[Any]) -> None:
        await self._check_alone(connection)
        left = await fetch_value("nodes", connection, "left")
        if left is not None:
            raise CannotMove(
                f"the ledger was moved out of {self._database_name()} already, into the home {left}; use that one"
            )
        if not await _value(connection, "held"):
            raise CannotMove(f"the database {self._database_name()} has no ledger to move")
        await check_tasks(connection)
        if self._lost_path is not None:
            await check_lost_commits(connection, self._lost_path)

    async def _check_alone(self, connection: asyncpg.Connection[Any]) -> None:
        if living := [row["node"] for row in await fetch_rows("transfer", connection, "living")]:
            raise CannotMove(f"daemons serve this ledger ({', '.join(living)}); stop them, and begin the move again")

    async def _compare(self, expected: Mapping[str, Measure], written: Contents) -> None:
        found = await measure(written)
        for kind in sorted({*expected, *found}):
            if expected.get(kind) != found.get(kind):
                was, now = (each.count if each is not None else 0 for each in (expected.get(kind), found.get(kind)))
                raise CannotMove(
                    f"the written ledger differs from the one that was read ({kind}: {was} read, {now} written), "
                    "so nothing was moved; this is a defect: please report it"
                )

    def _new_mark(self, state: Any) -> MovedMark:
        return MovedMark(id=self._new_id(), state=state, database=self._database_name(), at_ms=self._now_ms())

    def _check_mark(self, mark: MovedMark, state: str) -> None:
        """Raises CannotMove unless the mark is of an interrupted move in this direction, to or from this database."""
        if mark.state == state and mark.database == self._database_name():
            return
        reasons = {
            "served": f"it is in {mark.database} already",
            "moving": f"a move to {mark.database} was cut off; finish it with that database, and without --out",
            "moved": f"it was moved to {mark.database} already",
            "returning": f"a move from {mark.database} was cut off; finish it with that database, and with --out",
        }
        raise CannotMove(f"the ledger of {self._home} cannot be moved: {reasons[mark.state]}")

    def _database_name(self) -> str:
        return name_database(self._dsn)

    @asynccontextmanager
    async def _database(self) -> AsyncIterator[asyncpg.Connection[Any]]:
        try:
            connection = await connect_once(self._dsn, timeout=CONNECT_S, server_settings=SETTINGS)
            try:
                if self._durability == "fsync":
                    await check_durability(connection)
                await migrate(connection)
                yield connection
            finally:
                await connection.close()
        except SESSIONLESS as error:
            words = f"a transaction pooler stands before the database ({error}): name the database itself with --ledger"
            raise DatabaseUnusable(words) from error
        except UNAVAILABLE as error:
            raise DatabaseUnusable(f"{describe_trouble(error)}; then run the same command again") from error
        except (asyncpg.PostgresError, ValueError) as error:
            raise DatabaseUnusable(describe_trouble(error)) from error
