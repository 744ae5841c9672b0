"""`covenant passphrase`: what the keys in a home are locked with, set, changed or removed. The daemon must not run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click

from covenant.cli.calling import said_before
from covenant.cli.failures import Failure
from covenant.cli.output import put_json, say, shape
from covenant.daemon.environment import PASSPHRASE_FILE_VARIABLE, PASSPHRASE_VARIABLE, environment, find_home

NEW_FILE: Final = "--new-file"


@click.command("passphrase", epilog=shape("passphrase", "home", "change", "prekeys_kept"))
@click.option("--home", metavar="FOLDER", help="The home with the keys. Default: COVENANT_HOME, else ~/.covenant.")
@click.option(
    NEW_FILE, metavar="FILE", help="Where the new one is, for its owner alone. Default: you are asked for it."
)
@click.option("--remove", is_flag=True, help="Keep the keys without a passphrase from now on.")
@click.option("--json", "as_json", is_flag=True, help="Answer with one JSON object.")
def command(*, home: str | None, new_file: str | None, remove: bool, as_json: bool) -> None:
    """Set, change or remove the passphrase that the keys in a home are locked with.

    The daemon must not run: it saves its keys with the passphrase that it was started with. The one in force is taken
    from COVENANT_PASSPHRASE or COVENANT_PASSPHRASE_FILE, as a start takes it; if neither is set, you are asked for it.
    """
    if remove and new_file is not None:
        raise click.UsageError(f"--remove and {NEW_FILE} exclude each other")
    from covenant.ledger.log.opening import lock_home
    from covenant.model.errors import CovenantError, HomeLocked

    folder, _ = find_home(said_before("home", home), environment())
    if not (folder / "identity" / "local.key").exists():
        raise Failure(
            "no_key", f"there is no key in {folder}; the first start makes one, locked if {PASSPHRASE_VARIABLE} is set"
        )
    try:
        with lock_home(folder):
            change, kept = _change(folder, new_file, remove=remove)
    except HomeLocked as running:
        why = "a daemon saves its keys with the passphrase that it was started with"
        raise Failure("daemon_runs", f"{running}; {why}") from None
    except (CovenantError, OSError) as error:
        raise Failure("cannot_change", f"{error}") from error
    if as_json:
        put_json({"kind": "passphrase", "home": str(folder), "change": change, "prekeys_kept": kept})
    else:
        _tell(folder, change, kept=kept)


def _change(folder: Path, new_file: str | None, *, remove: bool) -> tuple[str, bool]:
    """What was done, and whether the prekeys are still there."""
    from covenant.daemon.home import LockedHome
    from covenant.daemon.keystore import Keystore, find_passphrase

    said = find_passphrase(environment())
    was_locked = Keystore(folder, None).locked
    if remove and not was_locked:
        raise Failure("not_locked", f"the keys in {folder} have no passphrase")
    if was_locked and said is None:
        said = _asked("Passphrase", f"set {PASSPHRASE_VARIABLE} or {PASSPHRASE_FILE_VARIABLE}")
    keystore = Keystore(folder, said if was_locked else None)
    try:
        # Before anybody thinks of a new one for nothing.
        keystore.read_key()
        kept = keystore.relock(None if remove else _new(new_file))
    except LockedHome as locked:
        raise Failure("wrong_passphrase", str(locked)) from None
    return "removed" if remove else "changed" if was_locked else "set", kept


def _new(new_file: str | None) -> str:
    from covenant.daemon.keystore import read_passphrase

    if new_file is not None:
        return read_passphrase(Path(new_file).expanduser(), NEW_FILE)
    return _asked("New passphrase", f"name a file with {NEW_FILE}", twice=True)


def _asked(what: str, otherwise: str, *, twice: bool = False) -> str:
    """On the terminal, unseen."""
    if not sys.stdin.isatty():
        raise Failure("no_terminal", f"there is no terminal to ask for the passphrase on; {otherwise}")
    answer: str = click.prompt(what, hide_input=True, confirmation_prompt=twice, err=True)
    return answer


def _tell(folder: Path, change: str, *, kept: bool) -> None:
    if change == "removed":
        say(f"the keys in {folder} are not locked any more")
        say(f"unset {PASSPHRASE_VARIABLE} and {PASSPHRASE_FILE_VARIABLE}: with either, the next start locks them again")
    else:
        say(f"the keys in {folder} are locked with the new passphrase")
        say(f"the next start needs it in {PASSPHRASE_VARIABLE}, or in the file that {PASSPHRASE_FILE_VARIABLE} names")
    if not kept:
        say("identity/prekeys.json opens with neither passphrase; the next start makes new ones")
