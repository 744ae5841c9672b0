"""`covenant peers verify-proof`: checks the proof of a peer's result."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any, Final

import click

from covenant.cli.daemon_client import connect
from covenant.cli.options import given_home, home_option, local_command
from covenant.cli.terminal import ExitCode, Failure, Output, put, say
from covenant.model.errors import CovenantError

if TYPE_CHECKING:
    from pathlib import Path

PROOF_BYTES_MAX: Final = 64 * 1024 * 1024
PROVEN: Final = frozenset({"offer", "result"})
"""What a proof covers. The conversation may stay with the provider; the rest of the proof can still be checked."""


@local_command(None, "verify-proof", "proof_verified", "holds", "checks", "unchecked")
@click.argument("file", type=click.File("rb"))
@click.option("--provider", metavar="ID", help="The instance that must have signed the result.")
@click.option("--requester", metavar="ID", help="The instance that must have asked for the work.")
@click.option("--budget", type=click.IntRange(1), metavar="TOKENS", help="The most tokens that the work may have used.")
@home_option("The home of a daemon that has the delegation in its ledger.")
def verify_proof(output: Output, *, file: IO[bytes], home: str | None, **expected: Any) -> None:
    """Check the proof of a peer's result. FILE is the output of `covenant peers proof`; - reads it from stdin.

    The check fails if a line of the conversation was changed, moved or left out, or the offer, the result or the usage
    was changed.

    Anybody can sign a result. --provider names the instance that must have signed it. Without --provider the command
    asks the home's daemon which peer it delegated the task to; if no daemon runs or knows the task, the command only
    names the signer.

    Exits with 0 if FILE has the offer and the result, the provider is known and everything is valid, with 1 if
    something is invalid, and with 4 if the offer or the result is missing from FILE, or the provider is not known.
    """
    from covenant.seal.proofs import verify_evidence

    data = file.read(PROOF_BYTES_MAX + 1)
    if len(data) > PROOF_BYTES_MAX:
        raise Failure("too_large", f"a proof has at most {PROOF_BYTES_MAX} bytes")
    try:
        if expected["provider"] is None:
            expected |= _recorded(given_home(home), data)
        report = verify_evidence(data, **expected)
    except ValueError as wrong:
        raise Failure("no_proof", f"this is no proof: {wrong}") from None
    checks = [{"name": check.name, "holds": check.holds, "detail": check.detail} for check in report.checks]
    if not output.answer({"holds": report.holds, "checks": checks, "unchecked": list(report.unchecked)}):
        for check in report.checks:
            put(f"{'holds ' if check.holds else 'BROKEN'}  {check.name}  {check.detail}".rstrip())
        for name in report.unchecked:
            put(f"not checked  {name}")
    if not report.holds:
        raise click.exceptions.Exit(ExitCode.REFUSED)
    if "provider" in report.unchecked:
        signed = next(check.detail for check in report.checks if check.name == "signature")
        say(f"covenant: this is {signed}; give --provider, the id that you expect, to have that checked")
    if not PROVEN.isdisjoint(report.unchecked):
        say("covenant: the offer or the result is not in this file, so nothing that was asked or answered is proven")
    if not (PROVEN | {"provider"}).isdisjoint(report.unchecked):
        raise click.exceptions.Exit(ExitCode.UNCHECKED)


def _recorded(home: Path, data: bytes) -> dict[str, Any]:
    """The peer that the daemon of this home delegated the task to, by its ledger.

    Empty if no daemon runs, or it did not.
    """
    from covenant.seal.proofs import read_evidence

    named = read_evidence(data).proof.delegation_id
    if not (home / "operator.token").exists():
        return {}
    try:
        with connect(home) as client:
            ours = client.ask("show_delegation", delegationId=named)["delegation"]
            peer = client.ask("show_peer", peerId=ours["peerId"])["peer"]
    except (Failure, CovenantError, OSError):
        return {}
    if ours["role"] != "requester":
        return {}
    return {"provider": peer["id"], "formerly": peer["formerIds"]}
