"""A daemon goes on where it was after its ledger was moved into a database, and after it came back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from covenant.daemon.home import KEY_NAME, TOKEN_NAME, UnsafeHome
from covenant.ledger.embedded.moved_mark import mark_served, read_mark
from covenant.model.errors import HomeUnusable, Unavailable
from tests.cli.daemons import covenant as run_command
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.e2e.test_shared_ledger import agents, call, covenant, message, shared
from tests.ledger_contract.postgres_server import Databases
from tests.waits import BOUND_S


@pytest.fixture
async def url(databases: Databases) -> AsyncIterator[str]:
    url = await databases.borrow()
    yield url
    await databases.give_back(url)


async def facts(daemon: DaemonUnderTest, tenant: str) -> dict[str, Any]:
    listed = await call(daemon, "echo", "ListTasks")
    by_id = {task["id"]: await call(daemon, "echo", "GetTask", id=task["id"]) for task in listed["tasks"]}
    seen = await daemon.ask("GET", "/v1/agents", token=tenant)
    assert (await daemon.daemon.base.storage.ledger.audit_verify()).valid
    return {"tasks": by_id, "agents": seen.json()}


async def test_a_ledger_is_moved_neither_into_nor_out_of_a_database_that_may_lose_commits(
    tmp_path: Path, databases: Databases
) -> None:
    url, home = await databases.make(), tmp_path / "a"
    await (database := await asyncpg.connect(url)).execute(
        f"ALTER DATABASE {url.partition('?')[0].rpartition('/')[2]} SET synchronous_commit = off"
    )
    await database.close()
    async with open_daemon_under_test(home):
        pass
    move = ("ledger", "move", "--home", str(home), "--ledger", url)
    refused = await asyncio.to_thread(run_command, *move, "--json")
    assert (refused.code, refused.json["code"]) == (1, "ledger_unusable")
    assert "can lose acknowledged tasks" in refused.json["message"]
    assert "ledger.durability" in refused.json["message"]
    async with open_daemon_under_test(home):  # it was not marked
        pass
    assert (await covenant(*move))["exit"] == 0
    assert "can lose acknowledged tasks" in (await asyncio.to_thread(run_command, *move, "--out", "--json")).err
    assert (await covenant(*move, "--out"))["exit"] == 0
    await databases.drop(url)


async def test_a_daemon_goes_on_with_its_ledger_in_a_database_and_back_in_its_home(tmp_path: Path, url: str) -> None:
    home = tmp_path / "a"
    echo, slow, begun, _ = agents()
    at_once = {"grace_ms": 0}  # an agent works when this daemon stops
    async with open_daemon_under_test(home, echo, slow, daemon=at_once) as daemon:
        tenant = await daemon.add_tenant("acme")
        for text in ("one", "two"):
            await call(daemon, "echo", "SendMessage", message=message(text))
        returned = {"returnImmediately": True}
        await call(daemon, "slow", "SendMessage", message=message("wait"), configuration=returned)
        await asyncio.wait_for(begun.wait(), BOUND_S)
        before = await facts(daemon, tenant)
        running = await covenant("ledger", "move", "--home", str(home), "--ledger", url)
        assert (running["exit"], "already open" in running["message"]) == (1, True)
    moved = await covenant("ledger", "move", "--home", str(home), "--ledger", url)
    assert (moved["kind"], moved["direction"], moved["exit"]) == ("ledger_moved", "in", 0)
    counted = {each["what"]: each["count"] for each in moved["moved"]}
    assert (counted["task"], counted["live_task"], counted["tenant"]) == (3, 1, 2)
    with pytest.raises(HomeUnusable, match="--ledger"):
        async with open_daemon_under_test(home, echo, slow):
            pass
    async with open_daemon_under_test(home, echo, slow, ledger=shared(url)) as daemon:
        assert await facts(daemon, tenant) == before
        await call(daemon, "echo", "SendMessage", message=message("three"))
        after = await facts(daemon, tenant)
        serving = await covenant("ledger", "move", "--out", "--home", str(tmp_path / "b"), "--ledger", url)
        assert "has no identity/local.key" in serving["message"]
    back = await covenant("ledger", "move", "--out", "--home", str(home), "--ledger", url)
    assert (back["direction"], back["exit"]) == ("out", 0)
    async with open_daemon_under_test(home, echo, slow) as daemon:
        assert await facts(daemon, tenant) == after
    with pytest.raises((Unavailable, UnsafeHome), match="moved out"):
        async with open_daemon_under_test(home, echo, slow, ledger=shared(url)):
            pass


async def test_a_home_served_on_a_database_does_not_begin_an_empty_ledger(tmp_path: Path, url: str) -> None:
    home, own = tmp_path / "a", tmp_path / "b"
    echo, *_ = agents()
    async with open_daemon_under_test(home, echo, ledger=shared(url)) as daemon:
        await call(daemon, "echo", "SendMessage", message=message("one"))
        listed = await call(daemon, "echo", "ListTasks")
    assert len(listed["tasks"]) == 1
    with pytest.raises(HomeUnusable, match=r"its ledger is in postgres.*--ledger.*move --out"):
        async with open_daemon_under_test(home, echo):
            pass
    again = await covenant("ledger", "move", "--home", str(home), "--ledger", url)
    assert (again["exit"], "is in postgres" in again["message"]) == (1, True)
    variables = {"COVENANT_LEDGER_DURABILITY": "os"}
    ran = await asyncio.to_thread(run_command, "doctor", "--home", str(home), "--json", env=variables)
    told = [each["what"] for each in ran.json["findings"]]
    assert ran.json["well"], told
    assert any(each.startswith("the ledger is in postgres") for each in told)
    assert any(each.startswith("the database is at level") for each in told)
    assert "there is no ledger yet" not in told
    async with open_daemon_under_test(own):  # it has a ledger of its own, and keeps it
        pass
    copy_key_and_token(home, own)
    async with open_daemon_under_test(own, ledger=shared(url)):
        pass
    assert read_mark(own) is None
    assert (await covenant("ledger", "move", "--out", "--home", str(home), "--ledger", url))["exit"] == 0
    async with open_daemon_under_test(home, echo) as daemon:
        assert await call(daemon, "echo", "ListTasks") == listed


async def test_a_home_without_a_ledger_has_nothing_to_move(tmp_path: Path, url: str) -> None:
    empty = tmp_path / "empty"
    refused = await covenant("ledger", "move", "--home", str(empty), "--ledger", url)
    assert refused["exit"] == 1
    assert refused["message"] == f"{empty} has no ledger to move; name its home with --home"
    assert not empty.exists(), "no home is made by the way"


def test_a_home_remembers_where_its_database_is_and_no_password(tmp_path: Path) -> None:
    for host in ("old", "new"):
        mark_served(tmp_path, f"postgres://covenant:secret@{host}:5432/db?password=secret&host=/run/pg", 1)
        mark = read_mark(tmp_path)
        assert mark is not None
        assert mark.database == f"postgres://covenant@{host}:5432/db?host=/run/pg"
    assert "secret" not in (tmp_path / "moved.json").read_text()


async def test_a_mark_that_cannot_be_read_is_named_by_the_start_and_by_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "moved.json").write_text("{")
    with pytest.raises(HomeUnusable, match=r"moved\.json cannot be read"):
        async with open_daemon_under_test(tmp_path):
            pass
    ran = await asyncio.to_thread(run_command, "doctor", "--home", str(tmp_path), "--json")
    assert (ran.code, any("moved.json cannot be read" in each["what"] for each in ran.json["findings"])) == (1, True)


async def test_a_home_with_a_ledger_elsewhere_begins_none_in_an_empty_database_by_itself(
    tmp_path: Path, url: str, databases: Databases
) -> None:
    own, served, other = tmp_path / "own", tmp_path / "served", await databases.make()
    async with open_daemon_under_test(own):
        pass
    async with open_daemon_under_test(served, ledger=shared(url)):
        pass
    refusals = {
        own: "in its files: move that into an empty database with `covenant ledger move`",
        served: "in postgres",
    }
    for home, reason in refusals.items():
        with pytest.raises(HomeUnusable, match=f"no ledger, and that of {home} is {reason}.*`covenant ledger init`"):
            async with open_daemon_under_test(home, ledger=shared(other)):
                pass
    with pytest.raises(UnsafeHome, match=f"of another instance, and that of {own} is in its files.*--home"):
        async with open_daemon_under_test(own, ledger=shared(url)):
            pass
    async with open_daemon_under_test(own):  # as before
        pass
    assert (await covenant("ledger", "init", "--home", str(served), "--ledger", other))["exit"] == 0
    async with open_daemon_under_test(served, ledger=shared(other)):
        pass
    async with open_daemon_under_test(served, ledger=shared(url)):  # the first one is there still
        pass
    await databases.drop(other)


async def test_a_database_that_lost_its_ledger_is_not_begun_anew(tmp_path: Path, databases: Databases) -> None:
    url = await databases.make()
    async with open_daemon_under_test(tmp_path, ledger=shared(url)):
        pass
    await (database := await asyncpg.connect(url)).execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    await database.close()
    with pytest.raises(HomeUnusable, match=r"no ledger any more.*restore it from its backup"):
        async with open_daemon_under_test(tmp_path, ledger=shared(url)):
            pass
    await databases.drop(url)


def copy_key_and_token(source: Path, home: Path) -> None:
    """All that the documentation asks for."""
    for name in (KEY_NAME, TOKEN_NAME):
        (home / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy2(source / name, home / name)


def known_to_peers(daemon: DaemonUnderTest) -> dict[str, Any]:
    keys = daemon.daemon.base.storage.instance_keys
    assert keys is not None
    return {
        "id": keys.id,
        "prekeys": [each.kid for each in keys.bundle(daemon.daemon.base.storage.ledger.now_ms()).prekeys],
        "certificates": keys.certificates(),
        "void_before_ms": keys.void_before_ms,
    }


async def test_peers_know_the_instance_by_the_same_keys_wherever_its_ledger_is_served(tmp_path: Path, url: str) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    peers = {"enabled": True}
    async with open_daemon_under_test(a, peers=peers) as daemon:
        keys = daemon.daemon.base.storage.instance_keys
        assert keys is not None
        keys.replace_purpose_keys(daemon.daemon.base.storage.ledger.now_ms(), compromised=True)
        before = known_to_peers(daemon)
    assert before["void_before_ms"] > 0
    assert (await covenant("ledger", "move", "--home", str(a), "--ledger", url))["exit"] == 0
    assert not (a / "identity" / "prekeys.json").exists()
    copy_key_and_token(a, b)
    async with open_daemon_under_test(b, peers=peers, ledger=shared(url)) as daemon:
        assert known_to_peers(daemon) == before
    copy_key_and_token(a, c)
    (c / KEY_NAME).write_text("11" * 32)
    wrong = await covenant("ledger", "move", "--out", "--home", str(c), "--ledger", url)
    assert "copy identity/local.key" in wrong["message"]
    copy_key_and_token(a, c)
    assert (await covenant("ledger", "move", "--out", "--home", str(c), "--ledger", url))["exit"] == 0
    async with open_daemon_under_test(c, peers=peers) as daemon:
        assert known_to_peers(daemon) == before
