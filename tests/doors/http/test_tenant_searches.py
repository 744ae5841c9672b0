"""A tenant that asks for tasks by its own token: it is told of its own, and cannot even count those of another."""

from pathlib import Path
from typing import Any

import msgspec

from covenant.ledger.machine.commands import Accept
from covenant.model.ids import TaskId
from covenant.model.settings import TenantSettings
from covenant.model.task import fingerprint
from tests.doors.clients import Http
from tests.doors.doors_under_test import DoorsUnderTest, open_doors
from tests.doors.speakers import HttpSpeaker
from tests.ledger_contract.samples import agent, make_task, task_id


async def tenants_with_tasks(under_test: DoorsUnderTest) -> dict[str, Http]:
    """Two tenants with two tasks each, beside one of the mailbox."""
    tenants = {}
    for number, name in enumerate(("acme", "beta")):
        tenants[name] = await under_test.tenant(name)
        for each in (1, 2):
            task = make_task(10 * number + each, tenant=name, context_id=f"talk-{number}", task_kind="secret")
            await under_test.ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))
    task = make_task(30)
    await under_test.ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))
    return tenants


async def asked(tenant: Http, target: str) -> tuple[int, dict[str, Any]]:
    reply = await tenant.ask("GET", target)
    return reply.status, reply.json


async def test_a_tenants_token_finds_and_counts_its_own_tasks_alone(under_test: DoorsUnderTest) -> None:
    tenants = await tenants_with_tasks(under_test)
    status, found = await asked(tenants["acme"], "/a2a/tasks?count=true")
    assert (status, found["total"], [task["task_id"] for task in found["tasks"]]) == (200, 2, [task_id(2), task_id(1)])
    for target in (
        "/a2a/tasks?tenant=beta&count=true",
        f"/a2a/tasks?id={task_id(11)}&count=true",
        "/a2a/tasks?context=talk-1&count=true",
        f"/a2a/tasks?parent={task_id(11)}&count=true",
        "/a2a/tasks?origin=native&text=work&count=true",
    ):
        _, found = await asked(tenants["acme"], target)
        assert (target, found["tasks"], found["total"], found["next"]) == (target, [], 0, None)
    _, found = await asked(tenants["acme"], "/a2a/tasks?task_kind=secret&limit=1")
    # A cursor is sealed for its tenant: nobody else goes on from there.
    status, other = await asked(tenants["beta"], f"/a2a/tasks?limit=50&after={found['next']}")
    assert (status, other["code"]) == (400, "invalid_cursor")
    _, counts = await asked(tenants["beta"], "/a2a/tasks/counts")
    assert (counts["lanes"]["queued"], [each["tenant"] for each in counts["by_agent"]]) == (2, ["beta"])


async def test_an_agent_without_a_host_is_of_the_tenant_else_of_the_default_one(under_test: DoorsUnderTest) -> None:
    acme, speaker = await under_test.tenant("acme"), HttpSpeaker()
    for number, name in ((1, "acme"), (2, "default")):
        task = make_task(number, recipient=agent(f"clerk@{name}"), tenant=name)
        await under_test.ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))

    async def found(**filters: Any) -> list[str]:
        answer = await speaker.ask(under_test.operator, "find_a2a_tasks", agent="clerk", **filters)
        return [task["task_id"] for task in answer["tasks"]]

    assert (await found(), await found(tenant="acme")) == ([task_id(2)], [task_id(1)])
    _, own = await asked(acme, "/a2a/tasks?agent=clerk&count=true")
    assert ([task["task_id"] for task in own["tasks"]], own["total"]) == ([task_id(1)], 1)
    chosen = {"filter": {"agent": "clerk"}, "command": "cancel", "reason": "r", "dry_run": True}
    tried = await speaker.ask(under_test.operator, "repair_a2a_tasks", **chosen)
    assert [each["task_id"] for each in tried["outcomes"]] == [task_id(2)]


async def test_a_tenants_token_is_for_nothing_else_of_the_operators(under_test: DoorsUnderTest) -> None:
    tenants = await tenants_with_tasks(under_test)
    for target in (
        "/a2a/queue",
        "/a2a/tasks/recent",
        *(f"/a2a/tasks/{task_id(1)}/{each}" for each in ("show", "tree")),
    ):
        status, told = await asked(tenants["acme"], target)
        assert (target, status, told["code"]) == (target, 401, "unknown_token")
        assert "covenant identities enroll" in told["message"]
    await HttpSpeaker().ask(under_test.operator, "change_tenant", name="acme", disabled=True)
    for target in ("/a2a/tasks", "/a2a/queue"):
        status, told = await asked(tenants["acme"], target)
        assert (status, told["message"]) == (401, "unknown or revoked token")


async def test_a_tenants_queries_count_against_its_rate(short_path: Path) -> None:
    async with open_doors(short_path, tenant_limits=TenantSettings(rate_per_min=2, burst=2)) as under_test:
        tenants = await tenants_with_tasks(under_test)
        statuses = [(await asked(tenants["acme"], "/a2a/tasks"))[0] for _ in range(3)]
        assert statuses == [200, 200, 429]


async def test_how_an_id_begins_tells_a_tenant_of_its_own_tasks_alone(under_test: DoorsUnderTest) -> None:
    tenants = await tenants_with_tasks(under_test)
    status, told = await asked(tenants["acme"], f"/a2a/tasks/{task_id(1)[:20]}/log")
    assert (status, told["code"]) == (409, "ambiguous_id")
    assert [number for number in (1, 2, 11, 12, 30) if task_id(number) in told["message"]] == [1, 2]
    for number, name in ((41, "acme"), (42, "beta"), (58, "beta")):
        task = make_task(number, tenant=name)
        task = msgspec.structs.replace(task, id=TaskId(f"abcdef{number}{task.id[8:]}"))
        await under_test.ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))
    # Three tasks begin so, and one of them is acme's: another's are not even an ambiguity.
    status, told = await asked(tenants["acme"], "/a2a/tasks/abcdef/log")
    assert (status, told["task_id"][:8]) == (200, "abcdef41")
    for given in ("abcdef42", "abcdef58-0000", "abcdef5", "zz"):
        status, told = await asked(tenants["acme"], f"/a2a/tasks/{given}/log")
        assert (status, told["message"]) == (404, f"no task begins with {given!r}")
