"""`covenant a2a compact`."""

from __future__ import annotations

from typing import Final

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import put, shape

WITHIN_S: Final = 3_600.0


@click.command("compact", epilog=shape("a2a_compacted", "dropped"))
@calls
def command(call: Call) -> None:
    """Merge the journal's sealed history into a snapshot.

    Drops nothing that is queued, leased, following or not yet drained. Needs the capability a2a.compact.
    """
    answer = call.ask("compact_a2a", within_s=WITHIN_S)
    if not call.answer({"kind": "a2a_compacted", "dropped": answer["dropped"]}):
        put(f"dropped {answer['dropped']} a2a event(s)")
