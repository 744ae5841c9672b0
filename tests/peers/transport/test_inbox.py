"""What comes in: each envelope once, from those we know, sealed for us and unchanged; all else is refused."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from covenant.ledger.machine.peer_commands import ChangePeer, RemovePeer
from covenant.model.errors import Forbidden, Invalid, OverLimit, Refusal
from covenant.model.peers.delegation import DelegationRole
from covenant.model.peers.delegation_messages import CapabilityQuery
from covenant.model.peers.instance import Trust
from covenant.peers.peer_settings import PeerSettings
from covenant.seal.envelope import ENVELOPE_BYTES_MAX
from covenant.seal.keys import base64url, canonical
from tests.ledger_contract.samples import OPERATOR
from tests.peers.transport_under_test import (
    TransportUnderTest,
    accept,
    cancel,
    offer,
    offer_id,
    refused,
    result,
    transport_under_test,
)

NONCE = "n" * 24


@pytest.fixture
async def alice(tmp_path: Path) -> AsyncIterator[TransportUnderTest]:
    async with transport_under_test(tmp_path / "alice") as opened:
        yield opened


@pytest.fixture
async def bob(tmp_path: Path, alice: TransportUnderTest) -> AsyncIterator[TransportUnderTest]:
    """Bob knows alice, and takes what she sends."""
    async with transport_under_test(tmp_path / "bob") as opened:
        await opened.knows(alice, url=None)
        yield opened


@pytest.fixture
async def mallory(tmp_path: Path) -> AsyncIterator[TransportUnderTest]:
    async with transport_under_test(tmp_path / "mallory") as opened:
        yield opened


def parts(envelope: bytes) -> dict[str, str]:
    read: dict[str, str] = json.loads(envelope)
    return read


def header_of(envelope: bytes) -> dict[str, Any]:
    text = parts(envelope)["protected"]
    read: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    return read


def with_header(envelope: bytes, **changes: Any) -> bytes:
    """The same envelope under another header; nobody has signed that."""
    changed = {**header_of(envelope), **changes}
    return json.dumps({**parts(envelope), "protected": base64url(canonical(changed))}).encode()


async def codes(at: TransportUnderTest) -> list[str]:
    return [row["code"] for row in await at.audit()]


async def refuse(at: TransportUnderTest, envelope: bytes, address: str = "192.0.2.1") -> Refusal:
    return await refused(at.inbox.receive(envelope, address))


async def test_an_offer_is_taken_in_once_however_often_it_comes(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    first = await bob.inbox.receive(alice.sealed(offer(), bob, seq=1), None)
    again = await bob.inbox.receive(alice.sealed(offer(), bob, seq=1), None)
    assert (first.duplicate, again.duplicate) == (False, True)
    assert bob.provider.heard == [("delegation_offer", offer_id(1), 1)]
    assert [line.typ for line in await bob.ledger.message_log()] == ["delegation_offer"] * 2


async def test_a_replayed_envelope_is_a_conflict_also_after_a_restart(
    alice: TransportUnderTest, tmp_path: Path
) -> None:
    async with transport_under_test(tmp_path / "bob") as bob:
        await bob.knows(alice, url=None)
        envelope = alice.sealed(offer(), bob, seq=1)
        await bob.inbox.receive(envelope, None)
        refusal = await refuse(bob, envelope)
        assert (refusal.status, refusal.code) == (409, "replayed")
        keys = bob.keys
    async with transport_under_test(tmp_path / "bob", keys) as bob:
        refusal = await refuse(bob, envelope)
        assert (refusal.status, refusal.code) == (409, "replayed")
        assert await codes(bob) == ["replayed", "replayed"]
        assert not bob.provider.heard


async def test_of_two_that_come_at_once_one_is_taken(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    envelope = alice.sealed(offer(), bob, seq=1)
    came = await asyncio.gather(*(bob.inbox.receive(envelope, None) for _ in range(5)), return_exceptions=True)
    assert sorted(getattr(each, "code", "taken") for each in came) == ["replayed"] * 4 + ["taken"]
    assert len(bob.provider.heard) == 1


async def test_an_envelope_cannot_be_made_somebody_elses(
    alice: TransportUnderTest, bob: TransportUnderTest, mallory: TransportUnderTest
) -> None:
    await bob.knows(mallory, url=None)
    envelope = alice.sealed(offer(), bob, seq=1)
    claimed = with_header(envelope, **{"from": mallory.id})
    resigned = with_header(envelope, **{"from": mallory.id, "skid": mallory.keyring.key})
    for changed, code in ((claimed, "header_mismatch"), (resigned, "bad_signature")):
        refusal = await refuse(bob, changed, code)
        assert (refusal.status, refusal.code) == (400, "refused")
    assert set(await codes(bob)) == {"header_mismatch", "bad_signature"}
    assert not bob.provider.heard


@pytest.mark.parametrize(
    "change",
    [
        {"typ": "delegation_cancel"},
        {"to": "frd1_" + "a" * 40},
        {"jti": "another"},
        {"seq": 2},
        {"kid": "another"},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_no_field_of_a_header_can_be_changed(
    alice: TransportUnderTest, bob: TransportUnderTest, change: dict[str, Any]
) -> None:
    refusal = await refuse(bob, with_header(alice.sealed(offer(), bob, seq=1), **change))
    assert (refusal.status, refusal.code) == (400, "refused")
    assert await codes(bob) == ["bad_signature"]


async def test_times_cannot_be_changed(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    envelope = alice.sealed(offer(), bob, seq=1)
    for field in ("iat", "exp"):
        changed = with_header(envelope, **{field: header_of(envelope)[field] + 1})
        assert (await refuse(bob, changed, field)).code == "refused"
    assert await codes(bob) == ["bad_signature"] * 2


async def test_what_is_for_somebody_else_is_not_taken(
    alice: TransportUnderTest, bob: TransportUnderTest, mallory: TransportUnderTest
) -> None:
    refusal = await refuse(bob, alice.sealed(offer(), mallory, seq=1))
    assert (refusal.status, refusal.code) == (400, "wrong_recipient")
    assert await codes(bob) == ["wrong_recipient"]


async def test_what_is_too_old_or_from_the_future_is_told_apart(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    now = bob.clock()
    for at_ms, code in ((now - 361_000, "stale"), (now + 90_000, "from_future")):
        refusal = await refuse(bob, alice.sealed(offer(), bob, seq=1, now_ms=at_ms))
        assert (refusal.status, refusal.code) == (400, code)
    assert sorted(await codes(bob)) == ["from_future", "stale"]


async def test_what_is_sealed_to_another_key_does_not_open(
    alice: TransportUnderTest, bob: TransportUnderTest, mallory: TransportUnderTest
) -> None:
    refusal = await refuse(bob, alice.sealed(offer(), bob, seq=1, prekey=mallory.prekey()))
    assert (refusal.status, refusal.code) == (400, "unknown_prekey")
    lied = msgspec.structs.replace(mallory.prekey(), kid=bob.prekey().kid)
    refusal = await refuse(bob, alice.sealed(offer(), bob, seq=1, prekey=lied))
    assert (refusal.status, refusal.code) == (400, "cannot_open")
    assert sorted(await codes(bob)) == ["cannot_open", "unknown_prekey"]


async def test_a_key_that_is_over_is_refused_by_name(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    old = bob.prekey()
    bob.clock.ahead_ms = alice.clock.ahead_ms = 49 * 3_600_000
    refusal = await refuse(bob, alice.sealed(offer(), bob, seq=1, prekey=old))
    assert (refusal.status, refusal.code) == (400, "prekey_expired")


async def test_no_older_version_or_other_suite_is_spoken(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    envelope = alice.sealed(offer(), bob, seq=1)
    for change in ({"v": 1}, {"suite": "X25519-NONE"}):
        assert (await refuse(bob, with_header(envelope, **change), str(change))).code == "refused"
    assert sorted(await codes(bob)) == ["suite_not_supported", "version_not_supported"]


async def test_our_own_envelopes_do_not_come_back_to_us(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    assert (await refuse(bob, bob.sealed(offer(), bob, seq=1))).code == "refused"
    assert (await refuse(bob, bob.sealed(offer(), alice, seq=1), "elsewhere")).code == "refused"
    assert await codes(bob) == ["reflected"] * 2


async def test_strangers_and_those_denied_hear_the_same_and_the_operator_who_it_was(
    alice: TransportUnderTest, bob: TransportUnderTest, mallory: TransportUnderTest
) -> None:
    unknown = await refuse(bob, mallory.sealed(offer(), bob, seq=1), "192.0.2.1")
    await bob.ledger.commit(ChangePeer(id=alice.id, by=OPERATOR, denied=True))
    denied = await refuse(bob, alice.sealed(offer(), bob, seq=1), "192.0.2.2")
    assert (unknown.status, unknown.code, unknown.message) == (denied.status, denied.code, denied.message)
    rows = {row["address"]: row for row in await bob.audit()}
    assert {row["code"] for row in rows.values()} == {"unknown_sender"}
    assert mallory.id in rows["192.0.2.1"]["reason"]
    assert alice.id in rows["192.0.2.2"]["reason"]


async def test_a_peer_that_was_removed_is_a_stranger(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    await bob.ledger.commit(RemovePeer(id=alice.id, by=OPERATOR))
    assert (await refuse(bob, alice.sealed(offer(), bob, seq=1))).code == "refused"


async def test_what_is_too_large_is_refused_before_it_is_read(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    assert (await refuse(bob, b" " * (ENVELOPE_BYTES_MAX + 1))).code == "refused"
    assert (await bob.inbox.refuse_too_large("elsewhere")).code == "refused"
    assert await codes(bob) == ["too_large"] * 2


async def test_a_large_envelope_is_taken_in_whole(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    await bob.inbox.receive(alice.sealed(offer(), bob, seq=1), None)
    text = "x" * 3_000_000
    await alice.knows(bob)
    await alice.offers(bob.id)
    await alice.inbox.receive(bob.sealed(result(text=text), alice, seq=1), None)
    (heard,) = alice.requester.messages
    assert getattr(heard, "result", None) == text


@given(data=st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whatever_bytes_come_a_stranger_hears_one_answer(bob: TransportUnderTest, data: bytes) -> None:
    refusal = await refuse(bob, data)
    assert type(refusal) is Invalid
    assert refusal.code == "refused"
    refusal = await refused(bob.inbox.poll(data, "192.0.2.1"))
    assert refusal.code == "refused"


@given(at=st.integers(min_value=0), bit=st.integers(0, 7))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_bit_of_an_envelope_can_be_turned(
    alice: TransportUnderTest, bob: TransportUnderTest, at: int, bit: int
) -> None:
    envelope = bytearray(alice.sealed(offer(), bob, seq=1))
    envelope[at % len(envelope)] ^= 1 << bit
    refusal = await refused(bob.inbox.receive(bytes(envelope), None))
    assert refusal.code == "refused"
    assert not bob.provider.heard


@given(
    body=st.binary(max_size=300)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(msgspec.json.encode)
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_whatever_a_peer_puts_into_an_envelope_is_refused_in_words(
    alice: TransportUnderTest, bob: TransportUnderTest, body: bytes
) -> None:
    for typ in ("delegation_offer", "delegation_result", "capability_query", "poll", "unheard_of"):
        envelope = alice.keyring.seal(body, typ=typ, to=bob.id, prekey=bob.prekey(), now_ms=bob.clock(), seq=1)
        for way in (bob.inbox.receive, bob.inbox.poll):
            refusal = await refused(way(envelope, None))
            assert isinstance(refusal, Invalid), refusal
            assert refusal.code in {"invalid_json", "invalid_request", "type_not_supported"}


async def test_what_is_of_a_delegation_has_a_number_and_nothing_else_has(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    assert (await refuse(bob, alice.sealed(offer(), bob))).code == "invalid_seq"
    query = CapabilityQuery(nonce=NONCE, versions=(2,))
    assert (await refuse(bob, alice.sealed(query, bob, seq=1))).code == "invalid_seq"


async def test_a_gap_is_told_with_the_number_that_is_missing(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    await bob.inbox.receive(alice.sealed(offer(), bob, seq=1), None)
    refusal = await refuse(bob, alice.sealed(cancel(), bob, seq=3))
    assert (refusal.status, refusal.code, getattr(refusal, "expected", None)) == (409, "out_of_order", 2)


async def test_a_mere_peer_may_end_what_is_known_and_begin_nothing(tmp_path: Path, alice: TransportUnderTest) -> None:
    async with transport_under_test(tmp_path / "other") as bob:
        await bob.knows(alice, url=None, trust=Trust.PEER)
        for message in (accept(), result(), cancel()):
            refusal = await refuse(bob, alice.sealed(message, bob, seq=1))
            assert type(refusal) is Forbidden
            assert refusal.code == "untrusted"
        await bob.inbox.receive(alice.sealed(offer(), bob, seq=1), None)
        assert bob.provider.heard, "offers are rejected by message, and by those who judge them"
        await bob.inbox.receive(alice.sealed(cancel(), bob, seq=2), None)
        await bob.offers(alice.id, 7)
        await bob.inbox.receive(alice.sealed(result(7), bob, seq=1), None)
        assert [typ for typ, *_ in bob.requester.heard] == ["delegation_result"]


async def test_a_question_is_answered_at_once_and_sealed_to_the_keys_that_it_brings(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    query = CapabilityQuery(nonce=NONCE, versions=(2,), keys=alice.keyring.bundle(alice.clock()))
    received = await bob.inbox.receive(alice.sealed(query, bob), None)
    await alice.knows(bob)
    assert isinstance(received.envelope, msgspec.Raw)
    refusal = await refused(alice.inbox.receive_fetched(bytes(received.envelope)))
    assert refusal.code == "challenge_over", "it opens; and alice has not asked by this question"


async def test_a_peer_that_talks_too_much_is_told_when_to_come_back(tmp_path: Path, alice: TransportUnderTest) -> None:
    async with transport_under_test(tmp_path / "strict", settings=PeerSettings(messages_per_min=2)) as bob:
        await bob.knows(alice, url=None)
        for number in (1, 2):
            await bob.inbox.receive(alice.sealed(offer(number), bob, seq=1), None)
        refusal = await refuse(bob, alice.sealed(offer(3), bob, seq=1))
        assert type(refusal) is OverLimit
        assert refusal.code == "rate_limited"
        assert refusal.retry_after_ms is not None
        assert 0 < refusal.retry_after_ms <= 30_000
        bob.clock.ahead_ms += refusal.retry_after_ms
        alice.clock.ahead_ms = bob.clock.ahead_ms
        await bob.inbox.receive(alice.sealed(offer(3), bob, seq=1), None)
        await bob.ledger.commit(ChangePeer(id=alice.id, by=OPERATOR, trust=Trust.TRUSTED))
        bob.clock.ahead_ms += 60_000
        alice.clock.ahead_ms = bob.clock.ahead_ms
        for number in range(10, 30):
            await bob.inbox.receive(alice.sealed(offer(number), bob, seq=1), None)
        assert (await refuse(bob, alice.sealed(offer(99), bob, seq=1))).code == "rate_limited"


async def test_repeated_refusals_cost_one_row_a_minute(
    alice: TransportUnderTest, bob: TransportUnderTest, mallory: TransportUnderTest
) -> None:
    await bob.inbox.receive(alice.sealed(offer(), bob, seq=1), None)
    for number in range(20):
        await refuse(bob, b"nonsense %d" % number)
        await refuse(bob, alice.sealed(offer(), bob, seq=5))
    assert sorted(await codes(bob)) == ["malformed", "out_of_order"]
    bob.clock.ahead_ms = 61_000
    await refuse(bob, b"more nonsense")
    rows = await bob.audit()
    assert sorted((row["code"], row["suppressed_before"]) for row in rows) == [
        ("malformed", 0),
        ("malformed", 19),
        ("out_of_order", 0),
    ]


async def test_strangers_at_many_addresses_cost_a_bounded_number_of_rows(bob: TransportUnderTest) -> None:
    for number in range(150):
        await refuse(bob, b"nonsense", f"192.0.2.{number}")
    assert len(await bob.audit()) == 100
    bob.clock.ahead_ms = 61_000
    await refuse(bob, b"nonsense", "198.51.100.1")
    assert max(row["suppressed_before"] for row in await bob.audit()) == 50


async def test_a_role_cannot_be_confused(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    """What a requester says of an offer is not taken for what its provider says."""
    await bob.inbox.receive(alice.sealed(offer(), bob, seq=1), None)
    await bob.inbox.receive(alice.sealed(result(), bob, seq=2), None)
    assert not bob.requester.heard
    (delegation,) = await bob.ledger.delegations_live(DelegationRole.PROVIDER)
    assert delegation.received_seq == 1
