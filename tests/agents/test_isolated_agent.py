"""Isolated functions: each turn in a process of its own, which can say and ask what a function in the daemon can."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from covenant import Agent
from covenant.agents.agent_loader import ServedFile, load_agent, load_agents
from covenant.exchange.a2a_service import A2ARequest
from covenant.exchange.tasks.reader import TaskReader
from covenant.ledger.clock import uuid_source
from covenant.ledger.machine.commands import SignalTask, Sweep
from covenant.ledger.machine.entry import Entry
from covenant.model.a2a_requests import CancelTask, Message, SendMessage
from covenant.model.content import Json, Text
from covenant.model.ids import TaskId
from covenant.model.task_event import ArtifactUpdate, Signal, StatusUpdate
from covenant.model.task_view import TaskState
from covenant.model.tenants import DEFAULT
from tests.agents.agents_under_test import AgentsUnderTest, function, open_agents, said
from tests.waits import BOUND_S, eventually

FILE = """
import asyncio, ctypes, logging, os, pathlib, subprocess, sys, time
from covenant import Agent, CallLimit, NotEnough, WrongType
from covenant.agents.api import Rejection
from covenant.model.content import Text
from covenant.model.task_event import StatusUpdate

isolated = dict(isolate=True)
speaker = Agent("speaker", **isolated)
@speaker
def speak(turn):
    print("not for the daemon's line")
    yield turn.status("reading", progress=0.25)
    yield f"{turn.text} in {os.getpid()}"
    yield turn.file("a.md", b"# a" * 500_000)
    yield turn.data({"n": turn.turn})
    turn.spend(tokens=5, input_tokens=5)

odd = Agent("odd", **isolated)
@odd
def be_odd(turn):
    yield {"status": StatusUpdate(5), "rejection": Rejection(None), "text": Text(5)}[turn.text]

returns = Agent("returns", **isolated)
@returns
async def come_back(turn):
    return turn.text.upper()

asks = Agent("asks", **isolated)
@asks
async def ask(turn):
    if turn.turn == 1:
        yield turn.need_input("Which language?")
    else:
        yield f"{turn.text}, after {len(turn.history)} messages"

rejects = Agent("rejects", **isolated)
@rejects
def reject(turn):
    return turn.reject("not my work")

replies = Agent("replies", **isolated)
@replies
def reply(turn):
    return turn.reply("just this")

calls = Agent("calls", **isolated)
@calls
def call(turn):
    one = turn.call("shout", "hey")
    two = turn.call_all([("shout", "a"), ("shout", "b")])
    refused = []
    for attempt in (lambda: turn.call("nobody", "x"), lambda: turn.call_first([("broken", "x")])):
        try:
            attempt()
        except Exception as refusal:
            refused.append(f"{type(refusal).__name__} {refusal.code}")
    return " ".join([one.text, *(each.text for each in two), *refused])

calls_async = Agent("calls_async", **isolated)
@calls_async
async def call_async(turn):
    calling = asyncio.ensure_future(turn.call("endless", "x"))
    while not (pathlib.Path(__file__).parent / "endless").exists():
        await asyncio.sleep(0.005)
    calling.cancel()
    return (await turn.call("shout", "hey")).text

crashes = Agent("crashes", **isolated)
@crashes
def crash(turn):
    yield "so far"
    if turn.text == "raise":
        raise ValueError("swordfish")
    if turn.text == "segfault":
        ctypes.string_at(0)
    if turn.text == "odd":
        yield 5
    os._exit({"zero": 0}.get(turn.text, 3))

class ShopClosed(Exception):
    pass

def note(word):
    with open(pathlib.Path(__file__).parent / "notes", "a") as lines:
        lines.write(word + "\\n")

pays = Agent("pays", **isolated)
@pays
async def pay(turn):
    def charge():
        note("charge")
        raise ShopClosed("closed")
    try:
        await turn.step("charge", charge)
    except ShopClosed as error:
        said = str(error)
    return f"{said}, {await turn.wait_for('go')}"

rolls = Agent("rolls", **isolated)
@rolls
def roll(turn):
    first = turn.step("one", lambda: turn.call("shout", "dice").task_id)
    note("same" if turn.call("shout", "dice").task_id == first else "another")
    return turn.wait_for("go")

