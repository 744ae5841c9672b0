"""A delegation between instances, from the offer to the proven result, over sealed envelopes and real sockets."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.daemon.telemetry import Log
from covenant.daemon.wiring.agents import AgentSync
from covenant.exchange.access.principals import Principal
from covenant.exchange.delegation import OrphanCanceller
from covenant.exchange.mailbox import MailboxExchange
from covenant.exchange.tasks.reader import read_tree
from covenant.ledger.embedded.journal.segments import list_segments
from covenant.ledger.machine.commands import Cancel, Sweep
from covenant.ledger.machine.identity_commands import ChangeTenant, MakeGrant
from covenant.ledger.machine.peer_commands import LearnPeer
from covenant.ledger.machine.states import State
from covenant.model.agent_definition import AgentDefinition
from covenant.model.content import Json, Text
from covenant.model.grant import respond_actions
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import ACCEPTED, CANCELLED, COMPLETED, FAILED, REJECTED, RUNNING, TIMEOUT
from covenant.model.peers.instance import Trust
from covenant.model.task import REMOTE, Result, ResultStatus
from covenant.model.task_event import StatusUpdate
from covenant.model.task_view import TaskState
from covenant.model.tenants import DEFAULT, TenantLimits
from covenant.peers.requester import requester_service
from covenant.seal.proofs import verify_evidence
from tests.ledger_contract.samples import OPERATOR, make_grant
from tests.peers.peers_under_test import PeerUnderTest, changed, peer_under_test, said, two_peers, worker
from tests.waits import BOUND_S


async def shout(turn: Any) -> str:
    return str(turn.text.upper())


async def test_a_task_is_done_by_a_peer_and_its_result_is_proven(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(shout)) as (rita, paul):
        task_id = await rita.delegate(paul, "hello")
        view = await rita.ended(task_id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "HELLO")
        delegation = await rita.delegation(task_id)
        assert delegation.state is COMPLETED
        assert delegation.proof is not None
        assert delegation.broken == ()
        (work,) = await paul.works()
        assert (work.state, work.task_id, work.peer) == (COMPLETED, delegation.delegation_id, rita.id)


async def test_an_offer_is_accepted_and_its_work_begun_by_one_record(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(shout)) as (rita, paul):
        view = await rita.ended(await rita.delegate(paul))
        assert view.state is TaskState.COMPLETED
        (work,) = await paul.works()
    records = [
        json.loads(line)["events"]
        for segment in list_segments(tmp_path / "paul" / "ledger" / "journal")
        for line in segment.path.read_bytes().splitlines()
    ]
    (accepted,) = [events for events in records if any(event["type"] == "task_sent" for event in events)]
    assert [event["task_id"] for event in accepted if event["type"] == "task_leased"] == [work.task_id]


async def test_an_offer_that_finds_no_free_place_waits_and_is_done(tmp_path: Path) -> None:
    go_on, begun = asyncio.Event(), asyncio.Queue[str]()

    async def slow(turn: Any) -> str:
        begun.put_nowait(turn.text)
        await go_on.wait()
        return str(turn.text)

    async with two_peers(tmp_path, worker(slow, concurrency=1)) as (rita, paul):
        first = await rita.delegate(paul, "first")
        assert await asyncio.wait_for(begun.get(), BOUND_S) == "first"
        second = await rita.delegate(paul, "second")
        delegation = await rita.stands(second, ACCEPTED, RUNNING)
        assert delegation.delegation_id is not None
        entry = await paul.ledger.entry(TaskId(delegation.delegation_id))
        assert entry is not None
        assert entry.state is State.QUEUED
        go_on.set()
        assert [said(await rita.ended(each)) for each in (first, second)] == ["first", "second"]
        assert await asyncio.wait_for(begun.get(), BOUND_S) == "second"
        assert begun.empty()


async def test_a_kept_token_of_an_earlier_form_is_replaced_before_an_offer_is_made(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(shout)) as (rita, paul):
        assert (await rita.ended(await rita.delegate(paul, "once"))).state is TaskState.COMPLETED
        known = rita.ledger.peer(paul.id)
        assert known is not None
        assert known.capabilities is not None
        kept = msgspec.structs.replace(known.capabilities, token="EroBCk8KBXJpZ2h0")
        await rita.ledger.commit(LearnPeer(id=paul.id, by=OPERATOR, capabilities=kept))
        view = await rita.ended(await rita.delegate(paul, "again"))
        assert (view.state, said(view)) == (TaskState.COMPLETED, "AGAIN")


async def test_a_proof_can_be_checked_offline_and_one_changed_line_breaks_it(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(shout)) as (rita, paul):
        task_id = await rita.delegate(paul, "hello")
        await rita.ended(task_id)
        evidence = await rita.evidence(task_id)
        report = verify_evidence(msgspec.json.encode(evidence), provider=paul.id, requester=rita.id, budget=50_000)
        assert report.holds
        assert not report.unchecked
        assert [line["content"] for line in evidence["transcript"]] == ["hello", "HELLO"]
        evidence["transcript"][1]["content"] = "HELLO!"
        assert verify_evidence(msgspec.json.encode(evidence)).broken == ("transcript",)


async def test_what_the_agent_gets_is_the_task_its_context_and_its_parts(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def look(turn: Any) -> Any:
        seen.append((turn.text, turn.metadata, [type(part).__name__ for part in turn.parts], turn.task.origin))
        return [turn.file("list.txt", b"one\ntwo"), turn.data({"n": 1}), "done"]

    async with two_peers(tmp_path, worker(look)) as (rita, paul):
        parts = (Text("count"), Json({"things": 2}))
        task_id = await rita.delegate(paul, "count", parts=parts, context="a long story")
        view = await rita.ended(task_id)
    assert seen == [("count", {"context": "a long story"}, ["Text", "Resource", "Json"], "peer")]
    assert said(view) == "done"
    assert [artifact.name for artifact in view.artifacts] == ["list.txt", "data"]
    assert view.artifacts[1].parts == (Json({"n": 1}),)


async def test_neither_side_is_told_anything_under_the_daemons_own_keys_by_the_other(tmp_path: Path) -> None:
    seen: list[Any] = []
    forged = {"mine": "kept", REMOTE: {"name": "vault"}, "covenant.peer": {"budget": 9}, "x-arbiter.tool_call": True}

    async def look(turn: Any) -> Any:
        seen.extend(part.metadata for part in turn.parts)
        return [Json({"n": 1}, metadata=forged), "done"]

    async with two_peers(tmp_path, worker(look)) as (rita, paul):
        parts = (Text("count", metadata=forged), Json({"things": 2}, metadata=forged))
        view = await rita.ended(await rita.delegate(paul, "count", parts=parts))
    assert [each for each in seen if each is not None] == [{"mine": "kept"}] * len(parts)
    told = [part.metadata for artifact in view.artifacts for part in artifact.parts if isinstance(part, Json)]
    assert told == [{"mine": "kept"}]


async def test_how_the_work_goes_is_told_while_it_goes_on(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def slow(turn: Any) -> Any:
        turn.spend(tokens=7)
        yield turn.status("half way")
        await go_on.wait()
        yield "done"

    async with two_peers(tmp_path, worker(slow)) as (rita, paul):
        task_id = await rita.delegate(paul)
        await rita.stands(task_id, RUNNING)
        await rita.until_delegation(task_id, lambda found: found.message == "half way")
        await rita.until_delegation(task_id, lambda found: found.usage.total == 7)
        tree = await read_tree(rita.ledger, task_id, None)
        assert (tree.remote, tree.provider, tree.status, tree.usage) == (True, paul.id, "running", {"tokens": 7})
        go_on.set()
        await rita.ended(task_id)
        texts = [step.what.text for step in await rita.steps(task_id) if isinstance(step.what, StatusUpdate)]
        assert "half way" in texts
        notes = await rita.noted(task_id, REMOTE)
        assert notes[-1]["peer"] == paul.id
        assert notes[-1]["status"] == "completed"
        assert notes[-1]["usage"]["total"] == 7


async def test_what_fails_there_fails_here_for_the_same_reason(tmp_path: Path) -> None:
    async def refuse(turn: Any) -> Any:
        yield turn.reject("not my trade")

    async with two_peers(tmp_path, worker(refuse)) as (rita, paul):
        task_id = await rita.delegate(paul)
        view = await rita.ended(task_id)
        assert view.state is TaskState.FAILED
        assert "not my trade" in said(view)
        assert (await rita.delegation(task_id)).state is FAILED


async def test_work_that_asks_a_requester_of_an_earlier_version_is_ended_and_says_what_it_wanted(
    tmp_path: Path,
) -> None:
    go = asyncio.Event()

    async def ask(turn: Any) -> Any:
        await go.wait()
        yield turn.need_input("which colour?")

    async with two_peers(tmp_path, worker(ask)) as (rita, paul):
        task_id = await rita.delegate(paul)
        await rita.stands(task_id, RUNNING)
        known = paul.ledger.peer(rita.id)
        assert known is not None
        assert known.keys is not None
        older = msgspec.structs.replace(known.keys, versions=(2, 3))
        await paul.ledger.commit(LearnPeer(id=rita.id, by=OPERATOR, keys_shown=older))
        go.set()
        view = await rita.ended(task_id)
        assert view.state is TaskState.FAILED
        assert "which colour?" in said(view)
        assert (await rita.delegation(task_id)).code == "input_required"
        (work,) = await paul.works()
        assert (await paul.ended(work.task_id)).state is TaskState.CANCELED


async def test_work_that_needs_credentials_is_ended_and_says_so(tmp_path: Path) -> None:
    async def ask(turn: Any) -> Any:
        yield turn.need_auth("which password?")

    async with two_peers(tmp_path, worker(ask)) as (rita, paul):
        view = await rita.ended(await rita.delegate(paul))
        assert view.state is TaskState.FAILED
        assert "which password?" in said(view)


async def test_work_that_takes_longer_than_agreed_ends_as_timeout(tmp_path: Path) -> None:
    async def endless(turn: Any) -> str:
        await asyncio.Event().wait()
        return "never"

    short = changed(timeout_ms=30_000)
    async with two_peers(tmp_path, worker(endless), ours=short) as (rita, paul):
        task_id = await rita.delegate(paul)
        await rita.stands(task_id, RUNNING)
        await _sweep(paul, short.timeout_ms + 10_000)
        await rita.stands(task_id, TIMEOUT)
        view = await rita.ended(task_id)
        assert (view.state, said(view)) == (TaskState.FAILED, "Task timed out")


@pytest.mark.parametrize("words", ["Task timed out", "deadline_exceeded"])
async def test_work_that_fails_with_the_words_of_a_timeout_has_failed(tmp_path: Path, words: str) -> None:
    async def fail(turn: Any) -> Any:
        yield turn.fail(words)

    async with two_peers(tmp_path, worker(fail)) as (rita, paul):
        task_id = await rita.delegate(paul)
        view = await rita.ended(task_id)
        assert view.state is TaskState.FAILED
        assert ((await rita.delegation(task_id)).state, (await rita.delegation(task_id)).code) == (
            FAILED,
            "agent_failed",
        )
        (work,) = await paul.works()
        assert work.state is FAILED


@pytest.mark.parametrize("words", ["", "it asks something back, and the peer cannot answer questions"])
async def test_work_that_an_operator_cancels_is_canceled_whatever_the_reason(tmp_path: Path, words: str) -> None:
    """What was asked for counts only where the work was ended because it asked."""

    async def endless(turn: Any) -> Any:
        yield turn.status("which colour?")
        await asyncio.Event().wait()

    async with two_peers(tmp_path, worker(endless)) as (rita, paul):
        task_id = await rita.delegate(paul)
        await rita.stands(task_id, RUNNING)
        (work,) = await paul.works()
        await paul.ledger.commit(Cancel(task_id=work.task_id, by=OPERATOR, reason=words))
        await rita.stands(task_id, CANCELLED)
        assert (await rita.delegation(task_id)).code is None


async def _sweep(at: PeerUnderTest, later_ms: int) -> None:
    """What a daemon does once a second, when so much time has gone by."""
    at.clock.ahead_ms += later_ms
    await at.ledger.commit(Sweep())


# What is not taken


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"slots": 0}, "busy"),
        ({"slots_per_peer": 0}, "busy"),
        ({"budget_min": 40_000, "budget_max": 30_000}, "budget_too_low"),
        ({"offers_per_min": 0}, "rate_limited"),
    ],
)
async def test_an_offer_that_is_not_taken_fails_the_task_and_says_why(
    tmp_path: Path, settings: dict[str, Any], code: str
) -> None:
    # What passes is waited for, as long as the requester has time.
    ours = changed(timeout_ms=1)
    async with two_peers(tmp_path, worker(shout), ours=ours, theirs=changed(**settings)) as (rita, paul):
        task_id = await rita.delegate(paul)
        view = await rita.ended(task_id)
        delegation = await rita.delegation(task_id)
        assert (view.state, delegation.state, delegation.code) == (TaskState.FAILED, REJECTED, code)
        assert said(view).startswith(code)
        assert {work.state for work in await paul.works()} == {REJECTED}


async def test_a_peer_that_is_not_verified_there_is_not_worked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requester_service, "INTRODUCTION_MS", 1_000)
    async with peer_under_test(tmp_path / "rita") as rita, peer_under_test(tmp_path / "paul", worker(shout)) as paul:
        await rita.knows(paul)
        await paul.knows(rita, trust=Trust.PEER)
        view = await rita.ended(await rita.delegate(paul))
        assert view.state is TaskState.FAILED
        assert all(work.state is REJECTED for work in await paul.works())


async def test_a_denied_peer_is_not_worked_for(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(shout), theirs=changed(deny=("rita",))) as (rita, paul):
        view = await rita.ended(await rita.delegate(paul))
        assert view.state is TaskState.FAILED
        assert all(work.state is REJECTED for work in await paul.works())


async def test_a_profile_that_a_peer_does_not_have_is_known_before_anything_is_sent(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(shout)) as (rita, paul):
        view = await rita.ended(await rita.delegate(paul, profile="painter"))
        assert view.state is TaskState.FAILED
        assert "no_profile" in said(view)
        assert await paul.works() == []


async def test_only_named_profiles_are_offered_where_the_settings_name_some(tmp_path: Path) -> None:
    agents = worker(shout), worker(shout, "other")
    async with two_peers(tmp_path, *agents, theirs=changed(profiles=("other",))) as (rita, _):
        peer = rita.directory.find("paul")
        offered = await rita.directory.capabilities(peer)
        assert [profile.name for profile in offered.profiles] == ["other"]


# Delegating on


def calling(name: str, whom: str) -> Any:
    async def call(turn: Any) -> str:
        answer = await turn.call(whom, turn.text + ">")
        return str(answer.text)

    return worker(call, name)


async def test_a_peer_delegates_on_and_the_tree_shows_it(tmp_path: Path) -> None:
    async with (
        peer_under_test(tmp_path / "anna", calling("start", "bert/middle")) as anna,
        peer_under_test(tmp_path / "bert", calling("middle", "carl/last")) as bert,
        peer_under_test(tmp_path / "carl", worker(shout, "last")) as carl,
    ):
        for one, other in ((anna, bert), (bert, carl)):
            await one.knows(other)
            await other.knows(one)
        task_id = await anna.ask("start", "go")
        view = await anna.ended(task_id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "GO>>")
        tree = await read_tree(anna.ledger, task_id, None)
        (child,) = tree.children
        assert (child.remote, child.provider, child.profile, child.status) == (True, bert.id, "middle", "completed")
        result = (await anna.evidence(child.task_id))["result"]
        (below,) = result["subDelegations"]
        assert (below["profile"], below["remote"], below["provider"], below["status"]) == (
            "last",
            True,
            carl.id,
            "completed",
        )
        (work,) = await carl.works()
        assert work.offer is None
        assert work.depth_remaining == 1


async def test_work_never_comes_back_to_an_instance_that_it_is_done_for(tmp_path: Path) -> None:
    async with (
        peer_under_test(tmp_path / "anna", calling("start", "bert/middle"), worker(shout, "last")) as anna,
        peer_under_test(tmp_path / "bert", calling("middle", "anna/last")) as bert,
    ):
        await anna.knows(bert)
        await bert.knows(anna)
        view = await anna.ended(await anna.ask("start"))
        assert "depth_exceeded" in said(view)
        assert [work.state for work in await anna.works()] == [REJECTED]


async def test_an_agent_is_called_by_its_profile_alone_wherever_it_is(tmp_path: Path) -> None:
    async with (
        peer_under_test(tmp_path / "anna", calling("start", "last")) as anna,
        peer_under_test(tmp_path / "bert", worker(shout, "last")) as bert,
    ):
        await anna.knows(bert)
        await bert.knows(anna)
        await anna.directory.capabilities(anna.directory.find("bert"))
        assert said(await anna.ended(await anna.ask("start", "x"))) == "X>"


async def test_a_chain_of_instances_ends_where_the_first_one_said(tmp_path: Path) -> None:
    shallow = changed(depth_max=1)
    async with (
        peer_under_test(tmp_path / "anna", calling("start", "bert/middle"), settings=shallow) as anna,
        peer_under_test(tmp_path / "bert", calling("middle", "carl/last")) as bert,
        peer_under_test(tmp_path / "carl", calling("last", "dora/end")) as carl,
        peer_under_test(tmp_path / "dora", worker(shout, "end")) as dora,
    ):
        for one, other in ((anna, bert), (bert, carl), (carl, dora)):
            await one.knows(other)
            await other.knows(one)
        view = await anna.ended(await anna.ask("start"))
        assert said(view) == "agent_failed: the agent failed"
        assert [work.depth_remaining for work in (*await bert.works(), *await carl.works())] == [1, 0]
        assert await dora.works() == []


async def test_cancelling_the_first_task_ends_all_that_was_delegated_for_it(tmp_path: Path) -> None:
    async def endless(turn: Any) -> str:
        await asyncio.Event().wait()
        return "never"

    async with (
        peer_under_test(tmp_path / "anna", calling("start", "bert/middle")) as anna,
        peer_under_test(tmp_path / "bert", calling("middle", "carl/last")) as bert,
        peer_under_test(tmp_path / "carl", worker(endless, "last")) as carl,
    ):
        for one, other in ((anna, bert), (bert, carl)):
            await one.knows(other)
            await other.knows(one)
        orphans = [asyncio.create_task(_orphans(each)) for each in (anna, bert)]
        task_id = await anna.ask("start")
        await carl.until_works(lambda works: any(work.state is RUNNING for work in works))
        await anna.cancel(task_id)
        await carl.until_works(lambda works: all(work.state is CANCELLED for work in works))
        await bert.until_works(lambda works: all(work.state is CANCELLED for work in works))
        for each in orphans:
            each.cancel()


async def _orphans(at: PeerUnderTest) -> None:
    await OrphanCanceller(at.ledger).run()


# What it costs


async def test_work_is_stopped_at_the_budget_that_was_agreed(tmp_path: Path) -> None:
    async def spend(turn: Any) -> Any:
        for _ in range(100):
            turn.spend(tokens=30)
            yield "."
            await asyncio.sleep(0)

    async with two_peers(tmp_path, worker(spend)) as (rita, paul):
        task_id = await rita.delegate(paul, budget=100)
        view = await rita.ended(task_id)
        assert view.state is TaskState.FAILED
        assert "budget_exceeded" in said(view)
        delegation = await rita.delegation(task_id)
        assert (delegation.state, delegation.code, delegation.budget) == (FAILED, "budget_exceeded", 100)


async def test_a_round_trip_waits_for_nothing_that_is_done_now_and_then(tmp_path: Path) -> None:
    never_ms = 600_000
    slow = changed(retry_first_ms=never_ms, retry_max_ms=never_ms, status_interval_ms=never_ms, timeout_ms=never_ms)
    async with two_peers(tmp_path, worker(shout), ours=slow, theirs=slow) as (rita, paul):
        assert said(await rita.ended(await rita.delegate(paul)))


async def test_what_is_delegated_on_has_no_more_than_what_is_left_of_the_budget(tmp_path: Path) -> None:
    async def middle(turn: Any) -> str:
        turn.spend(tokens=60)
        return str((await turn.call("carl/last", "on")).text)

    async with (
        peer_under_test(tmp_path / "anna") as anna,
        peer_under_test(tmp_path / "bert", worker(middle, "middle")) as bert,
        peer_under_test(tmp_path / "carl", worker(shout, "last")) as carl,
    ):
        for one, other in ((anna, bert), (bert, carl)):
            await one.knows(other)
            await other.knows(one)
        task_id = await anna.delegate(bert, profile="middle", budget=100)
        assert said(await anna.ended(task_id)) == "ON"
        assert [work.budget for work in await carl.works()] == [40]
        assert (await anna.delegation(task_id)).usage.total == 60


async def test_a_worker_outside_does_what_a_peer_delegates_and_is_held_to_its_budget(tmp_path: Path) -> None:
    async with two_peers(tmp_path) as (rita, paul):
        paul.catalogue.add_resident(DEFAULT, AgentDefinition(id="outside", kind="worker"), "file")
        outside = paul.catalogue.identity(DEFAULT, "outside")
        grant = make_grant(outside, respond_actions(paul.catalogue.client(DEFAULT))[0])
        await paul.ledger.commit(MakeGrant(by=OPERATOR, grant=grant))
        mailbox = MailboxExchange(paul.ledger, OPERATOR)
        itself = Principal(outside, operator=False, token_sha256="t")
        for tokens, state in ((10, TaskState.COMPLETED), (1_000, TaskState.FAILED)):
            task_id = await rita.delegate(paul, "go", profile="outside", budget=100)
            with paul.ledger.task_waiter(outside.pubkey) as waiter:
                assert await waiter.wait(10_000)
            (leased,) = (await mailbox.take(itself)).tasks
            result = Result(
                task_id=leased.task.id,
                status=ResultStatus.OK,
                content=(Text("done outside"),),
                metadata={"usage": {"tokens": tokens}},
            )
            await mailbox.settle(itself, result, leased.lease.lease_id)
            view = await rita.ended(task_id)
            assert view.state is state
            assert said(view).startswith("done outside" if state is TaskState.COMPLETED else "budget_exceeded")


async def test_what_an_agent_does_not_take_is_not_begun(tmp_path: Path) -> None:
    agent = worker(shout, input_modes=["application/json"])
    async with two_peers(tmp_path, agent) as (rita, paul):
        task_id = await rita.delegate(paul)
        assert "takes application/json" in said(await rita.ended(task_id))
        assert (await rita.delegation(task_id)).code == "invalid"
        assert [work.state for work in await paul.works()] == [REJECTED]


@pytest.mark.parametrize("limits", [TenantLimits(live_tasks=1), TenantLimits(queued_bytes=5)])
async def test_what_a_peer_offers_above_the_limits_of_the_tenant_is_not_begun(
    tmp_path: Path, limits: TenantLimits
) -> None:
    go_on = asyncio.Event()

    async def slow(turn: Any) -> str:
        await go_on.wait()
        return "done"

    async with two_peers(tmp_path, worker(slow)) as (rita, paul):
        first = await rita.delegate(paul, "hello")
        await rita.stands(first, RUNNING)
        await paul.ledger.commit(ChangeTenant(by=OPERATOR, name=DEFAULT, limits=limits))
        second = await rita.delegate(paul, "again")
        assert (await rita.stands(second, REJECTED)).code == "busy"
        await rita.cancel(second)
        assert (await rita.ended(second)).state is TaskState.CANCELED
        go_on.set()
        assert (await rita.ended(first)).state is TaskState.COMPLETED


async def test_what_is_too_large_for_any_agent_is_not_begun(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(shout)) as (rita, paul):
        task_id = await rita.delegate(paul, parts=(Text("look"), Json({"much": "no " * 500_000})))
        view = await rita.ended(task_id)
        assert (view.state, (await rita.delegation(task_id)).code) == (TaskState.FAILED, "invalid")
        assert [work.state for work in await paul.works()] == [REJECTED]


@pytest.mark.parametrize("named", ["bert/last", "bert", ""])
async def test_an_agent_of_the_catalogue_can_be_one_that_a_peer_plays(tmp_path: Path, named: str) -> None:
    agent_id = "last" if not named.endswith("last") else "helper"
    async with (
        peer_under_test(tmp_path / "anna", calling("start", agent_id)) as anna,
        peer_under_test(tmp_path / "bert", worker(shout, "last")) as bert,
    ):
        await anna.knows(bert)
        await bert.knows(anna)
        await anna.directory.capabilities(anna.directory.find("bert"))
        anna.catalogue.add_resident(DEFAULT, AgentDefinition(id=agent_id, kind="peer", peer=named), "file")
        await AgentSync(anna.ledger, anna.catalogue, anna.workers, Log(), peers=anna.requester).step()
        assert said(await anna.ended(await anna.ask(agent_id, "x"))) == "X"
        assert said(await anna.ended(await anna.ask("start", "y"))) == "Y>"
        assert len(await bert.works()) == 2
