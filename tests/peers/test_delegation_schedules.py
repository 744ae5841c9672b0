"""Whatever the network and the machines do, in any order: each delegation ends once, and both sides agree in the end.

Two instances with real ledgers and agents, and no network but this one: by chance a message arrives, is lost, arrives
and nobody hears so, comes before its turn, comes again, or as a copy of the very envelope; and either instance stops
and starts again. The seed says which; when an agent says something is a matter of time.
"""

import asyncio
import random
from collections import Counter, defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from covenant.ledger.machine.peer_commands import MoveOutbox
from covenant.model.errors import Conflict, Refusal
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import (
    CANCELLED,
    ENDED,
    FAILED,
    LOST,
    TIMEOUT,
    Delegation,
    DelegationKey,
    DelegationRole,
    DelegationState,
    OutboxMessage,
    OutboxMove,
)
from tests.ledger_contract.samples import OPERATOR
from tests.peers.peers_under_test import QUICK, PeerUnderTest, changed, peer_under_test, worker
from tests.peers.transport_under_test import Clock, Keys
from tests.waits import BOUND_S

SETTINGS: Final = changed(
    QUICK, silence_ms=5_000, timeout_ms=600_000, slots=100, slots_per_peer=100, offers_per_min=10_000
)
STEPS: Final = 60
ROLES: Final = {DelegationRole.REQUESTER: DelegationRole.PROVIDER, DelegationRole.PROVIDER: DelegationRole.REQUESTER}


