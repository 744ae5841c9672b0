"""A file that a client only links: the model is told of it in words, and nobody fetches it past the address guard."""

import json
from pathlib import Path

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from covenant.agents.model.pydantic_agent import PydanticAiAgent
from covenant.model.content import ResourceLink, Text
from covenant.model.task_view import TaskState
from tests.agents.agents_under_test import open_agents
from tests.agents.openai_server import openai_server
from tests.agents.pool_under_test import PoolUnderTest, told
from tests.outbound.http_servers import always, http_server, reply

KINDS = (None, "image/png", "application/pdf", "text/plain", "audio/mpeg", "video/mp4", "application/x-unknown")
BOT = {"id": "bot", "kind": "model"}


def played_at(url: str) -> OpenAIChatModel:
    return OpenAIChatModel("some-model", provider=OpenAIProvider(base_url=url, api_key="none"))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_model_agent_is_told_of_a_linked_file_and_nobody_fetches_it(tmp_path: Path, kind: str | None) -> None:
    async with http_server(always(reply(200, b"inside"))) as private, openai_server(["seen"]) as server:
        async with open_agents(tmp_path, BOT, models={"": played_at(server.url)}) as under_test:
            link = ResourceLink(private.url("/secret.png"), "a.png", kind)
            view = await under_test.ask("bot", [Text("look at"), link])
        assert view.state is TaskState.COMPLETED
        assert private.connections == 0
        (asked,) = server.asked
        said = json.dumps(asked["messages"][-1])
        assert private.url("/secret.png") in said
        assert '"image_url"' not in said, "a provider would fetch it: who sent it may mean an address of theirs"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_agent_written_with_pydantic_ai_fetches_no_linked_file(pool: PoolUnderTest, kind: str | None) -> None:
    async with http_server(always(reply(200, b"inside"))) as private, openai_server(["one", "two"]) as server:
        pool.serve(PydanticAiAgent(PydanticAgent(played_at(server.url))))
        link = ResourceLink(private.url("/x"), "", kind)
        view = await pool.ask(parts=(Text("look at"), link))
        assert (view.state, told(view)) == (TaskState.COMPLETED, "one")
        assert private.connections == 0
