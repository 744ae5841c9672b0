"""Commands on a home that work without a daemon: its first files, settings, checks and keys.

`covenant init`, `settings show`, `doctor` and `passphrase`; `covenant peers rotate-identity` and `revocation`.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from covenant.cli.daemon_client import connect
from covenant.cli.options import CommandGroup, given_home, home_option, local_command, program, short_path, token_option
from covenant.cli.terminal import ExitCode, Failure, Output, Unreachable, print_table, put, say
from covenant.daemon.environment import PASSPHRASE_FILE_VARIABLE, PASSPHRASE_VARIABLE, environment, now_ms
from covenant.model.errors import CovenantError, HomeLocked

if TYPE_CHECKING:
    from covenant.daemon.doctor.ledger_repair import Checkup, RepairPlan
    from covenant.daemon.keystore import Keystore

NEW_FILE: Final = "--new-file"

AGENTS_FILE: Final = "agents.py"
FIRST_AGENT: Final = '''"""Agents of this daemon: `covenant serve agents.py` serves every `Agent` at the top level."""

from covenant import Agent, Turn

hello = Agent("hello", description="Greets its caller")


@hello
async def greet(turn: Turn):
    # A string is a chunk of the answer, and is streamed. Returning completes the task; raising fails it.
    yield f"Hello, {turn.text}!"
'''

settings: Final = CommandGroup("settings", help="Settings: their values and sources.", no_args_is_help=True)


@local_command(None, "init", "init", "home", "files")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default=AGENTS_FILE, metavar="[FILE]")
@home_option("The home that the settings are for.")
def init(output: Output, *, file: Path, home: str | None) -> None:
    """Write a commented settings.toml into the home, and a first agent into FILE (default: agents.py).

    An existing file is left as it is. Everything in settings.toml is commented out, so it changes nothing.
    """
    from covenant.daemon.home import UnsafeHome, make_home
    from covenant.daemon.settings_loader import FILE_NAME, settings_text

    folder = given_home(home)
    try:
        make_home(folder)
        texts = ((folder / FILE_NAME, settings_text()), (file, FIRST_AGENT))
        written = [(path, _write_new(path, text)) for path, text in texts]
    except UnsafeHome as error:
        raise Failure("unsafe_home", str(error)) from error
    except OSError as error:
        raise Failure("cannot_write", f"{error.filename or file}: {error.strerror}") from error
    if output.answer({"home": str(folder), "files": [{"path": str(path), "new": new} for path, new in written]}):
        return
    for path, new in written:
        put(f"wrote {short_path(path)}" if new else f"{short_path(path)} is there already, and stays as it is")
    given = "" if home is None else f" --home {shlex.quote(short_path(folder))}"
    say(f"next: {program()}{given} serve {shlex.quote(str(file))}")
    say(f"then, in another terminal: {program()}{given} call hello world")


def _write_new(path: Path, text: str) -> bool:
    """Whether it was written: an existing file is left as it is."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


@local_command(settings, "show", "settings", "shown_from", "settings")
@home_option("The home whose daemon is asked, or whose settings.toml is read.", fallback=False)
@token_option()
@click.option("--files", is_flag=True, help="Show the settings that the next start would use, even if a daemon runs.")
def show_settings(output: Output, *, home: str | None, token_file: str | None, files: bool) -> None:
    """Show every setting: its value, the source of the value, and its meaning.

    Shows the settings in force in the running daemon. If none runs, shows those of settings.toml and the environment.
    An invalid value is then an error, as it is for `covenant serve`.
    """
    found = None if files else _settings_in_force(given_home(home), token_file)
    shown_from = "files" if found is None else "daemon"
    if found is None:
        found = _settings_in_files(home)
    if output.answer({"shown_from": shown_from, "settings": found}):
        return
    made = []
    for row in found:
        value = ",".join(row["value"]) if isinstance(row["value"], (list, tuple)) else str(row["value"])
        made.append(("" if row["source"] == "default" else "bold", row["name"], value, row["source"], row["meaning"]))
    print_table(("setting", "value", "from", "meaning"), made)
    if shown_from == "daemon":
        say("these are in force in the running daemon; --files shows what the next start would use")
    else:
        say("these are of settings.toml and the environment" + ("" if files else ": no daemon answers in this home"))


def _settings_in_force(home: Path, token_file: str | None) -> list[dict[str, Any]] | None:
    """None: no daemon answers."""
    try:
        with connect(home, token_file) as client:
            found: list[dict[str, Any]] = client.ask("show_settings")["settings"]
            return found
    except Unreachable:
        return None


def _settings_in_files(home: str | None) -> list[dict[str, Any]]:
    from covenant.daemon.settings_loader import load, rows
    from covenant.model.errors import SettingsError

    try:
        loaded = load({}, environment(), home=home)
    except SettingsError as error:
        raise Failure("bad_setting", str(error)) from error
    return [row._asdict() for row in rows(loaded)]


