"""Finding an agent's card from what a caller knows of it: the card's own address, the agent's, or its host's.

| what was given           | where is looked, until there is a card                                              |
|--------------------------|-------------------------------------------------------------------------------------|
| `https://h/x/card.json`  | there                                                                               |
| `https://h`, `https://h/`| `/.well-known/agent-card.json`, `/agent-card.json`                                  |
| `https://h/a/agent`      | `/a/agent/agent-card.json`, `/a/agent/.well-known/agent-card.json`, and the host's  |
|                          | `/.well-known/agent-card.json`, if that names the address given                     |

The last condition is there because a host may have many agents: the card of another one is not the card of this one.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urljoin

import msgspec

from covenant.model.agent_card import RemoteCard
from covenant.outbound.credentials import Credentials
from covenant.outbound.fetching import Fetched, Fetcher
from covenant.outbound.location import Location, Unreadable, read_url
from covenant.outbound.remote_errors import NoCard, RefusalCode, RemoteRefused
from covenant.wire.a2a.card_codec import BadCard, v1_fields, read_card

WELL_KNOWN: Final = "/.well-known/agent-card.json"
BESIDE: Final = "/agent-card.json"
ABSENT: Final = frozenset({400, 404, 405, 410, 501})
"""Answers that mean: not here."""
_ASKING: Final = {"accept": "application/json", "a2a-version": "1.0"}


def card_places(url: str) -> tuple[str, ...]:
    """Where the card may be, the likeliest first."""
    location = _read(url)
    path = location.target.partition("?")[0]
    root = f"{location.scheme}://{location.authority}"
    if path.endswith(".json"):
        return (location.url,)
    if path in ("", "/"):
        return (f"{root}{WELL_KNOWN}", f"{root}{BESIDE}")
    agent = f"{root}{path.rstrip('/')}"
    return (f"{agent}{BESIDE}", f"{agent}{WELL_KNOWN}", f"{root}{WELL_KNOWN}")


async def find_card(fetcher: Fetcher, url: str, credentials: Credentials) -> RemoteCard:
    """Raises NoCard, RemoteRefused if it may not be seen, BadCard, AddressRefused and CallFailed."""
    places = card_places(url)
    status: int | None = None
    no_json: BadCard | None = None
    for place in places:
        answer = await fetcher.fetch("GET", place, headers={**_ASKING, **credentials.headers(place)})
        status = answer.status
        if status in ABSENT:
            continue
        try:
            card = _card(answer)
        except BadCard as bad:
            if bad.field != "card":
                raise
            # A page for people, as many servers have for every path.
            no_json = no_json or bad
            continue
        if len(places) == 3 and place == places[-1] and not _names(card, url):
            continue
        return card
    if no_json is not None:
        raise no_json
    raise NoCard(f"there is no agent card for {url}; looked at {', '.join(places)}", status=status)


def _card(answer: Fetched) -> RemoteCard:
    status = answer.status
    if status in (401, 403):
        code: RefusalCode = "unauthenticated" if status == 401 else "forbidden"
        words = "needs a credential" if status == 401 else "is not for this credential"
        raise RemoteRefused(code, f"the card at {answer.url} {words} (HTTP {status})", status=status)
    if not 200 <= status < 300:
        raise RemoteRefused("unavailable", f"the card at {answer.url} was answered with HTTP {status}", status=status)
    return read_card(answer.body, answer.url)


def _names(card: RemoteCard, url: str) -> bool:
    wanted = _read(url).url.rstrip("/")
    return any(_same(way.url, wanted) for way in card.ways)


def _same(url: str, wanted: str) -> bool:
    try:
        return read_url(url).url.rstrip("/") == wanted
    except Unreadable:
        return False


def _read(url: str) -> Location:
    try:
        return read_url(url)
    except Unreadable as error:
        raise NoCard(f"{url[:200]!r} cannot be called: {error}") from error


async def verified(fetcher: Fetcher, card: RemoteCard) -> RemoteCard:
    """The card with who signed it. The key must come from where the card came from, or anybody could vouch for it.

    Raises NoCard if no signature holds.
    """
    # A quarter of what a call from a command line takes to start, for cards that are to be verified.
    from covenant.seal.cards import SIGNATURES_MAX, header_of, signer_of  # noqa: PLC0415

    if not card.signatures:
        raise NoCard(f"the card at {card.url} has no signature")
    forms: list[dict[str, Any]] = [card.fields, v1_fields(card.fields)]
    sets: dict[str, dict[str, Any]] = {}
    for signature in card.signatures[:SIGNATURES_MAX]:
        place = header_of(signature).get("jku")
        keys_url = urljoin(card.url, place) if isinstance(place, str) else None
        if keys_url is None or not _same_origin(keys_url, card.url):
            continue
        if keys_url not in sets:
            sets[keys_url] = await _keys(fetcher, keys_url)
        signer = signer_of(forms, signature, sets[keys_url])
        if signer is not None:
            return msgspec.structs.replace(card, signed_by=signer)
    raise NoCard(f"no signature of the card at {card.url} holds by a key from the same origin")


def _same_origin(one: str, other: str) -> bool:
    try:
        return read_url(one).origin == read_url(other).origin
    except Unreadable:
        return False


async def _keys(fetcher: Fetcher, url: str) -> dict[str, Any]:
    answer = await fetcher.fetch("GET", url, headers={"accept": "application/json"})
    try:
        keys = msgspec.json.decode(answer.body) if answer.status == 200 and _same_origin(answer.url, url) else {}
    except (msgspec.DecodeError, RecursionError):
        keys = {}
    listed = keys.get("keys") if isinstance(keys, dict) else None
    return {"keys": [key for key in listed if isinstance(key, dict)] if isinstance(listed, list) else []}
