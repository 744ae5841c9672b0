"""A daemon that is started without a umask: what it and the commands write is still for its owner alone."""

import os
import stat
from pathlib import Path

from covenant.agents.model.agent_memory import AgentMemories
from covenant.daemon.demo import make_demo_home
from covenant.daemon.home import make_home
from tests.cli.daemons import Daemon
from tests.hostile.client import operator_token, request

NO_UMASK = ("sh", "-c", 'umask 0; exec "$@"', "sh")
AGENT = """
from covenant import Agent

echo = Agent("echo")


@echo
async def say(turn):
    yield turn.file("x.txt", b"x")
    yield turn.text
"""


def exposed(folder: Path) -> dict[str, str]:
    """What others could read, write or enter, by path."""
    found: dict[str, str] = {}
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO) and not stat.S_ISLNK(mode):
            found[str(path.relative_to(folder))] = stat.filemode(mode)
    return found


def test_nothing_in_a_home_is_for_others_though_the_umask_is_zero(short_path: Path) -> None:
    agents = short_path / "agents.py"
    agents.write_text(AGENT)
    parent = short_path / "made" / "for it"
    home = parent / "home"
    parent.mkdir(parents=True)
    daemon = Daemon(home, str(agents), inside=NO_UMASK, env={"COVENANT_PEERS_ENABLED": "1"})
    try:
        token = operator_token(home)
        message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hi"}]}
        body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
        answer = request(daemon.url, "POST", "/v1/a2a/agents/echo", token=token, body=body)
        assert answer.json["result"]["task"]["status"]["state"] == "TASK_STATE_COMPLETED", answer
        assert daemon.run("identities", "enroll", "bob@test").code == 0
        assert daemon.run("identities", "rotate").code == 0
        assert (home / "http.url").is_file()
        assert stat.S_ISSOCK((home / "sock").stat().st_mode)
        assert exposed(home) == {}
    finally:
        daemon.stop()
    assert exposed(home) == {}


def test_folders_that_lead_to_a_home_cannot_be_changed_by_others(short_path: Path) -> None:
    """Whoever can write to one could put another home in place of this one."""
    home = short_path / "a" / "b" / "home"
    before = os.umask(0)
    try:
        make_home(home)
    finally:
        os.umask(before)
    assert not home.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    for made in (home.parent, home.parent.parent):
        assert not made.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


async def test_memories_and_the_demos_home_are_not_for_others_though_the_umask_is_zero(short_path: Path) -> None:
    before = os.umask(0)
    try:
        home = make_demo_home(short_path)
        await AgentMemories(home / "memory", lambda: 0).of("default", "bot").write("the user likes tea")
    finally:
        os.umask(before)
    assert exposed(home) == {}
