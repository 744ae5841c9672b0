"""The pictures: a real daemon serves every address in them, and every event and state in them is in the table."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from covenant.ledger.machine.states import TRANSITIONS
from tests.cli.daemons import Daemon
from tests.waits import BOUND_S

ROOT = Path(__file__).parent.parent.parent
OVERVIEW = (ROOT / "docs" / "overview.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BRANCH = re.compile(r"^ (│ +)?[├└]── (/.*?)(?:  |$)", re.MULTILINE)
EVENT = re.compile(r"│  ((?:task|result)_\w+)")
STATE = re.compile(r"►│  (\w+)")
AGENT = """
from covenant import Agent, Turn

agent = Agent("shout", description="Says it louder", default_project="p")


@agent
async def shout(turn: Turn) -> str:
    return turn.text.upper()
"""


def addresses(text: str) -> set[str]:
    """The paths of the tree. Those further in are below the agent's."""
    found = set()
    for inner, words in BRANCH.findall(text):
        below = "/v1/a2a/agents/NAME" if inner else ""
        found |= {below + word for word in words.replace(" …", "").rstrip(",").split(", ") if word.startswith("/")}
    return found


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("o")
    (folder / "agents.py").write_text(AGENT)
    made = Daemon(folder / "home", str(folder / "agents.py"), env={"COVENANT_PEERS_ENABLED": "1"})
    try:
        yield made
    finally:
        assert made.stop() == 0


def ask(daemon: Daemon, path: str, body: bytes | None) -> tuple[int, bytes]:
    asked = urllib.request.Request(daemon.url + path, data=body)
    asked.add_header("Authorization", f"Bearer {(daemon.home / 'operator.token').read_text().strip()}")
    try:
        with urllib.request.urlopen(asked, timeout=BOUND_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read()


def served(daemon: Daemon, path: str) -> bool:
    """Somebody answers there, be it with a refusal of what was asked."""
    return any(ask(daemon, path, body)[0] not in (404, 405) for body in (None, b"{}"))


def test_every_address_in_the_pictures_is_served(daemon: Daemon) -> None:
    task_id = json.loads(ask(daemon, "/a2a/tasks/send", b'{"message": "hello"}')[1])["id"]
    paths = addresses(OVERVIEW) | addresses(README)
    assert {"/", "/mcp", "/a2a/tasks", "/a2a/tasks/ID", "/v1/a2a/agents/NAME/message:send"} <= paths
    for path in paths:
        real = path.replace("NAME", "shout").replace("ID", task_id).replace("/…", "/identity")
        assert served(daemon, real), path
    assert not served(daemon, "/nowhere")


def test_every_event_and_state_of_a_tasks_way_is_in_the_table() -> None:
    events = set(EVENT.findall(OVERVIEW))
    states = set(STATE.findall(OVERVIEW)) - events
    assert {"task_sent", "task_leased", "task_settled", "result_drained"} <= events
    assert events <= {event for _, event in TRANSITIONS}
    assert {state.value for state in TRANSITIONS.values()} >= states >= {"queued", "leased", "settled", "drained"}
