"""docs/postgres.md: its commands, against a real server and two homes."""

import re
import shlex
from pathlib import Path

from tests.cli.daemons import Daemon, covenant
from tests.ledger_contract.postgres_server import Databases

PAGE = (Path(__file__).parents[2] / "docs" / "postgres.md").read_text(encoding="utf-8")
SHOWN = "postgres://covenant@db.example/covenant"


async def test_the_daemons_of_the_page_share_a_ledger(databases: Databases, short_path: Path) -> None:
    (block,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    install, serve = block.splitlines()
    assert install == "pip install 'covenant-a2a[postgres]'"
    words = shlex.split(serve)
    assert words[:4] == ["covenant", "serve", "--home", "a"]
    assert words[4:6] == ["--ledger", SHOWN]
    url = await databases.make()
    try:
        # The server of the tests does not sync, which a daemon refuses unless it is told that this is meant.
        env = {"COVENANT_PASSPHRASE": "three words together", "COVENANT_LEDGER_DURABILITY": "os"}
        made = covenant("ledger", "init", "--ledger", url, "--home", str(short_path / "first"), env=env)
        assert made.code == 0, made
        a = Daemon(short_path / "a", "--ledger", url, env=env)
        b = Daemon(short_path / "b", "--ledger", url, env=env)
        try:
            a.json("identities", "enroll", "worker@local")
            a.json("capabilities", "grant", "a2a.send.worker@local", "--to", "operator@local")
            sent = a.json("a2a", "send", "--to", "worker@local", "hello")
            assert b.json("a2a", "show", sent["task_id"])["task"]["id"] == sent["task_id"]
            assert sum(node["alive"] for node in b.json("ledger", "nodes")["nodes"]) == 2
        finally:
            a.stop()
            b.stop()
    finally:
        await databases.drop(url)
