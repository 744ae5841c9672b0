"""`covenant identities purge`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import shape
from covenant.cli.purging import before, purge


@click.command("purge", epilog=shape("identities_purged", "before_ms", "purged"))
@before
@calls
def command(call: Call, *, before_ms: int | None, older_than_ms: int | None) -> None:
    """Forget identities whose token was revoked long ago."""
    purge(
        call,
        "purge_identities",
        "identities_purged",
        "revoked token(s)",
        before_ms=before_ms,
        older_than_ms=older_than_ms,
    )