careless = Agent("careless", **isolated)
@careless
async def be_careless(turn):
    if turn.text == "reads":
        return repr(sys.stdin.read()) + subprocess.run("cat", stdout=subprocess.PIPE).stdout.decode()
    if turn.text == "logs":
        logging.getLogger("shop").warning("%d of %s", "half")
        logging.getLogger("shop").warning("\\ud800")
        return "went on"
    if turn.text == "waits":
        refused = []
        for wait in (turn.sleep, lambda s: turn.wait_for("x", timeout_s=s), lambda s: turn.ask("x?", timeout_s=s)):
            try:
                await wait(float("nan"))
            except WrongType as wrong:
                refused.append(wrong.field)
        return " ".join(refused)
    if turn.text == "waits in vain":
        try:
            await turn.wait_for("x", timeout_s=0.001)
        except TimeoutError as late:
            return str(late)
    raise KeyboardInterrupt

hangs = Agent("hangs", timeout_ms=60_000, **isolated)
@hangs
async def hang(turn):
    yield str(os.getpid())
    time.sleep(600)
"""


@pytest.fixture
async def under_test(tmp_path: Path) -> AsyncIterator[AgentsUnderTest]:
    path = tmp_path / "isolated_agents.py"
    path.write_text(FILE)
    broken, endless = Agent("broken"), Agent("endless")

    @broken
    async def fail(turn: Any) -> None:
        raise ValueError

    @endless
    async def wait(turn: Any) -> None:
        (tmp_path / "endless").touch()
        await asyncio.Event().wait()

    async with open_agents(tmp_path / "home", function("shout", "{}!"), broken, endless) as opened:
        for found in load_agents([ServedFile(path)]):
            definition = found.definition
            opened.catalogue.add_resident(DEFAULT, definition, "code")
            opened.workers.register(opened.catalogue.identity(DEFAULT, definition.id), found.body)
        yield opened


async def test_an_isolated_function_says_everything_from_another_process(under_test: AgentsUnderTest) -> None:
    view = await under_test.ask("speaker", "hello")
    words = said(view)
    assert words.startswith("hello in ")
    assert words != f"hello in {os.getpid()}"
    (read,) = [step.what for step in await under_test.steps(view) if isinstance(step.what, StatusUpdate)]
    assert (read.text, read.metadata) == ("reading", {"progress": 0.25})
    text, file, data = view.artifacts
    assert (text.parts, data.parts) == ((Text(words),), (Json({"n": 1}),))
    assert file.name == "a.md"
    assert view.result is not None
    assert view.result.metadata == {"usage": {"tokens": 5, "input_tokens": 5}}
    assert said(await under_test.ask("returns", "hello")) == "HELLO"


async def test_an_isolated_function_asks_rejects_and_replies(under_test: AgentsUnderTest) -> None:
    parked = await under_test.ask("asks", "translate")
    assert (parked.state, said(parked)) == (TaskState.INPUT_REQUIRED, "Which language?")
    assert said(await under_test.ask("asks", "Latin", task_id=parked.task.id)) == "Latin, after 2 messages"
    rejected = await under_test.ask("rejects", "x")
    assert (rejected.state, said(rejected)) == (TaskState.REJECTED, "not my work")
    replied = await under_test.ask("replies", "x")
    assert (replied.result is not None and replied.result.reply, said(replied)) == (True, "just this")


@pytest.mark.parametrize(
    ("kind", "field"), [("status", "StatusUpdate.text"), ("rejection", "Rejection.text"), ("text", "Text.text")]
)
async def test_an_isolated_generator_fails_with_the_field_that_cannot_be_said(
    under_test: AgentsUnderTest, kind: str, field: str
) -> None:
    view = await under_test.ask("odd", kind)
    assert view.state is TaskState.FAILED
    assert said(view).startswith(f"the agent yielded an invalid value: {field}")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("reads", "''"),
        ("logs", "went on"),
        ("waits", "seconds timeout_s timeout_s"),
        ("interrupts itself", "the agent failed"),
    ],
)
async def test_a_careless_isolated_function_ends_as_it_would_in_the_daemon(
    under_test: AgentsUnderTest, text: str, answer: str
) -> None:
    """Standard input, which has the daemon's answers, is empty for it; a record that cannot be written is no error."""
    assert said(await under_test.ask("careless", text)) == answer


