"""Two daemons on one ledger: what a token has open at one of them ends before its revocation at the other is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.api import Agent, Turn
from covenant.ledger.postgres.nodes import Membership
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.e2e.test_shared_ledger import copy_keys, message, shared
from tests.ledger_contract.postgres_server import Databases
from tests.waits import BOUND_S, eventually


@pytest.fixture
async def url(databases: Databases) -> str:
    return await databases.make()


def membership(daemon: DaemonUnderTest) -> Membership:
    ledger = daemon.daemon.base.storage.ledger
    assert isinstance(ledger, PostgresLedger)
    return ledger._membership


async def test_a_revocation_is_told_when_the_long_polls_of_the_token_have_ended_at_every_daemon(
    tmp_path: Path, url: str
) -> None:
    async with open_daemon_under_test(tmp_path / "a", ledger=shared(url)) as a:
        copy_keys(tmp_path)
        async with open_daemon_under_test(tmp_path / "b", ledger=shared(url)) as b:
            enrolled = await a.ask("POST", "/identities/enroll", json={"display": "bob@here", "actions": []})
            token = enrolled.json()["token_b58"]
            assert not await _is_unknown(b, token)
            polling = asyncio.create_task(b.ask("GET", "/a2a/tasks/next?wait_ms=50000", token=token))
            await eventually(lambda: _has_waiter(b))
            async with membership(b)._busy:  # it hears nothing of the others meanwhile
                revoking = asyncio.create_task(a.ask("POST", "/identities/revoke", json={"identity": "bob@here"}))
                await eventually(lambda: _is_unknown(a, token))
                # A daemon that was silent for as long as its lease ends the poll by itself.
                assert polling.done() or not revoking.done(), "the other daemon would still let the token in"
            assert (await asyncio.wait_for(revoking, BOUND_S)).status_code == 200
            refused = await b.ask("GET", "/a2a/queue", token=token)
            assert (refused.status_code, (await polling).status_code) == (401, 401)


async def _has_waiter(daemon: DaemonUnderTest) -> bool:
    ledger = daemon.daemon.base.storage.ledger
    assert isinstance(ledger, PostgresLedger)
    return bool(ledger._task_waiters.lines)


async def _is_unknown(daemon: DaemonUnderTest, token: str) -> bool:
    return (await daemon.ask("GET", "/a2a/queue", token=token)).status_code == 401


async def test_a_stream_ends_when_its_tenant_is_disabled_at_another_daemon_and_its_work_goes_on(
    tmp_path: Path, url: str
) -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    slow = Agent("slow", default_project="work")

    @slow
    async def work(_: Turn) -> str:
        begun.set()
        await go.wait()
        return "done"

    async with open_daemon_under_test(tmp_path / "a", ledger=shared(url)) as a:
        copy_keys(tmp_path)
        async with open_daemon_under_test(tmp_path / "b", ledger=shared(url)) as b:
            token = await b.add_tenant("acme", slow)
            body = {"jsonrpc": "2.0", "id": 1, "method": "SendStreamingMessage", "params": {"message": message("go")}}
            headers = {"A2A-Version": "1.0", "Authorization": f"Bearer {token}"}
            async with b.http.stream("POST", "/v1/a2a/agents/slow", json=body, headers=headers) as stream:
                lines = stream.aiter_lines()
                first = await anext(lines)
                await asyncio.wait_for(begun.wait(), BOUND_S)
                await a.tenants.change(a.operator, "acme", disabled=True)
                rest = [line async for line in lines]
            assert "data" in first + "".join(rest)
            assert "COMPLETED" not in "".join(rest), "it ended before the work did"
            go.set()
            await a.tenants.change(a.operator, "acme", disabled=False)
            await eventually(lambda: _is_completed(b, token))


async def _is_completed(daemon: DaemonUnderTest, token: str) -> bool:
    listed: Any = await daemon.ask("GET", "/v1/a2a/agents/slow/tasks", token=token, headers={"A2A-Version": "1.0"})
    return [task["status"]["state"] for task in listed.json()["tasks"]] == ["TASK_STATE_COMPLETED"]
