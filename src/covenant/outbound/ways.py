"""Which of the ways that a card offers is taken, and which is tried after it.

In this order: JSON-RPC 1.0, HTTP+JSON 1.0, JSON-RPC 0.3, gRPC; those at the origin that the caller named before others.
Servers do not always speak what their card says, so a JSON-RPC address is also tried in the other dialect, if it
answers that it does not know the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from covenant.model.agent_card import GRPC, HTTP_JSON, JSONRPC
from covenant.model.agent_card import RemoteCard, RemoteInterface
from covenant.outbound.remote_errors import NoCard

RANK: Final = {(JSONRPC, "1.0"): 0, (HTTP_JSON, "1.0"): 1, (JSONRPC, "0.3"): 2, (GRPC, "1.0"): 3}
_OTHER: Final = {"1.0": "0.3", "0.3": "1.0"}


def ways_of(card: RemoteCard | None, url: str, at_home: Callable[[str], bool]) -> tuple[RemoteInterface, ...]:
    """The ways to try, the best first. `url` is what the caller named: the address, where no card has another.

    `at_home` says whether a URL is at the origin that the caller named. Raises NoCard.
    """
    offered = card.ways if card is not None else ()
    known = sorted(
        (way for way in offered if (way.binding, way.version) in RANK),
        key=lambda way: (not at_home(way.url), RANK[way.binding, way.version]),
    )
    if not known and card is not None and (offered or card.url == url):
        said = ", ".join(f"{way.binding} {way.version}" for way in offered) or "none"
        raise NoCard(f"the card of {card.name!r} offers no way to call it that is known here; it has {said}")
    if not known:
        known = [RemoteInterface(url=url, binding=JSONRPC, version="1.0")]
    tried = [way for way in known if way.binding != GRPC] or known
    spoken = {(way.url, way.version) for way in tried if way.binding == JSONRPC}
    for way in tuple(tried):
        other = _OTHER[way.version]
        if way.binding == JSONRPC and (way.url, other) not in spoken:
            tried.append(RemoteInterface(url=way.url, binding=JSONRPC, version=other))
            spoken.add((way.url, other))
    return tuple(tried)
