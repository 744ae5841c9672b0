"""Two daemons as processes on one PostgreSQL: one hangs and goes on, one is killed, and one is drained."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import asyncpg
import pytest

from covenant.daemon.home import KEY_NAME, TOKEN_NAME
from covenant.ledger.postgres.nodes import LEASE_MS as DEFAULT_LEASE_MS
from tests.agents.test_served_files import call, get, send
from tests.cli.daemons import Daemon
from tests.ledger_contract.postgres_server import Databases
from tests.waits import BOUND_S, until

AGENTS = """
import asyncio
from covenant import Agent

echo, slow = Agent("echo"), Agent("slow")

@echo
async def answer(turn):
    return f"echo: {turn.text}"

@slow
async def wait(turn):
    await asyncio.Event().wait()
"""
LEASE_MS = 2_000
NOTED = """
CREATE TABLE beats (number serial, node text, seen_ms bigint, lost boolean);
CREATE FUNCTION note_beat() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO beats (node, seen_ms, lost) VALUES (NEW.node, NEW.seen_ms, NEW.lost_at_ms IS NOT NULL);
    RETURN NULL;
END $$;
CREATE TRIGGER note_beat AFTER UPDATE ON nodes FOR EACH ROW EXECUTE FUNCTION note_beat();
"""
LATE_BEATS = """
SELECT count(*) FROM beats AS b JOIN nodes AS a ON a.node = 'a' AND b.seen_ms > a.until_ms
WHERE b.node = 'b' AND b.number < (SELECT min(number) FROM beats WHERE node = 'a' AND lost)
"""
MARGIN_MS = 2_000
"""For a machine that does other work, too."""
STOPPED_S = 30.0
SHOWN_MS = 4_000
"""Within so long the loss of a daemon is promised to be shown, with the lease that is the default."""


@pytest.fixture
async def url(databases: Databases) -> str:
    return await databases.make()


def start(folder: Path, url: str, name: str, lease_ms: int = LEASE_MS) -> Daemon:
    variables = {
        "COVENANT_LEDGER_URL": url,
        "COVENANT_LEDGER_DURABILITY": "os",
        "COVENANT_LEDGER_NODE_LEASE_MS": str(lease_ms),
        "COVENANT_DAEMON_NODE": name,
    }
    give_keys(folder, folder / name)
    return Daemon(folder / name, str(folder / "agents.py"), env=variables)


def give_keys(folder: Path, home: Path) -> None:
    """Daemons that share a ledger are one instance: each but the first has the keys of another home in the folder."""
    for key in () if home.exists() else sorted(folder.glob(f"*/{KEY_NAME}"))[:1]:
        source = key.parents[len(Path(KEY_NAME).parts) - 1]
        for name in (KEY_NAME, TOKEN_NAME):
            (home / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copy2(source / name, home / name)
        home.chmod(0o700)


async def in_thread(doing: Callable[..., Any], *given: Any) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(doing, *given), BOUND_S)


def nodes(daemon: Daemon) -> dict[str, dict[str, Any]]:
    token = (daemon.home / TOKEN_NAME).read_text().strip()
    asked = Request(f"{daemon.url}/v1/admin/nodes", headers={"Authorization": f"Bearer {token}"})
    with urlopen(asked, timeout=BOUND_S) as answer:
        return {node["node"]: node for node in json.load(answer)["nodes"]}


def state_of_echo(daemon: Daemon, text: str) -> str:
    """Of a task. A daemon that has stood still, as on a busy machine, refuses for a moment what can be repeated."""
    message = {"messageId": text, "role": "ROLE_USER", "parts": [{"text": text}]}
    told: dict[str, Any] = {}

    def is_taken() -> bool:
        told.update(call(daemon, "echo", "SendMessage", message=message))
        return "result" in told

    until(is_taken)
    state: str = told["result"]["task"]["status"]["state"]
    return state


async def test_a_daemon_that_hangs_is_declared_lost_and_one_that_is_killed_too_and_both_come_back(
    tmp_path: Path, url: str
) -> None:
    agents = tmp_path / "agents.py"
    agents.write_text(AGENTS)

    a, b = await in_thread(start, tmp_path, url, "a"), await in_thread(start, tmp_path, url, "b")
    held = (await in_thread(lambda: send(a, "slow", "wait", wait=False)))["id"]
    first = (await in_thread(nodes, b))["a"]
    assert (first["alive"], first["leases"]) == (True, 1)

    a.process.send_signal(signal.SIGSTOP)
    try:
        await in_thread(until, lambda: not nodes(b)["a"]["alive"])
        await in_thread(until, lambda: '"holder_lost": true' in json.dumps(b.json("a2a", "show", held)))
        assert await in_thread(state_of_echo, b, "meanwhile") == "TASK_STATE_COMPLETED"
    finally:
        a.process.send_signal(signal.SIGCONT)
    await in_thread(until, lambda: nodes(b)["a"]["alive"])
    assert (await in_thread(nodes, b))["a"]["boot"] != first["boot"], "it goes on as a new run"
    assert await in_thread(state_of_echo, a, "again") == "TASK_STATE_COMPLETED"

    connection = await asyncpg.connect(url)
    try:
        await connection.execute(NOTED)
        await in_thread(a.stop, signal.SIGKILL)
        await in_thread(until, lambda: not nodes(b)["a"]["alive"])
        await in_thread(until, lambda: b.json("a2a", "status") is not None)
        await asyncio.wait_for(_declared(connection), BOUND_S)
        lease_ms = await connection.fetchval("SELECT until_ms - seen_ms FROM nodes WHERE node = 'a'")
        assert lease_ms == LEASE_MS
        assert await connection.fetchval(LATE_BEATS) <= 1, "the first beat after the lease finds it"
    finally:
        await connection.close()
    assert await in_thread(b.stop) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_daemon_that_stood_still_for_half_a_minute_finds_itself_fenced(tmp_path: Path, url: str) -> None:
    """With the lease that is the default."""
    agents = tmp_path / "agents.py"
    agents.write_text(AGENTS)
    a, b = [await in_thread(start, tmp_path, url, name, DEFAULT_LEASE_MS) for name in ("a", "b")]
    held = (await in_thread(lambda: send(a, "slow", "wait", wait=False)))["id"]
    before = (await in_thread(nodes, b))["a"]["boot"]
    a.process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(STOPPED_S)
        connection = await asyncpg.connect(url)
        try:
            took_ms = await connection.fetchval("SELECT lost_at_ms - seen_ms FROM nodes WHERE node = 'a'")
        finally:
            await connection.close()
        assert took_ms is not None
        assert took_ms <= SHOWN_MS + MARGIN_MS
    finally:
        a.process.send_signal(signal.SIGCONT)
    await in_thread(until, lambda: nodes(b)["a"]["alive"])
    assert (await in_thread(nodes, b))["a"]["boot"] != before
    assert "ledger.fenced" in a.log
    assert (await in_thread(send, a, "echo", "again"))["status"]["state"] == "TASK_STATE_COMPLETED"
    shown = await in_thread(b.json, "a2a", "show", held)
    assert '"holder_lost": true' in json.dumps(shown), "only a repair begins it again"
    for daemon in (a, b):
        await in_thread(daemon.stop)


async def _declared(connection: asyncpg.Connection[Any]) -> None:
    while True:
        if await connection.fetchval("SELECT lost_at_ms FROM nodes WHERE node = 'a'") is not None:
            return
        await asyncio.sleep(0.02)


async def test_a_daemon_is_drained_while_clients_send_and_the_other_refuses_and_loses_nothing(
    tmp_path: Path, url: str
) -> None:
    agents = tmp_path / "agents.py"
    agents.write_text(AGENTS)
    a, b = await in_thread(start, tmp_path, url, "a"), await in_thread(start, tmp_path, url, "b")
    acknowledged: dict[Daemon, list[str]] = {a: [], b: []}
    refused: list[str] = []
    is_drained = asyncio.Event()

    async def send_to(daemon: Daemon) -> None:
        while not is_drained.is_set():
            try:
                task = await in_thread(lambda: send(daemon, "echo", "hello", wait=False))
            except (OSError, KeyError, HTTPException) as error:  # refused, or nobody listens any more
                if daemon is b:
                    refused.append(repr(error))
                return
            acknowledged[daemon].append(task["id"])

    sending = [asyncio.create_task(send_to(daemon)) for daemon in (a, a, b, b)]
    await in_thread(until, lambda: all(len(tasks) >= 10 for tasks in acknowledged.values()))
    before = len(acknowledged[b])
    drained = await in_thread(a.run, "drain", "--timeout-s", "30")
    assert drained.code == 0, drained
    await in_thread(a.process.wait, BOUND_S)
    assert await in_thread(a.stop) == 0
    gone = (await in_thread(nodes, b))["a"]
    assert (gone["alive"], gone["left"]) == (False, True)
    assert " left " in (await in_thread(b.run, "ledger", "nodes")).out
    await in_thread(until, lambda: len(acknowledged[b]) >= before + 10)
    is_drained.set()
    await asyncio.gather(*sending)
    assert refused == []
    for task_id in (*acknowledged[a], *acknowledged[b]):
        await in_thread(until, lambda: get(b, "echo", task_id)["status"]["state"] == "TASK_STATE_COMPLETED")  # noqa: B023  it is awaited here
    assert not (await in_thread(nodes, b))["a"]["alive"]
    assert await in_thread(b.stop) == 0
