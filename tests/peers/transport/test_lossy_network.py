"""Between two instances stands somebody who loses and cuts what passes; each message is taken once all the same."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from covenant.model.peers.delegation import DelegationRole
from covenant.peers.peer_settings import PeerSettings
from tests.peers.transport_under_test import (
    Keys,
    TransportUnderTest,
    accept,
    cancel,
    delivering,
    listening,
    offer_id,
    result,
    status,
    transport_under_test,
)

DELEGATIONS = 12
FETCHING = PeerSettings(retry_first_ms=5, retry_max_ms=20, poll_wait_ms=1_000, poll=("*",))
CALLING = PeerSettings(retry_first_ms=5, retry_max_ms=20)


class Breaker:
    """Passes on what comes, and by chance does not: neither the request, nor the answer, nor all of it."""

    def __init__(self, seed: int, port: int, odds: float) -> None:
        self._chance = random.Random(seed)
        self._port = port
        self.odds = odds
        self.broken = 0

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks: list[asyncio.Task[None]] = []
        back: asyncio.StreamWriter | None = None
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            tasks += [
                asyncio.create_task(self._one_way(reader, back)),
                asyncio.create_task(self._one_way(there, writer)),
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except ConnectionError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            for end in (writer, back):
                if end is not None:
                    end.close()

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65_536):
                if self._chance.random() < self.odds:
                    self.broken += 1
                    writer.write(piece[: self._chance.randrange(len(piece))])
                    return
                writer.write(piece)
        except ConnectionError:
            return


@asynccontextmanager
async def breaking(seed: int, port: int, odds: float = 0.2) -> AsyncIterator[tuple[Breaker, str]]:
    breaker = Breaker(seed, port, odds)
    server = await asyncio.start_server(breaker.pass_on, "127.0.0.1", 0)
    async with server:
        yield breaker, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def assert_whole(heard: list[tuple[str, str, int]], numbers: int) -> None:
    """All of each delegation, in its order, and nothing twice."""
    for number in range(1, DELEGATIONS + 1):
        assert [seq for _, named, seq in heard if named == offer_id(number)] == list(range(1, numbers + 1))


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_each_message_is_taken_once_over_lines_that_break(tmp_path: Path, seed: int) -> None:
    async with (
        transport_under_test(tmp_path / "alice", settings=CALLING) as alice,
        transport_under_test(tmp_path / "bob", settings=CALLING) as bob,
        listening(alice),
        listening(bob),
        breaking(seed, bob.keys.port) as (there, to_bob),
        breaking(seed + 100, alice.keys.port) as (back, to_alice),
    ):
        await alice.knows(bob, url=to_bob)
        await bob.knows(alice, url=to_alice)
        async with delivering(alice), delivering(bob):
            await _converse(alice, bob)
        assert there.broken
        assert back.broken
    assert_whole(bob.provider.heard, 2)
    assert_whole(alice.requester.heard, 3)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_each_message_is_taken_once_if_one_side_fetches_over_such_a_line(tmp_path: Path, seed: int) -> None:
    async with (
        transport_under_test(tmp_path / "alice", settings=CALLING) as alice,
        transport_under_test(tmp_path / "bob", settings=FETCHING) as bob,
        listening(alice),
        breaking(seed, alice.keys.port) as (breaker, to_alice),
    ):
        await alice.knows(bob, url=None)
        await bob.knows(alice, url=to_alice)
        async with delivering(alice), delivering(bob):
            await _converse(alice, bob)
        assert breaker.broken
    assert_whole(bob.provider.heard, 2)
    assert_whole(alice.requester.heard, 3)


async def test_a_partition_heals_by_itself(tmp_path: Path) -> None:
    """First nothing passes in either direction; then everything does."""
    async with (
        transport_under_test(tmp_path / "alice", settings=CALLING) as alice,
        transport_under_test(tmp_path / "bob", settings=CALLING) as bob,
        listening(alice),
        listening(bob),
        breaking(7, bob.keys.port, odds=1.0) as (there, to_bob),
        breaking(8, alice.keys.port, odds=1.0) as (back, to_alice),
    ):
        await alice.knows(bob, url=to_bob)
        await bob.knows(alice, url=to_alice)
        async with delivering(alice), delivering(bob):
            await alice.offers(bob.id, 1)
            await alice.until(lambda: alice.outbox.troubles() and alice.outbox.troubles()[0].attempts >= 3)
            there.odds = back.odds = 0.0
            await _converse(alice, bob, first=2)
    assert bob.provider.heard[0][1:] == (offer_id(1), 1)


async def test_both_may_begin_again_at_any_time(tmp_path: Path) -> None:
    """Stop both while things are under way, and go on, until all has arrived."""
    keys = (Keys(), Keys())
    heard: list[tuple[str, str, int]] = []
    for turn in range(6):
        async with (
            transport_under_test(tmp_path / "alice", keys[0], settings=CALLING) as alice,
            transport_under_test(tmp_path / "bob", keys[1], settings=CALLING) as bob,
            listening(bob),
        ):
            if turn == 0:
                await alice.knows(bob)
                await bob.knows(alice, url=None)
                for number in range(1, DELEGATIONS + 1):
                    await alice.offers(bob.id, number, cancel(number))
            async with delivering(alice):
                if turn < 5:
                    await alice.until_addressees(lambda waiting: len(bob.provider.heard) >= 3 or not waiting)
                else:
                    await alice.delivered()
                    known = await bob.ledger.delegations_live(DelegationRole.PROVIDER)
                    assert [each.received_seq for each in known] == [2] * DELEGATIONS
        heard += bob.provider.heard
    assert len(heard) == len(set(heard)), "nothing was new to it twice"


async def _converse(alice: TransportUnderTest, bob: TransportUnderTest, *, first: int = 1) -> None:
    """Alice offers, bob answers in three messages, alice says one more thing; until all of it has arrived."""
    numbers = range(first, DELEGATIONS + 1)
    for number in numbers:
        await alice.offers(bob.id, number)
    await bob.provider.until(len(numbers))
    for number in numbers:
        await bob.says(DelegationRole.PROVIDER, alice.id, number, accept(number), status(number, 1))
        await alice.says(DelegationRole.REQUESTER, bob.id, number, cancel(number))
    await alice.delivered()
    for number in numbers:
        await bob.says(DelegationRole.PROVIDER, alice.id, number, result(number), transitions=("result_completed",))
    await bob.delivered()
