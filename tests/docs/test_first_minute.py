"""Where a stranger could stumble in the first minute: each place is tried as that stranger would."""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from a2a.server.agent_execution import AgentExecutor

from tests.cli.daemons import Daemon
from tests.waits import BOUND_S

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
USED = re.compile(r"\$\{?([A-Za-z][A-Za-z_]+)")
SET = re.compile(r"\b([A-Za-z][A-Za-z_]+)=")
GIVEN = {"PATH", "PWD", "HOME", "fpath", "COVENANT_HOME", "COVENANT_TOKEN"}
"""Set by a shell, or named by a page as a variable of ours."""
AGENTS = """
from a2a.server.agent_execution import AgentExecutor

from covenant import Agent, Turn

shout = Agent("shout", description="Says it louder")

@shout
async def say(turn: Turn):
    yield turn.text.upper()

class Silent(AgentExecutor):
    async def execute(self, context, event_queue): ...
    async def cancel(self, context, event_queue): ...

silent = Silent()
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("f")
    (folder / "agents.py").write_text(AGENTS)
    made = Daemon(folder / "home", str(folder / "agents.py"))
    try:
        yield made
    finally:
        assert made.stop() == 0


def fetched(daemon: Daemon, url: str, body: dict[str, Any] | None = None, *, token: bool = True) -> str:
    asked = urllib.request.Request(url, data=None if body is None else json.dumps(body).encode())
    if token:
        asked.add_header("Authorization", f"Bearer {(daemon.home / 'operator.token').read_text().strip()}")
    with urllib.request.urlopen(asked, timeout=BOUND_S) as answer:
        return str(answer.read(), "utf-8")


def test_an_agent_of_ones_own_is_called_by_its_name(daemon: Daemon) -> None:
    assert daemon.run("call", "shout", "hello").out == "HELLO\n"


def test_the_printed_address_of_an_agent_shows_its_card_and_the_root_says_where_to_begin(daemon: Daemon) -> None:
    card = json.loads(fetched(daemon, f"{daemon.url}/v1/a2a/agents/shout"))
    assert card["name"] == "shout"
    assert "/v1/a2a/agents/" in fetched(daemon, daemon.url + "/", token=False)


def test_the_root_card_leads_to_an_agent_that_answers(daemon: Daemon) -> None:
    card = json.loads(fetched(daemon, daemon.url + "/.well-known/agent-card.json", token=False))
    (url,) = {each["url"] for each in card["supportedInterfaces"] if each["protocolBinding"] == "JSONRPC"}
    assert url.endswith("/v1/a2a/agents/index")
    message = {"messageId": "1", "role": "ROLE_USER", "parts": [{"text": "say it louder"}]}
    call = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    assert "SAY IT LOUDER" in fetched(daemon, url, call)


def test_the_mailbox_says_that_it_is_not_the_protocol_and_who_speaks_that(daemon: Daemon) -> None:
    said = daemon.run("a2a", "--help").out
    assert "mailbox" in said
    assert "`covenant call`" in said


def test_the_refusal_of_a_first_repair_names_the_grant_that_it_needs(daemon: Daemon) -> None:
    daemon.json("identities", "enroll", "worker@local")
    daemon.json("capabilities", "grant", "a2a.send.worker@local")
    task = daemon.json("a2a", "send", "--to", "worker@local", "work")["task_id"]
    refused = daemon.run("a2a", "force-error", task, "--reason", "try", "--message", "no")
    assert refused.code != 0
    (command,) = re.findall(r"covenant (capabilities grant \S+ --to \S+)", refused.err)
    assert daemon.run(*command.split()).code == 0
    assert "capabilities grant" not in daemon.run("a2a", "force-error", task, "--reason", "try", "--message", "no").err


def test_an_executor_of_the_sdk_is_not_published_with_the_words_of_the_sdk(daemon: Daemon) -> None:
    card = json.loads(fetched(daemon, f"{daemon.url}/v1/a2a/agents/silent"))
    assert AgentExecutor.__doc__
    assert AgentExecutor.__doc__.split(".")[0] not in card["description"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_variable_in_a_command_is_set_on_its_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(USED.findall(text)) <= GIVEN | set(SET.findall(text))
