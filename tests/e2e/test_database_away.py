"""The database goes away while an agent works: what the agent did is written when the database is back, once."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.api import Agent, Turn
from covenant.ledger.postgres import batch_writer
from tests.daemon_under_test import open_daemon_under_test
from tests.e2e.test_shared_ledger import call, message, until
from tests.e2e.test_stopped_node import LEASE_MS
from tests.ledger_contract.postgres_server import Server, programs
from tests.waits import BOUND_S


@pytest.fixture
def database() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    server = Server(folder, programs())
    try:
        server.prepare()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("text", ["end", "say"])
async def test_work_that_ends_while_the_database_is_away_is_written_when_it_is_back(
    tmp_path: Path, database: Server, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The writer of batches tries again for ten seconds, and the agent's job only after that.
    monkeypatch.setattr(batch_writer, "TRIES_MAX", 2)
    begun: list[str] = []
    go, back = asyncio.Event(), asyncio.Event()
    slow = Agent("slow")

    @slow
    async def work(turn: Turn) -> AsyncIterator[Any]:
        begun.append(turn.text)
        await go.wait()
        if turn.text == "say":
            yield "said "
            await back.wait()
        yield "done"

    ledger = {"url": database.url("postgres"), "durability": "os", "node_lease_ms": LEASE_MS}
    async with open_daemon_under_test(tmp_path / "home", slow, ledger=ledger) as daemon:

        async def is_away() -> bool:
            return (await daemon.ask("GET", "/readyz")).status_code != 200

        async def is_delayed() -> bool:
            return "agent.write_delayed" in caplog.text

        async def is_completed() -> bool:
            found = await call(daemon, "slow", "GetTask", id=task_id)
            return bool(found.get("status", {}).get("state") == "TASK_STATE_COMPLETED")

        returned = {"returnImmediately": True}
        sent = await call(daemon, "slow", "SendMessage", message=message(text), configuration=returned)
        task_id = sent["task"]["id"]
        await until(lambda: _is(bool(begun)))
        await asyncio.to_thread(database.kill)
        await until(is_away)
        go.set()
        await until(is_delayed)
        await asyncio.wait_for(asyncio.to_thread(database.start), BOUND_S)
        back.set()
        await until(is_completed)
        artifacts = (await call(daemon, "slow", "GetTask", id=task_id))["artifacts"]
        parts = [part["text"] for each in artifacts for part in each["parts"]]
        assert "".join(parts) == ("said done" if text == "say" else "done")
        assert begun == [text]


async def _is(met: bool) -> bool:
    return met
