"""What was said to peers reaches them: in order, once, over real sockets, whatever happens in between."""

import asyncio
import errno
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.ledger.machine.peer_commands import ChangePeer, ReceiveFromPeer, SendToPeer
from covenant.model.peers.delegation import DelegationKey, DelegationRole, ReceivedEnvelope
from covenant.model.peers.instance import InstanceId, Trust
from covenant.peers.peer_settings import PeerSettings
from covenant.seal.envelope import receipt
from covenant.seal.identity import InstanceIdentity, sign_change
from tests.ledger_contract import fault_plans
from tests.ledger_contract.samples import OPERATOR
from tests.outbound.http_servers import Answer, Request, always, http_server, reply, silence
from tests.peers.transport_under_test import (
    QUICK,
    Keys,
    TransportUnderTest,
    accept,
    begun,
    cancel,
    delivering,
    listening,
    offer,
    offer_id,
    result,
    said,
    status,
    transport_under_test,
)
from tests.places import free_port
from tests.waits import BOUND_S

SOMEBODY = Keys()
SLOW = PeerSettings(retry_first_ms=600_000, retry_max_ms=600_000)


def taken(request: Request) -> bytes:
    """As the peer itself would say it."""
    signed = receipt(InstanceIdentity(SOMEBODY.private_key), request.body)
    return reply(200, json.dumps({"status": "accepted", "receipt": signed}).encode())


def taking(*, close: bool = False) -> Answer:
    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(taken(request))
        if close:
            writer.close()

    return speak


@pytest.fixture
async def alice(tmp_path: Path) -> AsyncIterator[TransportUnderTest]:
    async with transport_under_test(tmp_path / "alice") as opened:
        yield opened


@pytest.fixture
async def bob(tmp_path: Path) -> AsyncIterator[TransportUnderTest]:
    async with transport_under_test(tmp_path / "bob") as opened:
        yield opened


