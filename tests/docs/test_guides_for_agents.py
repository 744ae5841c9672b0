"""The agents and calls in the guides for authors, served and called as they stand."""

import ast
import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.daemons import Daemon
from tests.docs.test_snippets import ROOT, snippets
from tests.waits import BOUND_S

HELPERS = """
from covenant import Agent, Turn

dictionary = Agent("dictionary")
researcher = Agent("researcher")
reviewer = Agent("reviewer")

@dictionary
async def look_up(turn: Turn):
    yield f"{turn.text} in other words"

@researcher
async def research(turn: Turn):
    yield f"facts ({turn.text})"

@reviewer
async def review(turn: Turn):
    yield f"reviewed: {turn.text}"
"""
ELSEWHERE = "https://reviewer.example/a2a"


def of(page: str) -> list[str]:
    return list(snippets((ROOT / "docs" / page).read_text(encoding="utf-8")))


def served(folder: Path, *files: str) -> Daemon:
    paths = [folder / f"agents_{number}.py" for number in range(len(files))]
    for path, text in zip(paths, files, strict=True):
        path.write_text(text, encoding="utf-8")
    return Daemon(folder / "home", *map(str, paths))


@pytest.mark.parametrize(
    ("number", "answer"), [(0, "Working on it… "), (1, "good morning in other words")], ids=["async", "plain"]
)
def test_the_agents_of_the_guide_answer(short_path: Path, number: int, answer: str) -> None:
    daemon = served(short_path, of("writing-agents.md")[number], HELPERS)
    try:
        told = daemon.run("call", "translator", "good morning", "--json").json
        assert told["text"] == answer
        if number == 0:
            assert "text.md" in [artifact.get("name") for artifact in told["artifacts"]]
    finally:
        assert daemon.stop() == 0


def test_the_writer_of_the_guide_asks_both_others(short_path: Path) -> None:
    (writer,) = of("delegation.md")
    assert ELSEWHERE in writer
    daemon = served(short_path, writer.replace(ELSEWHERE, "reviewer"), HELPERS)
    try:
        told = daemon.run("call", "writer", "tides").out
        assert told == "reviewed: facts (What is known about tides?)\n"
    finally:
        assert daemon.stop() == 0


async def test_a_remote_agent_is_called_as_the_page_says(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (snippet,) = of("formats/remote-agents.md")
    daemon = await asyncio.to_thread(served, short_path, HELPERS)
    monkeypatch.setenv("AGENT_TOKEN", (daemon.home / "operator.token").read_text().strip())
    there = f'"{daemon.url}/v1/a2a/agents/reviewer", allow_private=True'
    called = snippet.replace('"https://agent.example/a2a"', there)
    assert called != snippet
    try:
        code = compile(called, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        async with asyncio.timeout(BOUND_S):
            await eval(code, {"__name__": "snippet"})
        assert capsys.readouterr().out.split(os.linesep) == [
            "completed reviewed: Summarise the minutes",
            "reviewed: Summarise the minutes",
        ]
    finally:
        assert daemon.stop() == 0


def test_the_worker_of_the_guide_works_from_a_process_of_its_own(short_path: Path) -> None:
    echo = (
        'from covenant import Agent, Turn\necho = Agent("echo")\n@echo\nasync def e(turn: Turn):\n    yield turn.text'
    )
    daemon = served(short_path, echo)
    (snippet,) = (text for text in of("writing-agents.md") if "worker.run()" in text)
    (short_path / "worker.py").write_text(snippet)
    try:
        daemon.json("agents", "add", "summarizer")
        token = daemon.json("identities", "enroll", "summarizer@default")["token_b58"]
        daemon.json("capabilities", "grant", "a2a.send.echo@default", "--to", "summarizer@default")
        worker = subprocess.Popen([sys.executable, str(short_path / "worker.py"), daemon.url, token])
        try:
            told = daemon.run("call", "summarizer", "the long story of a tide", "--json").json
        finally:
            worker.kill()
            worker.wait()
        assert told["text"] == "the long story of a … (ok)"
        assert {"count", "source.txt"} <= {artifact.get("name") for artifact in told["artifacts"]}
    finally:
        assert daemon.stop() == 0
