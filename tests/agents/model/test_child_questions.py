"""An agent that a model has called asks for an approval: a person gives it, to the caller or to the agent itself."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai.models import Model

from covenant.model.ids import TaskId
from covenant.model.question import QUESTION
from covenant.model.task_view import TaskState, TaskView
from tests.agents.agents_under_test import AgentsUnderTest, open_agents, said
from tests.agents.model.test_model_agent import BOT, Script
from tests.waits import eventually

CLERK = {**BOT, "needs_approval": ["write"]}
BOSS = {"id": "boss", "kind": "model"}
WRITE = ("write", {"path": "a.txt", "content": "x"})
CALL = ("agent", {"agent": "bot", "message": "write it"})


def models(boss: Script, clerk: Script) -> dict[str, Model]:
    return {"boss": boss.model, "bot": clerk.model}


def asked_of(view: TaskView) -> dict[str, Any]:
    assert view.state is TaskState.INPUT_REQUIRED, view
    assert view.message is not None
    assert view.message.metadata is not None
    found: dict[str, Any] = view.message.metadata[QUESTION]
    return found


def made(view: TaskView) -> Iterable[str | None]:
    return [artifact.name for artifact in view.artifacts]


async def view_of(under_test: AgentsUnderTest, task_id: str) -> TaskView:
    return (await under_test.conversations.reader.past(TaskId(task_id))).existing_view()


async def at_end(under_test: AgentsUnderTest, task_id: TaskId) -> TaskView:
    async def ended() -> bool:
        return (await view_of(under_test, task_id)).state.terminal

    await eventually(ended)
    return await view_of(under_test, task_id)


async def test_the_caller_is_parked_with_what_is_asked_and_the_answer_is_passed_on(tmp_path: Path) -> None:
    boss, clerk = Script(CALL, "it is written"), Script(WRITE, "done")
    async with open_agents(tmp_path, CLERK, BOSS, models=models(boss, clerk)) as under_test:
        view = await under_test.ask("boss", "go")
        asked = asked_of(view)
        assert said(view).startswith("bot asks: May I use write with")
        assert (asked["kind"], asked["tool"], asked["arguments"]["agent"]) == ("approval", "agent", "bot")
        child = await view_of(under_test, asked["arguments"]["task_id"])
        assert asked_of(child)["id"] == asked["arguments"]["question_id"]
        assert boss.returned == [], "the model hears nothing before a person has decided"
        view = await under_test.ask("boss", "approve", task_id=view.task.id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "it is written")
        child = await view_of(under_test, child.task.id)
        assert (child.state, said(child)) == (TaskState.COMPLETED, "done")
        assert "a.txt" in made(child)
        assert "done" in boss.returned[0]
        assert len(boss.told) == 2
        assert list(made(view)).count("tool_call") == 1


async def test_a_denial_is_the_called_agents_and_it_hears_the_reason(tmp_path: Path) -> None:
    boss, clerk = Script(CALL, "so be it"), Script(WRITE, "nothing is written")
    async with open_agents(tmp_path, CLERK, BOSS, models=models(boss, clerk)) as under_test:
        view = await under_test.ask("boss", "go")
        view = await under_test.ask("boss", "deny: not today", task_id=view.task.id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "so be it")
        assert clerk.returned == ["A person denied this. not today"]
        assert "nothing is written" in boss.returned[0]


async def test_an_answer_to_the_called_agents_own_task_lets_its_caller_go_on(tmp_path: Path) -> None:
    boss, clerk = Script(CALL, "it is written"), Script(WRITE, "done")
    async with open_agents(tmp_path, CLERK, BOSS, models=models(boss, clerk)) as under_test:
        view = await under_test.ask("boss", "go")
        child = await under_test.ask("bot", "approve", task_id=TaskId(asked_of(view)["arguments"]["task_id"]))
        assert child.state is TaskState.COMPLETED
        view = await at_end(under_test, view.task.id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "it is written")
        assert "done" in boss.returned[0]


async def test_each_question_of_a_called_agent_is_asked_in_its_turn(tmp_path: Path) -> None:
    more = ("write", {"path": "b.txt", "content": "y"})
    boss, clerk = Script(CALL, ("ask_user", {"question": "Well?"}), "both"), Script(WRITE, more, "done")
    async with open_agents(tmp_path, CLERK, BOSS, models=models(boss, clerk)) as under_test:
        view = await under_test.ask("boss", "go")
        for name in ("a.txt", "b.txt"):
            assert name in said(view)
            view = await under_test.ask("boss", "approve", task_id=view.task.id)
        assert said(view) == "Well?"
        view = await under_test.ask("boss", "yes", task_id=view.task.id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "both")
        assert len(clerk.told) == 3
        assert len(boss.told) == 3


async def test_of_calls_at_once_those_that_ask_are_waited_for_and_the_others_are_not_made_again(tmp_path: Path) -> None:
    calls = [{"agent": "bot", "message": "write it"}, {"agent": "other", "message": "hello"}]
    boss, clerk, other = Script(("parallel", {"calls": calls}), "both"), Script(WRITE, "done"), Script("hi")
    agents = (CLERK, BOSS, {"id": "other", "kind": "model"})
    known = {**models(boss, clerk), "other": other.model}
    async with open_agents(tmp_path, *agents, models=known) as under_test:
        view = await under_test.ask("boss", "go")
        view = await under_test.ask("boss", "approve", task_id=view.task.id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "both")
        assert len(other.told) == 1
        assert "[bot]\ndone\n(it also made: a.txt)\n[other]\nhi\n" in boss.returned[0]


@pytest.mark.parametrize("words", ["perhaps", "is it done?"])
async def test_a_message_that_decides_nothing_is_refused_and_the_caller_waits_on(tmp_path: Path, words: str) -> None:
    boss, clerk = Script(CALL, "it is written"), Script(WRITE, "done")
    async with open_agents(tmp_path, CLERK, BOSS, models=models(boss, clerk)) as under_test:
        view = await under_test.ask("boss", "go")
        with pytest.raises(Exception, match="waits for an approval"):
            await under_test.ask("boss", words, task_id=view.task.id)
        assert clerk.returned == []
