"""Delegations endure: restarts of either side at every step, peers that are away, silence, cancels, and re-offers."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.agents.api import Agent
from covenant.ledger.clock import PAUSE_MS
from covenant.ledger.machine.peer_commands import DelegationChanges, SendToPeer
from covenant.model.errors import Conflict
from covenant.model.peers.delegation import (
    ACCEPTED,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    FAILED,
    LOST,
    OFFERED,
    REJECTED,
    RUNNING,
    Delegation,
    DelegationKey,
    DelegationRole,
    ReceivedEnvelope,
)
from covenant.model.peers.delegation_messages import (
    DelegationAccept,
    DelegationOffer,
    DelegationResult,
    StatusReport,
    TokenUsage,
)
from covenant.model.settings import Limits
from covenant.model.task_view import TaskState
from covenant.peers.message_redaction import outgoing as saying
from covenant.peers.transport.inbox import IncomingMessage
from covenant.seal.proofs import sign_proof
from covenant.seal.purpose_keys import PurposeKey
from tests.ledger_contract.samples import OPERATOR
from tests.peers.peers_under_test import PeerUnderTest, changed, peer_under_test, said, two_peers, worker
from tests.peers.transport_under_test import Clock, Keys


async def shout(turn: Any) -> str:
    return str(turn.text.upper())


async def endless(turn: Any) -> str:
    await asyncio.Event().wait()
    return "never"


class Gated:
    """Work that waits until it may go on, whenever it is begun."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.begun = 0

    @property
    def agent(self) -> Agent:
        async def work(turn: Any) -> str:
            self.begun += 1
            await self.open.wait()
            return str(turn.text.upper())

        return worker(work, idempotent=True, on_lost="requeue")


SILENT = changed(status_interval_ms=600_000)
"""Of a provider that says nothing by itself."""


class TwoPeers:
    """Two peers that come and go; their folders, keys and ports stay."""

    def __init__(self, home: Path, agent: Agent, *, clock: Clock | None = None) -> None:
        self._home = home
        self._agent = agent
        self.clock = clock or Clock()
        self.keys = {"rita": Keys(), "paul": Keys()}
        self._known = False

    def rita(self, **more: Any) -> Any:
        return peer_under_test(self._home / "rita", keys=self.keys["rita"], clock=self.clock, **more)

    def paul(self, **more: Any) -> Any:
        return peer_under_test(self._home / "paul", self._agent, keys=self.keys["paul"], clock=self.clock, **more)

    async def introduce(self) -> None:
        """Once: from then on each has the other's keys and capabilities."""
        async with self.rita() as rita, self.paul() as paul:
            await rita.knows(paul)
            await paul.knows(rita)
            await rita.directory.capabilities(rita.directory.find("paul"))


# Restarts


async def test_an_offer_to_a_peer_that_is_away_waits_until_it_is_back(tmp_path: Path) -> None:
    two = TwoPeers(tmp_path, worker(shout))
    await two.introduce()
    async with two.rita() as rita:
        async with two.paul(listens=False, delivers=False) as paul:
            task_id = await rita.delegate(paul, "hello")
        await rita.stands(task_id, OFFERED)
        async with two.paul():
            view = await rita.ended(task_id)
            assert (view.state, said(view)) == (TaskState.COMPLETED, "HELLO")


@pytest.mark.parametrize("state", [OFFERED, ACCEPTED, RUNNING])
async def test_a_requester_that_stops_goes_on_where_it_was(tmp_path: Path, state: Any) -> None:
    gated = Gated()
    two = TwoPeers(tmp_path, gated.agent)
    await two.introduce()
    async with two.paul(listens=state is not OFFERED, works=state is not ACCEPTED) as paul, two.rita() as rita:
        task_id = await rita.delegate(paul, "hello")
        # Work that nobody does is told of too, and so counts as under way here.
        await rita.stands(task_id, state, *([RUNNING] if state is ACCEPTED else []))
    gated.open.set()
    async with two.paul(), two.rita() as rita:
        view = await rita.ended(task_id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "HELLO")
        assert (await rita.delegation(task_id)).broken == ()


