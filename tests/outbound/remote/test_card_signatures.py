"""What is said of a card's signature: it holds, it is broken, nobody can tell, or there is none."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urljoin

import pytest

from covenant.outbound.remote.card_lookup import check_signature, find_card
from covenant.outbound.remote.remote_registry import Credentials
from covenant.seal.cards import CardSigner
from tests.outbound.http_servers import HERE, Request, Served, always, by_path, fetcher, http_server, reply

SIGNER = CardSigner(bytes(range(32)))
CARD: dict[str, Any] = {"name": "n", "version": "1", "supportedInterfaces": []}


@asynccontextmanager
async def open_server(keys_at: str | None, changed: dict[str, Any], keys: Any) -> AsyncIterator[Served]:
    """A card that was signed, and then changed. `keys_at`: where it says that its key is; None: it is not signed."""
    card: dict[str, Any] = {}

    async def tell(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(200, json.dumps(card).encode()))

    answers = {"card.json": tell, "keys": always(reply(200, json.dumps(keys).encode()))}
    async with http_server(by_path(**answers)) as served:
        place = None if keys_at is None else urljoin(served.url(), keys_at)
        signatures = [each._asdict() for each in SIGNER.sign(CARD, keys_url=place)] if place is not None else []
        card.update({**CARD, "signatures": signatures, **changed})
        yield served


UNREADABLE = {"signatures": [{"protected": "no", "signature": "x"}]}


@pytest.mark.parametrize(
    ("keys_at", "changed", "keys", "state"),
    [
        (None, {}, SIGNER.key_set(), "none"),
        ("/keys", {}, SIGNER.key_set(), "valid"),
        ("/keys", {"name": "somebody else"}, SIGNER.key_set(), "invalid"),
        ("/keys", {}, {"keys": []}, "unknown"),
        ("/keys", {}, "no keys", "unknown"),
        ("https://elsewhere.example/keys", {}, SIGNER.key_set(), "unknown"),
        (None, UNREADABLE, SIGNER.key_set(), "unknown"),
    ],
)
async def test_the_state_of_a_signature(keys_at: str | None, changed: dict[str, Any], keys: Any, state: str) -> None:
    async with open_server(keys_at, changed, keys) as served, fetcher(HERE) as calls:
        url = served.url("/card.json")
        found = await check_signature(calls, await find_card(calls, url, Credentials(url)))
    assert found.state == state, found.detail
    assert (found.key_id is not None) == (state in ("valid", "invalid"))
