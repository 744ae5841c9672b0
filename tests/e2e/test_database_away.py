"""The database goes away while an agent works: what the agent did is written when the database is back, once."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from covenant.agents.api import Agent, Turn
from covenant.ledger.postgres import batch_writer
from covenant.model.task_event import StepUpdate
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.e2e.test_shared_ledger import call, message, until
from tests.e2e.test_stopped_node import LEASE_MS
from tests.ledger_contract.postgres_proxy import proxy_before
from tests.ledger_contract.postgres_server import Server, programs
from tests.waits import BOUND_S

WAITING_BATCH = """
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND wait_event_type = 'Lock' AND query LIKE 'WITH w AS%'
"""


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


@asynccontextmanager
async def batch_ended(url: str) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
    """The next batch waits in the database, as it yields, and is ended there on leaving."""
    connection = await asyncpg.connect(url)

    async def count(what: str = "pid") -> bool:
        await connection.execute("SELECT pg_stat_clear_snapshot()")
        return bool(await connection.fetchval(f"SELECT count({what}) {WAITING_BATCH}"))

    try:
        async with connection.transaction():
            await connection.fetch("SELECT FROM writers FOR UPDATE")
            yield count
            await until(lambda: count("pg_terminate_backend(pid)"))
    finally:
        await connection.close()


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("in_step", [False, True])
async def test_output_whose_write_is_in_doubt_is_written_once_and_the_turn_goes_on(
    tmp_path: Path,
    database: Server,
    *,
    in_step: bool,
    written: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(batch_writer, "TRIES_MAX", 2)
    url, go, more = database.url("postgres"), asyncio.Event(), asyncio.Event()
    talker = Agent("talker")

    @talker
    async def work(turn: Turn) -> AsyncIterator[Any]:
        yield "a "
        await go.wait()
        turn._job.spend({"tokens": 10})  # a whole number, as models report it
        yield await turn.step("say", lambda: "a ") if in_step else "a "
        await more.wait()
        yield "a "
        yield await turn.step("count", lambda: "4")

    async with proxy_before(url) as proxy:
        ledger = {"url": proxy.url, "durability": "os", "node_lease_ms": LEASE_MS}
        async with open_daemon_under_test(tmp_path / "home", talker, ledger=ledger) as daemon:

            async def ask() -> Any:
                return await call(daemon, "talker", "GetTask", id=task_id)

            async def has_begun() -> bool:
                return "artifacts" in await ask()

            async def is_doubtful() -> bool:
                return "outcome_unknown" in {getattr(record, "code", "") for record in caplog.records}

            async def is_completed() -> bool:
                state = (await ask()).get("status", {}).get("state")
                assert state != "TASK_STATE_FAILED"
                return bool(state == "TASK_STATE_COMPLETED")

            returned = {"returnImmediately": True}
            sent = await call(daemon, "talker", "SendMessage", message=message("go"), configuration=returned)
            task_id = sent["task"]["id"]
            await until(has_begun)
            async with nullcontext() if written else batch_ended(url):
                proxy.answers_lost = True
                go.set()
            await until(is_doubtful)
            more.set()  # what is said now waits for its turn
            proxy.answers_lost = False
            await until(is_completed)
            artifacts = (await ask())["artifacts"]
            assert "".join(part["text"] for each in artifacts for part in each["parts"]) == "a a a 4"
            steps = [step.what for step in await daemon.daemon.base.storage.ledger.steps(task_id, 0, 100)]
            names = [step.name for step in steps if isinstance(step, StepUpdate)]
            assert names == (["say", "count"] if in_step else ["count"])


async def test_later_output_is_not_written_before_earlier_output_whose_write_failed(
    tmp_path: Path, database: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch_writer, "TRIES_MAX", 8)  # the later output is still tried when the database is back
    url, go, more = database.url("postgres"), asyncio.Event(), asyncio.Event()
    talker = Agent("talker")

    @talker
    async def work(turn: Turn) -> AsyncIterator[Any]:
        yield "1 "
        await go.wait()
        yield "2 "
        await more.wait()
        yield "3 "
        yield await turn.step("count", lambda: "4")

    async with proxy_before(url) as proxy:
        ledger = {"url": proxy.url, "durability": "os", "node_lease_ms": LEASE_MS}
        async with open_daemon_under_test(tmp_path / "home", talker, ledger=ledger) as daemon:
            sent = await call(
                daemon, "talker", "SendMessage", message=message("go"), configuration={"returnImmediately": True}
            )
            task_id = sent["task"]["id"]
            await until(lambda: _has_come(_text(daemon, task_id), "1 "))
            async with batch_ended(url) as is_waiting:
                proxy.answers_lost = True
                go.set()
                await until(is_waiting)
                more.set()
            await until(lambda: _is("outcome_unknown" in {getattr(record, "code", "") for record in caplog.records}))
            proxy.answers_lost = False
            await until(lambda: _has_come(_text(daemon, task_id), "4"))
            assert await _text(daemon, task_id) == "1 2 3 4"


async def _text(daemon: DaemonUnderTest, task_id: str) -> str:
    artifacts = (await call(daemon, "talker", "GetTask", id=task_id)).get("artifacts", ())
    return "".join(part["text"] for each in artifacts for part in each["parts"])


async def _has_come(asked: Awaitable[str], wanted: str) -> bool:
    return wanted in await asked