async def test_a_result_that_comes_while_the_requester_is_away_waits_for_it(tmp_path: Path) -> None:
    gated = Gated()
    two = TwoPeers(tmp_path, gated.agent)
    await two.introduce()
    async with two.paul() as paul:
        async with two.rita() as rita:
            task_id = await rita.delegate(paul, "hello")
            await rita.stands(task_id, RUNNING)
        gated.open.set()
        await paul.until_works(lambda works: all(work.state is COMPLETED for work in works))
        async with two.rita() as rita:
            assert said(await rita.ended(task_id)) == "HELLO"
            assert (await rita.evidence(task_id))["offer"] is not None


async def test_a_result_that_is_heard_while_nobody_works_on_the_task_is_told_after_a_restart(tmp_path: Path) -> None:
    gated = Gated()
    two = TwoPeers(tmp_path, gated.agent)
    await two.introduce()
    async with two.paul() as paul:
        async with two.rita() as rita:
            task_id = await rita.delegate(paul, "hello")
            await rita.stands(task_id, RUNNING)
        gated.open.set()
        async with two.rita(works=False) as rita:
            delegation = await rita.stands(task_id, COMPLETED)
            assert delegation.result is not None
        async with two.rita() as rita:
            assert said(await rita.ended(task_id)) == "HELLO"
            assert (await rita.evidence(task_id))["offer"] is not None
            await rita.until_delegation(task_id, lambda found: found.result is None)
            assert (await rita.delegation(task_id)).offer is None


async def test_a_provider_that_stops_while_it_works_does_it_once_more_and_tells_one_result(tmp_path: Path) -> None:
    gated = Gated()
    two = TwoPeers(tmp_path, gated.agent)
    await two.introduce()
    async with two.rita() as rita:
        async with two.paul() as paul:
            task_id = await rita.delegate(paul, "hello")
            await rita.stands(task_id, RUNNING)
        gated.open.set()
        async with two.paul() as paul:
            assert said(await rita.ended(task_id)) == "HELLO"
            assert gated.begun == 2
            assert len(await paul.works()) == 1


async def test_a_result_that_could_not_be_delivered_is_delivered_after_a_restart(tmp_path: Path) -> None:
    gated = Gated()
    two = TwoPeers(tmp_path, gated.agent)
    await two.introduce()
    async with two.rita() as rita:
        async with two.paul(delivers=False) as paul:
            task_id = await rita.delegate(paul, "hello")
            gated.open.set()
            await paul.until_works(lambda works: any(work.state is COMPLETED for work in works))
        assert (await rita.delegation(task_id)).state is OFFERED
        async with two.paul():
            assert said(await rita.ended(task_id)) == "HELLO"


# Cancels


async def test_a_cancel_reaches_work_under_way(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(endless)) as (rita, paul):
        task_id = await rita.delegate(paul)
        await rita.stands(task_id, RUNNING)
        await rita.cancel(task_id)
        await paul.until_works(lambda works: works[0].state is CANCELLED)
        await rita.stands(task_id, CANCELLED)
        assert (await paul.ended((await paul.works())[0].task_id)).state is TaskState.CANCELED


async def test_a_cancel_reaches_work_that_nobody_has_begun(tmp_path: Path) -> None:
    two = TwoPeers(tmp_path, worker(shout))
    await two.introduce()
    async with two.rita() as rita, two.paul(works=False) as paul:
        task_id = await rita.delegate(paul)
        await rita.stands(task_id, ACCEPTED, RUNNING)
        await rita.cancel(task_id)
        await rita.stands(task_id, CANCELLED)


async def test_a_cancel_of_what_was_never_delivered_ends_it_as_soon_as_it_is(tmp_path: Path) -> None:
    two = TwoPeers(tmp_path, worker(endless))
    await two.introduce()
    async with two.rita() as rita:
        async with two.paul(listens=False, delivers=False) as paul:
            task_id = await rita.delegate(paul)
        await rita.stands(task_id, OFFERED)
        await rita.cancel(task_id)
        await rita.stands(task_id, CANCELLING)
        async with two.paul():
            await rita.stands(task_id, CANCELLED)


