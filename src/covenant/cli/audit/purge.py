"""`covenant audit purge`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import shape
from covenant.cli.purging import before, purge


@click.command("purge", epilog=shape("audit_purged", "before_ms", "purged"))
@before
@calls
def command(call: Call, *, before_ms: int | None, older_than_ms: int | None) -> None:
    """Drop old audit rows. A marker row says how many, and where the chain is anchored now."""
    purge(call, "purge_audit", "audit_purged", "audit row(s)", before_ms=before_ms, older_than_ms=older_than_ms)
