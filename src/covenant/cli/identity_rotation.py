"""`covenant peers rotate-identity` and `covenant peers revocation`: this instance's own key, without a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from covenant.cli.options import given_home, home_option, local_command
from covenant.cli.terminal import Failure, Output, say
from covenant.daemon.environment import environment, now_ms
from covenant.model.errors import CovenantError, HomeLocked

if TYPE_CHECKING:
    from pathlib import Path

    from covenant.daemon.keystore import Keystore


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
    from covenant.ledger.embedded.journal.recovery import lock_home

    folder = given_home(home)
    keystore = _open(folder)
    try:
        with lock_home(folder):
            before, now = change_identity(keystore, now_ms(), compromised=compromised)
    except HomeLocked as running:
        raise Failure("daemon_runs", f"{running}; stop it first: it speaks under the key that it has") from None
    except (CovenantError, OSError) as error:
        raise Failure("cannot_change", f"{error}") from error
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
        own_id, statement = write_revocation(_open(given_home(home)), now_ms())
    except (CovenantError, OSError, ValueError) as error:
        raise Failure("no_key", f"{error}") from error
    output.show({"id": own_id, "statement": statement}, statement)


def _open(folder: Path) -> Keystore:
    from covenant.daemon.keystore import Keystore, find_passphrase

    try:
        return Keystore(folder, find_passphrase(environment()))
    except CovenantError as error:
        raise Failure("no_key", f"{error}") from error