async def test_a_cancel_that_nobody_was_there_to_pass_on_is_passed_on_later(tmp_path: Path) -> None:
    two = TwoPeers(tmp_path, worker(endless))
    await two.introduce()
    async with two.paul() as paul:
        async with two.rita() as rita:
            task_id = await rita.delegate(paul)
            await rita.stands(task_id, RUNNING)
        async with two.rita(works=False) as rita:
            await rita.cancel(task_id)
            await rita.stands(task_id, CANCELLED)
            await paul.until_works(lambda works: works[0].state is CANCELLED)


async def test_a_cancel_that_the_provider_heard_just_before_it_died_is_carried_out(tmp_path: Path) -> None:
    two = TwoPeers(tmp_path, worker(endless, idempotent=True, on_lost="requeue"))
    await two.introduce()
    async with two.rita() as rita:
        async with two.paul() as paul:
            task_id = await rita.delegate(paul)
            await rita.stands(task_id, RUNNING)
        async with two.paul(listens=False, delivers=False, works=False) as paul:
            await paul.provider.stop()
            (work,) = await paul.works()
            await paul.ledger.commit(SendToPeer(key=work.key, transitions=("cancel",)))
        async with two.paul() as paul:
            await paul.until_works(lambda works: works[0].state is CANCELLED)
            await rita.stands(task_id, CANCELLED)


# Silence


async def test_a_silent_provider_is_lost_and_goes_on_by_itself_when_it_is_heard_again(tmp_path: Path) -> None:
    gated = Gated()
    two = TwoPeers(tmp_path, gated.agent)
    await two.introduce()
    async with two.rita(settings=changed(silence_ms=1)) as rita:
        async with two.paul() as paul:
            task_id = await rita.delegate(paul, "hello")
            await rita.stands(task_id, RUNNING)
        await rita.stands(task_id, LOST)
        async with two.paul():
            await rita.stands(task_id, RUNNING)
            gated.open.set()
            assert said(await rita.ended(task_id)) == "HELLO"


@pytest.mark.parametrize("step_ms", [86_400_000, -86_400_000], ids=["forward", "back"])
async def test_no_provider_is_given_up_because_the_clock_was_set(tmp_path: Path, step_ms: int) -> None:
    gated = Gated()
    two = TwoPeers(tmp_path, gated.agent)
    await two.introduce()
    async with two.rita(settings=changed(silence_ms=600_000, timeout_ms=600_000)) as rita, two.paul() as paul:
        task_id = await rita.delegate(paul, "hello")
        await rita.stands(task_id, RUNNING)
        two.clock.stepped_ms += step_ms
        assert await rita.sweep.sweep() == 0
        two.clock.ahead_ms += PAUSE_MS
        assert await rita.sweep.sweep() == 0
        assert (await rita.delegation(task_id)).state is RUNNING


async def test_a_lost_offer_that_is_made_again_is_never_begun_twice(tmp_path: Path) -> None:
    gated = Gated()
    two = TwoPeers(tmp_path, gated.agent)
    await two.introduce()
    async with two.rita(settings=changed(silence_ms=1)) as rita:
        async with two.paul(delivers=False) as paul:
            task_id = await rita.delegate(paul, "hello")
            await paul.until_works(lambda works: any(work.state is RUNNING for work in works))
        await rita.stands(task_id, LOST)
        again = await rita.requester.offer_again(OPERATOR, task_id)
        assert again.state is OFFERED
        gated.open.set()
        async with two.paul() as paul:
            assert said(await rita.ended(task_id)) == "HELLO"
            assert len(await paul.works()) == 1


async def test_a_lost_delegation_that_is_given_up_fails_as_provider_lost(tmp_path: Path) -> None:
    two = TwoPeers(tmp_path, worker(endless))
    await two.introduce()
    async with two.rita(settings=changed(silence_ms=1)) as rita:
        async with two.paul(listens=False, delivers=False) as paul:
            task_id = await rita.delegate(paul)
        await rita.stands(task_id, LOST)
        await rita.requester.force_error(OPERATOR, task_id, "its machine burned down")
        view = await rita.ended(task_id)
        assert said(view) == "provider_lost: its machine burned down"
        assert (await rita.delegation(task_id)).state is FAILED


