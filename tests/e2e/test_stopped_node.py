"""Two daemons as processes on one PostgreSQL: one is stopped like a machine that hangs, and goes on; one is killed."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.agents.test_served_files import send
from tests.cli.daemons import Daemon
from tests.ledger_contract.postgres_server import Databases, databases
from tests.waits import BOUND_S, until

__all__ = ["databases"]

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
MARGIN_MS = 2_000
"""For a machine that does other work, too."""


@pytest.fixture
async def url(databases: Databases) -> str:
    return await databases.make()


async def in_thread(doing: Callable[..., Any], *given: Any) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(doing, *given), BOUND_S)


def nodes(daemon: Daemon) -> dict[str, dict[str, Any]]:
    return {node["node"]: node for node in daemon.json("ledger", "nodes")["nodes"]}


async def test_a_daemon_that_hangs_is_declared_lost_and_one_that_is_killed_too_and_both_come_back(
    tmp_path: Path, url: str
) -> None:
    agents = tmp_path / "agents.py"
    agents.write_text(AGENTS)

    def start(name: str) -> Daemon:
        variables = {
            "COVENANT_LEDGER_URL": url,
            "COVENANT_LEDGER_DURABILITY": "os",
            "COVENANT_LEDGER_NODE_LEASE_MS": str(LEASE_MS),
            "COVENANT_PASSPHRASE": "open sesame",
            "COVENANT_DAEMON_NODE": name,
        }
        return Daemon(tmp_path / name, str(agents), env=variables)

    a, b = await in_thread(start, "a"), await in_thread(start, "b")
    held = (await in_thread(lambda: send(a, "slow", "wait", wait=False)))["id"]
    first = (await in_thread(nodes, b))["a"]
    assert (first["alive"], first["leases"]) == (True, 1)

    a.process.send_signal(signal.SIGSTOP)
    try:
        await in_thread(until, lambda: not nodes(b)["a"]["alive"])
        await in_thread(until, lambda: '"holder_lost": true' in json.dumps(b.json("a2a", "show", held)))
        answered = await in_thread(send, b, "echo", "meanwhile")
        assert answered["status"]["state"] == "TASK_STATE_COMPLETED"
    finally:
        a.process.send_signal(signal.SIGCONT)
    await in_thread(until, lambda: nodes(b)["a"]["alive"])
    assert (await in_thread(nodes, b))["a"]["boot"] != first["boot"], "it goes on as a new run"
    answered = await in_thread(send, a, "echo", "again")
    assert answered["status"]["state"] == "TASK_STATE_COMPLETED"

    await in_thread(a.stop, signal.SIGKILL)
    await in_thread(until, lambda: not nodes(b)["a"]["alive"])
    await in_thread(until, lambda: b.json("a2a", "status") is not None)
    connection = await asyncpg.connect(url)
    try:
        await asyncio.wait_for(_declared(connection), BOUND_S)
        took_ms = await connection.fetchval("SELECT lost_at_ms - seen_ms FROM nodes WHERE node = 'a'")
    finally:
        await connection.close()
    assert took_ms <= LEASE_MS * 4 / 3 + MARGIN_MS, "by the ledger's clock: a lease, and a beat of whoever finds it"
    assert await in_thread(b.stop) == 0


async def _declared(connection: asyncpg.Connection[Any]) -> None:
    while True:
        if await connection.fetchval("SELECT lost_at_ms FROM nodes WHERE node = 'a'") is not None:
            return
        await asyncio.sleep(0.02)
