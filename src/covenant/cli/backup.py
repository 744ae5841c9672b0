"""`covenant backup` and `covenant restore`: a home as one file, and back."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import click

import covenant
from covenant.cli.daemon_client import connect
from covenant.cli.options import given_before, given_home, home_option, local_command, token_option
from covenant.cli.terminal import Failure, Output, put, say
from covenant.daemon.environment import now_ms
from covenant.model.errors import CovenantError, HomeLocked

if TYPE_CHECKING:
    from covenant.daemon.home_backup import Restored, Until
    from covenant.ledger.embedded.backup_file import Manifest, StagedBackup

COPY_S: Final = 3_600.0
"""How long a daemon may take to copy its ledger."""
STDIO: Final = "-"


@local_command(None, "backup", "backup", "file", "backup_id", "position", "made_at_ms", "bytes")
@click.argument("file", type=click.Path(dir_okay=False))
@home_option("The home to back up.")
@token_option
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
        with _staged(folder, given_before("token_file", token_file)) as staged:
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

        ledger = runner.run(open_ledger(home, clock=now_ms))
        try:
            backups = StagedBackups(home, ledger, uuid_source())
            staged = runner.run(backups.begin())
            try:
                yield staged
            finally:
                runner.run(backups.end(staged.id))
        finally:
            runner.run(ledger.close())


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
    from covenant.ledger.embedded.disk import open_private, sync_dir

    if file == STDIO:
        return write_backup(sys.stdout.buffer, home, staged, covenant.__version__), 0
    path = Path(file).expanduser()
    if path.exists():
        raise Failure("file_exists", f"{file} is there already; name a new file")
    # The file gets its name once it is whole.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "xb", opener=open_private) as out:
            manifest = write_backup(out, home, staged, covenant.__version__)
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
        os.link(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_dir(path.absolute().parent)
    return manifest, size


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
    with _opened(file) as source:
        done = asyncio.run(_restore(source, folder, segments, end))
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


async def _restore(source: IO[bytes], home: Path, segments: Path | None, until: Until | None) -> Restored:
    from covenant.daemon.home_backup import restore as restore_home

    try:
        return await restore_home(source, home, now_ms=now_ms, segments=segments, until=until)
    except OSError as error:
        raise Failure("cannot_restore", f"{error.filename or home}: {error.strerror or error}") from error
    except CovenantError as error:
        raise Failure("cannot_restore", str(error)) from error


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    if file == STDIO:
        yield sys.stdin.buffer
        return
    try:
        with Path(file).expanduser().open("rb") as source:
            yield source
    except FileNotFoundError as error:
        raise Failure("no_file", f"there is no file {error.filename}") from error
