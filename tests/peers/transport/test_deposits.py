"""What is left at a relay is not delivered: it waits in the ledger until the recipient says that it has it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covenant.ledger.machine.peer_commands import LearnPeer, SendToPeer
from covenant.model.peers.delegation import DelegationKey, DelegationRole
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.peers.transport.inbox import ALL_LOOK_UPS_PER_MIN
from covenant.seal.envelope import RELAYED_LIFE_MS_MAX
from covenant.seal.identity import ENVELOPE_LIFE_MS_MAX, sign_change
from covenant.seal.keys import from_base64url, new_private_key
from covenant.wire.peers import ACKS, Ack, DeliveryAcks, encode
from tests.ledger_contract.samples import OPERATOR
from tests.outbound.http_servers import Answer, Request, Served, always, http_server, reply
from tests.peers.transport_under_test import (
    QUICK,
    Keys,
    TransportUnderTest,
    accept,
    begun,
    cancel,
    delivering,
    offer_id,
    result,
    said,
    status,
    transport_under_test,
)
from tests.waits import BOUND_S

KEPT_MS = 3_600_000


@pytest.fixture
async def bob(tmp_path: Path) -> AsyncIterator[TransportUnderTest]:
    async with transport_under_test(tmp_path / "bob") as opened:
        yield opened


class Deposits:
    """A relay that keeps what comes."""

    def __init__(self) -> None:
        self.headers: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.came = asyncio.Event()

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        header = json.loads(from_base64url(json.loads(request.body)["protected"]))
        self.headers.append(header)
        self.paths.append(request.target)
        self.came.set()
        writer.write(reply(200, json.dumps({"status": "relayed", "untilMs": header["iat"] + KEPT_MS}).encode()))

    async def count(self, number: int) -> None:
        async with asyncio.timeout(BOUND_S):
            while len(self.headers) < number:
                self.came.clear()
                await self.came.wait()


@asynccontextmanager
async def alice_with(folder: Path, relay: Served) -> AsyncIterator[TransportUnderTest]:
    settings = replace(QUICK, relay=f"relay={relay.url()}")
    async with transport_under_test(folder / "alice", settings=settings) as opened:
        yield opened


@asynccontextmanager
async def depositing(folder: Path, answer: Answer) -> AsyncIterator[TransportUnderTest]:
    async with http_server(answer) as relay, alice_with(folder, relay) as alice:
        yield alice


async def noted(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    """The relay's answer has been heard."""
    async with asyncio.timeout(BOUND_S):
        while not alice.outbox._deliveries[bob.id].deposits:  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0)


def acks(bob: TransportUnderTest, alice: TransportUnderTest, number: int, seq: int) -> bytes:
    said = DeliveryAcks(acks=(Ack(role=DelegationRole.REQUESTER, offer_id=offer_id(number), seq=seq),))
    prekey = alice.prekey()
    return bob.keyring.seal(encode(said), typ=ACKS, to=alice.id, prekey=prekey, now_ms=bob.clock(), relayed=True)


async def test_a_message_waits_until_its_recipient_says_that_it_has_it(tmp_path: Path, bob: TransportUnderTest) -> None:
    relay = Deposits()
    async with depositing(tmp_path, relay) as alice:
        await alice.knows(bob, url=None)
        async with delivering(alice):
            await alice.offers(bob.id, 1, cancel(1))
            await relay.count(2)
            assert [header["seq"] for header in relay.headers] == [1, 2]
            assert relay.paths == [f"/relay/{bob.id}/api/v1/a2a/receive"] * 2
            lives = {header["exp"] - header["iat"] for header in relay.headers}
            assert lives == {RELAYED_LIFE_MS_MAX}
            assert len(await alice.ledger.peer_outbox(bob.id)) == 2
            await alice.inbox.receive_fetched(acks(bob, alice, 1, 1), relayed=True)
            assert [each.seq for each in await alice.ledger.peer_outbox(bob.id)] == [2]
            await alice.inbox.receive_fetched(acks(bob, alice, 1, 2), relayed=True)
            await alice.delivered()
        assert len(relay.headers) == 2


