"""What an agent that a model plays does and says, through the doors of a daemon. The model is a server on loopback."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from tests.agents import mcp_server
from tests.agents.openai_server import Cut, Line, OpenAi, openai_server
from tests.cli.daemons import Daemon
from tests.outbound.http_servers import always, http_server, reply
from tests.places import short_folder
from tests.waits import BOUND_S


class Site:
    def __init__(self, daemon: Daemon, model: OpenAi) -> None:
        self.daemon = daemon
        self.model = model
        self._token = (daemon.home / "operator.token").read_text().strip()

    async def post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        headers = {"authorization": f"Bearer {self._token}"}
        async with httpx2.AsyncClient(timeout=BOUND_S, trust_env=False, base_url=self.daemon.url) as http:
            answer = await http.post(path, json=body, headers=headers)
        assert answer.status_code < 300, answer.text
        return answer

    async def send(self, method: str, message: dict[str, Any]) -> dict[str, Any]:
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"message": message}}
        found: dict[str, Any] = (await self.post("/v1/a2a/agents/bot", call)).json()["result"]
        return found

    def told(self, question: int) -> str:
        """What the model was told last before it was asked for its answer with this number."""
        text: str = self.model.asked[question]["messages"][-1]["content"]
        return text

    def tools(self, question: int) -> set[str]:
        return {tool["function"]["name"] for tool in self.model.asked[question]["tools"]}


@asynccontextmanager
async def a_site(lines: Sequence[Line], env: dict[str, str] | None = None, **home: Any) -> AsyncIterator[Site]:
    """A daemon with the agent `bot`, whose model says these lines. `home`: JSON files in its home."""
    with short_folder() as folder:
        async with openai_server(lines) as model:
            (folder / "home").mkdir(mode=0o700)
            for name, content in home.items():
                (folder / "home" / f"{name}.json").write_text(json.dumps(content))
            known = {"COVENANT_MODEL_NAME": "openai:small", "COVENANT_MODEL_BASE_URL": model.url, **(env or {})}
            daemon = await asyncio.to_thread(Daemon, folder / "home", env=known)
            try:
                await asyncio.to_thread(daemon.json, "agents", "add", "bot", "--kind", "model")
                yield Site(daemon, model)
            finally:
                await asyncio.to_thread(daemon.stop)


V03 = {"kind": "message", "messageId": "1", "role": "user", "parts": [{"kind": "text", "text": "hello"}]}
V1 = {"messageId": "1", "role": "ROLE_USER", "parts": [{"text": "hello"}]}
USED = {"input_tokens": 11, "output_tokens": 5, "tokens": 16}


async def test_tokens_and_the_reason_to_stop_are_told_in_either_dialect() -> None:
    async with a_site(["hello you", Cut("hello yo")]) as site:
        old = (await site.send("message/send", V03))["metadata"]
        assert (old["x-arbiter.input_tokens"], old["x-arbiter.output_tokens"]) == (11, 5)
        assert (old["x-arbiter.stop_reason"], old["x-arbiter.agent_id"]) == ("stop", "bot")
        assert old["covenant.usage"].items() >= USED.items()
        new = (await site.send("SendMessage", V1))["task"]["metadata"]
        assert new["covenant.usage"].items() >= USED.items()
        assert (new["covenant.stop_reason"], new["covenant.partial"], new["covenant.model"]) == (
            "length",
            True,
            "small",
        )


async def test_the_web_is_searched_at_the_address_of_the_setting() -> None:
    page = reply(body=b"<p>spring comes early", content_type="text/html")
    async with http_server(always(page)) as engine:
        place = {"COVENANT_MODEL_SEARCH": engine.url("/find?q={query}"), "COVENANT_OUTBOUND_ALLOW": "127.0.0.1"}
        async with a_site([("search", {"query": "spring & summer"}), "early"], place) as site:
            await site.send("SendMessage", V1)
            assert [request.target for request in engine.requests] == ["/find?q=spring%20%26%20summer"]
            assert site.told(1) == "[/search spring & summer]\nspring comes early\n[END SEARCH]"


async def test_the_web_is_searched_by_a_tool_of_an_mcp_server() -> None:
    server = {"command": sys.executable, "args": [mcp_server.__file__]}
    lines: list[Line] = [("search", {"query": "spring"}), "found"]
    async with a_site(
        lines, {"COVENANT_MODEL_SEARCH": "mcp:web.find"}, mcp_servers={"servers": {"web": server}}
    ) as site:
        await site.send("SendMessage", V1)
        assert site.told(1) == "[/search spring]\nfound: spring\n[END SEARCH]"


async def test_without_the_setting_nothing_is_searched() -> None:
    async with a_site([("search", {"query": "spring"}), "sorry"]) as site:
        await site.send("SendMessage", V1)
        assert "search" not in site.tools(0)
        assert "Unknown tool name: 'search'" in site.told(1)


async def test_files_are_kept_read_and_listed_in_a_conversation_and_nowhere_else() -> None:
    kept = ("write", {"path": "plan.txt", "content": "sow early", "persist": True})
    loose = ("write", {"path": "note.txt", "content": "not kept"})
    lines: list[Line] = [kept, loose, "done", ("list_files", {}), ("read", {"path": "plan.txt"}), "read"]
    elsewhere: list[Line] = [("read", {"path": "plan.txt"}), "no"]
    async with a_site([*lines, *elsewhere, *elsewhere]) as site:
        conversation = (await site.post("/v1/conversations", {"agent": "bot"})).json()["conversation_id"]
        await site.post(f"/v1/conversations/{conversation}/messages", {"message": "make a plan"})
        assert "kept in this conversation" in site.told(1)
        await site.post(f"/v1/conversations/{conversation}/messages", {"message": "what is the plan?"})
        assert site.told(4) == "[/list files]\nplan.txt, 9 bytes\n[END LIST]"
        assert site.told(5) == "[/read plan.txt]\nsow early\n[END READ]"
        other = (await site.post("/v1/conversations", {"agent": "bot"})).json()["conversation_id"]
        await site.post(f"/v1/conversations/{other}/messages", {"message": "what is the plan?"})
        assert site.told(7).startswith("[/read plan.txt]\nERR: no file 'plan.txt'")
        await site.send("SendMessage", V1)
        assert not {"read", "list_files"} & site.tools(8)
        assert "Unknown tool name: 'read'" in site.told(9)
