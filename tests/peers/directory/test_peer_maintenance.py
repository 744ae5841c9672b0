"""What is done about peers from time to time: met when they are there, challenged when they know us, keys renewed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from covenant.ledger.clock import PAUSE_MS
from covenant.model.peers.delegation import Peer
from covenant.model.peers.instance import Trust
from covenant.peers.peer_services import PeerMaintenance
from covenant.peers.provider.offer_admission import OfferedProfiles
from covenant.seal.identity import PREKEY_PERIOD_MS
from tests.ledger_contract.samples import OPERATOR
from tests.peers.transport_under_test import Clock, Keys, TransportUnderTest, listening, transport_under_test
from tests.waits import BOUND_S, eventually


def upkeep(of: TransportUnderTest) -> PeerMaintenance:
    return PeerMaintenance(of.context, of.directory)


@asynccontextmanager
async def instance(
    folder: Path, keys: Keys | None = None, clock: Clock | None = None
) -> AsyncIterator[TransportUnderTest]:
    async with transport_under_test(folder, keys, clock=clock) as at, listening(at):
        yield at


@asynccontextmanager
async def kept_up(at: TransportUnderTest) -> AsyncIterator[PeerMaintenance]:
    keeping = upkeep(at)
    running = asyncio.create_task(keeping.run())
    try:
        yield keeping
    finally:
        await asyncio.wait_for(keeping.stop(), BOUND_S)
        assert running.done()


class FullDisk(Keys):
    is_full = False

    def save(self, prekeys: Any) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        super().save(prekeys)


def trust(at: TransportUnderTest, of: TransportUnderTest) -> Trust | None:
    peer = at.ledger.peer(of.id)
    return peer.trust if peer is not None else None


async def settle(keeping: PeerMaintenance, *entries: str) -> None:
    """Adds the peers of the settings, and waits until each was tried."""
    keeping.add_static(entries)
    await keeping.sweep()


async def test_peers_of_the_settings_are_added_and_marked_as_such(tmp_path: Path) -> None:
    async with instance(tmp_path / "a") as a, instance(tmp_path / "b") as b:
        await settle(upkeep(a), f"north={b.id}@{b.url}")
        peer = a.ledger.peer(b.id)
        assert peer is not None
        assert (peer.name, peer.url, peer.source) == ("north", b.url, "setting")


async def test_what_is_wrong_in_the_settings_stops_nothing_and_nobody_else(tmp_path: Path) -> None:
    async with instance(tmp_path / "a") as a, instance(tmp_path / "b") as b:
        await settle(upkeep(a), "nonsense", "http://127.0.0.1:1", a.url, b.url)
        assert [peer.id for peer in a.ledger.peers()] == [b.id]


async def test_one_that_is_not_there_yet_is_met_when_it_is(tmp_path: Path) -> None:
    clock = Clock()
    async with (
        transport_under_test(tmp_path / "a", clock=clock) as a,
        transport_under_test(tmp_path / "b", clock=clock) as b,
    ):
        async with listening(b):
            pass
        keeping = upkeep(a)
        await settle(keeping, b.url)
        assert a.ledger.peers() == ()
        async with listening(b):
            await keeping.sweep()
            assert a.ledger.peers() == (), "it is not tried again at once"
            clock.ahead_ms += 1_000
            await keeping.sweep()
            assert trust(a, b) is Trust.PEER


async def test_what_an_operator_has_changed_is_newer_than_the_setting(tmp_path: Path) -> None:
    async with instance(tmp_path / "a") as a, instance(tmp_path / "b") as b:
        await settle(upkeep(a), f"north={b.url}")
        await a.directory.change(OPERATOR, "north", name="south")
        await settle(upkeep(a), f"north={b.url}")
        assert [peer.name for peer in a.ledger.peers()] == ["south"]


async def test_both_are_verified_by_themselves_once_the_second_one_adds_the_first(tmp_path: Path) -> None:
    async with instance(tmp_path / "a") as a, instance(tmp_path / "b") as b, kept_up(a), kept_up(b):
        await a.directory.add(OPERATOR, url=b.url, peer_id=None, name=None)
        assert trust(a, b) is Trust.PEER
        await b.directory.add(OPERATOR, url=a.url, peer_id=None, name=None)
        await a.until(lambda: trust(a, b) is Trust.VERIFIED)
        await b.until(lambda: trust(b, a) is Trust.VERIFIED)


async def test_one_that_an_operator_has_lowered_or_denied_is_left_alone(tmp_path: Path) -> None:
    async with instance(tmp_path / "a") as a, instance(tmp_path / "b") as b:
        await a.directory.add(OPERATOR, url=b.url, peer_id=None, name=None)
        await b.directory.add(OPERATOR, url=a.url, peer_id=None, name=None)
        await a.directory.change(OPERATOR, b.id, denied=True)
        heard = len(await b.ledger.message_log())
        await upkeep(a).sweep()
        assert (trust(a, b), len(await b.ledger.message_log())) == (Trust.PEER, heard)
        await a.directory.change(OPERATOR, b.id, denied=False)
        await upkeep(a).sweep()
        assert trust(a, b) is Trust.VERIFIED
        await a.directory.change(OPERATOR, b.id, trust=Trust.PEER)
        await upkeep(a).sweep()
        assert trust(a, b) is Trust.PEER


async def test_where_a_stranger_was_it_is_looked_again_until_the_peer_is_back(tmp_path: Path) -> None:
    clock = Clock()
    async with instance(tmp_path / "a", clock=clock) as a, transport_under_test(tmp_path / "b", clock=clock) as b:
        async with listening(b):
            await a.directory.add(OPERATOR, url=b.url, peer_id=None, name=None)
        keeping = upkeep(a)
        async with instance(tmp_path / "c", Keys(port=b.keys.port), clock):
            await a.directory.refresh(a.directory.find(b.id))
            await keeping.sweep()
            assert a.directory.find(b.id).conflict == "identity_changed"
        async with listening(b):
            clock.ahead_ms += 2_000
            await keeping.sweep()
            assert a.directory.find(b.id).conflict is None


@pytest.mark.parametrize("asker", ["the maintenance", "somebody else"])
async def test_keys_that_are_void_while_a_question_is_under_way_are_told_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asker: str
) -> None:
    asked, go = asyncio.Event(), asyncio.Event()
    async with instance(tmp_path / "a") as a, instance(tmp_path / "b") as b:
        await a.directory.add(OPERATOR, url=b.url, peer_id=None, name=None)
        await b.directory.add(OPERATOR, url=a.url, peer_id=None, name=None)
        offering = b.directory._offering

        async def answer_late(peer: Peer) -> OfferedProfiles:
            asked.set()
            await go.wait()
            return await offering(peer)

        async def is_trying() -> bool:
            return bool(keeping._trying)

        monkeypatch.setattr(b.directory, "_offering", answer_late)
        keeping = upkeep(a)
        asking = keeping.sweep() if asker == "the maintenance" else a.directory.verify(a.directory.find(b.id))
        under_way = asyncio.ensure_future(asking)
        await asyncio.wait_for(asked.wait(), BOUND_S)
        a.keyring.replace_purpose_keys(a.clock(), compromised=True)
        keeping.announce_keys()
        joins = asyncio.ensure_future(keeping.sweep())
        await eventually(is_trying)
        go.set()
        await asyncio.wait_for(asyncio.gather(under_way, joins), BOUND_S)
        assert b.directory.find(a.id).void_before_ms == 0, "the question was asked before"
        await keeping.sweep()
        assert b.directory.find(a.id).void_before_ms == a.keyring.void_before_ms > 0
        heard = len(await b.ledger.message_log())
        await keeping.sweep()
        assert len(await b.ledger.message_log()) == heard, "it is told once"


async def test_our_keys_are_renewed_each_day_and_a_disk_that_is_full_stops_nothing(tmp_path: Path) -> None:
    async with transport_under_test(tmp_path / "a") as a:
        keeping = upkeep(a)
        (first,) = a.keys.prekeys
        await keeping.sweep()
        assert a.keys.prekeys == [first]
        a.clock.ahead_ms += PREKEY_PERIOD_MS
        await keeping.sweep()
        assert (len(a.keys.prekeys), a.keys.prekeys[0]) == (2, first)

    full = FullDisk()
    async with transport_under_test(tmp_path / "b", full) as b:
        full.is_full = True
        b.clock.ahead_ms += PREKEY_PERIOD_MS
        await upkeep(b).sweep()
        assert len(b.keyring.bundle(b.clock()).prekeys) == 1


async def test_a_clock_that_was_set_forward_throws_no_key_away_before_it_was_steady(tmp_path: Path) -> None:
    """Its peers still seal to the key that it has."""
    async with transport_under_test(tmp_path) as alice:
        held = alice.prekey().kid
        alice.clock.stepped_ms += 400 * 86_400_000
        await upkeep(alice).sweep()
        assert alice.keyring.prekey(held) is not None
        alice.clock.ahead_ms += PAUSE_MS
        await upkeep(alice).sweep()
        assert alice.keyring.prekey(held) is None
