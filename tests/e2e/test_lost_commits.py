"""A daemon whose database has lost commits: it refuses that at each start, and the command and the doctor say so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.daemon.home import LOST_COMMITS_NAME
from covenant.model.errors import Unavailable
from tests.cli.daemons import Ran, covenant
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.e2e.test_shared_ledger import agents, call, execute, message, until
from tests.ledger_contract.postgres_server import Databases

LOST = "UPDATE writers SET seq = seq - 1 WHERE node = 'a'"


@pytest.fixture
async def url(databases: Databases) -> AsyncIterator[str]:
    url = await databases.borrow()
    yield url
    await databases.give_back(url)


async def run(home: Path, url: str, *words: str) -> Ran:
    variables = {"COVENANT_LEDGER_DURABILITY": "os", "COVENANT_LEDGER_URL": url, "COVENANT_DAEMON_NODE": "a"}
    return await asyncio.to_thread(covenant, *words, "--home", str(home), env=variables)


async def lose_a_commit(home: Path, url: str) -> None:
    echo, *_ = agents()
    async with open_daemon_under_test(home, echo, ledger=ledger(url), daemon={"node": "a"}) as daemon:
        await call(daemon, "echo", "SendMessage", message=message("one"))
        await execute(url, LOST)
        await until(lambda: is_refused(daemon))


async def is_refused(daemon: DaemonUnderTest) -> bool:
    answer = await daemon.ask("GET", "/readyz")
    return "covenant ledger restored" in answer.text


def ledger(url: str) -> dict[str, object]:
    return {"url": url, "durability": "os"}


async def test_a_restart_does_not_forget_lost_commits(tmp_path: Path, url: str) -> None:
    home = tmp_path / "a"
    await lose_a_commit(home, url)
    started = await run(home, url, "serve", "--http-port", "0")
    assert started.code != 0
    assert "covenant ledger restored" in started.err
    assert str(home / LOST_COMMITS_NAME) in started.err
    assert "Traceback" not in started.err
    with pytest.raises(Unavailable, match="lost commits"):
        async with open_daemon_under_test(home, ledger=ledger(url), daemon={"node": "a"}):
            pass
    examined = await run(home, url, "doctor", "--json")
    (found,) = [each for each in examined.json["findings"] if not each["well"]]
    assert "lost commits" in found["what"]
    assert "covenant ledger restored" in found["way_out"]
    assert (await run(home, url, "ledger", "restored")).code == 0
    assert (await run(home, url, "doctor", "--json")).json["well"]
    async with open_daemon_under_test(home, ledger=ledger(url), daemon={"node": "a"}) as daemon:
        assert (await daemon.ask("GET", "/readyz")).status_code == 200
        rows = await daemon.daemon.base.storage.ledger.audit_recent(None, 100, None)
    assert sum('"ledger_restored"' in each.row for each in rows) == 1


async def test_a_ledger_without_its_last_commits_is_moved_once_the_loss_is_accepted(tmp_path: Path, url: str) -> None:
    home = tmp_path / "a"
    await lose_a_commit(home, url)
    refused = await run(home, url, "ledger", "move", "--out")
    assert refused.code != 0
    assert "covenant ledger restored" in refused.err
    assert (home / LOST_COMMITS_NAME).exists()
    assert not (home / "journal").exists()
    assert (await run(home, url, "ledger", "restored")).code == 0
    moved = await run(home, url, "ledger", "move", "--out")
    assert moved.code == 0, moved
    assert not (home / LOST_COMMITS_NAME).exists()
    async with open_daemon_under_test(home):
        pass