async def acquaint(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    """Alice can reach bob, and he takes what she sends."""
    await alice.knows(bob)
    await bob.knows(alice, url=None)


async def test_what_is_said_of_a_delegation_arrives_in_its_order(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    async with listening(bob), delivering(alice):
        await acquaint(alice, bob)
        for number in range(1, 6):
            await alice.offers(bob.id, number, cancel(number))
        await alice.delivered()
    for number in range(1, 6):
        of_one = [(typ, seq) for typ, named, seq in bob.provider.heard if named == offer_id(number)]
        assert of_one == [("delegation_offer", 1), ("delegation_cancel", 2)]
    assert not alice.outbox.troubles()
    assert [line.direction for line in await alice.ledger.message_log()] == ["sent"] * 10


async def test_a_stop_before_the_first_step_of_a_run_ends_it(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    await acquaint(alice, bob)
    for _ in range(2):
        running = asyncio.create_task(alice.outbox.run())
        await alice.outbox.stop()
        await asyncio.wait_for(running, BOUND_S)
    await alice.offers(bob.id)
    async with listening(bob), delivering(alice):
        await bob.provider.until(1)


async def test_two_instances_talk_to_each_other(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    async with listening(alice), listening(bob), delivering(alice), delivering(bob):
        await alice.knows(bob)
        await bob.knows(alice)
        await alice.offers(bob.id)
        await bob.provider.until(1)
        await bob.says(DelegationRole.PROVIDER, alice.id, 1, accept(), status(1, 1), status(1, 2))
        await bob.says(DelegationRole.PROVIDER, alice.id, 1, result(), transitions=("result_completed",))
        await alice.requester.until(4)
        await bob.delivered()
    assert [seq for *_, seq in alice.requester.heard] == [1, 2, 3, 4]
    (delegation,) = await alice.ledger.delegations()
    assert (delegation.state, delegation.received_seq) == ("completed", 4)


async def test_what_is_delivered_is_not_sent_again_and_what_is_under_way_not_twice_at_once(
    alice: TransportUnderTest,
) -> None:
    """Of one delegation one at a time, of several as many as may be."""
    under_way, most = 0, 0
    enough, go = asyncio.Event(), asyncio.Event()

    async def slow(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == QUICK.deliveries_per_peer:
            enough.set()
        await go.wait()
        under_way -= 1
        writer.write(taken(request))

    async with http_server(slow) as served:
        peer = await _somebody_at(alice, served.url())
        for number in range(1, 8):
            await alice.offers(peer, number, cancel(number))
        async with delivering(alice):
            await asyncio.wait_for(enough.wait(), BOUND_S)
            assert most == QUICK.deliveries_per_peer
            go.set()
            await alice.delivered()
        assert len(served.requests) == 14
        assert most == QUICK.deliveries_per_peer
        assert served.connections <= 2 * QUICK.deliveries_per_peer, "connections are kept between messages"


async def test_a_peer_that_is_away_gets_everything_once_it_is_back(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    async with listening(bob):
        pass
    await acquaint(alice, bob)
    async with delivering(alice):
        await alice.offers(bob.id, 1, cancel(1))
        await alice.until_parcels(bob.id, lambda messages: any(each.attempts >= 3 for each in messages))
        (trouble,) = alice.outbox.troubles()
        assert trouble.peer == bob.id
        assert trouble.failure.startswith("connect_failed")
        assert (await alice.ledger.peer_outbox(bob.id))[0].failure == trouble.failure
        async with listening(bob):
            await alice.delivered()
    assert [seq for *_, seq in bob.provider.heard] == [1, 2]


async def test_nobody_waits_for_a_peer_that_is_away(
    alice: TransportUnderTest, bob: TransportUnderTest, tmp_path: Path
) -> None:
    async with transport_under_test(tmp_path / "carol") as carol, listening(carol), delivering(alice):
        async with listening(bob):
            pass
        await acquaint(alice, bob)
        await acquaint(alice, carol)
        await alice.offers(bob.id, 1)
        await alice.until_parcels(bob.id, lambda messages: messages[0].attempts)
        await alice.offers(carol.id, 2)
        await alice.until_addressees(lambda waiting: waiting == (bob.id,))


async def test_a_peer_that_is_heard_of_again_is_tried_at_once(tmp_path: Path, bob: TransportUnderTest) -> None:
    async with listening(bob):
        pass
    slow = PeerSettings(retry_first_ms=600_000, retry_max_ms=3_600_000)
    async with transport_under_test(tmp_path / "alice", settings=slow, clock=bob.clock) as alice, delivering(alice):
        await acquaint(alice, bob)
        await alice.offers(bob.id, 1)
        await alice.until(lambda: alice.outbox.troubles() and alice.outbox.troubles()[0].attempts == 1)
        bob.clock.ahead_ms += 601_000
        await alice.offers(bob.id, 2)
        await alice.until(lambda: alice.outbox.troubles()[0].attempts == 2)
        assert alice.outbox.troubles()[0].next_ms > alice.clock() + 1_000_000, "twenty minutes from now"
        async with listening(bob):
            bob.clock.ahead_ms += 601_000
            assert len(await alice.ledger.peer_outbox(bob.id)) == 2
            jti, until_ms = "proof-of-life", alice.clock() + 300_000
            heard = ReceivedEnvelope(sender=bob.id, jti=jti, typ="capability_response", until_ms=until_ms)
            await alice.ledger.commit(ReceiveFromPeer(envelope=heard))
            await alice.delivered()


async def test_an_address_that_was_mended_is_tried_at_once(tmp_path: Path, bob: TransportUnderTest) -> None:
    async with (
        transport_under_test(tmp_path / "alice", settings=SLOW) as alice,
        listening(bob),
        http_server(always(reply(500))) as broken,
        delivering(alice),
    ):
        await alice.knows(bob, url=broken.url().rstrip("/"))
        await bob.knows(alice, url=None)
        await alice.offers(bob.id)
        await alice.until_parcels(bob.id, lambda messages: messages[0].attempts)
        assert (await alice.ledger.peer_outbox(bob.id))[0].failure == "http_500: HTTP 500"
        await alice.ledger.commit(ChangePeer(id=bob.id, by=OPERATOR, url=bob.url))
        await alice.delivered()


async def test_what_an_earlier_run_left_is_delivered_by_the_next(tmp_path: Path, bob: TransportUnderTest) -> None:
    async with listening(bob):
        pass
    async with transport_under_test(tmp_path / "alice") as alice:
        await acquaint(alice, bob)
        await alice.offers(bob.id, 1, cancel(1))
        async with delivering(alice):
            await alice.until_parcels(bob.id, lambda messages: messages[0].attempts)
        keys = alice.keys
    async with transport_under_test(tmp_path / "alice", keys) as alice, listening(bob), delivering(alice):
        assert (await alice.ledger.peer_outbox(bob.id))[0].attempts
        await alice.delivered()
    assert [seq for *_, seq in bob.provider.heard] == [1, 2]


async def test_what_was_taken_and_not_written_down_is_sent_again_and_known(
    tmp_path: Path, bob: TransportUnderTest
) -> None:
    """As after a crash between the peer's answer and our record."""
    async with transport_under_test(tmp_path / "alice") as alice, listening(bob):
        await acquaint(alice, bob)
        await alice.offers(bob.id)
        (message,) = await alice.ledger.peer_outbox(bob.id)
        envelope = alice.keyring.seal(
            bytes(message.body), typ=message.typ, to=bob.id, prekey=bob.prekey(), now_ms=alice.clock(), seq=message.seq
        )
        await bob.inbox.receive(envelope, None)
        keys = alice.keys
    async with transport_under_test(tmp_path / "alice", keys) as alice, listening(bob), delivering(alice):
        await alice.delivered()
    assert [seq for *_, seq in bob.provider.heard] == [1]


async def test_a_receiver_that_begins_again_goes_on_where_it_was(tmp_path: Path, alice: TransportUnderTest) -> None:
    async with transport_under_test(tmp_path / "bob") as bob, listening(bob), delivering(alice):
        await acquaint(alice, bob)
        await alice.offers(bob.id)
        await alice.delivered()
        keys = bob.keys
    async with transport_under_test(tmp_path / "bob", keys) as bob, delivering(alice):
        await alice.says(DelegationRole.REQUESTER, bob.id, 1, cancel())
        async with listening(bob):
            await alice.delivered()
        assert [(typ, seq) for typ, _, seq in bob.provider.heard] == [("delegation_cancel", 2)]


async def test_keys_are_renewed_between_two_messages(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    async with listening(bob), delivering(alice):
        await acquaint(alice, bob)
        await alice.offers(bob.id)
        await alice.delivered()
        old = alice.ledger.peers()[0].keys
        alice.clock.ahead_ms = bob.clock.ahead_ms = 50 * 3_600_000
        bob.keyring.rotate(bob.clock())
        await alice.says(DelegationRole.REQUESTER, bob.id, 1, cancel())
        await alice.delivered()
        assert alice.ledger.peers()[0].keys != old
    assert [seq for *_, seq in bob.provider.heard] == [1, 2]


async def test_a_key_that_is_unknown_over_there_costs_one_more_try_and_no_wait(tmp_path: Path) -> None:
    async with transport_under_test(tmp_path / "alice", settings=SLOW) as alice, delivering(alice):
        async with transport_under_test(tmp_path / "bob") as bob, listening(bob):
            await acquaint(alice, bob)
        without_prekeys = Keys(bob.keys.private_key, [], bob.keys.port)
        async with transport_under_test(tmp_path / "bob", without_prekeys) as bob, listening(bob):
            await alice.offers(bob.id)
            await alice.delivered()
            assert [row["code"] for row in await bob.audit()] == ["unknown_prekey"]
            assert [seq for *_, seq in bob.provider.heard] == [1]


async def test_a_delegation_that_is_refused_holds_up_no_other(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    async with listening(bob), delivering(alice):
        await alice.knows(bob)
        await bob.knows(alice, url=None, trust=Trust.PEER)
        await alice.offers(bob.id, 1)
        await alice.delivered()
        # Bob never heard of this one, and takes a cancel of it from nobody that is not verified.
        unheard = DelegationKey(DelegationRole.REQUESTER, bob.id, offer_id(2))
        await alice.ledger.commit(
            SendToPeer(
                key=unheard,
                begin=begun(DelegationRole.REQUESTER, bob.id, 2),
                transitions=("offer",),
                messages=(said(cancel(2)),),
            )
        )
        await alice.until_parcels(bob.id, lambda messages: any(each.attempts >= 2 for each in messages))
        await alice.says(DelegationRole.REQUESTER, bob.id, 1, cancel(1))
        await alice.until_parcels(bob.id, lambda messages: {each.offer_id for each in messages} == {offer_id(2)})
        (trouble,) = alice.outbox.troubles()
        assert (trouble.offer_id, trouble.failure.partition(":")[0]) == (offer_id(2), "untrusted")
        # Once bob trusts alice it goes through by itself.
        await bob.ledger.commit(ChangePeer(id=alice.id, by=OPERATOR, trust=Trust.VERIFIED))
        await alice.delivered()


async def test_a_peer_that_knows_nothing_of_it_any_more_takes_it_as_new(
    tmp_path: Path, alice: TransportUnderTest
) -> None:
    """As when it was put back from an older backup."""
    async with delivering(alice):
        async with transport_under_test(tmp_path / "bob") as bob, listening(bob):
            await acquaint(alice, bob)
            await alice.offers(bob.id)
            await alice.delivered()
        async with transport_under_test(tmp_path / "older", bob.keys) as older, listening(older):
            await older.knows(alice, url=None)
            await alice.says(DelegationRole.REQUESTER, bob.id, 1, offer(), transitions=("offer",))
            await alice.delivered()
            assert older.provider.heard == [("delegation_offer", offer_id(1), 2)]


async def test_a_peer_that_asks_for_time_is_given_it(alice: TransportUnderTest) -> None:
    answers = [reply(429, b'{"error":"slow down","code":"rate_limited"}', retry_after="7")]

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0) if answers else taken(request))

    async with http_server(speak) as served, delivering(alice):
        peer = await _somebody_at(alice, served.url())
        await alice.offers(peer, 1)
        await alice.until_parcels(peer, lambda messages: messages[0].attempts)
        (trouble,) = alice.outbox.troubles()
        assert trouble.failure == "rate_limited: slow down"
        assert 6_000 < trouble.next_ms - alice.clock() <= 7_000
        await alice.offers(peer, 2)
        assert len(served.requests) == 1, "also when there is more to say"
        alice.clock.ahead_ms = 7_001
        await alice.offers(peer, 3)
        await alice.until(lambda: len(served.requests) >= 2)


@pytest.mark.parametrize("step_ms", [86_400_000, -86_400_000], ids=["forward", "back"])
async def test_a_clock_that_is_set_makes_no_pause_shorter_or_longer(alice: TransportUnderTest, step_ms: int) -> None:
    answers = [reply(429, b'{"error":"slow down","code":"rate_limited"}', retry_after="7")]

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0) if answers else taken(request))

    async with http_server(speak) as served, delivering(alice):
        peer = await _somebody_at(alice, served.url())
        await alice.offers(peer, 1)
        await alice.until_parcels(peer, lambda messages: messages[0].attempts)
        alice.clock.stepped_ms += step_ms
        await alice.offers(peer, 2)
        assert len(served.requests) == 1, "it has asked for seven seconds"
        alice.clock.ahead_ms += 7_001
        await alice.offers(peer, 3)
        await alice.until(lambda: len(served.requests) >= 2)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (reply(200, b"<html>welcome</html>"), "bad_response"),
        (reply(200, b'{"status":"ok"}'), "bad_response"),
        (reply(200, b"{}"), "bad_response"),
        (reply(302, location="http://127.0.0.1:1/"), "http_302"),
        (reply(404, b'{"error":"there is nothing at this path","code":"unknown_route"}'), "unknown_route"),
        (reply(400, b'{"error":"not accepted","code":"refused"}'), "refused"),
        (reply(200, b"x", content_encoding="gzip"), "bad_response"),
        (b"nonsense\r\n\r\n", "connection_lost"),
    ],
    ids=[
        "a web page",
        "another api",
        "nothing",
        "a redirect",
        "no peers there",
        "we are strangers",
        "compressed",
        "no http",
    ],
)
async def test_only_an_instance_that_says_so_has_taken_a_message(
    alice: TransportUnderTest, answer: bytes, failure: str
) -> None:
    async with http_server(always(answer, close=True)) as served, delivering(alice):
        peer = await _somebody_at(alice, served.url())
        await alice.offers(peer)
        await alice.until_parcels(peer, lambda messages: messages[0].attempts >= 2)
        (trouble,) = alice.outbox.troubles()
        assert (trouble.offer_id, trouble.failure.partition(":")[0]) == (None, failure)


@pytest.mark.parametrize("lost", [True, False], ids=["after a lost connection", "at once"])
async def test_a_number_that_the_peer_has_already_tells_of_a_lost_ledger_unless_it_was_sent_before(
    alice: TransportUnderTest, lost: bool
) -> None:
    """The peer that took the message may have died before its answer."""

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        if lost and len(served.requests) == 1:
            writer.close()
            return
        signed = receipt(InstanceIdentity(SOMEBODY.private_key), request.body)
        writer.write(reply(200, json.dumps({"status": "accepted", "duplicate": True, "receipt": signed}).encode()))

    async with http_server(speak) as served, delivering(alice):
        await alice.offers(await _somebody_at(alice, served.url()))
        await alice.delivered()
    assert len(served.requests) == (2 if lost else 1)
    assert len(await alice.audit("ledger_forgotten")) == (0 if lost else 1)


async def test_many_that_wait_for_a_peer_that_is_away_cost_one_try_at_a_time(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    async with listening(bob):
        pass
    await acquaint(alice, bob)
    for number in range(1, 101):
        await alice.offers(bob.id, number)
    async with delivering(alice):
        await alice.until(lambda: alice.outbox.troubles() and alice.outbox.troubles()[0].attempts >= 3)
        tried = sum(each.attempts for each in await alice.ledger.peer_outbox(bob.id))
        assert tried <= QUICK.deliveries_per_peer + alice.outbox.troubles()[0].attempts
        async with listening(bob):
            await alice.delivered()
    assert len(bob.provider.heard) == 100


async def test_nothing_is_sent_to_a_peer_without_an_address_or_one_that_is_denied(alice: TransportUnderTest) -> None:
    async with http_server(taking()) as served, delivering(alice):
        peer = await _somebody_at(alice, served.url())
        await alice.ledger.commit(ChangePeer(id=peer, by=OPERATOR, denied=True))
        await alice.offers(peer, 1)
        await alice.ledger.commit(ChangePeer(id=peer, by=OPERATOR, denied=False, url=""))
        await alice.offers(peer, 2)
        assert not served.requests
        assert not alice.outbox.troubles()
        await alice.ledger.commit(ChangePeer(id=peer, by=OPERATOR, url=served.url().rstrip("/")))
        await alice.delivered()
        assert len(served.requests) == 2


async def test_a_stop_does_not_wait_for_a_peer_that_hangs(alice: TransportUnderTest) -> None:
    async with http_server(silence, port=free_port()) as served:
        peer = await _somebody_at(alice, served.url())
        await alice.offers(peer)
        async with delivering(alice):
            await asyncio.wait_for(served.asked.wait(), BOUND_S)
        (message,) = await alice.ledger.peer_outbox(peer)
        assert message.attempts == 0, "it has not waited until the attempt failed"
    async with http_server(taking(), port=served.port), delivering(alice):
        await alice.delivered()


@pytest.mark.parametrize("closed", ["after the answer", "at the next request"])
async def test_a_kept_connection_that_the_peer_closed_costs_no_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, closed: str
) -> None:
    """At the next request: the peer's idle time ends just as the request is under way, so nobody sees it coming."""
    caplog.set_level(logging.INFO)
    answered: set[asyncio.StreamWriter] = set()

    async def close_later(request: Request, writer: asyncio.StreamWriter) -> None:
        if writer not in answered:
            answered.add(writer)
            writer.write(taken(request))
        else:
            writer.close()

    async with (
        transport_under_test(tmp_path / "alice", settings=SLOW) as alice,
        http_server(close_later if closed == "at the next request" else taking(close=True)) as served,
        delivering(alice),
    ):
        peer = await _somebody_at(alice, served.url())
        for number in range(1, 6):
            await alice.offers(peer, number)
            await alice.delivered()
        assert len(served.requests) == (5 if closed == "after the answer" else 5 + 4)
        # A delivery that fails is logged with the pause before the next try: there was none.
        assert "outbox.failed" not in caplog.messages


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254",
        "http://224.0.0.1:8080",
        "http://0.0.0.0:8080",
        "http://127.0.0.1:25x",
        "http://nobody.example",
    ],
)
async def test_no_place_is_called_that_nobody_can_mean(alice: TransportUnderTest, url: str) -> None:
    async with delivering(alice):
        peer = await _somebody_at(alice, url)
        await alice.offers(peer)
        await alice.until_parcels(peer, lambda messages: messages[0].attempts)
        assert ((await alice.ledger.peer_outbox(peer))[0].failure or "").startswith("address_refused")


