"""`covenant peers verify-proof`."""

from __future__ import annotations

from typing import IO, Any, Final

import click

from covenant.cli.failures import ExitCode, Failure
from covenant.cli.output import put, put_json, say, shape

FILE_BYTES_MAX = 64 * 1024 * 1024
PROVEN: Final = frozenset({"offer", "result"})
"""A proof is about these. The conversation may stay with the provider, and the proof still says something."""


@click.command("verify-proof", epilog=shape("proof_verified", "holds", "checks", "unchecked"))
@click.argument("file", type=click.File("rb"))
@click.option("--provider", metavar="ID", help="Who must have made it.")
@click.option("--requester", metavar="ID", help="For whom it must have been made.")
@click.option("--budget", type=click.IntRange(1), metavar="TOKENS", help="The most that it may have used.")
@click.option("--json", "as_json", is_flag=True, help="Answer with one JSON object.")
def command(*, file: IO[bytes], provider: str | None, requester: str | None, budget: int | None, as_json: bool) -> None:
    """Check, offline, what a peer's result proves. FILE is what `covenant peers proof` wrote; - reads it from stdin.

    One changed, missing or moved line of the conversation fails, and so does a changed offer, result or usage.

    Exits with 0 if the offer and the result were there and everything holds, with 1 if something is broken, and with
    4 if the offer or the result is missing from FILE: then nothing is known about what was asked or answered.
    """
    from covenant.seal.evidence import verify_evidence

    data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise Failure("too_large", f"a proof has at most {FILE_BYTES_MAX} bytes")
    try:
        report = verify_evidence(data, provider=provider, requester=requester, budget=budget)
    except ValueError as wrong:
        raise Failure("no_proof", f"this is no proof: {wrong}") from None
    if as_json:
        checks: list[dict[str, Any]] = [
            {"name": check.name, "holds": check.holds, "detail": check.detail} for check in report.checks
        ]
        put_json(
            {"kind": "proof_verified", "holds": report.holds, "checks": checks, "unchecked": list(report.unchecked)}
        )
    else:
        for check in report.checks:
            put(f"{'holds ' if check.holds else 'BROKEN'}  {check.name}  {check.detail}".rstrip())
        for name in report.unchecked:
            put(f"not checked  {name}")
    if not report.holds:
        raise click.exceptions.Exit(ExitCode.REFUSED)
    if not PROVEN.isdisjoint(report.unchecked):
        say("covenant: the offer or the result is not in this file, so nothing that was asked or answered is proven")
        raise click.exceptions.Exit(ExitCode.UNCHECKED)
