"""An offer that is made anew while its result is being made: the last result is proven for the new offer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.model.peers.delegation import Delegation, DelegationKey, DelegationRole, ReceivedEnvelope
from covenant.model.peers.delegation_messages import DelegationOffer, DelegationResult
from covenant.model.peers.instance import KeyPurpose
from covenant.peers.provider import result_builder, task_reporter
from covenant.peers.provider.provider_service import Provider
from covenant.peers.transport.inbox import IncomingMessage
from covenant.seal.proofs import assert_offer, offer_hash
from tests.peers.peers_under_test import PeerUnderTest, peer_under_test, worker
from tests.waits import BOUND_S

RESULT = "delegation_result"
OTHER_EPOCH = "restored-1"


@asynccontextmanager
async def acquainted(home: Path, go: asyncio.Event) -> AsyncIterator[tuple[PeerUnderTest, PeerUnderTest]]:
    """Rita has delegated to paul, who works until `go`. Afterwards nothing is delivered to rita any more."""

    async def work(turn: Any) -> str:
        await go.wait()
        return "done"

    async with peer_under_test(home / "paul", worker(work)) as paul:
        async with peer_under_test(home / "rita") as rita:
            await rita.knows(paul)
            await paul.knows(rita)
            await rita.delegate(paul)
            await paul.until_works(lambda works: works and works[0].sent_seq > 0)
        yield rita, paul


async def now(paul: PeerUnderTest) -> Delegation:
    (found,) = await paul.works()
    return found


def made_anew(rita: PeerUnderTest, paul: PeerUnderTest, before: Delegation) -> DelegationOffer:
    assert before.offer is not None
    peer = paul.ledger.peer(rita.id)
    assert peer is not None
    key = rita.keyring.signing(KeyPurpose.PROOFS, peer.keys, rita.clock())
    offer = msgspec.structs.replace(before.offer, timeout=before.offer.timeout - 1_000)
    return assert_offer(key, offer, provider=paul.id)


async def receive_offer(rita: PeerUnderTest, paul: PeerUnderTest, offer: DelegationOffer) -> None:
    """As the first message of a rita whose ledger was restored."""
    peer = paul.ledger.peer(rita.id)
    assert peer is not None
    envelope = ReceivedEnvelope(
        sender=rita.id,
        jti="anew",
        typ="delegation_offer",
        until_ms=paul.clock() + 1_000,
        seq=1,
        epoch=OTHER_EPOCH,
    )
    key = DelegationKey(DelegationRole.PROVIDER, rita.id, offer.offer_id)
    await paul.provider.receive(IncomingMessage(peer, envelope, offer, key))


async def last_proof(paul: PeerUnderTest, rita: PeerUnderTest) -> str:
    messages = [each for each in await paul.ledger.peer_outbox(rita.id) if each.typ == RESULT]
    proof = msgspec.json.decode(messages[-1].body, type=DelegationResult).proof
    assert proof is not None
    return proof.offer_hash


async def test_a_result_that_was_being_made_is_made_again_for_the_offer_that_came_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, loop, build = asyncio.Event(), asyncio.get_running_loop(), result_builder.build_result
    async with acquainted(tmp_path, go) as (rita, paul):
        anew = made_anew(rita, paul, await now(paul))
        built: list[Any] = []

        def build_late(work: Any, *more: Any) -> Any:
            """In a thread: the offer comes between the look at the delegation and the result."""
            built.append(work)
            if len(built) == 1:
                asyncio.run_coroutine_threadsafe(receive_offer(rita, paul, anew), loop).result(BOUND_S)
            return build(work, *more)

        monkeypatch.setattr(task_reporter, "HEAVY_CHARS", 0)
        monkeypatch.setattr(task_reporter, "build_result", build_late)
        go.set()
        await paul.until_works(lambda works: works[0].ended)
        assert len(built) == 2
        assert await last_proof(paul, rita) == offer_hash(anew)


async def test_an_offer_that_comes_while_the_result_is_sent_gets_a_result_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, judge = asyncio.Event(), Provider._rejection
    async with acquainted(tmp_path, go) as (rita, paul):
        before = await now(paul)
        anew = made_anew(rita, paul, before)

        async def judge_late(self: Provider, *given: Any) -> Any:
            """The work ends between the look at the delegation and the answer to the offer."""
            judged = await judge(self, *given)
            go.set()
            await paul.until_works(lambda works: works[0].ended)
            return judged

        monkeypatch.setattr(Provider, "_rejection", judge_late)
        await receive_offer(rita, paul, anew)

        async def told_twice() -> bool:
            return [each.typ for each in await paul.ledger.peer_outbox(rita.id)].count(RESULT) == 2

        await paul.until(told_twice)
        assert await last_proof(paul, rita) == offer_hash(anew)
