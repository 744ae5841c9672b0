"""Envelopes changed at random, sent to a real daemon: never a fault, one answer to strangers, none opened twice."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

import pytest

from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.peer_daemons import Answer, Node, PeerDaemons, open_peer_daemons
from tests.e2e.peers.scripted_peer import ScriptedPeer, header_of, packed, rewritten, unpacked
from tests.places import short_folder

REFUSED: Final = (
    b'{"error":"this envelope is not accepted; this instance speaks version 2 of the protocol","code":"refused"}'
)
STRANGE: Final[tuple[Any, ...]] = (
    None,
    "",
    0,
    -1,
    2**53 - 1,
    1e308,
    True,
    [],
    {},
    "x" * 300,
    "\u0000",
    "frd1_" + "a" * 40,
)

_numbers = count(1)


@pytest.fixture(scope="module")
def made() -> Iterator[PeerDaemons]:
    with short_folder() as folder, open_peer_daemons(folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def node(made: PeerDaemons) -> Node:
    plenty: dict[str, Any] = {"messages_per_min": 1_000_000, "offers_per_min": 1_000_000}
    return made.node("target", AGENTS, **plenty)


@pytest.fixture(scope="module")
def peer(node: Node) -> Iterator[ScriptedPeer]:
    with ScriptedPeer("changer") as actor:
        actor.known_to(node)
        yield actor


def changed_bytes(chance: random.Random, data: bytes) -> bytes:
    if not data:
        return b"\0"
    at = chance.randrange(len(data))
    match chance.randrange(5):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + chance.randbytes(chance.randrange(1, 9)) + data[at:]
        case 3:
            return data[:at] + data[at + 1 :]
        case _:
            return data + data[at:]


def changed_part(chance: random.Random, envelope: bytes) -> bytes:
    parts = unpacked(envelope)
    name = chance.choice(list(parts))
    return packed(**{**parts, name: changed_bytes(chance, parts[name])})


def changed_json(chance: random.Random, envelope: bytes) -> bytes:
    said = json.loads(envelope)
    name = chance.choice(list(said))
    match chance.randrange(4):
        case 0:
            said[name] = chance.choice(STRANGE)
        case 1:
            del said[name]
        case 2:
            said[chance.choice(("protected", "extra"))] = said[name]
        case _:
            return json.dumps([said]).encode()
    return json.dumps(said).encode()


def changed_header(chance: random.Random, envelope: bytes) -> bytes:
    """Under the signature that it had."""
    name = chance.choice([*header_of(envelope), "more"])
    return rewritten(envelope, **{name: chance.choice(STRANGE[1:9])})


CHANGES: Final[tuple[Callable[[random.Random, bytes], bytes], ...]] = (
    changed_part,
    changed_json,
    changed_header,
    changed_bytes,
)


def differs(one: bytes, other: bytes) -> bool:
    """Not only in how it is written: the same parts are the same envelope."""
    try:
        return unpacked(one) != unpacked(other)
    except (ValueError, AttributeError, TypeError):
        return True


def strangers_answer(answer: Answer) -> bool:
    return (answer.status, answer.raw) == (400, REFUSED)


def attack(node: Node, peer: ScriptedPeer, chance: random.Random, rounds: int) -> None:
    envelope = peer.envelope(node)
    heard: list[tuple[int, bytes]] = []
    for _ in range(rounds):
        number = next(_numbers)
        mutated = chance.choice(CHANGES)(chance, envelope)
        if not differs(mutated, envelope):
            continue
        answer = node.receive(mutated, source=f"127.7.{number // 250 % 250}.{number % 250 + 1}")
        assert answer.status < 500, (mutated, answer)
        assert strangers_answer(answer), (mutated, answer)
        heard.append((answer.status, answer.raw))
    assert len(set(heard)) == 1
    assert node.receive(envelope).status == 200, "whatever was tried with it, the envelope itself is good"
    again = node.receive(envelope)
    assert (again.status, again.code) == (409, "replayed"), "and is opened once"
    assert "Traceback" not in node.log


@pytest.mark.parametrize("seed", range(4))
def test_changed_envelopes_are_one_answer_and_the_whole_one_is_taken_once(
    node: Node, peer: ScriptedPeer, seed: int
) -> None:
    attack(node, peer, random.Random(seed), 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 24))
def test_many_changed_envelopes_are_one_answer(node: Node, peer: ScriptedPeer, seed: int) -> None:
    attack(node, peer, random.Random(seed), 1_000)


@pytest.mark.parametrize("seed", range(2))
def test_what_a_peer_signs_itself_is_refused_in_words_and_never_a_fault(
    node: Node, peer: ScriptedPeer, seed: int
) -> None:
    """A peer can sign anything: whatever stands in the header or the body, the daemon stands."""
    chance = random.Random(seed)
    for _ in range(40):
        whole = peer.envelope(node)
        if chance.random() < 0.5:
            name = chance.choice(list(header_of(whole)))
            sent = rewritten(whole, peer.identity, **{name: chance.choice(STRANGE[1:])})
        else:
            sent = peer.envelope(node, body=changed_bytes(chance, b'{"nonce":"x","versions":[2]}'))
        answer = node.receive(sent)
        assert answer.status < 500, (header_of(sent), answer)
    assert "Traceback" not in node.log