async def _somebody_at(alice: TransportUnderTest, url: str) -> InstanceId:
    """A peer whose keys are known, and for whom a script answers."""
    async with transport_under_test(alice.folder.parent / "somebody", SOMEBODY) as somebody:
        return (await alice.knows(somebody, url=url.rstrip("/"))).id


async def test_what_waited_for_a_peer_goes_to_its_new_identity(
    alice: TransportUnderTest, bob: TransportUnderTest, tmp_path: Path
) -> None:
    """The old key has named the new one, and whoever is asked at the old address says so."""
    old = bob.keys
    async with listening(bob):
        pass
    await acquaint(alice, bob)
    async with delivering(alice):
        await alice.offers(bob.id)
        await alice.until_parcels(bob.id, lambda messages: messages[0].attempts)
        anew = Keys(port=old.port)
        anew.change = sign_change(old.private_key, anew.private_key, alice.clock())
        async with transport_under_test(tmp_path / "anew", anew) as after, listening(after):
            await after.knows(alice, url=None)
            await alice.directory.refresh(alice.ledger.peers()[0])
            await alice.delivered()
            assert [seq for *_, seq in after.provider.heard] == [1]
            assert [peer.id for peer in alice.ledger.peers()] == [after.id]


async def test_what_cannot_be_written_down_any_more_is_not_delivered_again_and_again(tmp_path: Path) -> None:
    async with transport_under_test(tmp_path / "alice") as alice, http_server(taking(), port=free_port()) as served:
        peer = await _somebody_at(alice, served.url())
        for number in range(1, 101):
            await alice.offers(peer, number)
        keys = alice.keys
        plan = fault_plans.Plan("journal.sync", fault_plans.fail(errno.EIO))
        with fault_plans.armed(plan):
            await asyncio.wait_for(alice.outbox.run(), BOUND_S)
        assert plan.fired
        assert 1 <= len(served.requests) <= 100
    async with (
        transport_under_test(tmp_path / "alice", keys) as alice,
        http_server(taking(), port=served.port) as again,
    ):
        # What was being written when the disk failed may be there or not.
        left = len(await alice.ledger.peer_outbox(peer))
        assert left >= 100 - len(served.requests)
        async with delivering(alice):
            await alice.delivered()
        assert len(again.requests) == left


@pytest.mark.parametrize("said", [{}, {"receipt": "AAAA"}, {"receipt": "of another envelope"}])
async def test_what_somebody_on_the_way_says_was_taken_is_sent_again(
    alice: TransportUnderTest, said: dict[str, str]
) -> None:
    """He cannot sign for the peer, and a receipt for one envelope is none for another."""
    if said.get("receipt") == "of another envelope":
        said = {"receipt": receipt(InstanceIdentity(SOMEBODY.private_key), b"another one")}
    lie = reply(200, json.dumps({"status": "accepted", **said}).encode())
    async with http_server(always(lie), port=free_port()) as served, delivering(alice):
        peer = await _somebody_at(alice, served.url())
        await alice.offers(peer, 1)
        await alice.until_parcels(peer, lambda messages: messages[0].attempts)
        (trouble,) = alice.outbox.troubles()
        assert trouble.failure == "bad_receipt: the receipt is not signed by the peer; the message is sent again"
    async with http_server(taking(), port=served.port), delivering(alice):
        await alice.delivered()
