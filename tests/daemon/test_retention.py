"""Retention: what is kept no longer is erased by a pass of its own, for each tenant as long as it is kept there."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.agents.api import Agent, Turn
from covenant.daemon import schedulers
from covenant.daemon.schedulers import Retention, Singleton
from covenant.ledger.contract.retention import ERASED_AT_ONCE_MAX
from covenant.ledger.embedded.archive.archive_file import ARCHIVE_NAME
from covenant.model.settings import HOUR_MS
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.postgres_server import Databases

TASK_NOT_FOUND = -32001


def echo() -> Agent:
    agent = Agent("echo", description="Echoes.")

    @agent
    async def answer(turn: Turn) -> str:
        return turn.text

    return agent


async def call(daemon: DaemonUnderTest, token: str, method: str, params: dict[str, Any]) -> dict[str, Any]:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    headers = {"a2a-version": "1.0"}
    response = await daemon.ask("POST", "/v1/a2a/agents/echo", token=token, json=body, headers=headers)
    answer: dict[str, Any] = msgspec.json.decode(response.content)
    return answer


async def send(daemon: DaemonUnderTest, token: str, text: str) -> str:
    message = {"messageId": text[:100], "role": "ROLE_USER", "parts": [{"text": text}]}
    answer = await call(daemon, token, "SendMessage", {"message": message})
    return str(answer["result"]["task"]["id"])


async def knows(daemon: DaemonUnderTest, token: str, task_id: str) -> bool:
    answer = await call(daemon, token, "GetTask", {"id": task_id})
    assert "result" in answer or answer["error"]["code"] == TASK_NOT_FOUND, answer
    return "result" in answer


def retention(daemon: DaemonUnderTest) -> Retention:
    inner = [each.scheduler if isinstance(each, Singleton) else each for each in daemon.daemon.schedulers]
    (found,) = [each for each in inner if isinstance(each, Retention)]
    return found


async def test_each_tenants_finished_tasks_are_kept_as_long_as_it_says(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(tmp_path / "home", echo(), clock=clock, retention={"task_hours": 2}) as daemon:
        tokens = {
            "as the settings say": daemon.token,
            "longer": await daemon.add_tenant("longer", echo(), kept_hours=10),
            "shorter": await daemon.add_tenant("shorter", echo(), kept_hours=1),
        }
        tasks = {name: await send(daemon, token, "hello") for name, token in tokens.items()}
        left: list[set[str]] = []
        for _ in range(4):
            await retention(daemon).step()
            left.append({name for name, token in tokens.items() if await knows(daemon, token, tasks[name])})
            clock.advance(HOUR_MS + 1)
    assert left == [
        {"as the settings say", "longer", "shorter"},
        {"as the settings say", "longer"},
        {"longer"},
        {"longer"},
    ]


async def test_without_a_setting_everything_is_kept(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(tmp_path / "home", echo(), clock=clock) as daemon:
        task_id = await send(daemon, daemon.token, "hello")
        clock.advance(10_000 * HOUR_MS)
        assert (await retention(daemon).step()).tasks == 0
        assert await knows(daemon, daemon.token, task_id)


async def test_a_tenants_finished_tasks_take_no_more_than_it_may(tmp_path: Path) -> None:
    async with open_daemon_under_test(tmp_path / "home", echo(), clock=FakeClock()) as daemon:
        small = await daemon.add_tenant("small", echo(), kept_bytes=5_000)
        tasks = [await send(daemon, small, f"hello {number}") for number in range(10)]
        others = await send(daemon, daemon.token, "hello")
        assert await knows(daemon, small, tasks[-1])  # all is archived
        erased = await retention(daemon).step()
        left = [number for number, task_id in enumerate(tasks) if await knows(daemon, small, task_id)]
        assert left == list(range(erased.tasks, 10))
        assert 2 <= len(left) <= 5
        assert await knows(daemon, daemon.token, others)
        assert (await retention(daemon).step()).tasks == 0


async def test_the_audit_ages_out_and_its_chain_stays_valid(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(tmp_path / "home", echo(), clock=clock, retention={"audit_hours": 1}) as daemon:
        await daemon.add_tenant("acme")
        clock.advance(2 * HOUR_MS)
        await daemon.add_tenant("late")
        await retention(daemon).step()
        rows = [
            msgspec.json.decode(row.row)["kind"]["type"] for row in await daemon.ledger.audit_recent(None, 50, None)
        ]
        assert rows == ["tenant_added", "audit_purged"]
        report = await daemon.ledger.audit_verify()
        assert report.valid, report.failures


async def test_on_a_shared_ledger_a_tenants_finished_tasks_take_no_more_than_it_may(
    tmp_path: Path, databases: Databases
) -> None:
    url = await databases.borrow()
    settings: dict[str, Any] = {
        "ledger": {"url": url, "durability": "os"},
        "retention": {"tenant_bytes": 10_000_000},
    }
    async with open_daemon_under_test(tmp_path / "home", echo(), **settings) as daemon:
        small = await daemon.add_tenant("small", echo(), kept_bytes=5_000)
        tasks = [await send(daemon, small, f"{number} hello" * 50) for number in range(10)]
        others = await send(daemon, daemon.token, "hello")
        erased = await retention(daemon).step()
        left = [number for number, task_id in enumerate(tasks) if await knows(daemon, small, task_id)]
        assert left == list(range(erased.tasks, 10))
        assert 1 <= len(left) <= 5
        assert await knows(daemon, daemon.token, others)
        assert (await retention(daemon).step()).tasks == 0
    await databases.give_back(url)


async def test_a_tenant_that_has_much_to_erase_does_not_keep_the_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(tmp_path / "home", echo(), clock=clock) as daemon:
        much = await daemon.add_tenant("a-much", echo(), kept_hours=1)
        little = await daemon.add_tenant("b-little", echo(), kept_hours=1)
        for number in range(2 * ERASED_AT_ONCE_MAX // 10):
            await asyncio.gather(*(send(daemon, much, f"{number} {each}") for each in range(10)))
        task_id = await send(daemon, little, "hello")
        assert await knows(daemon, little, task_id)
        clock.advance(HOUR_MS + 1)
        monkeypatch.setattr(schedulers, "BATCHES_IN_PASS_MAX", 2)
        assert (await retention(daemon).step()).tasks == ERASED_AT_ONCE_MAX + 1
        assert not await knows(daemon, little, task_id)


async def test_a_tenant_whose_tasks_cannot_be_erased_does_not_stop_the_pass_of_the_others(
    tmp_path: Path,
) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(tmp_path / "home", echo(), clock=clock) as daemon:
        stuck = await daemon.add_tenant("a-stuck", echo(), kept_bytes=1)
        free = await daemon.add_tenant("b-free", echo(), kept_hours=1)
        tasks = {token: await send(daemon, token, "hello") for token in (stuck, free)}
        assert [await knows(daemon, token, task_id) for token, task_id in tasks.items()] == [True, True]
        with closing(sqlite3.connect(tmp_path / "home" / ARCHIVE_NAME)) as db:
            db.execute(
                "CREATE TRIGGER kept BEFORE DELETE ON a2a_tasks WHEN old.tenant_id = 'a-stuck'"
                " BEGIN SELECT raise(ABORT, 'this row stays'); END"
            )
        clock.advance(HOUR_MS + 1)
        assert (await retention(daemon).step()).tasks == 1
        assert [await knows(daemon, token, task_id) for token, task_id in tasks.items()] == [True, False]
