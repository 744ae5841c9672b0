"""`covenant peers discover`."""

from __future__ import annotations

import click

from covenant.cli.calling import Call, calls
from covenant.cli.output import brief, console, say, shape, table


@click.command("discover", epilog=shape("peers_discovered", "discovered", "ways"))
@click.option("--wait-ms", type=click.IntRange(0, 30_000), default=5_000, show_default=True, help="How long to look.")
@calls
def command(call: Call, *, wait_ms: int) -> None:
    """Look for other instances. What is found is a candidate: `covenant peers add` makes one a peer."""
    answer = call.ask("discover_peers", timeoutMs=wait_ms, within_s=wait_ms / 1000 + 30)
    if call.answer(answer):
        return
    for way in answer["ways"]:
        for failure in way.get("failures") or ():
            say(f"{way['source']}: {failure}")
    if not any(way["on"] for way in answer["ways"]):
        say("no way of finding is on; see static, mdns and dns_domains under [peers] in docs/settings.md")
    rows = table("", "found by", "name", "where", "id", "")
    for each in answer["discovered"]:
        wrong = each.get("conflict")
        about = f"{wrong}: {each['detail']}" if wrong else each.get("note") or ""
        rows.add_row(
            each["source"],
            brief(each["name"], 32),
            brief(each["url"] or each["announcedAs"], 60),
            each["instanceId"] or "unknown",
            brief(about, 80),
            style="red" if wrong else "",
        )
    if answer["discovered"]:
        console().print(rows)
    else:
        say("nobody was found")
