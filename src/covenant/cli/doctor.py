"""`covenant doctor`: what is wrong with a home, in words, and the way out. Needs no daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from covenant.cli.calling import said_before
from covenant.cli.failures import ExitCode, Failure
from covenant.cli.output import put, put_json, say, shape

if TYPE_CHECKING:
    from covenant.daemon.checkup import Checkup
    from covenant.daemon.salvage import Salvage


@click.command("doctor", epilog=shape("doctor", "home", "well", "findings", "losses", "set_aside"))
@click.option("--home", metavar="FOLDER", help="The home to look at. Default: COVENANT_HOME, else ~/.covenant.")
@click.option("--accept-loss", is_flag=True, help="Mend a damaged journal by giving up the records that are lost.")
@click.option("--yes", is_flag=True, help="Do not ask before giving them up.")
@click.option("--json", "as_json", is_flag=True, help="Answer with one JSON object.")
def command(*, home: str | None, accept_loss: bool, yes: bool, as_json: bool) -> None:
    """Check a home's files: permissions, lock, settings, snapshot, archive, journal. Changes nothing.

    Exits with 1 if something is wrong, and says what to do. Where a journal is damaged, --accept-loss says exactly
    which records would be lost, asks, and puts a mended journal in place; the damaged one is set aside.
    """
    from covenant.daemon.checkup import check
    from covenant.daemon.environment import environment, find_home, now_ms
    from covenant.daemon.salvage import carry_out
    from covenant.ledger.log.opening import lock_home

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
    if accept_loss and checkup.salvage is not None:
        _tell_losses(checkup.salvage)
        if not yes and not click.confirm("Give these up?", err=True):
            raise Failure("not_confirmed", "nothing was changed")
        with lock_home(folder):
            aside = carry_out(folder, checkup.salvage, now_ms())
        say(f"the journal is mended; as it was, it is in {aside}")
        told["set_aside"] = str(aside)
    if as_json:
        put_json(told)
    if not checkup.well and told["set_aside"] is None:
        raise click.exceptions.Exit(ExitCode.REFUSED)


def _tell(checkup: Checkup) -> None:
    for finding in checkup.findings:
        put(f"{'ok   ' if finding.well else 'WRONG'}  {finding.what}")
        if finding.way_out:
            put(f"       → {finding.way_out}")


def _tell_losses(salvage: Salvage) -> None:
    count = salvage.last_seq - salvage.first_seq + 1 - len(salvage.losses)
    say(f"{count} record(s) of the journal are kept. These would be lost:")
    for loss in salvage.losses:
        say(f"  record {loss.seq} ({loss.where}): {loss.reason}")
        for said in loss.said:
            say(f"    {said}")
    say("A task whose lease or result was in one of them is back where it was before, and its work may be done twice.")
