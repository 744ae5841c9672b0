"""Finds an agent's card from the card's own address, the agent's, or its host's.

| given address            | places, in this order, until one has a card                                         |
|--------------------------|-------------------------------------------------------------------------------------|
| `https://h/x/card.json`  | there                                                                               |
| `https://h`, `https://h/`| `/.well-known/agent-card.json`, `/agent-card.json`                                  |
| `https://h/a/agent`      | `/a/agent/agent-card.json`, `/a/agent/.well-known/agent-card.json`, and the host's  |
|                          | `/.well-known/agent-card.json`, if that card names the given address: the host may  |
|                          | have other agents                                                                   |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urljoin

import msgspec

from covenant.model.agent_card import GRPC, HTTP_JSON, JSONRPC, RemoteCard, RemoteInterface
from covenant.model.errors import CovenantError
from covenant.outbound.call_errors import NoCard, RefusalCode, RemoteRefused, error_text
from covenant.outbound.concurrency import SingleFlight
from covenant.outbound.http_fetcher import Fetched, Fetcher
from covenant.outbound.remote.remote_registry import Credentials
from covenant.outbound.urls import InvalidUrl, Location, origin_of, read_url
from covenant.wire.a2a.card_codec import BadCard, read_card, v1_fields

WELL_KNOWN: Final = "/.well-known/agent-card.json"
AGENT_CARD: Final = "/agent-card.json"
ABSENT: Final = frozenset({400, 404, 405, 410, 501})
_ASKING: Final = {"accept": "application/json", "a2a-version": "1.0"}
RANK: Final = {
    (JSONRPC, "1.0"): 0,
    (HTTP_JSON, "1.0"): 1,
    (JSONRPC, "0.3"): 2,
    (HTTP_JSON, "0.3"): 3,
    (GRPC, "1.0"): 4,
    (GRPC, "0.3"): 5,
}
_OTHER_VERSION: Final = {"1.0": "0.3", "0.3": "1.0"}
CARD_S: Final = 300.0
FAILURE_S: Final = 30.0
CARDS_MAX: Final = 1_000


def card_urls(url: str) -> tuple[str, ...]:
    """Where the card may be, the likeliest first."""
    location = _read(url)
    path = location.target.partition("?")[0]
    root = f"{location.scheme}://{location.authority}"
    if path.endswith(".json"):
        return (location.url,)
    if path in ("", "/"):
        return (f"{root}{WELL_KNOWN}", f"{root}{AGENT_CARD}")
    agent = f"{root}{path.rstrip('/')}"
    return (f"{agent}{AGENT_CARD}", f"{agent}{WELL_KNOWN}", f"{root}{WELL_KNOWN}")


async def find_card(fetcher: Fetcher, url: str, credentials: Credentials) -> RemoteCard:
    """Raises NoCard, RemoteRefused if it may not be seen, BadCard, AddressRefused and CallFailed."""
    places = card_urls(url)
    status: int | None = None
    not_json: BadCard | None = None
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
            not_json = not_json or bad
            continue
        if len(places) == 3 and place == places[-1] and not _lists_interface(card, url):
            continue
        return card
    if not_json is not None:
        raise not_json
    raise NoCard(f"there is no agent card for {url}; looked at {', '.join(places)}", status=status)


def _card(answer: Fetched) -> RemoteCard:
    status = answer.status
    if status in (401, 403):
        code: RefusalCode = "unauthenticated" if status == 401 else "forbidden"
        why = "needs a credential" if status == 401 else "is not for this credential"
        raise RemoteRefused(code, f"the card at {answer.url} {why} (HTTP {status})", status=status)
    if not 200 <= status < 300:
        error = error_text(answer.body)
        why = f"was refused: {error} (HTTP {status})" if error else f"was answered with HTTP {status}"
        raise RemoteRefused("unavailable", f"the card at {answer.url} {why}", status=status, remote_message=error)
    return read_card(answer.body, answer.url)


def _lists_interface(card: RemoteCard, url: str) -> bool:
    wanted = _read(url).url.rstrip("/")
    for interface in card.interfaces:
        with suppress(InvalidUrl):
            if read_url(interface.url).url.rstrip("/") == wanted:
                return True
    return False


def _read(url: str) -> Location:
    try:
        return read_url(url)
    except InvalidUrl as error:
        raise NoCard(f"{url[:200]!r} cannot be called: {error}") from error


class CardSignature(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """`unknown`: no key to check it with was found where the card came from."""

    state: Literal["valid", "invalid", "none", "unknown"]
    detail: str
    key_id: str | None = None


async def check_signature(fetcher: Fetcher, card: RemoteCard) -> CardSignature:
    """The signer. The key must come from the card's own origin, or anybody could vouch for it."""
    # A quarter of what a call from a command line takes to start, for cards that are to be verified.
    from covenant.seal.cards import SIGNATURES_MAX, header_of, signer_of  # noqa: PLC0415

    if not card.signatures:
        return CardSignature(state="none", detail=f"the card at {card.url} has no signature")
    forms: list[dict[str, Any]] = [card.fields, v1_fields(card.fields)]
    sets: dict[str, dict[str, Any]] = {}
    broken, own_origin = None, origin_of(card.url)
    for signature in card.signatures[:SIGNATURES_MAX]:
        header = header_of(signature)
        place = header.get("jku")
        keys_url = urljoin(card.url, place) if isinstance(place, str) else None
        if keys_url is None or own_origin is None or origin_of(keys_url) != own_origin:
            continue
        if keys_url not in sets:
            sets[keys_url] = await _keys(fetcher, keys_url)
        keys = sets[keys_url]
        signer = signer_of(forms, signature, keys)
        if signer is not None:
            detail = f"it holds by the key {signer} from {keys_url}; all members but the signatures are signed"
            return CardSignature(state="valid", detail=detail, key_id=signer)
        if any(key.get("kid") == header.get("kid") for key in keys["keys"]):
            broken = broken or str(header.get("kid"))
    detail = f"no signature of the card at {card.url} holds by a key from the same origin"
    return CardSignature(state="invalid" if broken is not None else "unknown", detail=detail, key_id=broken)


