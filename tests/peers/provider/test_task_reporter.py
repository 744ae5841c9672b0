"""What an agent says while its last word is still on its way: the peer hears it then, and not at the next heartbeat."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from covenant.ledger.machine.peer_commands import AddPeer
from covenant.model.peers.delegation import Peer
from covenant.model.peers.instance import Trust
from tests.e2e.peers.gate import Gate, says
from tests.ledger_contract.samples import OPERATOR
from tests.peers.peers_under_test import PeerUnderTest, changed, peer_under_test, worker

ACCEPT, STATUS = "delegation_accept", "delegation_status"
SELDOM = changed(status_interval_ms=600_000)
"""Nobody here waits for a heartbeat of this interval."""


class Teller:
    """Says what it is given, one word at a time."""

    def __init__(self) -> None:
        self.words: asyncio.Queue[str] = asyncio.Queue()

    async def tell(self, turn: Any) -> Any:
        while word := await self.words.get():
            yield turn.status(word)
        yield "done"


@asynccontextmanager
async def acquainted(home: Path, teller: Teller) -> AsyncIterator[tuple[PeerUnderTest, PeerUnderTest, Gate]]:
    """Rita asks paul, whose teller works; what he says to her goes through the gate."""
    async with (
        peer_under_test(home / "rita") as rita,
        peer_under_test(home / "paul", worker(teller.tell), settings=SELDOM) as paul,
    ):
        with Gate(rita.keys.port) as to_rita:
            await rita.knows(paul)
            keys = rita.keyring.bundle(paul.clock())
            known = Peer(id=rita.id, name="rita", url=to_rita.url, trust=Trust.VERIFIED, keys=keys)
            await paul.ledger.commit(AddPeer(by=OPERATOR, peer=known))
            yield rita, paul, to_rita


async def say(teller: Teller, paul: PeerUnderTest, word: str) -> None:
    """Until it is among what is to be sent."""
    teller.words.put_nowait(word)
    await paul.until_works(lambda works: works and works[0].message == word)


async def waiting(paul: PeerUnderTest, rita: PeerUnderTest) -> list[str]:
    return [each.typ for each in await paul.ledger.peer_outbox(rita.id)]


async def test_what_is_said_while_the_word_before_is_on_its_way_is_heard_after_it(tmp_path: Path) -> None:
    teller = Teller()
    async with acquainted(tmp_path, teller) as (rita, paul, to_rita):
        task_id = await rita.delegate(paul)
        await say(teller, paul, "first")
        await paul.until_parcels(rita.id, lambda messages: not messages)
        assert (await rita.delegation(task_id)).message == "first"

        caught = to_rita.catch("answer", says(STATUS))
        teller.words.put_nowait("second")
        await asyncio.to_thread(caught.until)
        for word in ("third", "fourth", "fifth"):
            await say(teller, paul, word)
        assert (await rita.delegation(task_id)).message == "second"
        assert await waiting(paul, rita) == [STATUS, STATUS], "what only waits is replaced"
        caught.pass_on()
        await rita.until_delegation(task_id, lambda found: found.message == "fifth")

        teller.words.put_nowait("")
        await rita.ended(task_id)
        assert ((await paul.works())[0].sent_seq, (await rita.delegation(task_id)).broken) == (
            (await rita.delegation(task_id)).received_seq,
            (),
        )


async def test_what_took_the_place_of_a_word_while_others_before_it_were_sent_is_what_is_sent(tmp_path: Path) -> None:
    teller = Teller()
    async with acquainted(tmp_path, teller) as (rita, paul, to_rita):
        to_rita.shut()
        task_id = await rita.delegate(paul)
        await say(teller, paul, "first")
        caught = to_rita.catch("answer", says(ACCEPT))
        to_rita.open()
        await asyncio.to_thread(caught.until)
        await say(teller, paul, "second")
        assert await waiting(paul, rita) == [ACCEPT, STATUS]
        caught.pass_on()
        await rita.until_delegation(task_id, lambda found: found.message == "second")