async def test_an_isolated_function_calls_other_agents(under_test: AgentsUnderTest) -> None:
    answered = "hey! a! b! NotFound unknown_agent NotEnough not_enough_answers"
    assert said(await under_test.ask("calls", "go")) == answered
    view = await under_test.ask("calls_async", "go")
    assert said(view) == "hey!"
    tree = await under_test.ledger.tree(view.task.id, None)
    assert sorted(str(child.a2a_state) for child in tree.children) == ["canceled", "completed"]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("segfault", "the agent's process was killed by signal 11"),
        ("exit", "the agent exited with status 3"),
        ("zero", "the agent's process exited in the middle of its turn"),
        ("raise", "the agent failed"),
        ("odd", "the agent yielded an int, which cannot be sent"),
    ],
)
async def test_a_process_that_dies_fails_its_own_task_alone(
    under_test: AgentsUnderTest, how: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        dead, alive = await asyncio.gather(under_test.ask("crashes", how), under_test.ask("returns", "hello"))
    assert dead.state is TaskState.FAILED
    assert said(dead).startswith(told)
    assert said(alive) == "HELLO"
    if how == "raise":
        assert any("swordfish" in str(getattr(record, "said", "")) for record in caplog.records)


async def _begin(under_test: AgentsUnderTest, name: str, text: str = "x") -> TaskId:
    agent = under_test.catalogue.agent(DEFAULT, name)
    assert agent is not None
    message = Message(message_id=uuid_source()(), parts=(Text(text),))
    ask = A2ARequest(caller=under_test.caller, agent=agent)
    return (await under_test.conversations.send(ask, SendMessage(message=message, blocking=False))).task.id


async def _until(under_test: AgentsUnderTest, task_id: TaskId, met: Callable[[Entry], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        with under_test.ledger.watch(task_id) as watch:
            while (entry := await under_test.ledger.entry(task_id)) is not None and not met(entry):
                await watch.next(BOUND_S)


async def _ended(under_test: AgentsUnderTest, task_id: TaskId) -> str:
    await _until(under_test, task_id, lambda entry: entry.ending is not None)
    view = (await TaskReader(under_test.ledger).past(task_id)).view()
    assert view is not None
    return said(view)


async def test_a_step_that_fails_is_done_once_in_its_process(under_test: AgentsUnderTest, tmp_path: Path) -> None:
    task_id = await _begin(under_test, "pays")
    await _until(under_test, task_id, lambda entry: entry.wait is not None)
    await under_test.ledger.commit(SignalTask(task_id=task_id, signal=Signal("go", "s1", "on")))
    assert await _ended(under_test, task_id) == "closed, on"
    assert (tmp_path / "notes").read_text() == "charge\n"


async def test_a_wait_of_a_process_that_is_in_vain_raises_the_timeout_of_the_daemon(
    under_test: AgentsUnderTest,
) -> None:
    task_id = await _begin(under_test, "careless", "waits in vain")
    await _until(under_test, task_id, lambda entry: entry.wait is not None)

    async def is_over() -> bool:
        await under_test.ledger.commit(Sweep())
        entry = await under_test.ledger.entry(task_id)
        return entry is not None and entry.ending is not None

    await eventually(is_over)
    assert await _ended(under_test, task_id) == "no signal 'x' came within 0.001 seconds"


async def test_a_call_within_a_step_of_a_process_is_counted_apart(under_test: AgentsUnderTest, tmp_path: Path) -> None:
    task_id = await _begin(under_test, "rolls")
    await _until(under_test, task_id, lambda entry: entry.wait is not None)
    await under_test.ledger.commit(SignalTask(task_id=task_id, signal=Signal("go", "s1", "on")))
    assert await _ended(under_test, task_id) == "on"
    assert (tmp_path / "notes").read_text().split() == ["another", "another"]


async def test_a_canceled_turn_ends_its_process(under_test: AgentsUnderTest) -> None:
    agent = under_test.catalogue.agent(DEFAULT, "hangs")
    assert agent is not None
    ask = A2ARequest(caller=under_test.caller, agent=agent)
    message = Message(message_id=uuid_source()(), parts=(Text("x"),))
    begun = await under_test.conversations.send(ask, SendMessage(message=message, blocking=False))
    pid = await _first_word(under_test, begun.task.id)
    assert _alive(pid)
    canceled = await under_test.conversations.cancel(ask, CancelTask(task_id=begun.task.id))
    assert canceled.state is TaskState.CANCELED
    async with asyncio.timeout(BOUND_S):
        while _alive(pid):  # noqa: ASYNC110  (a process)
            await asyncio.sleep(0.01)
    await asyncio.wait_for(under_test.workers.idle(), BOUND_S)


async def _first_word(under_test: AgentsUnderTest, task_id: TaskId) -> int:
    async with asyncio.timeout(BOUND_S):
        with under_test.ledger.watch(task_id) as watch:
            while True:
                for step in await under_test.ledger.steps(task_id, 0, 100):
                    if isinstance(step.what, ArtifactUpdate):
                        (part,) = step.what.parts
                        assert isinstance(part, Text)
                        return int(part.text)
                await watch.next(BOUND_S)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_agent_without_a_file_cannot_be_isolated() -> None:
    agent = Agent("loose", isolate=True)

    @agent
    def speak(turn: Any) -> Iterator[str]:
        yield "hello"

    with pytest.raises(TypeError, match="only where it is served from a file"):
        load_agent(agent)
