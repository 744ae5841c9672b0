"""`covenant doctor`: what is wrong with a home, in words, and the way out. Needs no daemon."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covenant.cli.calling import said_before
from covenant.cli.failures import ExitCode, Failure
from covenant.cli.output import put, put_json, say, shape
from covenant.model.errors import CovenantError

if TYPE_CHECKING:
    from covenant.daemon.finding import Checkup
    from covenant.daemon.salvage import Salvage


@click.command("doctor", epilog=shape("doctor", "home", "well", "findings", "losses", "set_aside"))
@click.option("--home", metavar="FOLDER", help="The home to look at. Default: COVENANT_HOME, else ~/.covenant.")
@click.option("--accept-loss", is_flag=True, help="Mend a damaged ledger by giving up the records that are lost.")
@click.option("--rebuild-archive", is_flag=True, help="Make the archive agree with the journal again. Loses nothing.")
@click.option("--yes", is_flag=True, help="Do not ask before giving them up.")
@click.option("--json", "as_json", is_flag=True, help="Answer with one JSON object.")
def command(*, home: str | None, accept_loss: bool, rebuild_archive: bool, yes: bool, as_json: bool) -> None:
    """Check a home for everything that a start would stumble over. Changes nothing.

    Exits with 1 if something is wrong, and says what to do. Where records are damaged or missing, --accept-loss says
    exactly which would be lost, asks, and mends the ledger; the damaged files are set aside. Where only the archive is
    at odds with the journal, --rebuild-archive mends it without a loss.
    """

    from covenant.daemon.checkup import check
    from covenant.daemon.environment import environment, find_home

    folder, _ = find_home(said_before("home", home), environment())
    checkup = check(folder, environment())
    told: dict[str, Any] = {
        "kind": "doctor",
        "home": str(folder),
        "well": checkup.well,
        "findings": [finding._asdict() for finding in checkup.findings],
        "losses": [loss._asdict() for loss in checkup.salvage.losses] if checkup.salvage else [],
        "set_aside": None,
    }
    if not as_json:
        _tell(checkup)
    mended = False
    try:
        if accept_loss and checkup.salvage is not None:
            _tell_losses(checkup.salvage)
            if not yes and not click.confirm("Give these up?", err=True):
                raise Failure("not_confirmed", "nothing was changed")
            told["set_aside"] = str(_accept(folder, checkup.salvage))
            mended = True
        elif rebuild_archive and checkup.rebuild:
            kept = _rebuild(folder)
            told["set_aside"] = None if kept is None else str(kept)
            mended = True
    except (CovenantError, OSError) as error:
        raise Failure("not_mended", f"the home could not be mended: {error}; the same command goes on") from error
    except sqlite3.Error as error:
        way_out = "move archive.db and archive.db-wal out of the home, and give up their history: doctor --accept-loss"
        raise Failure("not_mended", f"the archive could not be mended: {error}; {way_out}") from error
    if as_json:
        put_json(told)
    if not checkup.well and not mended:
        raise click.exceptions.Exit(ExitCode.REFUSED)


def _accept(folder: Path, salvage: Salvage) -> Path:
    from covenant.daemon.environment import now_ms
    from covenant.daemon.salvage import carry_out
    from covenant.ledger.log.opening import lock_home

    with lock_home(folder):
        aside = carry_out(folder, salvage, now_ms())
    say(f"the ledger is mended; what was damaged is in {aside}")
    return aside


def _rebuild(folder: Path) -> Path | None:
    from covenant.daemon.environment import environment, now_ms
    from covenant.daemon.limits import ledger_limits
    from covenant.daemon.loading import load
    from covenant.daemon.salvage import rebuild_archive
    from covenant.ledger.log.opening import lock_home

    limits = ledger_limits(load({}, environment(), home=folder).settings)
    with lock_home(folder):
        kept = rebuild_archive(folder, limits, now_ms())
    say("the archive agrees with the journal again; the next start brings it up to date")
    if kept is not None:
        say(f"the records that it had set aside are in {kept}")
    return kept


def _tell(checkup: Checkup) -> None:
    for finding in checkup.findings:
        put(f"{'ok   ' if finding.well else 'WRONG'}  {finding.what}")
        if finding.way_out:
            put(f"       → {finding.way_out}")


def _tell_losses(salvage: Salvage) -> None:
    lost = sum(loss.records for loss in salvage.losses)
    say(f"{salvage.last_seq - salvage.first_seq + 1 - lost} record(s) of the journal are kept. These would be lost:")
    for loss in salvage.losses:
        name = f"records {loss.seq} to {loss.through}" if loss.through > loss.seq else f"record {loss.seq}"
        say(f"  {name} ({loss.where}): {loss.reason}")
        for said in loss.said:
            say(f"    {said}")
    if salvage.archive_lost:
        say(f"  the archive ({salvage.archive_lost}): the history that the journal no longer tells")
    say("A task whose lease or result was in one of them is back where it was before, and its work may be done twice.")
