"""MCP in a daemon: cards that name what a server really has, and a door that says what is missing."""

import json
import sys
from pathlib import Path

from covenant.daemon.wiring.core import SERVERS_NAME
from covenant.doors.a2a.in_process_client import InProcessExchange
from covenant.doors.http.bearer_auth import TenantAuth
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME
from covenant.doors.mcp.streamable_http import McpDoor
from covenant.doors.metrics import Meter
from covenant.exchange.access.tenants import TenantLimiter
from covenant.exchange.cards import Cards
from covenant.model.agent_definition import AgentDefinition, CatalogueAgent
from covenant.model.tenants import DEFAULT
from covenant.seal.cards import CardSigner
from tests.agents import mcp_server
from tests.daemon_under_test import open_daemon_under_test
from tests.doors.a2a.a2a_under_test import open_a2a

URL = "http://localhost"


async def test_cards_name_what_is_declared_and_then_what_a_server_really_has(tmp_path: Path) -> None:
    small = {"command": sys.executable, "args": [mcp_server.__file__], "tools": ["gone"]}
    (tmp_path / SERVERS_NAME).write_text(json.dumps({"servers": {"small": small}}))
    agent = CatalogueAgent(tenant=DEFAULT, definition=AgentDefinition(id="thinker", kind="model"))
    async with open_daemon_under_test(tmp_path, serve=False, model={"name": "test"}) as daemon:
        features = daemon.daemon.agents.features
        cards = Cards(features.now, CardSigner(daemon.daemon.base.storage.key))
        before = cards.card(agent, URL)
        assert cards.card(agent, URL) is before
        assert "gone" in {skill.id for skill in before.skills}
        await features.tools.list(DEFAULT, agent.definition)
        after = cards.card(agent, URL)
        assert cards.card(agent, URL) is after
        names = {skill.id for skill in after.skills}
        assert "gone" not in names
        assert {"add", "pid"} <= names
        assert after.signatures != before.signatures


async def test_without_the_extra_the_door_says_how_to_get_it(tmp_path: Path) -> None:
    async with open_a2a(tmp_path) as s:
        gate = TenantAuth(s.tenancy, TenantLimiter(s.ledger.now_ms))
        # Nobody gets as far as the desk.
        door = McpDoor(None, gate, Meter(), version="1", body_bytes_max=1_000, present=False)  # type: ignore[arg-type]

        async def ask(headers: dict[bytes, bytes]) -> tuple[int, bytes]:
            scope = {"type": "http", "method": "POST", "path": "/mcp", "headers": [*headers.items()]}
            exchange = InProcessExchange({**scope, HEADERS_BY_NAME: headers}, b"{}")
            await door(exchange.scope, exchange.receive, exchange)
            begun, body = exchange.messages.get_nowait(), exchange.messages.get_nowait()
            assert begun is not None
            assert body is not None
            return begun["status"], body["body"]

        status, body = await ask({b"authorization": f"Bearer {s.token}".encode()})
        assert status == 501
        assert b"pip install 'covenant-a2a[mcp]'" in body
        assert (await ask({}))[0] == 401
