"""`covenant ledger`, `backup` and `restore`: the daemons that share a ledger, its database, and a home as one file."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

import click

import covenant
from covenant.cli.daemon_client import Invocation, connect, daemon_command
from covenant.cli.options import CommandGroup, Function, given_home, home_option, local_command, token_option
from covenant.cli.terminal import Failure, Output, ago, complete_file, print_table, put, say
from covenant.daemon.environment import PASSPHRASE_VARIABLE, environment, now_ms
from covenant.model.errors import CovenantError, HomeLocked

if TYPE_CHECKING:
    from covenant.daemon.home_backup import Restored, Until
    from covenant.daemon.settings import Settings
    from covenant.ledger.embedded.backup_file import Manifest, StagedBackup

T = TypeVar("T")

COPY_S: Final = 3_600.0
"""How long a daemon may take to copy its ledger."""
STDIO: Final = "-"

ledger: Final = CommandGroup(
    "ledger", help="The ledger: the daemons that share it, and its database.", no_args_is_help=True
)
url_option: Final[Callable[[Function], Function]] = click.option(
    "--ledger", "--ledger-url", "url", metavar="URL", help="The database. Default: the setting ledger.url."
)


@daemon_command(ledger, "nodes", "node_list", "nodes")
def nodes(call: Invocation) -> None:
    """List the daemons that serve this ledger: one, unless it is on PostgreSQL.

    A daemon that has left or was lost is listed for a day.
    """
    answer = call.ask("list_nodes")
    call.show_table(answer, ("node", "state", "started", "seen", "leases", "boot"), map(_node_row, answer["nodes"]))


def _node_row(node: dict[str, Any]) -> tuple[str, ...]:
    style, state = ("", "alive") if node["alive"] else ("", "left") if node["left"] else ("red", "lost")
    times = (ago(node["started_at_ms"]), ago(node["seen_at_ms"]))
    return style, node["node"], state, *times, str(node["leases"]), node["boot"][:8]


@local_command(ledger, "init", "ledger_init", "home", "level", "shared")
@url_option
@home_option("The home of the first daemon.")
def init(output: Output, *, url: str | None, home: str | None) -> None:
    """Prepare an empty database for several daemons, without serving: its tables, and the instance's key and operator.

    The key and the operator's token are made in the home. With COVENANT_PASSPHRASE they are also left in the database,
    locked with it: a daemon with an empty home and the same passphrase takes them from there. Without a passphrase,
    copy identity/local.key and operator.token into the home of each daemon. Does nothing if the database is prepared
    already. If the home has a ledger elsewhere, this begins another one: `covenant ledger move` would move it.
    """
    settings = _settings(url, home)
    level, is_shared = _run(lambda: _init(settings))
    share = f"daemons with an empty home and the same {PASSPHRASE_VARIABLE} take key and token from the database"
    copy = f"copy identity/local.key and operator.token from {settings.home} into the home of each other daemon"
    answer = {"home": str(settings.home), "level": level, "shared": is_shared}
    output.show(answer, f"the database is ready, at level {level}", share if is_shared else copy)


async def _init(settings: Settings) -> tuple[int, bool]:
    from covenant.daemon.keystore import find_passphrase
    from covenant.daemon.telemetry import Log
    from covenant.daemon.wiring.postgres_storage import import_postgres, node_name
    from covenant.daemon.wiring.storage import open_storage

    level: int = import_postgres("migrations").LEVEL
    async with open_storage(settings, Log(), begins_ledger=True):
        pass
    await _admin().forget_node(settings.ledger.url, node_name(settings))
    return level, find_passphrase(environment()) is not None


@local_command(ledger, "migrate", "ledger_migrated", "before", "level")
@url_option
@home_option("The home whose settings name the database.")
def migrate(output: Output, *, url: str | None, home: str | None) -> None:
    """Raise the database's schema to the level of this version. A daemon does the same when it starts."""
    settings = _settings(url, home)
    before, level = _run(lambda: _admin().migrate_database(settings.ledger.url))
    change = "" if before == level else f"; it was at {before}"
    output.show({"before": before, "level": level}, f"the schema is at level {level}{change}")


@local_command(ledger, "restored", "ledger_restored", "fenced")
@url_option
@home_option("The home whose settings name the database.")
def restored(output: Output, *, url: str | None, home: str | None) -> None:
    """Declare that the database was restored, or that a standby without the last commits took over.

    All running daemons are fenced, because their state may be newer than the database. They start again from the state
    of the database. Writes that were acknowledged after that moment are lost: work that was done since may be done
    again.
    """
    from covenant.daemon.wiring.postgres_storage import mark_restored

    settings = _settings(url, home)
    fenced = _run(lambda: mark_restored(settings))
    output.show({"fenced": fenced}, f"{fenced} run(s) of daemons are fenced; those that still run start again")


