"""The suite that two instances seal with: the hybrid one wherever both have it, whatever is taken away on the way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.model.peers.delegation import Peer
from covenant.model.peers.instance import HYBRID_SUITE, HYBRID_VERSIONS, SUITE, SUPPORTED_VERSIONS, Prekey
from covenant.peers.directory.instance_keys import PREKEYS_KEPT_MAX, InstanceKeys
from covenant.seal.identity import PREKEY_LIFE_MS, PREKEY_PERIOD_MS, PrivatePrekey, bundle_holds, new_prekey
from covenant.seal.keys import new_private_key
from covenant.wire import peers as wire
from covenant.wire.peers import Introduction, Poll, decode_introduction
from tests.ledger_contract.samples import OPERATOR
from tests.peers.transport_under_test import Clock, Keys, TransportUnderTest, listening, refused, transport_under_test
from tests.seal.instances import NOW

Alter = Callable[[Introduction], Introduction]


async def add(a: TransportUnderTest, b: TransportUnderTest) -> Peer:
    return await a.directory.add(OPERATOR, url=b.url, peer_id=None, name="north")


def instead(prekey: Callable[[Prekey], Prekey | None]) -> Alter:
    def alter(shown: Introduction) -> Introduction:
        assert shown.hybrid_prekey is not None
        return msgspec.structs.replace(shown, hybrid_prekey=prekey(shown.hybrid_prekey))

    return alter


@pytest.mark.parametrize(
    ("ours", "theirs", "suite"),
    [(True, True, HYBRID_SUITE), (True, False, SUITE), (False, True, SUITE), (False, False, SUITE)],
)
async def test_both_have_the_hybrid_suite_or_neither_uses_it(
    tmp_path: Path, ours: bool, theirs: bool, suite: str
) -> None:
    async with (
        transport_under_test(tmp_path / "a", Keys(hybrid=ours)) as a,
        transport_under_test(tmp_path / "b", Keys(hybrid=theirs)) as b,
        listening(a),
        listening(b),
    ):
        await b.knows(a)
        peer = await add(a, b)
        assert peer.verified_at_ms is not None, "a question and its answer were opened"
        assert (await a.directory.prekey_for(peer)).suite == suite
        back = b.ledger.peer(a.id)
        assert back is not None
        assert (await b.directory.prekey_for(back)).suite == suite


FORGED: dict[str, Callable[[Prekey], Prekey | None]] = {
    "stripped": lambda _: None,
    "another's": lambda _: new_prekey(new_private_key(), NOW, HYBRID_SUITE).prekey,
    "changed": lambda shown: msgspec.structs.replace(shown, not_after_ms=shown.not_after_ms - 1),
    "classic": lambda shown: msgspec.structs.replace(shown, suite=SUITE),
}


@pytest.mark.parametrize("forged", FORGED)
async def test_whoever_takes_the_hybrid_key_away_gets_nothing_sealed_with_less(tmp_path: Path, forged: str) -> None:
    async with (
        transport_under_test(tmp_path / "a", Keys(hybrid=True)) as a,
        transport_under_test(tmp_path / "b", Keys(hybrid=True)) as b,
    ):
        await b.knows(a)
        async with listening(b, instead(FORGED[forged])):
            peer = await add(a, b)
            assert (peer.verified_at_ms, b.ledger.peer(a.id).heard_at_ms) == (None, 0)  # type: ignore[union-attr]
            for asked in (a.directory.prekey_for(peer), a.directory.prekey_for(peer, fresh=True)):
                assert (await refused(asked)).code == "no_hybrid_keys"
        async with listening(a), listening(b):
            assert (await a.directory.prekey_for(peer)).suite == HYBRID_SUITE
            assert (await a.directory.verify(peer)).verified_at_ms is not None


async def test_the_versions_in_a_bundle_cannot_be_talked_down(tmp_path: Path) -> None:
    def lower(shown: Introduction) -> Introduction:
        keys = msgspec.structs.replace(shown.keys, versions=SUPPORTED_VERSIONS)
        return msgspec.structs.replace(shown, keys=keys, hybrid_prekey=None)

    async with (
        transport_under_test(tmp_path / "a", Keys(hybrid=True)) as a,
        transport_under_test(tmp_path / "b", Keys(hybrid=True)) as b,
        listening(b, lower),
    ):
        assert (await refused(add(a, b))).code == "unverified_keys"


async def test_an_old_key_that_is_over_is_no_key(tmp_path: Path) -> None:
    clock = Clock()
    async with (
        transport_under_test(tmp_path / "a", Keys(hybrid=True), clock=clock) as a,
        transport_under_test(tmp_path / "b", Keys(hybrid=True), clock=clock) as b,
    ):
        old = b.keyring.hybrid_prekey(clock())
        async with listening(b, instead(lambda _: old)):
            await b.knows(a)
            peer = await add(a, b)
            assert await a.directory.prekey_for(peer) == old
            clock.ahead_ms += PREKEY_LIFE_MS
            assert (await refused(a.directory.prekey_for(peer))).code == "no_hybrid_keys"
        async with listening(b):
            newer = await a.directory.prekey_for(peer)
            assert newer.suite == HYBRID_SUITE
            assert newer == b.keyring.hybrid_prekey(clock())


async def test_a_peer_that_has_lost_its_hybrid_key_is_asked_for_another(tmp_path: Path) -> None:
    keys = Keys(hybrid=True)
    async with transport_under_test(tmp_path / "a", Keys(hybrid=True)) as a, listening(a):
        async with transport_under_test(tmp_path / "b", keys) as b, listening(b):
            await b.knows(a)
            await add(a, b)
        keys.prekeys.clear()  # as after a restore from a backup without them
        async with transport_under_test(tmp_path / "b", keys) as b, listening(b):
            known = a.ledger.peer(b.id)
            assert known is not None
            await a.directory.verify(known)
            assert await a.directory.prekey_for(known) == b.keyring.hybrid_prekey(b.clock())


def poll(by: TransportUnderTest, of: TransportUnderTest, prekey: Prekey | None) -> bytes:
    asked = Poll(keys=by.keyring.bundle(by.clock()), hybrid_prekey=prekey)
    return by.keyring.seal(wire.encode(asked), typ=wire.POLL, to=of.id, prekey=of.prekey(), now_ms=by.clock())


async def test_what_is_fetched_is_sealed_to_the_hybrid_key_of_the_poll(tmp_path: Path) -> None:
    async with (
        transport_under_test(tmp_path / "a", Keys(hybrid=True)) as a,
        transport_under_test(tmp_path / "b", Keys(hybrid=True)) as b,
    ):
        await a.knows(b, url=None)
        await b.knows(a)
        await a.offers(b.id)
        assert (await refused(a.inbox.poll(poll(b, a, None), None))).code == "bad_keys"
        stolen = new_prekey(new_private_key(), b.clock(), HYBRID_SUITE).prekey
        assert (await refused(a.inbox.poll(poll(b, a, stolen), None))).code == "bad_keys"
        polled = await a.inbox.poll(poll(b, a, b.keyring.hybrid_prekey(b.clock())), None)
        (envelope,) = polled.envelopes
        taken = await b.inbox.receive_fetched(bytes(envelope))
        assert taken.ack is not None


def saved_ring(hybrid: bool = True) -> tuple[InstanceKeys, list[PrivatePrekey]]:
    saved: list[PrivatePrekey] = []

    def save(prekeys: Any) -> None:
        saved[:] = prekeys

    ring = InstanceKeys(new_private_key(), (), save, hybrid=hybrid)
    ring.rotate(NOW)
    return ring, saved


def test_prekeys_of_both_suites_are_made_each_day_and_erased() -> None:
    ring, saved = saved_ring()
    first = ring.hybrid_prekey(NOW)
    assert first is not None
    assert [each.prekey.suite for each in saved] == [SUITE, HYBRID_SUITE]
    bundle = ring.bundle(NOW)
    assert bundle_holds(bundle, ring.id, NOW)
    assert (bundle.versions, {each.suite for each in bundle.prekeys}) == (HYBRID_VERSIONS, {SUITE})
    assert not ring.is_due(NOW + PREKEY_PERIOD_MS - 1)
    ring.rotate(NOW + PREKEY_PERIOD_MS)
    assert len(saved) == 4
    assert ring.hybrid_prekey(NOW + PREKEY_PERIOD_MS) != first
    assert ring.prekey(first.kid) is not None, "who has seen the old one is still understood"
    ring.rotate(NOW + PREKEY_LIFE_MS + 60_001)
    assert ring.prekey(first.kid) is None
    assert first.kid not in {each.prekey.kid for each in saved}
    for day in range(40):
        ring.rotate(NOW + (day % 2) * 400 * PREKEY_PERIOD_MS - day * PREKEY_LIFE_MS)
    assert len(saved) <= 2 * PREKEYS_KEPT_MAX


def test_one_that_has_become_classic_shows_no_hybrid_key_and_still_opens() -> None:
    ring, saved = saved_ring()
    shown = ring.hybrid_prekey(NOW)
    assert shown is not None
    again = InstanceKeys(ring.private_key, saved, lambda _: None)
    assert (again.hybrid_prekey(NOW), again.versions, again.bundle(NOW).versions) == (
        None,
        SUPPORTED_VERSIONS,
        SUPPORTED_VERSIONS,
    )
    assert again.prekey(shown.kid) is not None


def test_a_home_of_an_earlier_release_gets_its_hybrid_key() -> None:
    ring, saved = saved_ring(hybrid=False)
    again = InstanceKeys(ring.private_key, saved, lambda _: None, hybrid=True)
    assert again.is_due(NOW)
    assert again.hybrid_prekey(NOW) is not None


def test_an_introduction_without_a_hybrid_key_says_nothing_of_it() -> None:
    ring, _ = saved_ring(hybrid=False)
    data = msgspec.json.encode(Introduction(name="x", keys=ring.bundle(NOW), hybrid_prekey=ring.hybrid_prekey(NOW)))
    assert b"hybrid" not in data
    assert decode_introduction(data).hybrid_prekey is None
