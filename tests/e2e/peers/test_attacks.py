"""Envelopes that a real daemon must not take: made by others with real keys, or recorded on the line and changed.

Whoever has proven to be a peer hears what was wrong. Everybody else hears one answer, the same to the byte; what it
was, the operator reads in the audit. Each test calls from an address of its own on loopback, since strangers are
counted by their address there.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final
from uuid import uuid4

import pytest

from covenant.model.peers.delegation_messages import DelegationCancel, DelegationResult
from covenant.model.peers.instance import InstanceId
from covenant.seal.identity import InstanceIdentity
from covenant.seal.keys import new_private_key
from covenant.seal.proofs import new_challenge
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.peer_daemons import Answer, Node
from tests.e2e.peers.scripted_peer import ScriptedPeer, envelopes_in, header_of, now_ms, packed, rewritten, unpacked

MINUTE_MS: Final = 60_000
REFUSED: Final = (
    b'{"error":"this envelope is not accepted; this instance speaks version 2 of the protocol","code":"refused"}'
)

_numbers = count(2)


@pytest.fixture
def address() -> str:
    """One that nobody has called from before."""
    number = next(_numbers)
    return f"127.0.{number // 250 + 1}.{number % 250 + 1}"


@pytest.fixture(scope="module")
def mallory(pair: Pair) -> Iterator[ScriptedPeer]:
    """A peer of bob's, which turns against it."""
    with ScriptedPeer(f"mallory-{uuid4().hex[:8]}") as actor:
        actor.known_to(pair.bob)
        yield actor


@pytest.fixture
def recorded(pair: Pair) -> bytes:
    """An offer of alice's, as it went over the line; bob has taken it."""
    before = len(pair.to_bob.there)
    offered = pair.alice.delegate(f"recorded {uuid4()}", "echo", "bob")
    pair.alice.ended(offered)
    sent = envelopes_in(pair.to_bob.there[before:])
    return next(each for each in sent if header_of(each)["typ"] == "delegation_offer")


def noted(node: Node, **wanted: Any) -> int:
    """How many rows the audit has on an envelope of which all this is so: one at least."""
    rows = node.audit("envelope_refused")
    found = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    assert found, (wanted, rows[:5])
    return len(found)


def told_nothing(node: Node, envelope: bytes, address: str, code: str) -> Answer:
    """What every stranger hears; the code is in the audit, and with it nobody's name."""
    answer = node.receive(envelope, source=address)
    assert (answer.status, answer.raw) == (400, REFUSED)
    noted(node, address=address, code=code, peer=None)
    return answer


# Attacks by a peer, who hears what was wrong.

FAULTS: Final[dict[str, dict[str, Any]]] = {
    "stale": {"iat": -10 * MINUTE_MS, "exp": -9 * MINUTE_MS},
    "from_future": {"iat": 5 * MINUTE_MS, "exp": 6 * MINUTE_MS},
    "bad_lifetime": {"iat": 0, "exp": 6 * MINUTE_MS},
    "wrong_recipient": {"to": "frd1_" + "a" * 40},
    "unknown_prekey": {"kid": "pk_" + "a" * 16},
}


@pytest.mark.parametrize("code", FAULTS)
def test_a_peers_envelope_that_is_wrong_is_refused_with_its_own_code(
    pair: Pair, mallory: ScriptedPeer, code: str
) -> None:
    changes = {name: now_ms() + value if name in ("iat", "exp") else value for name, value in FAULTS[code].items()}
    answer = pair.bob.receive(mallory.envelope(pair.bob, **changes))
    assert (answer.status, answer.code) == (400, code)
    noted(pair.bob, peer=mallory.id, code=code)


def test_a_peers_envelope_is_taken_once_and_its_replay_refused(pair: Pair, mallory: ScriptedPeer) -> None:
    envelope = mallory.envelope(pair.bob)
    assert pair.bob.receive(envelope).status == 200
    for _ in range(2):
        again = pair.bob.receive(envelope)
        assert (again.status, again.code) == (409, "replayed")
    noted(pair.bob, peer=mallory.id, code="replayed")


def test_an_offer_recorded_on_the_line_begins_nothing_when_it_is_sent_again(pair: Pair, recorded: bytes) -> None:
    runs = pair.daemons.lines("runs")
    answer = pair.bob.receive(recorded)
    assert (answer.status, answer.code) == (409, "replayed")
    assert pair.daemons.lines("runs") == runs


