"""Peers that cannot be reached fetch what there is for them: sealed, in order, and until they say that they have it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from covenant.ledger.machine.peer_commands import ChangePeer, SendToPeer
from covenant.model.peers.delegation import DelegationKey, DelegationRole
from covenant.model.peers.instance import KeyBundle, Trust
from covenant.peers.peer_settings import PeerSettings
from covenant.wire import peers as polling
from covenant.wire.peers import Ack, Poll
from tests.ledger_contract.samples import OPERATOR
from tests.outbound.http_servers import Request, always, http_server, reply
from tests.peers.transport_under_test import (
    TransportUnderTest,
    accept,
    begun,
    cancel,
    delivering,
    listening,
    offer,
    offer_id,
    refused,
    result,
    said,
    status,
    transport_under_test,
)
from tests.waits import BOUND_S

FETCHING = PeerSettings(retry_first_ms=10, retry_max_ms=50, poll_wait_ms=30_000, poll=("*",))
LONG_MS = 30_000


@pytest.fixture
async def alice(tmp_path: Path) -> AsyncIterator[TransportUnderTest]:
    """Can be reached."""
    async with transport_under_test(tmp_path / "alice") as opened, listening(opened):
        yield opened


@pytest.fixture
async def bob(tmp_path: Path, alice: TransportUnderTest) -> AsyncIterator[TransportUnderTest]:
    """Cannot be reached, and fetches from everybody that can."""
    async with transport_under_test(tmp_path / "bob", settings=FETCHING) as opened:
        await opened.knows(alice)
        await alice.knows(opened, url=None)
        yield opened


def poll(
    by: TransportUnderTest,
    of: TransportUnderTest,
    *acks: Ack,
    wait_ms: int = 0,
    most: int = 50,
    keys: KeyBundle | None = None,
) -> bytes:
    asked = Poll(keys=keys or by.keyring.bundle(by.clock()), acks=acks, wait_ms=wait_ms, max=most)
    return by.keyring.seal(polling.encode(asked), typ=polling.POLL, to=of.id, prekey=of.prekey(), now_ms=by.clock())


async def fetch(
    by: TransportUnderTest, of: TransportUnderTest, *acks: Ack, wait_ms: int = 0, most: int = 50
) -> list[bytes]:
    polled = await of.inbox.poll(poll(by, of, *acks, wait_ms=wait_ms, most=most), None)
    return [bytes(each) for each in polled.envelopes]


def heard_from(who: TransportUnderTest, at: TransportUnderTest) -> int:
    known = at.ledger.peer(who.id)
    assert known is not None
    return known.heard_at_ms


async def test_what_is_said_is_fetched_and_acknowledged(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    async with delivering(bob), delivering(alice):
        for number in (1, 2, 3):
            await alice.offers(bob.id, number, cancel(number))
        await alice.delivered()
    heard = [(named, seq) for _, named, seq in bob.provider.heard]
    assert sorted(heard) == [(offer_id(number), seq) for number in (1, 2, 3) for seq in (1, 2)]
    assert [heard.index((offer_id(n), 1)) < heard.index((offer_id(n), 2)) for n in (1, 2, 3)] == [True] * 3


async def test_a_whole_delegation_goes_by_one_reachable_side(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    """Alice offers, and cannot call bob; bob can call her, and does both."""
    async with delivering(bob), delivering(alice):
        await alice.offers(bob.id)
        await bob.provider.until(1)
        await bob.says(
            DelegationRole.PROVIDER, alice.id, 1, accept(), status(1, 1), result(), transitions=("result_completed",)
        )
        await alice.requester.until(3)
        await bob.delivered()
        await alice.delivered()
    assert [seq for *_, seq in alice.requester.heard] == [1, 2, 3]


async def test_what_was_handed_out_waits_until_it_is_acknowledged(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    await alice.offers(bob.id, 1, cancel(1))
    first, again = await fetch(bob, alice), await fetch(bob, alice)
    assert len(first) == len(again) == 2
    assert not set(first) & set(again), "each time sealed anew"
    acks = [(await bob.inbox.receive_fetched(each)).ack for each in again]
    assert acks == [Ack(role=DelegationRole.REQUESTER, offer_id=offer_id(1), seq=seq) for seq in (1, 2)]
    for each in first:
        assert (await bob.inbox.receive_fetched(each)).ack is not None, "what comes twice is acknowledged twice"
    assert [seq for *_, seq in bob.provider.heard] == [1, 2]
    assert len(await alice.ledger.peer_outbox(bob.id)) == 2
    assert acks[0] is not None
    assert len(await fetch(bob, alice, acks[0])) == 1
    assert acks[1] is not None
    assert await fetch(bob, alice, acks[1], acks[0]) == []
    assert not await alice.ledger.addressees()


async def test_a_lost_answer_loses_nothing_and_doubles_nothing(tmp_path: Path, alice: TransportUnderTest) -> None:
    """Between the two stands somebody who drops every answer at first."""
    lost = [True, True, True]

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", alice.keys.port)

        async def up() -> None:
            while piece := await reader.read(65_536):
                back.write(piece)

        async def down() -> None:
            while piece := await there.read(65_536):
                if lost and b'"envelopes":[{' in piece:
                    lost.pop()
                    return
                writer.write(piece)

        tasks = [asyncio.create_task(up()), asyncio.create_task(down())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            writer.close()
            back.close()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, transport_under_test(tmp_path / "bob", settings=FETCHING) as bob:
        await bob.knows(alice, url=f"http://127.0.0.1:{port}")
        await alice.knows(bob, url=None)
        async with delivering(bob):
            await alice.offers(bob.id, 1, cancel(1))
            await alice.delivered()
    assert not lost
    assert [seq for *_, seq in bob.provider.heard] == [1, 2]


async def test_a_poll_waits_until_there_is_something(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    waiting = asyncio.create_task(fetch(bob, alice, wait_ms=LONG_MS))
    await alice.until(lambda: heard_from(bob, alice))
    await alice.offers(bob.id)
    assert len(await asyncio.wait_for(waiting, BOUND_S)) == 1


async def test_a_poll_that_nobody_answers_ends_with_its_time(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    assert await asyncio.wait_for(fetch(bob, alice, wait_ms=1), BOUND_S) == []


async def test_the_next_poll_ends_the_one_before(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    first = asyncio.create_task(fetch(bob, alice, wait_ms=LONG_MS))
    await alice.until(lambda: heard_from(bob, alice))
    second = asyncio.create_task(fetch(bob, alice, wait_ms=LONG_MS))
    assert await asyncio.wait_for(first, BOUND_S) == []
    alice.inbox.close()
    assert await asyncio.wait_for(second, BOUND_S) == [], "a stop answers those who wait"


async def test_a_replayed_poll_gives_nothing(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    await alice.offers(bob.id)
    envelope = poll(bob, alice)
    assert len((await alice.inbox.poll(envelope, None)).envelopes) == 1
    refusal = await refused(alice.inbox.poll(envelope, None))
    assert (refusal.status, refusal.code) == (409, "replayed")


async def test_a_poll_with_somebody_elses_keys_is_refused(
    alice: TransportUnderTest, bob: TransportUnderTest, tmp_path: Path
) -> None:
    async with transport_under_test(tmp_path / "mallory") as mallory:
        stolen = mallory.keyring.bundle(mallory.clock())
        forged = msgspec.structs.replace(stolen, id=bob.id)
        for keys in (stolen, forged):
            refusal = await refused(alice.inbox.poll(poll(bob, alice, keys=keys), None))
            assert (refusal.status, refusal.code) == (400, "bad_keys")
    assert not heard_from(bob, alice)


async def test_only_whoever_it_is_for_is_handed_anything(
    alice: TransportUnderTest, bob: TransportUnderTest, tmp_path: Path
) -> None:
    await alice.offers(bob.id)
    async with transport_under_test(tmp_path / "carol") as carol:
        await alice.knows(carol, url=None)
        assert await fetch(carol, alice) == []
        acks = (Ack(role=DelegationRole.REQUESTER, offer_id=offer_id(1), seq=9),)
        assert await fetch(carol, alice, *acks) == []
    assert len(await alice.ledger.peer_outbox(bob.id)) == 1, "nobody acknowledges for another"


async def test_keys_that_a_poll_brings_are_learned(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    alice.clock.ahead_ms = bob.clock.ahead_ms = 50 * 3_600_000
    bob.keyring.rotate(bob.clock())
    alice.keyring.rotate(alice.clock())
    await fetch(bob, alice)
    known = alice.ledger.peer(bob.id)
    assert known is not None
    assert known.keys == bob.keyring.bundle(bob.clock())


async def test_an_answer_is_bounded_in_number_and_size(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    for number in range(1, 12):
        await alice.offers(bob.id, number)
    assert len(await fetch(bob, alice, most=4)) == 4
    for number in range(12, 18):
        await alice.offers(bob.id, number, task="x" * 50_000)
    assert len(await fetch(bob, alice)) == 17
    large = "y" * 2_500_000
    await alice.inbox.receive(bob.sealed(offer(50), alice, seq=1), None)
    await alice.inbox.receive(bob.sealed(offer(51), alice, seq=1), None)
    for number in (50, 51):
        await alice.says(
            DelegationRole.PROVIDER, bob.id, number, result(number, large), transitions=("result_completed",)
        )
    sizes = [len(each) for each in await fetch(bob, alice)]
    assert len(sizes) == 18
    assert sum(sizes) < 5_000_000


async def test_what_is_larger_than_an_answer_comes_alone(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    await alice.inbox.receive(bob.sealed(offer(50), alice, seq=1), None)
    large = "é" * 3_900_000
    await alice.says(DelegationRole.PROVIDER, bob.id, 50, result(50, large), transitions=("result_completed",))
    await bob.offers(alice.id, 50)
    async with delivering(bob):
        await bob.requester.until(1)
        await alice.delivered()


async def test_what_a_peer_cannot_take_holds_up_nothing_else(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    """As many as an answer may have are of delegations that bob knows nothing of, and he does not trust alice yet."""
    await bob.ledger.commit(ChangePeer(id=alice.id, by=OPERATOR, trust=Trust.PEER))
    for number in range(1, polling.ENVELOPES_MAX + 11):
        key = DelegationKey(DelegationRole.REQUESTER, bob.id, offer_id(number))
        begin = begun(DelegationRole.REQUESTER, bob.id, number)
        await alice.ledger.commit(
            SendToPeer(key=key, begin=begin, transitions=("offer",), messages=(said(cancel(number)),))
        )
    await alice.offers(bob.id, 500)
    async with delivering(bob):
        await alice.until_parcels(bob.id, lambda messages: offer_id(500) not in {each.offer_id for each in messages})
        assert bob.outbox.troubles()[0].failure.startswith("untrusted")
        await bob.ledger.commit(ChangePeer(id=alice.id, by=OPERATOR, trust=Trust.VERIFIED))
        await alice.delivered()


async def test_a_question_is_asked_and_answered_by_way_of_a_poll(tmp_path: Path, alice: TransportUnderTest) -> None:
    async with transport_under_test(tmp_path / "bob", settings=FETCHING) as bob:
        await bob.knows(alice)
        peer = await alice.knows(bob, url=None, trust=Trust.PEER, keys=False)
        await alice.directory.verify(peer)
        async with delivering(bob):
            await alice.until(lambda: alice.ledger.peer(bob.id).trust is Trust.VERIFIED)  # type: ignore[union-attr]


async def test_a_mere_peer_fetches_what_was_said_to_it(tmp_path: Path, alice: TransportUnderTest) -> None:
    async with transport_under_test(tmp_path / "bob", settings=FETCHING) as bob:
        await bob.knows(alice)
        await alice.knows(bob, url=None, trust=Trust.PEER)
        assert await fetch(bob, alice) == []
        await alice.offers(bob.id)
        assert len(await fetch(bob, alice)) == 1


async def test_one_that_is_denied_while_it_waits_is_handed_nothing(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    waiting = asyncio.create_task(fetch(bob, alice, wait_ms=1_000))
    await alice.until(lambda: heard_from(bob, alice))
    await alice.ledger.commit(ChangePeer(id=bob.id, by=OPERATOR, denied=True))
    await alice.offers(bob.id)
    assert await asyncio.wait_for(waiting, BOUND_S) == []


async def test_a_peer_that_does_not_answer_is_polled_again_and_shown(tmp_path: Path, alice: TransportUnderTest) -> None:
    async with (
        transport_under_test(tmp_path / "bob", settings=FETCHING) as bob,
        http_server(always(reply(503))) as broken,
        delivering(bob),
    ):
        await bob.knows(alice, url=broken.url().rstrip("/"))
        await alice.knows(bob, url=None)
        await alice.offers(bob.id)
        async with asyncio.timeout(BOUND_S):
            while not bob.outbox.troubles() or bob.outbox.troubles()[0].attempts < 2:
                broken.asked.clear()
                await broken.asked.wait()
        assert bob.outbox.troubles()[0].failure == "http_503: HTTP 503"
        await bob.ledger.commit(ChangePeer(id=alice.id, by=OPERATOR, url=alice.url))
        await alice.delivered()


async def test_a_restart_of_either_side_between_handing_out_and_acknowledging_loses_nothing(tmp_path: Path) -> None:
    async with transport_under_test(tmp_path / "alice") as alice, transport_under_test(tmp_path / "bob") as bob:
        await alice.knows(bob, url=None)
        await bob.knows(alice)
        await alice.offers(bob.id, 1, cancel(1))
        envelopes = await fetch(bob, alice)
        await bob.inbox.receive_fetched(envelopes[0])
        keys = (alice.keys, bob.keys)
    async with (
        transport_under_test(tmp_path / "alice", keys[0]) as alice,
        listening(alice),
        transport_under_test(tmp_path / "bob", keys[1], settings=FETCHING) as bob,
    ):
        # The port is another one: alice did not listen before.
        await bob.ledger.commit(ChangePeer(id=alice.id, by=OPERATOR, url=alice.url))
        async with delivering(bob):
            await alice.delivered()
        assert [(typ, seq) for typ, _, seq in bob.provider.heard] == [("delegation_cancel", 2)]


@pytest.mark.parametrize("said", ["", f'{{"id": "{1:032x}", "envelope": {{}}}}'], ids=["nothing", "what is refused"])
async def test_a_peer_that_answers_at_once_with_nothing_to_take_is_not_asked_without_a_pause(
    tmp_path: Path, alice: TransportUnderTest, said: str
) -> None:
    came = asyncio.Semaphore(0)

    async def at_once(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(200, b'{"envelopes": [], "relayed": [%s]}' % said.encode()))
        came.release()

    async with http_server(at_once) as served:
        settings = replace(FETCHING, retry_first_ms=100, relay=f"relay={served.url()}", poll=())
        async with transport_under_test(tmp_path / "carl", settings=settings) as carl:
            await carl.knows(alice, url=served.url().rstrip("/"))
            async with delivering(carl):
                loop = asyncio.get_running_loop()
                await came.acquire()
                began = loop.time()
                for _ in range(4):
                    await asyncio.wait_for(came.acquire(), BOUND_S)
                assert loop.time() - began >= 3 * 0.1


async def test_a_relay_that_had_an_envelope_is_asked_again_without_a_pause(
    tmp_path: Path, alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    asked = asyncio.Semaphore(0)
    waiting: list[bytes] = []

    async def hand_out(_: Request, writer: asyncio.StreamWriter) -> None:
        relayed = b",".join(b'{"id": "%032x", "envelope": %b}' % (1, waiting.pop()) for _ in waiting[:1])
        writer.write(reply(200, b'{"envelopes": [], "relayed": [%b]}' % relayed))
        asked.release()

    async with http_server(hand_out) as served:
        never_ms = int(10_000 * BOUND_S)
        settings = replace(FETCHING, retry_first_ms=never_ms, relay=f"relay={served.url()}", poll=())
        async with transport_under_test(tmp_path / "carl", settings=settings) as carl:
            await carl.knows(bob, url=None)
            ack = Ack(role=DelegationRole.REQUESTER, offer_id=offer_id(1), seq=1)
            told = polling.encode(polling.DeliveryAcks(acks=(ack,)))
            waiting.append(
                bob.keyring.seal(told, typ=polling.ACKS, to=carl.id, prekey=carl.prekey(), now_ms=bob.clock())
            )
            await carl.knows(alice, url=served.url().rstrip("/"))
            async with delivering(carl):
                for _ in range(2):
                    await asyncio.wait_for(asked.acquire(), BOUND_S)
