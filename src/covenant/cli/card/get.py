"""`covenant card get`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from covenant.cli.output import put, put_json, shape
from covenant.cli.remote_calls import calls_out, told

if TYPE_CHECKING:
    from covenant.daemon.connecting import Options
    from covenant.model.remote_card import RemoteCard


@click.command("get", epilog=shape("remote_card", "url", "card", "ways", "signed_by"))
@click.argument("target", metavar="NAME|URL")
@click.option("--verify", is_flag=True, help="Demand a signature by a key from the card's own host, and check it.")
@calls_out
def command(options: Options, *, target: str, as_json: bool, verify: bool) -> None:
    """Fetch an agent's card and show it: who it is, what it can do, how it is called.

    The agent is named by its URL, by the URL of its card, or by its name in a2a_agents.json.
    """

    async def fetch() -> RemoteCard:
        from covenant.daemon.connecting import open_card

        return await open_card(target, options, verify=verify)

    card = told(fetch, target, options)
    if as_json:
        put_json(_object(card))
        return
    for line in _lines(card):
        put(line)


def _object(card: RemoteCard) -> dict[str, Any]:
    import msgspec

    return {
        "kind": "remote_card",
        "url": card.url,
        "card": card.fields,
        "ways": msgspec.to_builtins(card.ways),
        "signed_by": card.signed_by,
    }


def _lines(card: RemoteCard) -> Iterator[str]:
    yield f"{card.name} {card.version}"
    if card.description:
        yield f"  {card.description}"
    yield f"  card:      {card.url}"
    for way in card.ways:
        yield f"  called by: {way.binding} {way.version} at {way.url}"
    yield f"  streams:   {'yes' if card.streaming else 'no' if card.streaming is False else 'not said'}"
    wanted = ", ".join(each.header or each.scheme for each in card.credentials)
    yield f"  wants:     {wanted or 'no credential'}"
    if card.signed_by is not None:
        yield f"  signed by: {card.signed_by}"
    for skill in card.skills:
        yield f"  - {skill.name}: {skill.description}" if skill.description else f"  - {skill.name}"