async def test_a_lost_delegation_is_given_up_by_itself_where_the_settings_say_so(tmp_path: Path) -> None:
    two = TwoPeers(tmp_path, worker(endless))
    await two.introduce()
    async with two.rita(settings=changed(silence_ms=1, force_lost=True, lost_after_ms=1)) as rita:
        async with two.paul(listens=False, delivers=False) as paul:
            task_id = await rita.delegate(paul)
        view = await rita.ended(task_id)
        assert (await rita.delegation(task_id)).code == "provider_lost"
        assert view.state is TaskState.FAILED


async def test_a_lost_delegation_can_be_cancelled_and_its_provider_hears_of_it_when_it_is_back(tmp_path: Path) -> None:
    two = TwoPeers(tmp_path, worker(endless, idempotent=True, on_lost="requeue"))
    await two.introduce()
    async with two.rita(settings=changed(silence_ms=1)) as rita:
        async with two.paul() as paul:
            task_id = await rita.delegate(paul)
            await rita.stands(task_id, RUNNING)
        await rita.stands(task_id, LOST)
        await rita.cancel(task_id)
        await rita.stands(task_id, CANCELLING)
        async with two.paul() as paul:
            await rita.stands(task_id, CANCELLED)
            assert (await paul.works())[0].state is CANCELLED


async def test_a_provider_that_rejected_a_lost_offer_rejects_it_again(tmp_path: Path) -> None:
    two = TwoPeers(tmp_path, worker(shout))
    await two.introduce()
    full = changed(slots=0)
    async with two.rita(settings=changed(silence_ms=1, timeout_ms=1)) as rita:
        async with two.paul(delivers=False, settings=full) as paul:
            task_id = await rita.delegate(paul)
            await paul.until_works(lambda works: any(work.state is REJECTED for work in works))
            await rita.stands(task_id, LOST)
            await rita.requester.offer_again(OPERATOR, task_id)
            await paul.until_works(lambda works: works[0].received_seq == 2)
            await paul.until_parcels(rita.id, lambda messages: len(messages) == 2)
        async with two.paul(settings=full):
            assert said(await rita.ended(task_id)).startswith("busy")
            assert (await rita.delegation(task_id)).state is REJECTED


async def test_work_of_which_only_the_task_is_left_is_not_begun_again(tmp_path: Path) -> None:
    gated = Gated()
    gated.open.set()
    two = TwoPeers(tmp_path, gated.agent)
    await two.introduce()
    async with two.rita() as rita, two.paul(limits=Limits(delegations_kept_max=1)) as paul:
        first = await rita.delegate(paul, "one")
        await rita.ended(first)
        offer = msgspec.convert((await rita.evidence(first))["offer"], DelegationOffer)
        await rita.ended(await rita.delegate(paul, "two"))
        await paul.until_works(lambda works: len(works) == 1)
        peer = paul.ledger.peer(rita.id)
        assert peer is not None
        envelope = ReceivedEnvelope(
            sender=rita.id, jti="again", typ="delegation_offer", until_ms=paul.clock() + 1_000, seq=1
        )
        key = DelegationKey(DelegationRole.PROVIDER, rita.id, first)
        heard = await paul.provider.receive(IncomingMessage(peer, envelope, offer, key))
        assert heard.known
        again = await paul.ledger.delegation(key)
        assert again is not None
        assert (again.state, again.code, gated.begun) == (REJECTED, "expired", 2)


async def test_what_is_not_lost_is_neither_offered_again_nor_given_up(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(endless)) as (rita, paul):
        task_id = await rita.delegate(paul)
        await rita.stands(task_id, RUNNING)
        for refused in (
            rita.requester.offer_again(OPERATOR, task_id),
            rita.requester.force_error(OPERATOR, task_id, "why not"),
        ):
            with pytest.raises(Conflict):
                await refused


# A provider that is not honest