class PeersUnderTest:
    """Rita asks, paul works; the test is the network between them."""

    def __init__(self, home: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = Clock()
        self._home = home
        self._keys = {"rita": Keys(), "paul": Keys()}
        self._stacks: dict[str, AsyncExitStack] = {}
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.begun: Counter[str] = Counter()
        self.lives = 0
        """How often paul was started."""
        self.tasks: list[TaskId] = []
        self.copies: list[tuple[str, bytes]] = []
        """Envelopes that were taken, and by whom."""
        self.handed: dict[DelegationKey, int] = {}
        """Up to which number the other side may have what was said of each."""
        self.ends: dict[tuple[str, DelegationKey], DelegationState] = {}
        self.rita: PeerUnderTest
        self.paul: PeerUnderTest

    async def start(self, name: str, *, listens: bool = False) -> None:
        stack = self._stacks[name] = AsyncExitStack()
        agents = () if name == "rita" else (worker(self._work, idempotent=True, on_lost="requeue"),)
        opened = await stack.enter_async_context(
            peer_under_test(
                self._home / name,
                *agents,
                keys=self._keys[name],
                clock=self.clock,
                settings=SETTINGS,
                listens=listens,
                delivers=False,
            )
        )
        opened.context.in_flight.append(lambda key: self.handed.get(key, 0))
        setattr(self, name, opened)
        self.lives += name == "paul"

    async def stop(self, name: str) -> None:
        await self._stacks.pop(name).aclose()

    async def close(self) -> None:
        for name in tuple(self._stacks):
            await self.stop(name)

    async def _work(self, turn: Any) -> str:
        self.begun[turn.text] += 1
        await self.gates[turn.text].wait()
        return f"done {turn.text}"

    async def introduce(self) -> None:
        for name in ("rita", "paul"):
            await self.start(name, listens=True)
        await self.rita.knows(self.paul)
        await self.paul.knows(self.rita)
        await self.rita.directory.capabilities(self.rita.directory.find("paul"))
        await self.again("rita")
        await self.again("paul")

    # What can happen

    async def offer(self) -> None:
        task_id = await self.rita.delegate(self.paul, f"job {len(self.tasks)}")
        self.tasks.append(task_id)
        await self.rita.until_delegation(task_id, lambda _: True)

    async def finish(self) -> None:
        """Some work at paul's comes to its end."""
        live = await self.paul.ledger.delegations_live(DelegationRole.PROVIDER)
        if live:
            work = self.chance.choice(list(live))
            assert work.offer is not None
            self.gates[work.offer.task].set()
            await self.paul.until_delegation(work.task_id, lambda found: found.ended)

    async def cancel(self) -> None:
        live = await self.rita.ledger.delegations_live(DelegationRole.REQUESTER)
        if live:
            task_id = self.chance.choice(list(live)).task_id
            await self.rita.cancel(task_id)
            states = (DelegationState.CANCELLING, *ENDED)
            await self.rita.until_delegation(task_id, lambda found: found.state in states)

    async def be_silent(self) -> None:
        """For long enough to be lost; then perhaps it is offered again, or given up."""
        self.clock.ahead_ms += 6_000
        await self.rita.sweep.sweep()
        for each in [
            each for each in await self.rita.ledger.delegations_live(DelegationRole.REQUESTER) if each.state is LOST
        ]:
            decision = self.chance.random()
            if decision < 0.4:
                await self.rita.requester.offer_again(OPERATOR, each.task_id)
            elif decision < 0.5:
                await self.rita.requester.force_error(OPERATOR, each.task_id, "given up")

    async def again(self, name: str | None = None) -> None:
        which = name or self.chance.choice(["rita", "paul"])
        await self.stop(which)
        await self.start(which)

    # The network

    async def carry(self) -> None:
        one, other = self._ways()[self.chance.randrange(2)]
        messages = await one.ledger.peer_outbox(other.id)
        if not messages:
            return
        key = self.chance.choice(list(dict.fromkeys(each.delegation for each in messages)))
        waiting = [each for each in messages if each.delegation == key]
        fate = self.chance.random()
        if fate < 0.1:
            await self._failed(one, waiting[0])
        elif fate < 0.25:
            await self._hand(one, other, waiting[0])
            await self._failed(one, waiting[0])
        elif fate < 0.4:
            await self._hand(one, other, waiting[-1])
        else:
            taken = await self._hand(one, other, waiting[0])
            assert taken, "the first that waits is always taken"
            await self._taken(one, waiting[0])

    async def replay(self) -> None:
        if self.copies:
            name, envelope = self.chance.choice(self.copies)
            with pytest.raises(Refusal):
                await getattr(self, name).inbox.receive(envelope, None)

    async def _hand(self, one: PeerUnderTest, other: PeerUnderTest, message: OutboxMessage) -> bool:
        """Whether it was taken. Whatever comes of it, nothing is heard but what comes next."""
        key = DelegationKey(ROLES[message.role], one.id, message.offer_id)
        before = await other.ledger.delegation(key)
        self.handed[message.delegation] = max(message.seq, self.handed.get(message.delegation, 0))
        envelope = one.keyring.seal(
            bytes(message.body),
            typ=message.typ,
            to=other.id,
            prekey=other.prekey(),
            now_ms=self.clock(),
            seq=message.seq,
        )
        try:
            await other.inbox.receive(envelope, None)
        except Conflict as refusal:
            if refusal.code != "out_of_order" or before is None or message.seq <= before.received_seq + 1:
                raise
            assert await heard(other, key) == before.received_seq
            return False
        self.copies.append((other.name, envelope))
        if before is not None:
            assert await heard(other, key) == max(before.received_seq, message.seq) <= before.received_seq + 1
        else:
            # What is said of something unknown changes nothing, unless it is the offer, or a cancel in its place.
            begins = message.typ in ("delegation_offer", "delegation_cancel")
            assert await heard(other, key) == (message.seq if begins else 0)
        return True

    async def _taken(self, one: PeerUnderTest, message: OutboxMessage) -> None:
        await one.ledger.commit(
            MoveOutbox(moves=(OutboxMove(delegation=message.delegation, seq=message.seq, delivered=True),))
        )

    async def _failed(self, one: PeerUnderTest, message: OutboxMessage) -> None:
        move = OutboxMove(
            delegation=message.delegation, seq=message.seq, attempts=message.attempts + 1, failure="lost", next_ms=0
        )
        await one.ledger.commit(MoveOutbox(moves=(move,)))

    def _ways(self) -> tuple[tuple[PeerUnderTest, PeerUnderTest], ...]:
        return (self.rita, self.paul), (self.paul, self.rita)

    # What is always so, and what is so in the end

    async def check(self) -> None:
        for at in (self.rita, self.paul):
            for kept in await at.ledger.delegations():
                each = await at.requester.shown(kept)
                if each.ended:
                    assert self.ends.setdefault((at.name, each.key), each.state) is each.state, "it ended twice"
                else:
                    assert (at.name, each.key) not in self.ends, "it ended, and goes on"
        works = Counter(each.offer_id for each in await self.paul.works())
        assert all(count == 1 for count in works.values())
        assert all(count <= self.lives for count in self.begun.values())

    async def settle(self) -> None:
        """From here on everything arrives, and all work comes to its end."""
        for number in range(len(self.tasks)):
            self.gates[f"job {number}"].set()
        bell = asyncio.Event()
        for at in (self.rita, self.paul):
            at.bells.append(bell)
        async with asyncio.timeout(BOUND_S):
            while True:
                bell.clear()
                for one, other in self._ways():
                    for message in await one.ledger.peer_outbox(other.id):
                        assert await self._hand(one, other, message)
                        await self._taken(one, message)
                if await self._over():
                    break
                await bell.wait()
        await self.check()

    async def _over(self) -> bool:
        quiet = not any([await one.ledger.peer_outbox(other.id) for one, other in self._ways()])
        known = [each for at in (self.rita, self.paul) for each in await at.ledger.delegations()]
        return quiet and all(each.ended for each in known)

    async def agree(self) -> None:
        theirs = {each.offer_id: each for each in await self.paul.works()}
        for task_id in self.tasks:
            our, their = await self.rita.delegation(task_id), theirs.get(task_id)
            if their is None:
                assert (our.state in (CANCELLED, FAILED), our.received_seq, our.key in self.handed) == (True, 0, False)
                continue
            assert (our.sent_seq, our.received_seq) == (their.received_seq, their.sent_seq)
            # A task that was canceled here stays so, whatever its provider made of it before it heard.
            given_up = our.state in (TIMEOUT, CANCELLED) or (our.state is FAILED and our.code == "provider_lost")
            assert given_up or our.state is their.state, (our.state, their.state)
            assert our.broken == ()


async def heard(at: PeerUnderTest, key: DelegationKey) -> int:
    record: Delegation | None = await at.ledger.delegation(key)
    return record.received_seq if record is not None else 0


async def live(home: Path, seed: int, steps: int) -> None:
    under_test = PeersUnderTest(home, seed)
    try:
        await under_test.introduce()
        transitions = {
            under_test.carry: 60,
            under_test.offer: 12,
            under_test.finish: 8,
            under_test.cancel: 5,
            under_test.replay: 8,
            under_test.be_silent: 4,
            under_test.again: 3,
        }
        for _ in range(steps):
            (transition,) = under_test.chance.choices(list(transitions), list(transitions.values()))
            await transition()
            await under_test.check()
        await under_test.settle()
        await under_test.agree()
        await under_test.again("rita")
        await under_test.again("paul")
        await under_test.check()
        await under_test.agree()
    finally:
        await under_test.close()


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_to_messages_and_machines_both_sides_agree_in_the_end(tmp_path: Path, seed: int) -> None:
    await live(tmp_path, seed, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
async def test_whatever_happens_for_longer_both_sides_agree_in_the_end(tmp_path: Path, seed: int) -> None:
    await live(tmp_path, seed, 4 * STEPS)
