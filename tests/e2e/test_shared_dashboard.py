"""The dashboard of two daemons on one PostgreSQL: each tells of both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.dashboard.browser import asking_agent, open_browser, send_task
from tests.dashboard.test_feed import follow, until_told
from tests.e2e.test_shared_ledger import copy_keys, shared
from tests.ledger_contract.postgres_server import Databases, databases

__all__ = ["databases"]


@pytest.fixture
async def pair(databases: Databases, short_path: Path) -> AsyncIterator[tuple[DaemonUnderTest, DaemonUnderTest]]:
    url = await databases.borrow()
    try:
        async with AsyncExitStack() as stack:
            nodes: list[Any] = []
            for name in ("a", "b"):
                if nodes:
                    copy_keys(short_path)
                opened = open_daemon_under_test(short_path / name, asking_agent(), ledger=shared(url))
                nodes.append(await stack.enter_async_context(opened))
            yield nodes[0], nodes[1]
    finally:
        await databases.give_back(url)


async def test_a_feed_tells_of_what_happens_at_the_other_daemon(pair: tuple[DaemonUnderTest, DaemonUnderTest]) -> None:
    here, there = pair
    async with open_browser(here, here.token) as browser, follow(browser) as feed:
        task = await send_task(there, "paint it")
        told = await until_told(feed, task["id"], "parked")
        assert told["agent"].startswith("teller@")
        assert (await browser.read(f"a2a/tasks/{task['id']}/show"))["state"] == "parked"


async def test_the_nodes_are_listed_and_a_session_knows_that_there_are_several(
    pair: tuple[DaemonUnderTest, DaemonUnderTest],
) -> None:
    here, there = pair
    async with open_browser(here, here.token) as browser:
        assert (await browser.read("session"))["several"] is True
        nodes = (await browser.read("v1/admin/nodes"))["nodes"]
        assert [node["alive"] for node in nodes] == [True, True]
        assert (await browser.read("session"))["node"] in {node["node"] for node in nodes}
    async with open_browser(there, there.token) as browser:
        assert (await browser.read("v1/admin/nodes"))["nodes"][0]["node"] == nodes[0]["node"]
