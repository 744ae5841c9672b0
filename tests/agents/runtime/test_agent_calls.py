"""Calls between agents of one pool: children in the ledger, found again, bounded, ended with their parent."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.agents.agent_loader import load_agent
from covenant.agents.api import Agent, SyncTurn, Turn
from covenant.agents.runtime.agent_calls import Answer, Call, CallLimit, NotEnough, RemoteFailure
from covenant.agents.runtime.job import Job
from covenant.agents.runtime.worker_pool import WorkerPool
from covenant.exchange.access.identities import operator_agent
from covenant.exchange.access.principals import IdentityAuth
from covenant.exchange.access.tenants import TenantAccess
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.delegation import Delegations, OrphanCanceller
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.tasks import TreeNode
from covenant.ledger.machine.commands import Accept, Repair
from covenant.model.content import Json, Text
from covenant.model.errors import Conflict, Refusal
from covenant.model.ids import TaskId
from covenant.model.retry_policy import Posture, Requeue
from covenant.model.settings import DelegationSettings
from covenant.model.task import DELEGATION, Task, fingerprint
from covenant.model.task_view import Artifact, TaskState, TaskView
from covenant.seal.keys import new_private_key
from tests.agents.pool_under_test import PoolUnderTest, a_ledger, now_ms, told
from tests.waits import BOUND_S

KEY = new_private_key()
Work = Callable[[Turn], Awaitable[Any]] | Callable[[SyncTurn], Any]


class CallingAgents(PoolUnderTest):
    """A pool with a catalogue: agents by name, which can call each other."""

    catalogue: Catalogue

    def serve_named(self, name: str, work: Work, **declared: Any) -> None:
        agent = Agent(name, **declared)
        agent(work)
        definition, body = load_agent(agent)
        self.catalogue.add_resident("default", definition, "code")
        self.workers.register(
            self.catalogue.identity("default", name), body, idempotent=agent.idempotent, on_lost=agent.on_lost
        )

    async def begin(self, name: str, text: str = "go", **fields: Any) -> TaskId:
        fields = {
            "sender": self.catalogue.client("default"),
            "recipient": self.catalogue.identity("default", name),
            "tenant": "default",
            "origin": "a2a",
            **fields,
        }
        task = Task(id=TaskId(f"00000000-0000-4000-8000-{len(self.begun):012x}"), intent_text=text, **fields)
        self.begun.append(task.id)
        await self.ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))
        return task.id

    async def done(self, name: str, text: str = "go", **fields: Any) -> TaskView:
        return await self.ended(await self.begin(name, text, **fields))

    async def tree(self, task_id: TaskId) -> TreeNode:
        return await self.ledger.tree(task_id, None)

    async def child(self, task_id: TaskId, place: int = 0) -> TaskId:
        return (await self.tree(task_id)).children[place].task_id

    def __init__(self, ledger: Ledger, workers: WorkerPool) -> None:
        super().__init__(ledger, workers)
        self.begun: list[TaskId] = []


@asynccontextmanager
async def open_agents(ledger: Ledger, **limits: Any) -> AsyncIterator[CallingAgents]:
    operator = operator_agent("operator@test", KEY)
    await TenantAccess(ledger, operator, IdentityAuth(ledger, operator)).open()
    catalogue = Catalogue(ledger, KEY)
    known = {"near": "https://near.example/a2a", "far": "https://far.example/a2a"}

    def delegations(pool: WorkerPool) -> Delegations:
        return Delegations(
            ledger, catalogue, pool, DelegationSettings(**limits), registered=lambda _, name: known.get(name)
        )

    workers = WorkerPool(ledger, stop_s=0.2, delegations=delegations)
    under_test = CallingAgents(ledger, workers)
    under_test.catalogue = catalogue
    running, orphans = asyncio.create_task(workers.run()), asyncio.create_task(OrphanCanceller(ledger).run())
    under_test.running = running
    await asyncio.sleep(0)
    try:
        yield under_test
    finally:
        orphans.cancel()
        workers.stop()
        if not running.done():
            await asyncio.wait((running,), timeout=BOUND_S)


@pytest.fixture
async def under_test(ledger: Ledger) -> AsyncIterator[CallingAgents]:
    async with open_agents(ledger) as opened:
        yield opened


async def echo(turn: Turn) -> str:
    turn.spend(5, requests=1)
    return f"echo {turn.text}"


async def forever(turn: Turn) -> None:
    await asyncio.Event().wait()


async def test_a_call_is_a_task_of_its_own_and_its_use_is_charged_to_the_caller(under_test: CallingAgents) -> None:
    async def ask(turn: Turn) -> str:
        answer = await turn.call("echo", "one")
        turn.spend(2)
        assert (answer.ok, answer.state, answer.tokens) == (True, TaskState.COMPLETED, 5)
        return f"heard {answer.text}"

    under_test.serve_named("asker", ask)
    under_test.serve_named("echo", echo)
    view = await under_test.done("asker")
    assert told(view) == "heard echo one"
    assert view.result is not None
    assert view.result.metadata == {"usage": {"tokens": 7, "requests": 1}, "delegated": {"tokens": 5, "requests": 1}}
    tree = await under_test.tree(view.task.id)
    (child,) = tree.children
    assert child.task is not None
    assert (child.task.parent, child.task.origin, child.task.depth) == (view.task.id, DELEGATION, 1)
    assert (child.task.sender, child.task.recipient) == (
        under_test.catalogue.identity("default", "asker"),
        under_test.catalogue.identity("default", "echo"),
    )
    assert (child.task.tenant, child.task.context_id) == ("default", view.task.id)
    assert (tree.usage, tree.usage_total) == ({"tokens": 2}, {"tokens": 7, "requests": 1})
    assert child.a2a_state == "completed"


async def test_what_fails_is_told_as_an_answer_and_what_cannot_be_asked_is_refused(under_test: CallingAgents) -> None:
    async def fail(turn: Turn) -> None:
        raise ValueError("not for your ears")

    seen: list[Any] = []

    async def ask(turn: Turn) -> None:
        seen.append((await turn.call("failing", "x")).state)
        for name, what in (("nobody", "x"), ("asker", "x"), ("near", turn.data({"a": 1})), ("echo", ())):
            try:
                await turn.call(name, what)
            except Refusal as refusal:
                seen.append(refusal.code)

    under_test.serve_named("asker", ask)
    under_test.serve_named("failing", fail)
    under_test.serve_named("echo", echo)
    assert (await under_test.done("asker")).state is TaskState.COMPLETED
    assert seen == [TaskState.FAILED, "unknown_agent", "loop_detected", "text_only", "empty_message"]


async def test_a_chain_ends_where_it_is_too_deep_or_comes_back(under_test: CallingAgents) -> None:
    async def down(turn: Turn) -> str:
        name = f"level{turn.task.depth + 1}" if turn.text == "down" else "level0"
        try:
            return (await turn.call(name, turn.text)).text
        except Refusal as refusal:
            return f"{turn.task.depth} {refusal.code}"

    for level in range(6):
        under_test.serve_named(f"level{level}", down)
    assert told(await under_test.done("level0", "down")) == "3 depth_exceeded"
    assert told(await under_test.done("level1", "back")) == "1 loop_detected"
    deep = await under_test.done("level0", "down", depth=2, chain=("somebody", "elsewhere"))
    assert told(deep) == "3 depth_exceeded"


async def test_a_second_attempt_finds_the_calls_of_the_first(under_test: CallingAgents) -> None:
    ran: list[str] = []
    holding = asyncio.Event()

    async def work(turn: Turn) -> str:
        ran.append(turn.text)
        return f"done {turn.text}"

    async def ask(turn: Turn) -> str:
        answers = [await turn.call("worker", "same"), await turn.call("worker", "same")]
        answers.append(await turn.call("worker", f"attempt {turn.attempt}"))
        answers.append(await turn.call("worker", "keyed", key="k"))
        if turn.attempt == 1:
            holding.set()
            await asyncio.Event().wait()
        return " ".join(answer.text for answer in answers)

    under_test.serve_named("worker", work)
    under_test.serve_named("asker", ask)
    task_id = await under_test.begin("asker")
    await asyncio.wait_for(holding.wait(), BOUND_S)
    requeue = Requeue(Posture.OPERATOR_ACCEPTED)
    by = under_test.catalogue.client("default")
    await under_test.ledger.commit(Repair(task_id=task_id, by=by, command=requeue, reason="again"))
    assert told(await under_test.ended(task_id)) == "done same done same done attempt 2 done keyed"
    assert ran == ["same", "same", "attempt 1", "keyed", "attempt 2"]
    assert len((await under_test.tree(task_id)).children) == 5


async def test_a_key_holds_for_the_whole_task_and_for_one_request(under_test: CallingAgents) -> None:
    seen: list[Any] = []

    async def ask(turn: Turn) -> Any:
        if turn.turn == 1:
            seen.append((await turn.call("echo", "one", key="k")).task_id)
            return turn.need_input("go on?")
        again = await turn.call("echo", "one", key="k")
        seen.append(again.task_id)
        with pytest.raises(Conflict, match="used for another call"):
            await turn.call("echo", "two", key="k")
        seen.append((await turn.call("echo", "one")).task_id)
        return "done"

    under_test.serve_named("asker", ask)
    under_test.serve_named("echo", echo)
    task_id = await under_test.begin("asker")
    await under_test.parked(task_id)
    await under_test.say(task_id, "yes")
    assert (await under_test.ended(task_id)).state is TaskState.COMPLETED
    assert (seen[0] == seen[1], seen[1] == seen[2]) == (True, False)


@pytest.mark.parametrize("how", ["canceled", "returned", "failed", "timed out"])
async def test_a_caller_that_ends_takes_its_calls_with_it(under_test: CallingAgents, how: str) -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def work(turn: Turn) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def ask(turn: Turn) -> str:
        calling = asyncio.ensure_future(turn.call("worker", "x"))
        if how in ("canceled", "timed out"):
            return (await calling).text
        await begun.wait()
        if how == "failed":
            raise ValueError("no more")
        return "done without it"

    under_test.serve_named("worker", work)
    under_test.serve_named("asker", ask, timeout_ms=None)
    task_id = await under_test.begin("asker")
    await asyncio.wait_for(begun.wait(), BOUND_S)
    child = await under_test.child(task_id)
    if how == "canceled":
        await under_test.cancel(task_id)
    elif how == "timed out":
        (job,) = [job for job in under_test.workers._jobs if job.task.id == task_id]
        job.fail_now("Task timed out")
    await asyncio.wait_for(stopped.wait(), BOUND_S)
    assert (await under_test.ended(child)).state is TaskState.CANCELED
    expected = {"canceled": TaskState.CANCELED, "returned": TaskState.COMPLETED}.get(how, TaskState.FAILED)
    assert (await under_test.ended(task_id)).state is expected


async def test_a_call_has_no_more_time_than_is_left_and_is_canceled_when_that_is_over(
    under_test: CallingAgents,
) -> None:
    seen: list[Answer] = []

    async def ask(turn: Turn) -> str:
        seen.append(await turn.call("worker", "x", timeout_ms=100))
        seen.append(await turn.call("echo", "y", timeout_ms=10_000_000))
        return "done"

    under_test.serve_named("worker", forever)
    under_test.serve_named("echo", echo)
    under_test.serve_named("asker", ask)
    deadline_ms = under_test.ledger.now_ms() + 60_000
    view = await under_test.done("asker", deadline_ms=deadline_ms, timeout_ms=30_000)
    assert view.state is TaskState.COMPLETED
    assert [answer.state for answer in seen] == [TaskState.CANCELED, TaskState.COMPLETED]
    slow, quick = (child.task for child in (await under_test.tree(view.task.id)).children)
    assert slow is not None
    assert quick is not None
    assert slow.deadline_ms is not None
    assert quick.deadline_ms is not None
    assert slow.deadline_ms < quick.deadline_ms <= view.created_at_ms + 31_000
    assert (slow.timeout_ms or 0) <= 100
    assert (quick.timeout_ms or 0) <= 30_000


async def test_a_call_that_its_author_gives_up_is_canceled(under_test: CallingAgents) -> None:
    begun = asyncio.Event()

    async def work(turn: Turn) -> None:
        begun.set()
        await forever(turn)

    async def ask(turn: Turn) -> str:
        calling = asyncio.ensure_future(turn.call("worker", "x"))
        await begun.wait()
        calling.cancel()
        await asyncio.wait((calling,))
        return "gave up" if calling.cancelled() else "never"

    under_test.serve_named("worker", work)
    under_test.serve_named("asker", ask)
    view = await under_test.done("asker")
    assert told(view) == "gave up"
    assert (await under_test.ended(await under_test.child(view.task.id))).state is TaskState.CANCELED


async def test_first_and_quorum_cancel_the_others_and_say_when_there_are_not_enough(
    under_test: CallingAgents,
) -> None:
    async def fail(turn: Turn) -> None:
        raise ValueError("no")

    seen: list[Any] = []

    async def ask(turn: Turn) -> None:
        seen.append((await turn.call_first([("forever", "a"), ("failing", "b"), ("echo", "c")])).text)
        both = await turn.call_quorum(2, [("forever", "d"), ("echo", "e"), Call(agent="echo", what="f")])
        seen.append(sorted(answer.text for answer in both))
        with pytest.raises(NotEnough, match="2 calls had to complete") as caught:
            await turn.call_quorum(2, [("forever", "g"), ("failing", "h"), ("failing", "i")])
        seen.append([answer.state for answer in caught.value.answers])
        seen.append(await turn.call_all([]))
        with pytest.raises(Refusal, match="quorum of 3"):
            await turn.call_quorum(3, [("echo", "j")])

    under_test.serve_named("asker", ask)
    for name, work in (("echo", echo), ("forever", forever), ("failing", fail)):
        under_test.serve_named(name, work)
    view = await under_test.done("asker")
    assert view.state is TaskState.COMPLETED
    assert seen == ["echo c", ["echo e", "echo f"], [TaskState.FAILED, TaskState.FAILED], ()]
    tree = await under_test.tree(view.task.id)
    assert [child.a2a_state for child in tree.children if child.task and child.task.intent_text in "adg"] == [
        "canceled"
    ] * 3


async def test_a_question_of_a_call_can_be_answered_or_passed_on(under_test: CallingAgents) -> None:
    async def question(turn: Turn) -> Any:
        return turn.need_input("which?") if turn.turn == 1 else f"so {turn.text}"

    async def ask(turn: Turn) -> Any:
        if turn.turn == 1:
            answer = await turn.call("question", "x", key="q")
            assert (answer.waits, answer.text) == (True, "which?")
            return turn.need_input(answer.text)
        waiting = await turn.call("question", "x", key="q")
        return (await turn.answer(waiting, turn.text)).text

    under_test.serve_named("asker", ask)
    under_test.serve_named("question", question)
    task_id = await under_test.begin("asker")
    assert told(await under_test.parked(task_id)) == "which?"
    await under_test.say(task_id, "the blue one")
    assert told(await under_test.ended(task_id)) == "so the blue one"
    with pytest.raises(Refusal, match="not called by this task"):
        await under_test.workers.delegations.answer(task_id, Task(**_fields(task_id)), (), "m")  # type: ignore[union-attr]


def _fields(task_id: TaskId) -> dict[str, Any]:
    operator = operator_agent("operator@test", KEY)
    return {"id": task_id, "sender": operator, "recipient": operator, "intent_text": "x"}


async def test_a_task_has_a_budget_of_calls_to_agents_elsewhere(tmp_path: Path) -> None:
    seen: list[str] = []
    later_ms = 0

    async def ask(turn: Turn) -> None:
        nonlocal later_ms

        async def tried(*calls: tuple[str, str]) -> str:
            """Nobody works for the agents elsewhere: a call to them is made, and never answered."""
            before = len((await ledger.tree(turn.task.id, None)).children)
            calling = asyncio.ensure_future(turn.call_all(calls))
            while not calling.done() and len((await ledger.tree(turn.task.id, None)).children) == before:
                await asyncio.wait((calling,), timeout=0.001)
            if not calling.done() and not all(name == "echo" for name, _ in calls):
                calling.cancel()
            try:
                await calling
            except CallLimit as limit:
                return limit.reason
            except asyncio.CancelledError:
                return "called"
            return "answered"

        seen.append(await tried(("near", "a"), ("far", "a")))
        seen.append(await tried(("near", "b")))
        later_ms += 10_000
        seen.append(await tried(("https://third.example/", "c")))
        seen.append(await tried(("near", "d"), ("near", "e")))
        seen.append(await tried(("near", "d")))
        later_ms += 10_000
        seen.append(await tried(("near", "f")))
        seen.append(await tried(("echo", "g"), ("echo", "h"), ("echo", "i")))
        seen.append(await tried(("echo", "g"), ("echo", "h")))

    async with (
        a_ledger(tmp_path / "home", monotonic_ms=lambda: now_ms() + later_ms) as ledger,
        open_agents(ledger, calls_max=3, agents_max=2, cooldown_ms=10_000, children_max=5) as under_test,
    ):
        under_test.serve_named("asker", ask)
        under_test.serve_named("echo", echo)
        assert (await under_test.done("asker")).state is TaskState.COMPLETED
    assert seen == [
        "called",
        "COOLDOWN",
        "UNIQUE_AGENT_LIMIT",
        "INVOCATION_LIMIT",
        "called",
        "INVOCATION_LIMIT",
        "INVOCATION_LIMIT",
        "answered",
    ]


async def test_a_job_without_delegation_says_so(pool: PoolUnderTest) -> None:
    class Body:
        async def run(self, job: Job) -> None:
            try:
                await job.calls.all([("echo", "x")])
            except Refusal as refusal:
                job.fail(refusal.code)

    pool.serve(Body())
    assert told(await pool.ask()) == "no_delegation"


def test_an_answer_comes_back_as_it_was_from_another_process() -> None:
    failure = RemoteFailure(code="refused", message="no", rpc_code=-32001)
    answer = Answer(
        text="a",
        parts=(Text("a"),),
        artifacts=(Artifact(artifact_id="x", parts=(Json({"n": 1}),)),),
        state=TaskState.FAILED,
        task_id=TaskId("t"),
        usage={"tokens": 2.0},
        remote_failure=failure,
    )
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Answer) == answer