@local_command(None, "doctor", "doctor", "home", "well", "findings", "losses", "set_aside")
@home_option("The home to look at.")
@click.option("--accept-loss", is_flag=True, help="Repair a damaged ledger without the records that are lost.")
@click.option("--rebuild-archive", is_flag=True, help="Make the archive agree with the journal again. Loses nothing.")
@click.option("--yes", is_flag=True, help="Do not ask before records are dropped.")
def doctor(output: Output, *, home: str | None, accept_loss: bool, rebuild_archive: bool, yes: bool) -> None:
    """Check a home for everything that would make a start fail. Changes nothing.

    Exits with 1 if something is wrong, and says what to do. If records are damaged or missing, --accept-loss lists
    those that would be lost, asks, and repairs the ledger; the damaged files are set aside. If only the archive
    contradicts the journal, --rebuild-archive repairs it without a loss.
    """
    import sqlite3

    from covenant.daemon.doctor.home_check import check

    folder = given_home(home)
    checkup = check(folder, environment())
    report: dict[str, Any] = {
        "home": str(folder),
        "well": checkup.well,
        "findings": [finding._asdict() for finding in checkup.findings],
        "losses": [loss._asdict() for loss in checkup.repair_plan.losses] if checkup.repair_plan else [],
        "set_aside": None,
    }
    if not output.json:
        _show_checkup(checkup)
    mended = False
    try:
        if accept_loss and checkup.repair_plan is not None:
            _show_losses(checkup.repair_plan)
            if not yes and not click.confirm("Give these up?", err=True):
                raise Failure("not_confirmed", "nothing was changed")
            report["set_aside"] = str(_accept(folder, checkup.repair_plan))
            mended = True
        elif rebuild_archive and checkup.rebuild:
            kept = _rebuild(folder)
            report["set_aside"] = None if kept is None else str(kept)
            mended = True
    except (CovenantError, OSError) as error:
        raise Failure("not_mended", f"the home could not be repaired: {error}; run the same command again") from error
    except sqlite3.Error as error:
        way_out = "move archive.db and archive.db-wal out of the home, and give up their history: doctor --accept-loss"
        raise Failure("not_mended", f"the archive could not be mended: {error}; {way_out}") from error
    output.answer(report)
    if not checkup.well and not mended:
        raise click.exceptions.Exit(ExitCode.REFUSED)


def _accept(folder: Path, repair_plan: RepairPlan) -> Path:
    from covenant.daemon.doctor.ledger_repair import carry_out
    from covenant.ledger.embedded.journal.recovery import lock_home

    with lock_home(folder):
        aside = carry_out(folder, repair_plan, now_ms())
    say(f"the ledger is repaired; the damaged files are in {aside}")
    return aside


def _rebuild(folder: Path) -> Path | None:
    from covenant.daemon.doctor.ledger_repair import rebuild_archive
    from covenant.daemon.settings import ledger_limits
    from covenant.daemon.settings_loader import load
    from covenant.ledger.embedded.journal.recovery import lock_home

    limits = ledger_limits(load({}, environment(), home=folder).settings)
    with lock_home(folder):
        kept = rebuild_archive(folder, limits, now_ms())
    say("the archive agrees with the journal again; the next start brings it up to date")
    if kept is not None:
        say(f"the records that it had set aside are in {kept}")
    return kept


def _show_checkup(checkup: Checkup) -> None:
    for finding in checkup.findings:
        put(f"{'ok   ' if finding.well else 'WRONG'}  {finding.what}")
        if finding.way_out:
            put(f"       → {finding.way_out}")


def _show_losses(repair_plan: RepairPlan) -> None:
    kept = repair_plan.last_seq - repair_plan.first_seq + 1 - sum(loss.records for loss in repair_plan.losses)
    say(f"{kept} record(s) of the journal are kept. These would be lost:")
    for loss in repair_plan.losses:
        name = f"records {loss.seq} to {loss.through}" if loss.through > loss.seq else f"record {loss.seq}"
        say(f"  {name} ({loss.where}): {loss.reason}")
        for line in loss.said:
            say(f"    {line}")
    if repair_plan.archive_lost:
        say(f"  the archive ({repair_plan.archive_lost}): the history that is no longer in the journal")
    say("A task whose lease or result was in one of them is back where it was before, and its work may be done twice.")


@local_command(None, "passphrase", "passphrase", "home", "change", "prekeys_kept")
@home_option("The home with the keys.")
@click.option(
    NEW_FILE, metavar="FILE", help="A file with the new passphrase, which only its owner can read. Default: asks."
)
@click.option("--remove", is_flag=True, help="Keep the keys without a passphrase from now on.")
def passphrase(output: Output, *, home: str | None, new_file: str | None, remove: bool) -> None:
    """Set, change or remove the passphrase that the keys in a home are encrypted with.

    The daemon must not run: it saves its keys with the passphrase that it was started with. The current passphrase is
    taken from COVENANT_PASSPHRASE or COVENANT_PASSPHRASE_FILE, as a start takes it; if neither is set, you are asked
    for it.
    """
    if remove and new_file is not None:
        raise click.UsageError(f"--remove and {NEW_FILE} exclude each other")
    folder = given_home(home)
    with _locked_keys(folder):
        change, kept = _change(folder, new_file, remove=remove)
    if not output.answer({"home": str(folder), "change": change, "prekeys_kept": kept}):
        _show_change(folder, change, kept=kept)


