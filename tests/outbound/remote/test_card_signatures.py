"""What is said of a card's signature: it holds, it is broken, nobody can tell, or there is none."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from covenant.outbound.remote.card_lookup import CardSignature, check_signature, find_card
from covenant.outbound.remote.remote_registry import Credentials
from covenant.seal.cards import CardSigner
from tests.outbound.http_servers import HERE, Served, always, by_path, fetcher, http_server, reply

SIGNER = CardSigner(bytes(range(32)))
CARD: dict[str, Any] = {"name": "n", "version": "1", "supportedInterfaces": []}


def signed(keys_url: str, **changed: Any) -> dict[str, Any]:
    made = [each._asdict() for each in SIGNER.sign(CARD, keys_url=keys_url)]
    return {**CARD, **changed, "signatures": made}


@asynccontextmanager
async def open_server(card: dict[str, Any], keys: Any) -> AsyncIterator[Served]:
    answers = {
        "card.json": always(reply(200, json.dumps(card).encode())),
        "keys": always(reply(200, json.dumps(keys).encode())),
    }
    async with http_server(by_path(**answers)) as served:
        yield served


async def check(card: dict[str, Any], keys: Any) -> CardSignature:
    async with open_server(card, keys) as served, fetcher(HERE) as calls:
        url = served.url("/card.json")
        return await check_signature(calls, await find_card(calls, url, Credentials(url)))


@pytest.mark.parametrize(
    ("card", "keys", "state"),
    [
        (CARD, SIGNER.key_set(), "none"),
        (signed("/keys"), SIGNER.key_set(), "valid"),
        (signed("/keys", name="somebody else"), SIGNER.key_set(), "invalid"),
        (signed("/keys"), {"keys": []}, "unknown"),
        (signed("/keys"), "no keys", "unknown"),
        (signed("https://elsewhere.example/keys"), SIGNER.key_set(), "unknown"),
        ({**CARD, "signatures": [{"protected": "no", "signature": "x"}]}, SIGNER.key_set(), "unknown"),
    ],
)
async def test_the_state_of_a_signature(card: dict[str, Any], keys: Any, state: str) -> None:
    found = await check(card, keys)
    assert found.state == state, found.detail
    assert (found.key_id is not None) == (state in ("valid", "invalid"))