@local_command(ledger, "move", "ledger_moved", "direction", "home", "moved")
@click.option("--out", is_flag=True, help="Move from the database into the home instead.")
@url_option
@home_option("The home that the ledger is in, or comes to.")
def move(output: Output, *, out: bool, url: str | None, home: str | None) -> None:
    """Move the ledger of a home into an empty database, or out of a database into a home.

    Everything is moved: tasks with their history, results, tenants, tokens, grants, agents, push configurations, peers,
    files and the audit. No daemon may run meanwhile. The command reads the copy back and compares it before it reports
    success. The source stays as it is, marked so that no daemon serves it. If a move was interrupted, run the same
    command again to finish it.
    """
    from covenant.daemon.wiring.postgres_storage import move_ledger

    settings = _settings(url, home)
    moved: Mapping[str, Any] = _run(lambda: move_ledger(settings, out=out))
    rows = [{"what": kind, "count": each.count, "digest": each.digest} for kind, each in moved.items()]
    if output.answer({"direction": "out" if out else "in", "home": str(settings.home), "moved": rows}):
        return
    print_table(("what", "count", "digest"), [("", kind, str(m.count), m.digest[:16]) for kind, m in moved.items()])
    if out:
        say(f"the ledger is in {settings.home}; remove ledger.url from its settings, and start the daemon there")
    else:
        say(f"the ledger is in the database; {settings.home} keeps the old files, and serves them no more")


def _admin() -> Any:
    from covenant.daemon.wiring.postgres_storage import import_postgres

    return import_postgres("database_admin")


def _settings(url: str | None, home: str | None) -> Settings:
    from covenant.daemon.settings_loader import load

    try:
        settings = load({"ledger.url": url}, environment(), home=home).settings
    except CovenantError as error:
        raise Failure("bad_setting", str(error)) from error
    if not settings.ledger.url:
        raise Failure("no_database", "no database is named: give --ledger postgres://…, or the setting ledger.url")
    return settings


def _run(work: Callable[[], Awaitable[T]]) -> T:
    async def run() -> T:
        return await work()

    try:
        return asyncio.run(run())
    except CovenantError as error:
        raise Failure("ledger_unusable", str(error)) from error


@local_command(None, "backup", "backup", "file", "backup_id", "position", "made_at_ms", "bytes")
@click.argument("file", type=click.Path(dir_okay=False))
@home_option("The home to back up.")
@token_option()
def backup(output: Output, *, file: str, home: str | None, token_file: str | None) -> None:
    """Write the home into FILE: the ledger as it is at one position, the settings, agents, keys and the token.

    A running daemon keeps working; everything that it acknowledged before is in the file. The home of a
    stopped daemon is opened as a start would open it. FILE is for its owner alone and holds the home's secrets; `-`
    writes it to standard output.
    """
    if file == STDIO and output.json:
        raise click.UsageError(
            "standard output cannot be both the backup and a JSON object; name a FILE, or leave out --json"
        )
    folder = given_home(home)
    try:
        with _staged(folder, token_file) as staged:
            manifest, size = _write(file, folder, staged)
    except OSError as error:
        raise Failure("cannot_write", f"{error.filename or file}: {error.strerror or error}") from error
    except CovenantError as error:
        raise Failure("backup_failed", str(error)) from error
    fields = {"backup_id": manifest.backup_id, "position": manifest.position, "made_at_ms": manifest.made_at_ms}
    if not output.answer({"file": file, **fields, "bytes": size}) and file != STDIO:
        put(f"backed up {folder} at position {manifest.position} to {file} ({size / (1 << 20):,.1f} MiB)")
        say("it holds the home's keys and token: keep it where only you can read it")


