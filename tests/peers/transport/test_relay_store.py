"""What a relay keeps: in order, within its limits, for its time, and again after a crash."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from covenant.model.errors import OverLimit
from covenant.model.peers.instance import InstanceId
from covenant.peers.peer_settings import PeerSettings
from covenant.peers.transport.relay import INTRODUCTION, Relay, RelayStore
from covenant.seal.identity import SKEW_MS
from tests.peers.transport_under_test import QUICK, cancel, transport_under_test

NOW = 1_800_000_000_000
ANN, BEN, CAT = (InstanceId("frd1_" + letter * 40) for letter in "abc")
LIMITS = PeerSettings(relay_bytes_max=100, relay_bytes_per_peer=60, relay_envelopes_per_peer=3)


class Clock:
    def __init__(self) -> None:
        self.now_ms = NOW

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(folder: Path, clock: Clock) -> RelayStore:
    store = RelayStore(folder / "relay", LIMITS, clock)
    store.open()
    return store


async def put(store: RelayStore, to: InstanceId, by: InstanceId, name: int, data: bytes = b'{"n":1}') -> None:
    kept = store.reserve(to, by, f"{name:032x}", len(data), NOW + 1_000)
    await store.write(to, kept, data)


async def names(store: RelayStore, to: InstanceId, most: int = 50) -> list[int]:
    return [int(each.id, 16) for each in await store.read(to, most)]


async def test_envelopes_are_handed_out_as_they_came_and_in_order_until_they_are_taken(
    tmp_path: Path, clock: Clock
) -> None:
    store = opened(tmp_path, clock)
    for name in (9, 1, 5):
        await put(store, BEN, ANN, name, b'{"n": %d}' % name)
    for held in (store, opened(tmp_path, clock)):
        assert await names(held, BEN) == [9, 1, 5]
        assert await names(held, BEN, most=2) == [9, 1]
        assert bytes((await held.read(BEN, 1))[0].envelope) == b'{"n": 9}'
        assert await names(held, CAT) == []
    await store.drop(BEN, [f"{9:032x}", f"{77:032x}"])
    assert await names(store, BEN) == await names(opened(tmp_path, clock), BEN) == [1, 5]


async def test_who_hangs_up_leaves_no_file_that_nobody_knows(tmp_path: Path, clock: Clock) -> None:
    store = opened(tmp_path, clock)
    await put(store, BEN, ANN, 1)
    for begun in (store.drop(BEN, [f"{1:032x}"]), put(store, BEN, ANN, 2)):
        free = threading.Event()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
        busy = asyncio.create_task(asyncio.to_thread(free.wait))
        asked = asyncio.create_task(begun)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        free.set()
        await busy
        await asyncio.to_thread(time.sleep, 0)  # the only thread has done what was asked before
        await asyncio.sleep(0)
        assert await names(store, BEN) == await names(opened(tmp_path, clock), BEN)
    assert await names(store, BEN) == [2]


async def test_each_limit_holds_also_after_a_restart_and_ends_with_what_was_taken(tmp_path: Path, clock: Clock) -> None:
    store = opened(tmp_path, clock)
    for name in range(3):
        await put(store, BEN, ANN, name)
    for held in (store, opened(tmp_path, clock)):
        with pytest.raises(OverLimit, match="for this recipient"):
            held.reserve(BEN, CAT, "0" * 32, 1, NOW)
        with pytest.raises(OverLimit, match="from you"):
            held.reserve(CAT, ANN, "0" * 32, 1, NOW)
    with pytest.raises(OverLimit, match="for this recipient"):
        store.reserve(ANN, BEN, "0" * 32, 61, NOW)
    await put(store, ANN, BEN, 7, b"x" * 60)
    with pytest.raises(OverLimit, match="is full"):
        store.reserve(CAT, CAT, "0" * 32, 30, NOW)
    await store.drop(ANN, [f"{7:032x}"])
    await put(store, CAT, CAT, 8, b"x" * 30)


async def test_a_place_that_could_not_be_written_is_given_back(tmp_path: Path, clock: Clock) -> None:
    store = opened(tmp_path, clock)
    (tmp_path / "relay" / BEN).write_text("in the way")
    for _ in range(LIMITS.relay_envelopes_per_peer + 1):
        with pytest.raises(OSError, match="exist"):
            await put(store, BEN, ANN, 1)
    assert await store.find(BEN, f"{1:032x}") is None


async def test_files_that_somebody_removed_hold_up_nothing_behind_them(tmp_path: Path, clock: Clock) -> None:
    store = opened(tmp_path, clock)
    for name in (1, 2, 3):
        await put(store, BEN, ANN, name)
    for file in sorted((tmp_path / "relay" / BEN).iterdir())[:2]:
        file.unlink()
    assert await names(store, BEN, most=2) == [3]
    for name in (4, 5):
        await put(store, BEN, ANN, name)


async def test_files_that_cannot_be_read_hold_up_nothing_behind_them_and_stay(tmp_path: Path, clock: Clock) -> None:
    store = opened(tmp_path, clock)
    for name in (1, 2, 3):
        await put(store, BEN, ANN, name)
    first, second, _ = sorted((tmp_path / "relay" / BEN).iterdir())
    for file in (first, second):
        file.rename(tmp_path / file.name)
        file.mkdir()
    for most in (1, 2, 3):
        assert await names(store, BEN, most) == [3]
    await store.drop(BEN, [f"{3:032x}"])
    assert await names(store, BEN, 1) == []
    for file in (first, second):
        file.rmdir()
        (tmp_path / file.name).rename(file)
    assert await names(store, BEN) == [1, 2]


async def test_an_envelope_whose_file_is_damaged_is_dropped_and_spoils_no_answer(tmp_path: Path, clock: Clock) -> None:
    store = opened(tmp_path, clock)
    for name in (1, 2):
        await put(store, BEN, ANN, name)
    damaged, whole = sorted((tmp_path / "relay" / BEN).iterdir())
    damaged.write_bytes(b'{"n":\0')
    for most in (1, 2):
        assert await names(store, BEN, most) == [2]
    assert sorted((tmp_path / "relay" / BEN).iterdir()) == [whole]


async def test_an_introduction_that_somebody_removed_is_shown_again_after_the_next_poll(
    tmp_path: Path, clock: Clock
) -> None:
    store = opened(tmp_path, clock)
    await store.introduce(BEN, b'{"who": "ben"}')
    (tmp_path / "relay" / BEN / INTRODUCTION).unlink()
    assert await store.introduction(BEN) is None
    await store.introduce(BEN, b'{"who": "ben"}')
    assert await store.introduction(BEN) == b'{"who": "ben"}'


async def test_what_is_over_goes_and_what_was_cut_off_is_nothing(tmp_path: Path, clock: Clock) -> None:
    store = opened(tmp_path, clock)
    await put(store, BEN, ANN, 1)
    place = tmp_path / "relay" / BEN
    (place / "0000000000000002.1.frd1_x.tmp").write_bytes(b"half of")
    (place / "somebody-elses").write_bytes(b"")
    again = opened(tmp_path, clock)
    assert await names(again, BEN) == [1]
    assert not list(place.glob("*.tmp"))
    clock.now_ms += 1_000 + SKEW_MS
    assert await names(again, BEN) == [1]
    clock.now_ms += 1
    assert await names(again, BEN) == []
    assert not list(place.glob("*.envelope"))


async def test_an_envelope_whose_file_cannot_be_deleted_ends_neither_the_sweep_nor_a_fetch(
    tmp_path: Path, clock: Clock
) -> None:
    store = opened(tmp_path, clock)
    for name in (1, 2, 3):
        await put(store, BEN, ANN, name)
    folder = tmp_path / "relay" / BEN
    first, second, third = sorted(folder.iterdir())
    for file in (first, second):
        file.unlink()
        file.mkdir()
    await store.drop(BEN, [f"{1:032x}"])
    clock.now_ms += 1_001 + SKEW_MS
    await store.sweep(lambda _: True)
    assert await names(store, BEN) == []
    assert not third.exists()


async def test_nothing_stays_of_one_that_is_not_relayed_to_any_more(tmp_path: Path, clock: Clock) -> None:
    store = opened(tmp_path, clock)
    await put(store, BEN, ANN, 1)
    await put(store, CAT, ANN, 2)
    await store.introduce(BEN, b"{}")
    assert await store.introduction(BEN) == b"{}"
    await store.sweep(lambda peer: peer == CAT)
    assert (await names(store, BEN), await names(store, CAT), await store.introduction(BEN)) == ([], [2], None)
    assert not (tmp_path / "relay" / BEN).exists()
    for name in (3, 4):
        await put(store, BEN, ANN, name)


async def test_an_envelope_that_comes_twice_at_once_is_kept_once_and_acknowledged_when_it_is_on_disk(
    tmp_path: Path,
) -> None:
    settings = replace(QUICK, relay_for=("*",), relay_keep_ms=1_000)
    async with (
        transport_under_test(tmp_path / "alice") as alice,
        transport_under_test(tmp_path / "bob") as bob,
        transport_under_test(tmp_path / "relay", settings=settings) as house,
    ):
        house.context.relay_folder = tmp_path / "kept"
        await house.knows(alice)
        await house.knows(bob)
        relay = Relay(house.context)
        await relay.open()
        for stale in (False, True):
            free = threading.Event()
            body = alice.sealed(cancel(1), bob, seq=1, now_ms=house.clock())
            header = relay.check(body, bob.id)
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=1))
            busy = asyncio.create_task(asyncio.to_thread(free.wait))
            keeping = [asyncio.create_task(relay.keep(body, header)) for _ in range(2)]
            for _ in range(10):
                await asyncio.sleep(0)
            acknowledged = [task.done() for task in keeping]
            free.set()
            await busy
            assert acknowledged == [False, False]
            assert sorted(duplicate for _, duplicate in await asyncio.gather(*keeping)) == [False, True], stale
            assert len(list((tmp_path / "kept" / bob.id).glob("*.envelope"))) == 1
            house.clock.ahead_ms += 1_001 + SKEW_MS