async def claiming(
    paul: PeerUnderTest, claim: Callable[[Delegation], tuple[tuple[str, ...], Any, DelegationChanges]]
) -> None:
    """It says something else than what happened: by hand, as its agents do nothing."""
    await paul.until_works(bool)
    (work,) = await paul.works()
    transitions, message, changes = claim(work)
    await paul.ledger.commit(
        SendToPeer(key=work.key, transitions=transitions, changes=changes, messages=(saying(message),))
    )


async def test_a_provider_that_says_it_used_more_than_agreed_is_stopped(tmp_path: Path) -> None:
    two = TwoPeers(tmp_path, worker(shout))
    await two.introduce()

    def overspent(work: Delegation) -> tuple[tuple[str, ...], Any, DelegationChanges]:
        usage = TokenUsage(completion=101, total=101)
        report = StatusReport(
            offer_id=work.offer_id, delegation_id=work.task_id, seq=999, status="running", token_usage=usage
        )
        return ("status",), report, DelegationChanges(status_seq=999)

    async with two.rita() as rita, two.paul(works=False, settings=SILENT) as paul:
        task_id = await rita.delegate(paul, budget=100)
        await claiming(paul, overspent)
        view = await rita.ended(task_id)
        assert said(view) == "budget_exceeded: 101 tokens were used, and 100 were agreed"
        delegation = await rita.delegation(task_id)
        assert (delegation.state, delegation.overspent, delegation.code) == (FAILED, True, "budget_exceeded")
        assert (await paul.works())[0].state is CANCELLED


async def test_a_provider_that_takes_more_than_was_offered_is_stopped(tmp_path: Path) -> None:
    two = TwoPeers(tmp_path, worker(shout))
    await two.introduce()

    def greedy(work: Delegation) -> tuple[tuple[str, ...], Any, DelegationChanges]:
        accept = DelegationAccept(
            offer_id=work.offer_id, delegation_id=work.task_id, max_token_budget=101, timeout=1_000
        )
        return (), accept, DelegationChanges()

    async with two.rita() as rita, two.paul(works=False, settings=SILENT) as paul:
        task_id = await rita.delegate(paul, budget=100)
        await claiming(paul, greedy)
        assert said(await rita.ended(task_id)).startswith("terms_exceeded")
        delegation = await rita.delegation(task_id)
        assert (delegation.state, delegation.code, delegation.budget) == (FAILED, "terms_exceeded", 100)


def forged(paul: PeerUnderTest, **more: Any) -> Callable[[Delegation], tuple[tuple[str, ...], Any, DelegationChanges]]:
    def claim(work: Delegation) -> tuple[tuple[str, ...], Any, DelegationChanges]:
        result = DelegationResult(
            offer_id=work.offer_id,
            delegation_id=work.task_id,
            profile=work.profile,
            status="completed",
            result="done",
            token_usage=more.get("usage", TokenUsage()),
            transcript=(),
        )
        assert work.offer is not None
        proof = sign_proof(
            PurposeKey(paul.keyring.private_key),
            requester=work.peer,
            offer=work.offer,
            result=result,
            transcript=(),
            now_ms=paul.clock(),
        )
        after = msgspec.structs.replace(result, proof=more.get("proof", proof), result=more.get("text", "done"))
        return ("result_completed",), after, DelegationChanges()

    return claim


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"text": "something else"}, "proof_broken"),
        ({"proof": None}, "proof_broken"),
        ({"usage": TokenUsage(completion=101, total=101)}, "budget_exceeded"),
    ],
)
async def test_a_result_that_is_not_proven_or_cost_too_much_is_not_believed(
    tmp_path: Path, more: dict[str, Any], code: str
) -> None:
    two = TwoPeers(tmp_path, worker(shout))
    await two.introduce()
    async with two.rita() as rita, two.paul(works=False, settings=SILENT) as paul:
        task_id = await rita.delegate(paul, budget=100)
        await claiming(paul, forged(paul, **more))
        view = await rita.ended(task_id)
        assert view.state is TaskState.FAILED
        assert said(view).startswith(code)
        delegation = await rita.delegation(task_id)
        assert (delegation.state, delegation.code) == (FAILED, code)
        assert bool(delegation.broken) is (code == "proof_broken")
