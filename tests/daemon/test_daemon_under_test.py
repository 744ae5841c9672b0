"""The whole daemon in one process: it serves over its own wiring, and leaves nothing behind."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from covenant.agents.api import Agent
from covenant.ledger.contract.ledger import Ledger
from tests.daemon_under_test import DaemonUnderTest, make_settings, open_daemon_under_test


def echo() -> Agent:
    agent = Agent("echo", default_project="work")

    @agent
    async def answer(turn: Any) -> str:
        return f"echo: {turn.text}"

    return agent


async def sent(daemon: DaemonUnderTest, text: str, **more: Any) -> httpx2.Response:
    message = {"messageId": "m1", "role": "ROLE_USER", "parts": [{"text": text}]}
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    return await daemon.ask("POST", "/v1/a2a/agents/echo", json=body, headers={"A2A-Version": "1.0"}, **more)


async def test_an_agent_answers_over_http(tmp_path: Path) -> None:
    async with open_daemon_under_test(tmp_path, echo()) as daemon:
        told = (await sent(daemon, "hello")).json()
        assert "echo: hello" in str(told["result"]["task"])
        assert (await sent(daemon, "hello", token="")).status_code == 401
        card = await daemon.ask("GET", "/v1/a2a/agents/echo/agent-card.json")
        assert card.json()["supportedInterfaces"][0]["url"] == f"{daemon.url}/v1/a2a/agents/echo"


async def test_a_tenant_has_agents_and_a_token_of_its_own(tmp_path: Path) -> None:
    async with open_daemon_under_test(tmp_path) as daemon:
        token = await daemon.add_tenant("acme", echo())
        assert (await sent(daemon, "hi", token=token)).status_code == 200
        assert daemon.tokens == {"acme": token}


async def test_the_port_of_grpc_is_in_the_first_card(tmp_path: Path) -> None:
    async with open_daemon_under_test(tmp_path, echo(), grpc={"enabled": True}, serve=False) as daemon:
        assert daemon.daemon.agents.features.now().grpc_port == daemon.grpc_port


async def test_two_daemons_run_beside_each_other_and_what_they_had_is_left(tmp_path: Path) -> None:
    async with (
        open_daemon_under_test(tmp_path / "one", echo(), peers={"enabled": True}) as one,
        open_daemon_under_test(tmp_path / "two", peers={"enabled": True}) as two,
    ):
        assert one.port != two.port
        assert (one.daemon.peers, two.daemon.peers) != (None, None)
        assert (await sent(one, "hello")).status_code == 200
        ledger: Ledger = one.ledger
        assert not one.socket.is_relative_to(two.home)
    assert not one.socket.exists()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    async with open_daemon_under_test(tmp_path / "one", echo()) as again:
        assert again.ledger is not ledger
        assert again.token == one.token


async def test_what_goes_wrong_meanwhile_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="wrong"):
        async with open_daemon_under_test(tmp_path, echo()):
            raise KeyError("wrong")


def test_a_section_that_there_is_not_is_no_setting(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no such sections: nonsense"):
        make_settings(tmp_path, nonsense={})
