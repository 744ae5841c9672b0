"""The dashboard of two daemons on one PostgreSQL: each tells of both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.dashboard.browser import ParsedPage, asking_agent, leave_stuck, new_viewer, open_browser, send_task
from tests.dashboard.test_feed import follow, until_told
from tests.e2e.test_shared_ledger import copy_keys, shared
from tests.ledger_contract.postgres_server import Databases
from tests.waits import eventually

FRAMES: Any = {"frame_bytes_max": 1024 * 1024}


@pytest.fixture
async def pair(databases: Databases, short_path: Path) -> AsyncIterator[tuple[DaemonUnderTest, DaemonUnderTest]]:
    url = await databases.borrow()
    try:
        async with AsyncExitStack() as stack:
            nodes: list[Any] = []
            for name in ("a", "b"):
                if nodes:
                    copy_keys(short_path)
                opened = open_daemon_under_test(short_path / name, asking_agent(), ledger=shared(url), log=FRAMES)
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


async def test_a_feed_tells_of_the_audit_and_the_requeues_of_the_other_daemon(
    pair: tuple[DaemonUnderTest, DaemonUnderTest],
) -> None:
    here, there = pair
    stuck = await leave_stuck(there)
    await there.identities.grant(there.operator, "a2a.repair.requeue", to=there.operator.agent.display)
    async with (
        open_browser(here, here.token) as browser,
        open_browser(there, there.token) as other,
        follow(browser) as feed,
    ):
        await new_viewer(there)
        assert (await feed.next("audit"))[1]["count"] > 0
        form = {"task": stuck.task_id, "lease": stuck.lease_id, "command": "requeue", "risk": "idempotent"}
        assert (await other.send("/ui/act/repair", **form, reason="gone")).status_code == 303
        await until_told(feed, stuck.task_id, "queued")


async def test_tasks_repair_the_inspector_and_frames_work_on_a_shared_ledger(
    pair: tuple[DaemonUnderTest, DaemonUnderTest],
) -> None:
    here, there = pair
    waits, stuck = await send_task(here, "paint it"), await leave_stuck(there)
    await here.identities.grant(here.operator, "a2a.repair.requeue", to=here.operator.agent.display)
    async with open_browser(here, here.token) as browser:
        found = await browser.read("a2a/tasks?limit=10")
        assert {task["task_id"] for task in found["tasks"]} == {waits["id"], stuck.task_id}
        lanes = (await browser.read("a2a/tasks/counts"))["lanes"]
        assert (lanes["parked"], lanes["in_flight"]) == (1, 1)
        assert (await browser.read("a2a/attention"))["numbers"]["parked"] == 1
        assert (await browser.read("rates"))["settled"] == [0]  # of the only minute that this daemon knows
        assert (await browser.read(f"a2a/tasks/{waits['id']}/tree"))["tree"]["task_id"] == waits["id"]
        frames = (await browser.read(f"a2a/tasks/{waits['id']}/frames"))["frames"]
        assert [frame["direction"] for frame in frames] == ["in", "out"]
        assert (await browser.send("/ui/act/answer", task=waits["id"], text="blue")).status_code == 303
        assert (await browser.read(f"a2a/tasks/{waits['id']}/show"))["turn"] == 2

        async def has_ended() -> bool:
            return (await browser.read(f"a2a/tasks/{waits['id']}/show"))["state"] not in ("queued", "in_flight")

        await eventually(has_ended)
        form = {"state": "in_flight", "command": "requeue", "risk": "idempotent", "reason": "they are gone"}
        dry = ParsedPage((await browser.send("/ui/act/bulk", **form)).text)
        assert stuck.task_id in dry.text
        assert "1 of 1 done" in ParsedPage((await browser.send("/ui/act/bulk", **dry.fields())).text).text
        assert (await browser.read(f"a2a/tasks/{stuck.task_id}/show"))["state"] == "queued"
        assert (await browser.send("/ui/act/cancel", task=stuck.task_id, reason="r")).status_code == 303
        asked = {"agent": "teller", "text": "green", "stream": True}
        inspected = (await browser.api("POST", "a2a/inspect", asked)).json()
        assert (inspected["findings"], inspected["conversation"][-1]["text"]) == ([], "done in green")
        assert (await browser.read("audit/verify"))["report"]["valid"]
        assert (await browser.read("audit/recent?limit=5"))["events"]


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
