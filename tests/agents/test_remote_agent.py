"""What agents elsewhere report of their usage: counted wherever they say it, and however the call ends."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.api import Agent, Turn
from covenant.model.task import URL_RECIPIENT
from covenant.model.tenants import DEFAULT
from tests.agents.agents_under_test import open_agents, said
from tests.outbound.remotes import Called, hand_made, status, task
from tests.waits import LONGER_S

REPORT = {"usage": {"input_tokens": 3, "output_tokens": 5}}
MESSAGE = {"messageId": "r", "role": "ROLE_AGENT", "parts": [{"text": "hi"}], "metadata": REPORT}
ARTIFACTS = [{"artifactId": name, "parts": [{"text": name}], "metadata": {"usage": {"tokens": 4}}} for name in "ab"]


def caller() -> Agent:
    asks = Agent("asks")

    @asks
    async def ask(turn: Turn) -> str:
        answer = await turn.call("far", "go")
        return f"{answer.state}: {answer.tokens:g}"

    return asks


@pytest.mark.parametrize(
    "answer",
    [
        {"task": task("COMPLETED", "hi", metadata=REPORT)},
        {"message": MESSAGE},
        {"task": {**task(), "status": {"state": "TASK_STATE_COMPLETED", "message": MESSAGE}}},
        {"task": task("COMPLETED", artifacts=ARTIFACTS)},
        {"task": {**task(metadata=REPORT), "status": {"state": "TASK_STATE_COMPLETED", "message": MESSAGE}}},
    ],
    ids=["task", "bare message", "status message", "artifacts", "task and message"],
)
async def test_usage_counts_wherever_an_answer_has_it(tmp_path: Path, answer: dict[str, Any]) -> None:
    async with (
        hand_made(lambda called: called.result(answer), streaming=False) as far,
        open_agents(tmp_path, caller()) as under_test,
    ):
        under_test.register(far=far.served.url(""))
        view = await under_test.ask("asks", "go")
        assert said(view) == "completed: 8"


@pytest.mark.parametrize("turns", [(10, 30, 60), (30, 20, 10)], ids=["all turns", "each turn alone"])
async def test_reports_of_several_turns_come_to_what_was_used(tmp_path: Path, turns: tuple[int, ...]) -> None:
    asks, left, told = Agent("asks"), list(turns), list[int]()

    @asks
    async def ask(turn: Turn) -> str:
        answer = await turn.call("far", "go")
        while answer.waits:
            answer = await turn.answer(answer, "more")
        return f"{answer.tokens:g}"

    def behave(called: Called) -> None:
        if called.method == "SendMessage":
            told.append(left.pop(0))
        metadata = {"usage": {"tokens": told[-1]}}
        called.result({"task": task("INPUT_REQUIRED" if left else "COMPLETED", "well", metadata=metadata)})

    async with hand_made(behave, streaming=False) as far, open_agents(tmp_path, asks) as under_test:
        under_test.register(far=far.served.url(""))
        assert said(await under_test.ask("asks", "go")) == "60"


@pytest.mark.parametrize("told", ["in an update", "when it is canceled"])
async def test_what_a_remote_had_reported_is_kept_when_time_is_over(tmp_path: Path, told: str) -> None:
    early = told == "in an update"

    async def behave(called: Called) -> None:
        if called.method == "CancelTask":
            called.result({"task": task("CANCELED")} if early else task("CANCELED", metadata=REPORT))
            return
        called.open()
        called.frame({"task": task("WORKING")})
        if early:
            news = status("WORKING", "begun")
            news["statusUpdate"]["metadata"] = REPORT
            called.frame(news)
        await called.writer.drain()
        await asyncio.Event().wait()

    async with hand_made(behave, stops=False) as far, open_agents(tmp_path, caller()) as under_test:
        under_test.register(far=far.served.url(""))
        here = under_test.catalogue.identity(DEFAULT, URL_RECIPIENT)
        heard = []
        for timeout_s in LONGER_S:
            under_test.workers.register(here, under_test.elsewhere.body(), timeout_ms=int(timeout_s * 1000))
            heard.append(said(await under_test.ask("asks", "go")))
            if heard[-1] == "failed: 8":
                return
        pytest.fail(f"{heard}")