async def verified(fetcher: Fetcher, card: RemoteCard) -> RemoteCard:
    """The card with its signer. Raises NoCard if no signature is valid."""
    signature = await check_signature(fetcher, card)
    if signature.state != "valid":
        raise NoCard(signature.detail)
    return msgspec.structs.replace(card, signed_by=signature.key_id)


async def _keys(fetcher: Fetcher, url: str) -> dict[str, Any]:
    answer = await fetcher.fetch("GET", url, headers={"accept": "application/json"})
    try:
        keys = (
            msgspec.json.decode(answer.body) if answer.status == 200 and origin_of(answer.url) == origin_of(url) else {}
        )
    except (msgspec.DecodeError, RecursionError):
        keys = {}
    listed = keys.get("keys") if isinstance(keys, dict) else None
    return {"keys": [key for key in listed if isinstance(key, dict)] if isinstance(listed, list) else []}


def offered_by(card: RemoteCard | None) -> str:
    """The bindings and versions of a card, as text."""
    offered = card.interfaces if card is not None else ()
    return ", ".join(f"{interface.binding} {interface.version}" for interface in offered) or "none"


def choose_interfaces(
    card: RemoteCard | None, url: str, is_own_origin: Callable[[str], bool]
) -> tuple[RemoteInterface, ...]:
    """The interfaces to try, the best first. `url` is what the caller named: the address, where no card has another.

    `RANK` has the order of bindings and versions; those at the caller's origin before others.
    Servers do not always speak the version of their card, so a JSON-RPC address is also tried in the other dialect.
    `is_own_origin` says whether a URL is at the origin that the caller named. Raises NoCard.
    """
    offered = card.interfaces if card is not None else ()
    known = sorted(
        (interface for interface in offered if (interface.binding, interface.version) in RANK),
        key=lambda interface: (not is_own_origin(interface.url), RANK[interface.binding, interface.version]),
    )
    if not known and card is not None and (offered or card.url == url):
        raise NoCard(f"the card of {card.name!r} offers no binding that is known here; it has {offered_by(card)}")
    if not known:
        known = [RemoteInterface(url=url, binding=JSONRPC, version="1.0")]
    tried = [interface for interface in known if interface.binding != GRPC] or known
    spoken = {(interface.url, interface.version) for interface in tried if interface.binding == JSONRPC}
    for interface in tuple(tried):
        other = _OTHER_VERSION[interface.version]
        if interface.binding == JSONRPC and (interface.url, other) not in spoken:
            tried.append(RemoteInterface(url=interface.url, binding=JSONRPC, version=other))
            spoken.add((interface.url, other))
    return tuple(tried)


@dataclass(frozen=True, slots=True)
class _CachedCard:
    until_s: float
    outcome: RemoteCard | CovenantError


class CardCache:
    """Cards that were fetched lately, and failures to fetch them. Each address is asked once, however many callers
    wait.

    A fetch with several waiters continues when one of them leaves.
    """

    def __init__(
        self,
        *,
        cards_max: int = CARDS_MAX,
        keeps: Callable[[CovenantError], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keeps`: which failures are cached; other failures reach only the callers that waited for them."""
        self._cards_max = cards_max
        self._keeps = keeps
        self._clock = clock
        self._kept: dict[str, _CachedCard] = {}
        self._flights: SingleFlight[RemoteCard] = SingleFlight()

    async def get(self, key: str, fetch: Callable[[], Awaitable[RemoteCard]]) -> RemoteCard:
        """The card under this key, fetched if need be. Raises what fetching it raised."""
        kept = self._kept.get(key)
        if kept is not None and kept.until_s > self._clock():
            if isinstance(kept.outcome, RemoteCard):
                return kept.outcome
            raise kept.outcome.with_traceback(None)
        # A running fetch belongs to the event loop that started it.
        return await self._flights.join((key, id(asyncio.get_running_loop())), lambda: self._fetch(key, fetch))

    def clear(self) -> None:
        self._kept.clear()

    async def _fetch(self, key: str, fetch: Callable[[], Awaitable[RemoteCard]]) -> RemoteCard:
        self._prune()
        try:
            card = await fetch()
        except CovenantError as error:
            if self._keeps(error):
                self._keep(key, error, FAILURE_S)
            raise
        self._keep(key, card, CARD_S)
        return card

    def _keep(self, key: str, outcome: RemoteCard | CovenantError, for_s: float) -> None:
        self._kept.pop(key, None)
        if len(self._kept) >= self._cards_max:
            self._kept.pop(next(iter(self._kept)))
        self._kept[key] = _CachedCard(self._clock() + for_s, outcome)

    def _prune(self) -> None:
        now_s = self._clock()
        for key in [key for key, kept in self._kept.items() if kept.until_s <= now_s]:
            del self._kept[key]


async def card_or_none(lookup: Awaitable[RemoteCard], url: str) -> RemoteCard | None:
    """The card; None if there is none, but the URL itself may be the agent's."""
    try:
        return await lookup
    except NoCard as missing:
        if missing.status is None or url.partition("?")[0].endswith(".json"):
            raise
        return None
