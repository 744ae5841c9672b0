"""What official clients of A2A 1.0 and 0.3 do, unchanged, against a whole daemon."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.compat.v0_3.types import AgentCard as OldCard
from a2a.types import a2a_pb2 as pb
from a2a.types.a2a_pb2 import AgentCard
from a2a.utils.errors import UnsupportedOperationError
from google.protobuf.json_format import ParseDict

from covenant import Agent, Turn
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.waits import BOUND_S

ROOT = "/.well-known/agent-card.json"
ECHO = "/v1/a2a/agents/echo"
OPEN = {"publish": "echo", "publish_anonymous": "loopback"}


def echo() -> Agent:
    agent = Agent("echo", description="Says it again")

    @agent
    async def say_again(turn: Turn) -> str:
        return turn.text

    return agent


async def card_at(daemon: DaemonUnderTest, path: str, **more: Any) -> dict[str, Any]:
    reply = await daemon.ask("GET", path, **more)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def test_both_generations_read_the_card_at_the_root(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", echo(), a2a=OPEN) as daemon:
        card = await card_at(daemon, ROOT, token="")
        old = OldCard.model_validate(card)
        assert (old.url, old.preferred_transport) == (f"{daemon.url}{ECHO}", "JSONRPC")
        async with httpx.AsyncClient(timeout=BOUND_S) as http:
            new = await A2ACardResolver(http, daemon.url).get_agent_card()
        assert new.supported_interfaces[0].protocol_version == "1.0"
        clean = await card_at(daemon, ROOT, token="", headers={"A2A-Version": "1.0"})
        ParseDict(clean, AgentCard())
        assert "url" not in clean


async def test_the_card_at_the_root_has_the_form_of_1_0_alone_where_the_setting_says_so(short_path: Path) -> None:
    cards = {"root_form": "1.0"}
    async with open_daemon_under_test(short_path / "home", echo(), a2a=OPEN, cards=cards) as daemon:
        ParseDict(await card_at(daemon, ROOT, token=""), AgentCard())
        assert "url" in await card_at(daemon, f"{ECHO}/agent-card.json")


async def test_callers_without_a_token_are_promised_no_extended_card(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", echo(), a2a=OPEN) as daemon:
        for path in (ROOT, f"{ECHO}/agent-card.json"):
            card = await card_at(daemon, path, token="")
            assert card["capabilities"]["extendedAgentCard"] is False
            assert card["supportsAuthenticatedExtendedCard"] is False
            assert (await card_at(daemon, path))["capabilities"]["extendedAgentCard"] is True
            assert (await card_at(daemon, ROOT, token="wrong"))["capabilities"]["extendedAgentCard"] is False
        async with httpx.AsyncClient(timeout=BOUND_S) as http:
            found = await A2ACardResolver(http, daemon.url).get_agent_card()
            found.capabilities.extended_agent_card = True
            for binding in ("JSONRPC", "HTTP+JSON"):
                config = ClientConfig(httpx_client=http, supported_protocol_bindings=[binding])
                client = ClientFactory(config).create(found)
                with pytest.raises(UnsupportedOperationError):
                    await client.get_extended_agent_card(pb.GetExtendedAgentCardRequest())


async def test_the_published_card_promises_an_extended_one_where_a_token_is_needed(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", echo(), a2a={"publish": "echo"}) as daemon:
        assert (await card_at(daemon, ROOT, token=""))["capabilities"]["extendedAgentCard"] is True


async def test_official_clients_find_the_card_below_the_agents_url(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", echo()) as daemon:
        said = {"Authorization": f"Bearer {daemon.token}"}
        async with httpx.AsyncClient(headers=said, timeout=BOUND_S) as http:
            card = await A2ACardResolver(http, f"{daemon.url}{ECHO}").get_agent_card()
            assert card.name == "echo"
            client = await ClientFactory(ClientConfig(httpx_client=http)).create_from_url(f"{daemon.url}{ECHO}")
            asked = pb.SendMessageRequest(
                message=pb.Message(message_id="1", role=pb.ROLE_USER, parts=[pb.Part(text="hello")])
            )
            assert [event async for event in client.send_message(asked)]


async def test_a_get_of_the_agents_url_is_its_card(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", echo()) as daemon:
        expected = await card_at(daemon, f"{ECHO}/agent-card.json")
        for path in (ECHO, f"{ECHO}/", f"{ECHO}{ROOT}"):
            assert await card_at(daemon, path) == expected
            assert (await daemon.ask("GET", path, token="")).status_code == 401
        refused = await daemon.ask("PUT", ECHO)
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, POST")