def test_a_replay_is_refused_after_a_crash_too(pair: Pair, recorded: bytes) -> None:
    pair.bob.kill()
    pair.bob.start()
    answer = pair.bob.receive(recorded)
    assert (answer.status, answer.code) == (409, "replayed")


def test_a_peer_that_signs_anothers_letter_as_its_own_has_nothing_of_it(
    pair: Pair, mallory: ScriptedPeer, recorded: bytes
) -> None:
    stolen = rewritten(
        recorded,
        mallory.identity,
        **{"from": mallory.id, "skid": mallory.identity.key, "cert": None, "jti": uuid4().hex},
    )
    answer = pair.bob.receive(stolen)
    assert (answer.status, answer.code) == (400, "cannot_open")
    noted(pair.bob, peer=mallory.id, code="cannot_open")


RESIGNED: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "id": lambda: {"jti": uuid4().hex},
    "type": lambda: {"typ": "delegation_offer"},
    "seq": lambda: {"seq": 2},
    "time": lambda: {"iat": now_ms() - 1_000, "exp": now_ms() + 1_000},
}


@pytest.mark.parametrize("field", RESIGNED)
def test_a_header_that_was_changed_and_signed_anew_does_not_open_the_letter(
    pair: Pair, mallory: ScriptedPeer, field: str
) -> None:
    cancel = DelegationCancel(offer_id=str(uuid4()))
    sealed = mallory.envelope(pair.bob, cancel, seq=1)
    answer = pair.bob.receive(rewritten(sealed, mallory.identity, **RESIGNED[field]()))
    assert (answer.status, answer.code) == (400, "cannot_open")


# Attacks by anybody, who hears nothing.

CHANGED: Final[dict[str, dict[str, Any]]] = {
    "id": {"jti": "another"},
    "type": {"typ": "delegation_cancel"},
    "seq": {"seq": 7},
    "no seq": {"seq": None},
    "recipient": {"to": "frd1_" + "a" * 40},
    "time": {"exp": 1_900_000_000_000},
    "prekey": {"kid": "pk_" + "a" * 16},
}


@pytest.mark.parametrize("field", CHANGED)
def test_a_letter_with_a_changed_header_is_refused_to_whoever_brings_it(
    pair: Pair, recorded: bytes, address: str, field: str
) -> None:
    told_nothing(pair.bob, rewritten(recorded, **CHANGED[field]), address, "bad_signature")


def test_a_letter_with_a_changed_body_is_refused(pair: Pair, recorded: bytes, address: str) -> None:
    parts = unpacked(recorded)
    parts["ciphertext"] = parts["ciphertext"][:-1] + bytes([parts["ciphertext"][-1] ^ 1])
    told_nothing(pair.bob, packed(**parts), address, "bad_signature")


def test_a_letter_signed_with_another_key_than_it_shows_is_refused(
    pair: Pair, mallory: ScriptedPeer, address: str
) -> None:
    told_nothing(
        pair.bob, mallory.envelope(pair.bob, signer=InstanceIdentity(new_private_key())), address, "bad_signature"
    )


def test_a_letter_that_shows_a_key_that_is_not_the_senders_is_refused(
    pair: Pair, mallory: ScriptedPeer, address: str
) -> None:
    with ScriptedPeer("nobody") as nobody:
        claimed: dict[str, Any] = {"from": mallory.id}
        forged = nobody.envelope(pair.bob, **claimed)
        told_nothing(pair.bob, forged, address, "header_mismatch")


@pytest.mark.parametrize("version", [0, 1, 3])
def test_another_version_is_refused_even_from_a_peer(
    pair: Pair, mallory: ScriptedPeer, address: str, version: int
) -> None:
    told_nothing(pair.bob, mallory.envelope(pair.bob, v=version), address, "version_not_supported")


@pytest.mark.parametrize("suite", ["none", "", "X25519-HKDF-SHA256-AES128GCM-Ed25519"])
def test_another_suite_is_refused_even_from_a_peer(pair: Pair, mallory: ScriptedPeer, address: str, suite: str) -> None:
    told_nothing(pair.bob, mallory.envelope(pair.bob, suite=suite), address, "suite_not_supported")


def test_a_daemons_own_letter_that_comes_back_is_refused(pair: Pair, recorded: bytes, address: str) -> None:
    own = next(each for each in envelopes_in(pair.to_alice.there) if header_of(each)["from"] == pair.bob.id)
    assert recorded
    told_nothing(pair.bob, own, address, "reflected")