@contextmanager
def _staged(home: Path, token_file: str | None) -> Iterator[StagedBackup]:
    """A copy of the ledger, by the daemon that has the home open, or by this process if none has."""
    from covenant.ledger.embedded.journal.recovery import lock_home

    if not (home / "journal").is_dir() and not (home / "sock").exists():
        raise Failure("no_home", f"there is no ledger in {home}; name its home with --home")
    try:
        lock_home(home).close()
    except HomeLocked:
        with _staged_by_daemon(home, token_file) as staged:
            yield staged
        return
    with asyncio.Runner() as runner:
        from covenant.ledger.clock import uuid_source
        from covenant.ledger.embedded.backup_file import StagedBackups
        from covenant.ledger.embedded.open import open_ledger

        opened = runner.run(open_ledger(home, clock=now_ms))
        try:
            backups = StagedBackups(home, opened, uuid_source())
            staged = runner.run(backups.begin())
            try:
                yield staged
            finally:
                runner.run(backups.end(staged.id))
        finally:
            runner.run(opened.close())


@contextmanager
def _staged_by_daemon(home: Path, token_file: str | None) -> Iterator[StagedBackup]:
    from covenant.ledger.embedded.backup_file import StagedBackup

    with connect(home, token_file) as client:
        answer = client.ask("begin_backup", within_s=COPY_S)
        del answer["kind"]
        staged = StagedBackup(**answer)
        try:
            if not os.access(staged.folder, os.R_OK | os.X_OK):
                raise Failure("cannot_read", f"{staged.folder} cannot be read; run this as the owner of the home")
            yield staged
        finally:
            # If the daemon is gone, its next start removes the copy.
            with suppress(Failure):
                client.ask("end_backup", backup_id=staged.id)


def _write(file: str, home: Path, staged: StagedBackup) -> tuple[Manifest, int]:
    from covenant.ledger.embedded.backup_file import write_backup

    if file == STDIO:
        return write_backup(sys.stdout.buffer, home, staged, covenant.__version__), 0
    path = Path(file).expanduser()
    if path.exists():
        raise Failure("file_exists", f"{file} is there already; name a new file")
    with complete_file(path, replace=False) as out:
        return write_backup(out, home, staged, covenant.__version__), out.tell()


@local_command(None, "restore", "restore", "home", "backup_id", "position", "incarnation", "queued", "in_flight")
@click.argument("file", type=click.Path(dir_okay=False))
@home_option("The home to make. It must not be there yet, or be empty.")
@click.option(
    "--segments",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder with the segments that backup.command has shipped since.",
)
@click.option("--until", metavar="POSITION|TIME", help="Where to end: a position, or a time such as 2026-01-31T12:00Z.")
def restore(output: Output, *, file: str, home: str | None, segments: Path | None, until: str | None) -> None:
    """Make a home from FILE, which `covenant backup` wrote; `-` reads it from standard input.

    Every file is compared with its hash, and the ledger is opened and checked. With --segments it goes on from the
    backup's position to the last shipped record, or to --until. A row in the audit says that it was restored.
    """
    from covenant.daemon.home_backup import parse_until

    if until is not None and segments is None:
        raise click.UsageError("--until needs --segments: a backup alone is of one position")
    try:
        end = parse_until(until) if until is not None else None
    except ValueError as error:
        raise click.UsageError(f"--until: {error}") from None
    folder = given_home(home)
    with _backup_file(file) as source:
        done = asyncio.run(_restore(source, file, folder, segments, end))
    fields = {
        "home": str(folder),
        "backup_id": done.manifest.backup_id,
        "position": done.incarnation.position,
        "incarnation": done.incarnation.id,
        "queued": done.counts.queued,
        "in_flight": done.counts.leased,
    }
    if output.answer(fields):
        return
    put(f"restored {folder} at position {done.incarnation.position}")
    say(f"{done.counts.queued} task(s) are queued there, and {done.counts.leased} were at work")
    say("it does not know what happened after that position: work that was done since then may be done again")


async def _restore(source: IO[bytes], file: str, home: Path, segments: Path | None, until: Until | None) -> Restored:
    from covenant.daemon.home_backup import restore as restore_home
    from covenant.ledger.embedded.backup_file import BadBackup

    try:
        return await restore_home(source, home, now_ms=now_ms, segments=segments, until=until)
    except OSError as error:
        raise Failure("cannot_restore", f"{error.filename or home}: {error.strerror or error}") from error
    except BadBackup as error:
        why = f"{file} cannot be restored: {error}; give another backup, and an empty home"
        raise Failure("cannot_restore", why) from error
    except CovenantError as error:
        raise Failure("cannot_restore", str(error)) from error


@contextmanager
def _backup_file(file: str) -> Iterator[IO[bytes]]:
    if file == STDIO:
        yield sys.stdin.buffer
        return
    try:
        with Path(file).expanduser().open("rb") as source:
            yield source
    except FileNotFoundError as error:
        raise Failure("no_file", f"there is no file {error.filename}") from error
