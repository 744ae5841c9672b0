"""`covenant audit verify`."""

from __future__ import annotations

from typing import Final

import click

from covenant.cli.calling import Call, calls
from covenant.cli.failures import ExitCode
from covenant.cli.output import put, say, shape

WITHIN_S: Final = 3_600.0


@click.command("verify", epilog=shape("audit_integrity", "report"))
@calls
def command(call: Call) -> None:
    """Check every audit row against the hash chain. Exits with 1 if one was changed, moved or is missing."""
    report = call.ask("verify_audit_integrity", within_s=WITHIN_S)["report"]
    if not call.answer({"kind": "audit_integrity", "report": report}):
        put(f"{'valid' if report['valid'] else 'INVALID'}: {report['events']} row(s), root {report['root_hash_hex']}")
        for failure in report["failures"]:
            say(failure)
    if not report["valid"]:
        raise click.exceptions.Exit(ExitCode.REFUSED)