async def test_while_the_relay_keeps_a_message_the_latest_status_waits_and_nothing_else_does(
    tmp_path: Path, bob: TransportUnderTest
) -> None:
    """Otherwise an agent that works for long fills the relay while its requester is away."""
    relay, of = Deposits(), DelegationKey(DelegationRole.PROVIDER, bob.id, offer_id(1))
    async with depositing(tmp_path, relay) as alice:
        await alice.knows(bob, url=None)
        await alice.ledger.commit(
            SendToPeer(
                key=of,
                begin=begun(DelegationRole.PROVIDER, bob.id, 1),
                transitions=("offer", "accept", "start"),
                messages=(said(accept(1)),),
            )
        )
        async with delivering(alice):
            await relay.count(1)
            await noted(alice, bob)
            for number in (1, 2, 3):
                await alice.ledger.commit(SendToPeer(key=of, messages=(said(status(1, number), latest=True),)))
            await alice.offers(bob.id, 2)
            await relay.count(2)
            waits = [each for each in await alice.ledger.peer_outbox(bob.id) if each.delegation == of]
            assert [each.seq for each in waits] == [1, 2]
            assert bytes(waits[1].body) == encode(status(1, 3))
            said_so = DeliveryAcks(acks=(Ack(role=DelegationRole.PROVIDER, offer_id=offer_id(1), seq=1),))
            acked = bob.keyring.seal(
                encode(said_so), typ=ACKS, to=alice.id, prekey=alice.prekey(), now_ms=bob.clock(), relayed=True
            )
            await alice.inbox.receive_fetched(acked, relayed=True)
            await relay.count(3)
            await noted(alice, bob)
            await alice.ledger.commit(SendToPeer(key=of, messages=(said(result(1)),)))
            await relay.count(4)
        sent = [(header["typ"].removeprefix("delegation_"), header["seq"]) for header in relay.headers]
        assert sent == [("accept", 1), ("offer", 1), ("status", 2), ("result", 3)]


async def test_what_the_relay_keeps_no_longer_is_left_there_again(tmp_path: Path, bob: TransportUnderTest) -> None:
    relay = Deposits()
    async with depositing(tmp_path, relay) as alice:
        await alice.knows(bob, url=None)
        async with delivering(alice):
            await alice.offers(bob.id, 1)
            await relay.count(1)
            alice.clock.ahead_ms += KEPT_MS - 60_000
            await alice.offers(bob.id, 2)
            await relay.count(2)
            alice.clock.ahead_ms += 60_001
            await alice.offers(bob.id, 3)
            await relay.count(4)
        first, _, *later = relay.headers
        assert first["jti"] not in {header["jti"] for header in later}
        assert len(await alice.ledger.peer_outbox(bob.id)) == 3


async def test_one_that_is_heard_from_and_does_not_have_it_is_sent_it_again(
    tmp_path: Path, bob: TransportUnderTest
) -> None:
    relay = Deposits()
    async with depositing(tmp_path, relay) as alice:
        await alice.knows(bob, url=None)
        await bob.knows(alice, url=None)
        async with delivering(alice):
            await alice.offers(bob.id, 1)
            await relay.count(1)
            await noted(alice, bob)
            alice.clock.ahead_ms += 60_001
            bob.clock.ahead_ms += 60_001
            await alice.inbox.receive_fetched(acks(bob, alice, 9, 1), relayed=True)
            await relay.count(2)
        assert [header["seq"] for header in relay.headers] == [1, 1]


async def test_one_that_was_heard_from_before_and_does_not_have_it_is_sent_it_again(
    tmp_path: Path, bob: TransportUnderTest
) -> None:
    """It may have refused the message, since it did not know our new identity then."""
    relay = Deposits()
    async with depositing(tmp_path, relay) as alice:
        await alice.knows(bob, url=None)
        await bob.knows(alice, url=None)
        async with delivering(alice):
            await alice.offers(bob.id, 1)
            await relay.count(1)
            await noted(alice, bob)
            await alice.inbox.receive_fetched(acks(bob, alice, 9, 1), relayed=True)
            heard = alice.ledger.peer(bob.id)
            async with asyncio.timeout(BOUND_S):
                while heard is None or alice.outbox._deliveries[bob.id].heard_at_ms != heard.heard_at_ms:  # noqa: ASYNC110
                    await asyncio.sleep(0)  # nothing tells of it
            alice.clock.ahead_ms += 60_001
            await alice.offers(bob.id, 2)
            await relay.count(3)
    assert [header["seq"] for header in relay.headers] == [1, 1, 1]


