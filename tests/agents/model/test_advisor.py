"""Advisors: asked by an agent, or letting its answers pass; what is not let pass is seen by nobody."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai.messages import ModelRequest, UserPromptPart
from pydantic_ai.models import Model

from covenant.model.content import Resource, Text
from covenant.model.task_view import TaskState, TaskView
from tests.agents.agents_under_test import open_agents, said
from tests.agents.model.test_model_agent import Script
from tests.agents.pool_under_test import chunks
from tests.waits import BOUND_S


def bot(**advisor: Any) -> dict[str, Any]:
    return {"id": "bot", "kind": "model", "advisor": {"model": "wise", **advisor}}


def shown(script: Script) -> list[str]:
    """What the model was shown last, by whoever asks it."""
    parts = [part for each in script.told[-1] if isinstance(each, ModelRequest) for part in each.parts]
    return [str(part.content) for part in parts if isinstance(part, UserPromptPart)]


def file_of(view: TaskView) -> bytes:
    (found,) = [part for artifact in view.artifacts for part in artifact.parts if isinstance(part, Resource)]
    return base64.b64decode(found.resource.blob or "")


async def test_an_agent_asks_its_advisor_twice_in_a_turn_and_is_charged_for_it(tmp_path: Path) -> None:
    asks = ("advise", {"question": "Is this wise?"})
    playing, wise = Script(asks, asks, asks, "done"), Script("It is.", "It still is.")
    async with open_agents(
        tmp_path, bot(prompt="Think of the costs."), models={"bot": playing.model, "wise": wise.model}
    ) as under_test:
        view = await under_test.ask("bot", "go")
        assert (view.state, said(view)) == (TaskState.COMPLETED, "done")
        framed = [f"[/advise Is this wise?]\n{words}\n[END ADVISE]" for words in ("It is.", "It still is.")]
        assert playing.returned[:2] == framed
        assert "ERR: the advisor may be asked 2 times" in playing.returned[2]
        assert (shown(wise), "Think of the costs." in wise.instructions) == (["Is this wise?"], True)
        assert view.result is not None
        assert (view.result.metadata or {})["usage"]["requests"] == 6


async def test_an_advisor_is_a_tool_only_where_there_is_one_and_it_is_allowed(tmp_path: Path) -> None:
    alone, barred = Script("a"), Script("b")
    models: dict[str, Model] = {"alone": alone.model, "barred": barred.model, "wise": Script().model}
    agents = ({"id": "alone", "kind": "model"}, {**bot(), "id": "barred", "capabilities": ["/write"]})
    async with open_agents(tmp_path, *agents, models=models) as under_test:
        for name in ("alone", "barred"):
            await under_test.ask(name, "go")
        assert "advise" not in alone.offered | barred.offered


async def test_an_answer_passes_the_gate_whole_and_nothing_goes_out_before(tmp_path: Path) -> None:
    write = [("write", {"path": "a.txt", "content": content}) for content in ("swordfish", "hi")]
    playing = Script(write[0], "the first answer", write[1], "the second answer")
    wise = Script("REDIRECT: name a source", "continue")
    async with open_agents(tmp_path, bot(mode="gate"), models={"bot": playing.model, "wise": wise.model}) as under_test:
        view = await under_test.ask("bot", "what is it?")
        assert (view.state, said(view)) == (TaskState.COMPLETED, "the second answer")
        steps = await under_test.steps(view)
        everything = str(steps)
        assert "the first answer" not in everything
        assert file_of(view) == b"hi"
        assert everything.index("gate_redirect") < everything.index("gate_continue") < everything.index("a.txt")
        texts = [part.text for made in chunks(steps) for part in made.parts if isinstance(part, Text)]
        assert "".join(texts) == "the second answer"
        assert shown(playing)[-1].endswith("name a source")
        assert "what is it?" in shown(wise)[0]
        assert "the second answer" in shown(wise)[0]


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        ("HALT: it is a secret", "the advisor stopped this answer: it is a secret"),
        ("halt", "the advisor stopped this answer: it gave no reason"),
        ("Looks good to me!", "the advisor stopped this answer: its reply could not be read"),
        ("Continued fractions are fun", "the advisor stopped this answer: its reply could not be read"),
    ],
)
async def test_what_an_advisor_stops_or_says_nothing_clear_about_is_seen_by_nobody(
    tmp_path: Path, verdict: str, told: str
) -> None:
    playing, wise = Script(("write", {"path": "a.txt", "content": "swordfish"}), "swordfish"), Script(verdict)
    async with open_agents(tmp_path, bot(mode="gate"), models={"bot": playing.model, "wise": wise.model}) as under_test:
        view = await under_test.ask("bot", "go")
        assert (view.state, said(view)) == (TaskState.FAILED, told)
        assert "swordfish" not in str(await under_test.steps(view))


async def test_what_cannot_be_read_passes_where_the_definition_says_so(tmp_path: Path) -> None:
    playing, wise = Script("an answer"), Script("Looks good to me!")
    advised = bot(mode="gate", malformed_halts=False)
    async with open_agents(tmp_path, advised, models={"bot": playing.model, "wise": wise.model}) as under_test:
        assert said(await under_test.ask("bot", "go")) == "an answer"


async def test_an_agent_is_sent_back_so_often_and_then_fails(tmp_path: Path) -> None:
    playing, wise = Script("one", "two"), Script("REDIRECT: again", "REDIRECT: again")
    advised = bot(mode="gate", max_redirects=1)
    async with open_agents(tmp_path, advised, models={"bot": playing.model, "wise": wise.model}) as under_test:
        view = await asyncio.wait_for(under_test.ask("bot", "go"), BOUND_S)
        assert view.state is TaskState.FAILED
        assert said(view) == "the advisor sent this back 2 times and let no answer pass"