@contextmanager
def _locked_keys(folder: Path) -> Iterator[None]:
    """Holds the lock of a home that has keys, while they are changed."""
    from covenant.ledger.embedded.journal.recovery import lock_home

    if not (folder / "identity" / "local.key").exists():
        raise Failure(
            "no_key", f"there is no key in {folder}; the first start makes one, locked if {PASSPHRASE_VARIABLE} is set"
        )
    try:
        with lock_home(folder):
            yield
    except HomeLocked as running:
        raise Failure("daemon_runs", str(running)) from None
    except (CovenantError, OSError) as error:
        raise Failure("cannot_change", str(error)) from error


def _change(folder: Path, new_file: str | None, *, remove: bool) -> tuple[str, bool]:
    """The change, and whether the prekeys were kept."""
    from covenant.daemon.home import LockedHome
    from covenant.daemon.keystore import Keystore, find_passphrase

    current = find_passphrase(environment())
    was_locked = Keystore(folder, None).locked
    if remove and not was_locked:
        raise Failure("not_locked", f"the keys in {folder} have no passphrase")
    if was_locked and current is None:
        current = _prompt("Passphrase", f"set {PASSPHRASE_VARIABLE} or {PASSPHRASE_FILE_VARIABLE}")
    keystore = Keystore(folder, current if was_locked else None)
    try:
        # Checked before a new passphrase is asked for.
        keystore.read_key()
        kept = keystore.relock(None if remove else _new(new_file))
    except LockedHome as locked:
        raise Failure("wrong_passphrase", str(locked)) from None
    return "removed" if remove else "changed" if was_locked else "set", kept


def _new(new_file: str | None) -> str:
    from covenant.daemon.keystore import read_passphrase

    if new_file is not None:
        return read_passphrase(Path(new_file).expanduser(), NEW_FILE)
    return _prompt("New passphrase", f"name a file with {NEW_FILE}", twice=True)


def _prompt(what: str, otherwise: str, *, twice: bool = False) -> str:
    """Asks on the terminal, without echo."""
    if not sys.stdin.isatty():
        raise Failure("no_terminal", f"there is no terminal to ask for the passphrase on; {otherwise}")
    answer: str = click.prompt(what, hide_input=True, confirmation_prompt=twice, err=True)
    return answer


def _show_change(folder: Path, change: str, *, kept: bool) -> None:
    if change == "removed":
        say(f"the keys in {folder} are not locked any more")
        say(f"unset {PASSPHRASE_VARIABLE} and {PASSPHRASE_FILE_VARIABLE}: with either, the next start locks them again")
    else:
        say(f"the keys in {folder} are locked with the new passphrase")
        say(f"the next start needs it in {PASSPHRASE_VARIABLE}, or in the file that {PASSPHRASE_FILE_VARIABLE} names")
    if not kept:
        say("identity/prekeys.json opens with neither passphrase; the next start makes new ones")


@local_command(None, "rotate-identity", "identity_rotated", "home", "before", "id", "compromised")
@home_option("The home with the keys.")
@click.option("--compromised", is_flag=True, help="The old key may be stolen: it also signs its own revocation.")
def rotate_identity(output: Output, *, home: str | None, compromised: bool) -> None:
    """Give this instance another identity key, which the old one names as its successor.

    The daemon must not run. After its next start it tells every peer; peers that poll find out at their next call. They
    keep their trust in this instance, and delegations continue. An earlier backup has the old key, which peers refuse
    once they know the new one: make a backup afterwards.
    """
    from covenant.daemon.keystore import change_identity

    folder = given_home(home)
    keystore = _open_keystore(folder)
    with _locked_keys(folder):
        before, now = change_identity(keystore, now_ms(), compromised=compromised)
    if output.answer({"home": str(folder), "before": before, "id": now, "compromised": compromised}):
        return
    say(f"this instance was {before}")
    say(f"and is {now} from its next start on; it tells its peers then")
    say("make a backup now: one from before has the old key")


@local_command(None, "revocation", "revocation", "id", "statement")
@home_option("The home with the keys.")
def revocation(output: Output, *, home: str | None) -> None:
    """Print a signed revocation of this instance's identity key. Keep it in a safe place, in case the key is stolen.

    A peer that gets it (POST /api/v1/a2a/identity, no token) refuses everything under that key.
    """
    from covenant.daemon.keystore import write_revocation

    try:
        own_id, statement = write_revocation(_open_keystore(given_home(home)), now_ms())
    except (CovenantError, OSError, ValueError) as error:
        raise Failure("no_key", f"{error}") from error
    output.show({"id": own_id, "statement": statement}, statement)


def _open_keystore(folder: Path) -> Keystore:
    from covenant.daemon.keystore import Keystore, find_passphrase

    try:
        return Keystore(folder, find_passphrase(environment()))
    except CovenantError as error:
        raise Failure("no_key", f"{error}") from error