async def test_an_own_address_cannot_say_that_it_is_a_relay(tmp_path: Path, bob: TransportUnderTest) -> None:
    said = reply(200, json.dumps({"status": "relayed", "untilMs": 2**53}).encode())
    async with http_server(always(said)) as there, depositing(tmp_path, Deposits()) as alice:
        await alice.knows(bob, url=there.url())
        async with delivering(alice):
            await alice.offers(bob.id, 1)
            await alice.until_parcels(bob.id, lambda messages: "bad_response" in (messages[0].failure or ""))


async def test_a_peer_at_whose_address_nobody_answers_finds_its_messages_at_the_relay(
    tmp_path: Path, bob: TransportUnderTest
) -> None:
    relay = Deposits()
    async with depositing(tmp_path, relay) as alice:
        await alice.knows(bob, url="http://127.0.0.1:1")
        async with delivering(alice):
            await alice.offers(bob.id, 1)
            await relay.count(1)
        assert len(await alice.ledger.peer_outbox(bob.id)) == 1


async def test_only_what_was_fetched_from_a_relay_may_live_for_a_day(tmp_path: Path, bob: TransportUnderTest) -> None:
    async with depositing(tmp_path, Deposits()) as alice:
        await alice.knows(bob, url=None)
        envelope = acks(bob, alice, 1, 1)
        with pytest.raises(Exception, match=f"lives {ENVELOPE_LIFE_MS_MAX} ms at most"):
            await alice.inbox.receive(envelope, None)
        await alice.inbox.receive_fetched(envelope, relayed=True)
        with pytest.raises(Exception, match="was received before"):
            await alice.inbox.receive_fetched(envelope, relayed=True)


async def test_an_envelope_of_a_void_key_is_refused_also_if_it_was_relayed(
    tmp_path: Path, bob: TransportUnderTest
) -> None:
    async with depositing(tmp_path, Deposits()) as alice:
        peer = await alice.knows(bob, url=None)
        await alice.ledger.commit(LearnPeer(id=peer.id, by=OPERATOR, void_before_ms=bob.clock() + 60_000))
        prekey = alice.prekey()
        body = encode(DeliveryAcks(acks=(Ack(role=DelegationRole.REQUESTER, offer_id=offer_id(1), seq=1),)))
        sealed = bob.keyring.seal(
            body, typ=ACKS, to=alice.id, prekey=prekey, now_ms=bob.clock(), relayed=True, certified=True
        )
        with pytest.raises(Exception, match="has declared this key void"):
            await alice.inbox.receive_fetched(sealed, relayed=True)


async def test_a_stranger_that_writes_much_keeps_nobody_from_being_followed_to_a_new_identity(
    tmp_path: Path, bob: TransportUnderTest
) -> None:
    old, anew = Keys(), Keys()
    anew.change = sign_change(old.private_key, anew.private_key, bob.clock())

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        known = bytes(shown) if f"/relay/{alice.id}/" in request.target else None
        writer.write(reply(404) if known is None else reply(200, known))

    async with (
        http_server(answer) as relay,
        transport_under_test(tmp_path / "alice", anew) as alice,
        transport_under_test(tmp_path / "before", old) as before,
        transport_under_test(tmp_path / "mallory") as mallory,
        transport_under_test(tmp_path / "carl", settings=replace(QUICK, relay=f"relay={relay.url()}")) as carl,
    ):
        shown = encode(alice.keyring.introduction(alice.clock()))
        await carl.knows(before, url=None)
        for _ in range(50):
            assert not await carl.inbox.follow_sender(mallory.sealed(cancel(1), carl, seq=1))
        assert len(relay.requests) < 50
        assert await carl.inbox.follow_sender(alice.sealed(cancel(1), carl, seq=1))
        assert [peer.id for peer in carl.ledger.peers()] == [alice.id]


async def test_a_relay_that_makes_up_senders_has_a_bounded_number_of_them_looked_up(tmp_path: Path) -> None:
    async with (
        http_server(always(reply(404))) as relay,
        transport_under_test(tmp_path / "carl", settings=replace(QUICK, relay=f"relay={relay.url()}")) as carl,
    ):
        prekey = carl.prekey()
        for _ in range(ALL_LOOK_UPS_PER_MIN + 10):
            made_up, now_ms = InstanceKeys(new_private_key(), (), lambda _: None), carl.clock()
            body = made_up.seal(
                encode(cancel(1)), typ="delegation_cancel", to=carl.id, prekey=prekey, now_ms=now_ms, seq=1
            )
            assert not await carl.inbox.follow_sender(body)
        assert len(relay.requests) == ALL_LOOK_UPS_PER_MIN
