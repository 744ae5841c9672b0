"""A peer whose words are made to be slow to search: the provider answers them, and everybody else meanwhile."""

import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from covenant.model.content import Json, Text
from covenant.model.peers.delegation_messages import DelegationResult
from tests.e2e.peers.peer_daemons import Node, call, open_peer_daemons
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.matrices import first_of
from tests.places import short_folder

SLOW_S: Final = 30.0
"""For anything that the provider answers meanwhile, on a busy machine. Where the search is not linear, minutes."""
CHARS: Final = 900_000
SECRET: Final = "ghp_" + "16C7e42F292c6912E7710c838347Ae178B4a"
AGENT: Final = """
from covenant import Agent

mirror = Agent("mirror", input_modes=["*/*"])


@mirror
async def show(turn):
    yield turn.reply(*turn.parts)
"""
SHAPES: Final[dict[str, Any]] = {
    "starts of JWTs": Text("-eyJ" * (CHARS // 4), mimeType="text/x"),
    "PEM labels": Text("".join(f"-----BEGIN {n}-----!" for n in range(CHARS // 22)), mimeType="text/x"),
    "a long name of a long list": Json({"a" * (CHARS // 2): [""] * (CHARS // 8)}),
    "names of secrets": Text("a.a.a.a.a.a.password" * (CHARS // 20), mimeType="text/x"),
}


@pytest.fixture(scope="module")
def provider() -> Iterator[Node]:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made.node("provider", AGENT)


@pytest.mark.parametrize("shape", first_of(SHAPES, 2))
def test_an_offer_made_to_be_slow_to_search_does_not_stop_the_provider(provider: Node, shape: str) -> None:
    with ScriptedPeer(f"slow-{shape.split(maxsplit=1)[0]}") as actor:
        actor.known_to(provider)
        offer = actor.offer(provider, "mirror", task=f"use {SECRET}", parts=(SHAPES[shape],))
        done, slowest_s = threading.Event(), [0.0]

        def look() -> None:
            while not done.is_set():
                began_s = time.monotonic()
                assert call(provider.port, "GET", "/readyz").status == 200
                slowest_s[0] = max(slowest_s[0], time.monotonic() - began_s)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            assert actor.say(provider, offer).status == 200
            result = actor.until(DelegationResult)
        finally:
            done.set()
            looking.join()
        assert (result.status, result.error_code) == ("completed", None)
        assert SECRET not in repr(result)
        assert slowest_s[0] < SLOW_S
