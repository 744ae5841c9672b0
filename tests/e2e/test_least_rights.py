"""A daemon whose role may change rows and nothing else: the tables are another role's, who migrates them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.ledger.postgres.migrations import LEVEL, WrongSchema
from covenant.ledger.postgres.open_postgres import DatabaseUnusable
from tests.daemon_under_test import open_daemon_under_test
from tests.e2e.test_shared_ledger import covenant
from tests.e2e.test_wrong_database import Guest, counting, doctor, open_guest, send
from tests.ledger_contract.postgres_server import Databases

TABLES = "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}"
SEQUENCES = "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {role}"


@pytest.fixture
async def guest(databases: Databases) -> AsyncIterator[Guest]:
    async with open_guest(databases) as guest:
        yield guest


async def test_a_role_that_may_only_change_rows_serves_a_ledger_that_another_one_has_made(
    tmp_path: Path, guest: Guest
) -> None:
    home = tmp_path / "a"
    made = await covenant("ledger", "init", "--home", str(home), "--ledger", guest.owner_url)
    assert made["exit"] == 0, made
    await guest.as_owner("REVOKE CREATE ON SCHEMA public FROM {role}", TABLES)
    agent, begun, _ = counting()
    with pytest.raises(DatabaseUnusable, match="writer_numbers"):
        async with open_daemon_under_test(home, agent, ledger=guest.settings):
            pass
    assert "this role may not use the sequence writer_numbers" in await doctor(tmp_path, guest)
    await guest.as_owner(SEQUENCES)
    assert "database" not in await doctor(tmp_path, guest)
    async with open_daemon_under_test(home, agent, ledger=guest.settings) as daemon:
        assert (await send(daemon, "one"))["task"]["status"]["state"] == "TASK_STATE_COMPLETED"
    assert begun == ["one"]


async def test_a_role_that_may_make_no_tables_is_told_who_should(tmp_path: Path, guest: Guest) -> None:
    await guest.as_owner("REVOKE CREATE ON SCHEMA public FROM {role}", "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    with pytest.raises(WrongSchema, match=r"may not make one .*run `covenant ledger init` with"):
        async with open_daemon_under_test(tmp_path / "a", ledger=guest.settings):
            pass
    made = await covenant("ledger", "init", "--home", str(tmp_path / "a"), "--ledger", guest.owner_url)
    assert made["exit"] == 0, made
    await guest.as_owner(TABLES, SEQUENCES, f"UPDATE ledger_level SET level = {LEVEL - 1}")
    with pytest.raises(WrongSchema, match=rf"at level {LEVEL - 1}, .*run `covenant ledger migrate` with"):
        async with open_daemon_under_test(tmp_path / "a", ledger=guest.settings):
            pass