def test_a_stranger_whose_letter_is_in_order_hears_what_every_stranger_hears(pair: Pair, address: str) -> None:
    with ScriptedPeer("stranger") as stranger:
        answer = told_nothing(pair.bob, stranger.envelope(pair.bob), address, "unknown_sender")
        garbage = pair.bob.receive(b"not an envelope at all", source=address)
        polled = pair.bob.receive(stranger.envelope(pair.bob), source=address, at="poll")
    for other in (garbage, polled):
        assert (other.status, other.raw) == (answer.status, answer.raw)
        assert {**other.headers, "date": ""} == {**answer.headers, "date": ""}


def test_a_peer_that_was_denied_is_a_stranger_again_until_it_is_allowed(pair: Pair, address: str) -> None:
    with ScriptedPeer(f"dora-{uuid4().hex[:8]}") as dora:
        dora.known_to(pair.bob)
        assert pair.bob.receive(dora.envelope(pair.bob)).status == 200
        pair.bob.ask("PATCH", f"/peers/{dora.name}", {"denied": True})
        told_nothing(pair.bob, dora.envelope(pair.bob), address, "unknown_sender")
        pair.bob.ask("PATCH", f"/peers/{dora.name}", {"denied": False})
        assert pair.bob.receive(dora.envelope(pair.bob)).status == 200


def test_what_strangers_send_from_one_address_costs_one_row_of_the_audit(pair: Pair, address: str) -> None:
    for _ in range(20):
        assert pair.bob.receive(b"{}", source=address).raw == REFUSED
    assert noted(pair.bob, address=address) == 1


def test_a_letter_larger_than_any_envelope_is_refused_like_a_strangers(pair: Pair, address: str) -> None:
    told_nothing(pair.bob, b"x" * (12 * 1024 * 1024), address, "too_large")


def test_a_message_out_of_order_or_of_no_delegation_is_refused_to_the_peer(pair: Pair, mallory: ScriptedPeer) -> None:
    unknown = mallory.say(pair.bob, DelegationCancel(offer_id=str(uuid4())))
    assert unknown.status == 200, "it may be one that is not kept any more; nothing follows from it"
    unnumbered = pair.bob.receive(mallory.envelope(pair.bob, DelegationCancel(offer_id=str(uuid4()))))
    assert (unnumbered.status, unnumbered.code) == (400, "invalid_seq")
    offer = mallory.offer(pair.bob, "slow")
    assert mallory.say(pair.bob, offer).status == 200
    early = mallory.say(pair.bob, DelegationCancel(offer_id=offer.offer_id), seq=3)
    assert (early.status, early.code, early.body.get("expected")) == (409, "out_of_order", 2), early
    assert mallory.say(pair.bob, DelegationCancel(offer_id=offer.offer_id), seq=2).status == 200
    assert mallory.until(DelegationResult).status == "cancelled"
    odd = mallory.envelope(pair.bob, body=b"[]", typ="delegation_offer")
    assert pair.bob.receive(odd).status == 400
    assert pair.bob.receive(mallory.envelope(pair.bob, body=b"{}", typ="greeting")).code == "type_not_supported"


def test_an_answer_that_nobody_asked_for_verifies_nobody(pair: Pair, mallory: ScriptedPeer) -> None:
    pair.bob.ask("PUT", f"/peers/{mallory.name}/trust", {"trustLevel": "peer"})
    try:
        answer = mallory.capabilities(InstanceId(pair.bob.id), new_challenge())
        refused = pair.bob.receive(mallory.envelope(pair.bob, answer))
        assert (refused.status, refused.code) == (409, "challenge_over")
        assert pair.bob.peer(mallory.name)["trustLevel"] == "peer"
    finally:
        pair.bob.ask("PUT", f"/peers/{mallory.name}/trust", {"trustLevel": "verified"})


def test_a_key_that_nobody_knows_cannot_be_told_from_one_that_is_known(
    pair: Pair, mallory: ScriptedPeer, address: str
) -> None:
    """A letter in a peer's name by somebody without its key is answered as one of nobody's."""
    forged = mallory.envelope(pair.bob, signer=InstanceIdentity(new_private_key()))
    with ScriptedPeer("stranger") as stranger:
        strange = pair.bob.receive(stranger.envelope(pair.bob), source=address)
    assert pair.bob.receive(forged, source=address).raw == strange.raw == REFUSED
