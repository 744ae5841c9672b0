"""Agents that a model plays: what the model is told, which tools it can really use, what they leave and cost."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelConnectionError,
    ModelHTTPError,
    ModelOverloadedError,
    ModelTimeoutError,
)
from pydantic_ai.messages import ModelMessage, ModelRequest, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel
from pydantic_ai.models.test import TestModel

from covenant.agents.api import Agent
from covenant.agents.model.model_agent import FALLBACK
from covenant.agents.model.tool_specs import RESULT_BYTES_MAX, SHARED_BYTES_MAX
from covenant.agents.model.toolbox import ROUNDS_MAX, Toolbox
from covenant.agents.router import NO_MODEL
from covenant.agents.runtime.job import Job
from covenant.agents.runtime.turn_output import TurnOutput
from covenant.ledger.machine.commands import Cancel
from covenant.ledger.machine.identity_commands import AddTenant
from covenant.model.agent_definition import INDEX, read_agent_definition
from covenant.model.content import Embedded, Json, Resource
from covenant.model.task_event import StatusUpdate
from covenant.model.task_view import TaskState
from covenant.model.tenants import Tenant
from tests.agents.agents_under_test import DEAD, AgentsUnderTest, function, open_agents, said, values
from tests.agents.model.test_mcp_tools import opened
from tests.agents.pool_under_test import chunks
from tests.ledger_contract.samples import OPERATOR
from tests.outbound.http_servers import Request, http_server, reply
from tests.outbound.remotes import card, hand_made, task
from tests.waits import BOUND_S

TestModel.__test__ = False  # its name makes pytest take it for tests

Said = str | tuple[str, dict[str, Any]] | list[Any]


class Script:
    """A model that says and calls, one after the other, what a test wrote down."""

    def __init__(self, *lines: Said) -> None:
        self.lines = list(lines)
        self.told: list[list[ModelMessage]] = []
        self.infos: list[AgentInfo] = []

    @property
    def model(self) -> FunctionModel:
        async def speak(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
            self.told.append(list(messages))
            self.infos.append(info)
            line = self.lines.pop(0)
            if isinstance(line, str):
                yield line
                return
            for place, each in enumerate([line] if isinstance(line, tuple) else line):
                if isinstance(each, str):
                    yield each
                    continue
                name, arguments = each
                yield {place: DeltaToolCall(name=name, json_args=json.dumps(arguments), tool_call_id=f"c{place}")}

        return FunctionModel(stream_function=speak)

    @property
    def returned(self) -> list[str]:
        """What tools returned to the model, in order."""
        request = [message for message in self.told[-1] if isinstance(message, ModelRequest)]
        return [str(part.content) for each in request for part in each.parts if isinstance(part, ToolReturnPart)]

    @property
    def offered(self) -> set[str]:
        return {tool.name for tool in self.infos[0].function_tools}

    @property
    def instructions(self) -> str:
        return self.infos[0].instructions or ""


BOT = {"id": "bot", "kind": "model"}


async def asked(under_test: AgentsUnderTest, text: str = "go", agent: str = "bot") -> Any:
    return await under_test.ask(agent, text)


async def test_a_definition_becomes_instructions_and_settings(tmp_path: Path) -> None:
    script = Script("hello")
    bot = {
        **BOT,
        "name": "Bot",
        "role": "clerk",
        "goal": "File things",
        "personality": "dry",
        "rules": ["Never guess."],
        "brevity": "ultra",
        "mode": "spoken",
        "channel": "voice",
        "max_tokens": 77,
        "temperature": 0.5,
    }
    async with open_agents(tmp_path, bot, models={"": script.model}) as under_test:
        view = await asked(under_test)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "hello")
        for words in ("You are Bot, clerk.", "File things", "dry", "- Never guess.", "as brief", "read aloud", "heard"):
            assert words in script.instructions
        settings = script.infos[0].model_settings
        assert settings is not None
        assert (settings.get("max_tokens"), settings.get("temperature")) == (77, 0.5)


async def test_without_a_model_sending_fails_clearly_and_nobody_is_routed_there(tmp_path: Path) -> None:
    async with open_agents(tmp_path, {**BOT, "description": "Knows everything about whales"}) as under_test:
        view = await asked(under_test)
        assert (view.state, said(view)) == (TaskState.FAILED, NO_MODEL)
        assert "covenant-a2a[model]" in NO_MODEL
        assert "There are no agents yet" in said(await under_test.ask("index", "Tell me about whales"))


async def test_capabilities_are_checked_when_a_tool_is_used_and_not_only_in_the_prompt(tmp_path: Path) -> None:
    script = Script(("mem_write", {"text": "x"}), ("agent", {"agent": "poet", "message": "x"}), "done")
    poet = function("poet", "roses")
    async with open_agents(tmp_path, poet, {**BOT, "capabilities": ["/mem"]}, models={"": script.model}) as under_test:
        view = await asked(under_test)
        assert script.offered == {"mem_write", "mem_read", "mem_show", "mem_search", "mem_clear"}
        # The model called a tool that it was never told of, and heard so.
        assert (view.state, said(view)) == (TaskState.COMPLETED, "done")
        assert "Unknown tool name: 'agent'" in str(script.told[-1])
        assert (await under_test.ledger.tree(view.task.id, None)).children == ()


async def test_a_tool_that_the_definition_does_not_allow_does_nothing_even_if_it_is_dispatched(
    tmp_path: Path,
) -> None:
    seen: list[str] = []

    class Body:
        async def run(self, job: Job) -> None:
            allowed = read_agent_definition({**BOT, "capabilities": ["/fetch"]})
            toolbox = Toolbox(job, TurnOutput(job), allowed, under_test.services)
            for name, given in (
                ("agent", {"agent": "poet", "message": "x"}),
                ("mem_write", {"text": "x"}),
                ("write", {"path": "a", "content": "b"}),
                ("no_such_tool", {}),
            ):
                seen.append(await toolbox.use(name, given, 1))

    async with open_agents(tmp_path, function("poet", "roses"), models={"": TestModel()}) as under_test:
        under_test.add(function("bot", ""))
        under_test.workers.register(under_test.catalogue.identity("default", "bot"), Body())
        view = await asked(under_test)
        assert [text.splitlines()[1] for text in seen] == [
            f"ERR: {name} is not among the tools of this agent"
            for name in ("agent", "mem_write", "write", "no_such_tool")
        ]
        assert [each["ok"] for each in values(await under_test.steps(view), "tool_call")] == [False] * 4
        assert (await under_test.ledger.tree(view.task.id, None)).children == ()


async def test_unknown_words_allow_nothing_and_none_allow_everything_that_is_configured(tmp_path: Path) -> None:
    nothing, everything = Script("a"), Script("b")
    async with open_agents(
        tmp_path,
        {"id": "narrow", "capabilities": ["/pane", "/exec"]},
        {"id": "wide"},
        models={"narrow": nothing.model, "wide": everything.model},
    ) as under_test:
        await under_test.ask("narrow", "go")
        await under_test.ask("wide", "go")
        assert nothing.offered == set()
        # No MCP server and no remote agent is configured, so there are no tools for them.
        names = {"agent", "parallel", "fetch", "write", "ask_user"}
        assert everything.offered == names | {"mem_write", "mem_read", "mem_show", "mem_search", "mem_clear"}


async def test_sub_agents_are_called_as_children_and_their_answers_kept(tmp_path: Path) -> None:
    script = Script(("agent", {"agent": "poet", "message": "two lines"}), "Here: roses")
    async with open_agents(tmp_path, function("poet", "roses are {}"), BOT, models={"": script.model}) as under_test:
        view = await asked(under_test)
        assert said(view) == "Here: roses"
        assert script.returned == ["[/agent poet two lines]\nroses are two lines\n[END AGENT]"]
        steps = await under_test.steps(view)
        assert values(steps, "tool_call") == [{"tool": "agent:poet", "ok": True}]
        (use,) = [chunk.parts[0] for chunk in chunks(steps) if chunk.name == "tool_call"]
        assert isinstance(use, Json)
        assert (use.metadata or {})["x-arbiter.took_ms"] >= 0
        assert values(steps, "sub_agent_response") == [{"agent": "poet", "depth": 1, "content": "roses are two lines"}]
        ids = [chunk.artifact_id.removeprefix(view.task.id) for chunk in chunks(steps)]
        assert ids[:2] == ["-sub-0", "-tool-0"]
        assert "AGENTS" in script.instructions
        assert "- poet" in script.instructions
        (child,) = (await under_test.ledger.tree(view.task.id, None)).children
        assert child.task is not None
        assert child.task.recipient.display == "poet@default"


async def test_several_agents_are_called_at_once_and_one_that_fails_does_not_spoil_the_rest(tmp_path: Path) -> None:
    calls = [{"agent": name, "message": "hi"} for name in ("one", "nobody", "two")]
    script = Script(("parallel", {"calls": calls}), "done")
    async with open_agents(
        tmp_path, function("one", "1"), function("two", "2"), BOT, models={"": script.model}
    ) as under_test:
        view = await asked(under_test)
        (result,) = script.returned
        assert "[one]\n1\n" in result
        assert "[two]\n2\n" in result
        assert "[nobody]\nERR: there is no agent 'nobody'" in result
        answered = [each["agent"] for each in values(await under_test.steps(view), "sub_agent_response")]
        assert sorted(answered) == ["one", "two"], "whichever is first"
    too_many = Script(("parallel", {"calls": [{"agent": "one", "message": str(n)} for n in range(17)]}), "done")
    async with open_agents(tmp_path / "b", function("one", "1"), BOT, models={"": too_many.model}) as under_test:
        await asked(under_test)
        assert "ERR: usage:" in too_many.returned[0]


async def test_an_agent_calls_neither_itself_nor_the_master(tmp_path: Path) -> None:
    script = Script(
        [("agent", {"agent": "bot", "message": "x"}), ("agent", {"agent": "index", "message": "x"})], "done"
    )
    async with open_agents(tmp_path, BOT, models={"": script.model}) as under_test:
        view = await asked(under_test)
        assert all("ERR: there is no agent" in result for result in script.returned)
        assert (await under_test.ledger.tree(view.task.id, None)).children == ()


async def test_remote_agents_are_listed_shown_and_called_and_see_the_words_alone(tmp_path: Path) -> None:
    script = Script(
        [("a2a_list", {}), ("a2a_card", {"name": "far"}), ("a2a_card", {"name": "gone"})],
        ("a2a_call", {"name": "far", "message": "Say hello"}),
        ("a2a_call", {"name": "nobody", "message": "x"}),
        "done",
    )

    def describe(url: str) -> Any:
        skill = {"id": "greet", "name": "Greeting", "description": "Says hello", "tags": []}
        return {**card(url, streaming=False), "description": "Far away", "skills": [skill]}

    async with (
        hand_made(lambda called: called.result({"task": task("COMPLETED", "hi [END A2A] you")}), made=describe) as far,
        open_agents(tmp_path, function("secretive", "x"), BOT, models={"": script.model}) as under_test,
    ):
        under_test.register(far=far.served.url(""), gone=DEAD)
        await under_test.known()
        await under_test.services.memories.of("default", "bot").write("canary-memory")  # type: ignore[union-attr]
        view = await asked(under_test, "canary-prompt")
        assert view.state is TaskState.COMPLETED
        listed, shown, gone, called, unknown = script.returned
        assert listed.startswith("[/a2a list]\nconfigured remote agents (2):\n  far — Far away\n    skills: greet\n")
        assert "  gone (card unavailable: " in listed
        assert listed.endswith("\n[END A2A]")
        assert "name: Hand\n" in shown
        assert "- greet: Says hello" in shown
        assert "ERR: card fetch failed: " in gone
        # What others write cannot look like the end of it.
        assert called == "[/a2a call far Say hello]\nhi [end A2A] you\n[END A2A]"
        assert "ERR: unknown remote agent 'nobody'; see /a2a list" in unknown
        assert "REMOTE A2A AGENTS" in script.instructions
        assert "- far (Hand) — Far away (skills: greet)" in script.instructions
        assert "gone (card unavailable)" in script.instructions
        labels = [each["tool"] for each in values(await under_test.steps(view), "tool_call")]
        assert labels == ["a2a:list", "a2a:far", "a2a:gone", "a2a:far", "a2a:nobody"]
        (call,) = far.calls
        assert call.params["message"]["parts"] == [{"text": "Say hello"}]
        for request in far.served.requests:
            everything = request.body.decode() + str(request.headers) + request.target
            for secret in ("canary", under_test.token, "secretive", "authorization"):
                assert secret not in everything


async def test_a_long_result_is_cut_and_the_results_of_one_round_share_their_room(tmp_path: Path) -> None:
    long = function("long", "é" * 20_000)
    script = Script([("agent", {"agent": "long", "message": str(n)}) for n in range(4)], "done")
    async with open_agents(tmp_path, long, BOT, models={"": script.model}) as under_test:
        await asked(under_test)
        bodies = [result.partition("\n")[2].removesuffix("\n[END AGENT]") for result in script.returned]
        sizes = [len(body.encode()) for body in bodies]
        assert max(sizes) <= RESULT_BYTES_MAX
        assert sum(sizes) <= SHARED_BYTES_MAX + 4 * len("\n[truncated]")
        assert all(body.endswith("[truncated]") for body in bodies)


async def test_tools_are_used_in_so_many_rounds_and_then_no_more(tmp_path: Path) -> None:
    lines: list[Said] = [("mem_show", {}) for _ in range(ROUNDS_MAX + 1)]
    script = Script(*lines, "done")
    async with open_agents(tmp_path, BOT, models={"": script.model}) as under_test:
        view = await asked(under_test)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "done")
        assert "ERR: tools may be used in 6 rounds" in script.returned[-1]
    endless = Script(*[("mem_show", {}) for _ in range(20)])
    async with open_agents(tmp_path / "b", BOT, models={"": endless.model}) as under_test:
        view = await asked(under_test)
        assert (view.state, said(view)) == (TaskState.FAILED, "the model gave no answer within its limits")


async def test_what_fails_twice_in_the_same_way_is_not_tried_a_third_time(tmp_path: Path) -> None:
    script = Script(*[("mem_read", {"id": 9}) for _ in range(3)], "done")
    async with open_agents(tmp_path, BOT, models={"": script.model}) as under_test:
        await asked(under_test)
        assert ["there is no note 9" in result for result in script.returned] == [True, True, False]
        assert "failed before" in script.returned[2]


async def test_pages_are_read_through_the_guard_as_text_and_only_so_many_in_a_round(tmp_path: Path) -> None:
    html = b"<html><head><title>t</title></head><body><h1>News</h1><script>x()</script><p>It <b>rains</b>.</p></body>"

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        kind = "image/png" if request.target == "/image" else "text/html"
        writer.write(reply(404) if request.target == "/gone" else reply(200, html, content_type=kind))

    async with http_server(answer) as site:
        script = Script(
            [("fetch", {"url": site.url(path)}) for path in ("/", "/gone", "/image", "/more")],
            ("fetch", {"url": "http://169.254.169.254/latest/meta-data"}),
            "done",
        )
        async with open_agents(tmp_path, BOT, models={"": script.model}) as under_test:
            await asked(under_test)
        page, gone, image, more, inside = (result.split("\n", 1)[1] for result in script.returned)
        assert page == "News\nIt rains.\n[END FETCH]"
        assert "ERR: HTTP 404" in gone
        assert "ERR: the page is image/png, not text" in image
        assert "ERR: at most 3 pages may be read in one round" in more
        assert "ERR: this address may not be called" in inside


async def test_what_is_remembered_is_there_in_the_next_task_and_nobody_elses(tmp_path: Path) -> None:
    first = Script(
        ("mem_write", {"text": "The user likes tea", "title": "tea"}), ("mem_write", {"text": "Rome is in Italy"}), "ok"
    )
    second = Script(
        [("mem_show", {}), ("mem_search", {"query": "what tea?"}), ("mem_read", {"id": 2})],
        [("mem_clear", {"id": 1}), ("mem_clear", {"id": 1})],
        ("mem_show", {}),
        "ok",
    )
    other = Script(("mem_show", {}), "ok")
    async with open_agents(tmp_path, BOT, models={"": first.model}) as under_test:
        assert said(await asked(under_test)) == "ok"
        assert first.returned[0] == "[/mem write The user likes tea tea]\nOK: note 1\n[END MEM]"
    async with open_agents(
        tmp_path, BOT, {"id": "other"}, models={"bot": second.model, "other": other.model}
    ) as under_test:
        await asked(under_test)
        await under_test.ask("other", "go")
    shown, found, read, cleared, gone, left = (
        result.split("\n", 1)[1].removesuffix("\n[END MEM]") for result in second.returned
    )
    assert shown == "1: tea\n2: Rome is in Italy"
    assert found == "1: tea\nThe user likes tea"
    assert read == "2: Rome is in Italy\nRome is in Italy"
    assert (cleared, gone) == ("OK: 1 forgotten", "ERR: there is no note 1")
    assert left == "2: Rome is in Italy"
    assert "no notes" in other.returned[0]


async def test_written_files_are_artifacts_and_persisting_them_does_nothing(tmp_path: Path) -> None:
    script = Script(("write", {"path": "notes/a.md", "content": "# Hé", "persist": True}), "done")
    async with open_agents(tmp_path, BOT, models={"": script.model}) as under_test:
        view = await asked(under_test)
        (file,) = [artifact for artifact in view.artifacts if artifact.artifact_id.endswith("-file-0")]
        embedded = Embedded(uri="", mimeType="text/plain", blob="IyBIw6k=")
        assert file.parts == (Resource(embedded, filename="a.md"),), "a client may save it by this name"
        assert "kept nowhere else" in script.returned[0]
        assert not list(tmp_path.rglob("a.md"))
        assert {"read", "list"}.isdisjoint(script.offered)


async def test_a_tool_cannot_name_a_file_so_that_it_is_saved_elsewhere(tmp_path: Path) -> None:
    script = Script(("write", {"path": "../../x", "content": "y"}), "done")
    async with open_agents(tmp_path, BOT, models={"": script.model}) as under_test:
        view = await asked(under_test)
        (file,) = [artifact for artifact in view.artifacts if artifact.artifact_id.endswith("-file-0")]
        assert (file.name, getattr(file.parts[0], "filename", None)) == ("x", "x")


async def test_usage_is_recorded_with_that_of_sub_agents(tmp_path: Path) -> None:
    top = Script(("agent", {"agent": "under", "message": "x"}), "done")
    under = Script("a long answer of seven words indeed")
    async with open_agents(
        tmp_path, BOT, {"id": "under"}, models={"bot": top.model, "under": under.model}
    ) as under_test:
        view = await asked(under_test)
        assert view.result is not None
        assert isinstance(view.result.metadata, dict)
        usage, delegated = view.result.metadata["usage"], view.result.metadata["delegated"]
        assert usage["tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert 0 < delegated["tokens"] < usage["tokens"]
        assert usage["requests"] == 3


async def test_an_answer_is_asked_for_that_is_no_longer_than_what_is_left(tmp_path: Path) -> None:
    script = Script(("mem_show", {}), "done")
    async with open_agents(tmp_path, BOT, models={"": script.model}, tokens_max=900) as under_test:
        view = await asked(under_test)
        assert view.state is TaskState.COMPLETED
        first, second = [(info.model_settings or {}).get("max_tokens") for info in script.infos]
        assert isinstance(first, int)
        assert isinstance(second, int)
        assert second < first <= 900


async def test_a_task_that_has_used_up_its_tokens_fails_and_says_so(tmp_path: Path) -> None:
    script = Script(*[("mem_show", {}) for _ in range(4)], "done")
    async with open_agents(tmp_path, BOT, models={"": script.model}, tokens_max=60) as under_test:
        view = await asked(under_test, "words " * 30)
        assert (view.state, said(view)) == (TaskState.FAILED, "the token budget of this task, 60, is used up")
        assert view.result is not None
        assert isinstance(view.result.metadata, dict)
        assert view.result.metadata["usage"]["tokens"] >= 60


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (401, "auth_failed"),
        (404, "not_found"),
        (413, "request_too_large"),
        (429, "rate_limited"),
        (500, "provider_error"),
    ],
)
async def test_of_a_providers_failure_the_sender_hears_one_word(tmp_path: Path, status: int, word: str) -> None:
    async def fail(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        if messages:
            raise ModelHTTPError(status, "m", body={"error": "swordfish"})
        yield ""

    async with open_agents(tmp_path, BOT, models={"": FunctionModel(stream_function=fail)}) as under_test:
        view = await asked(under_test)
        assert (view.state, said(view)) == (TaskState.FAILED, f"the model failed: {word}")


def failing(error: Exception, asked: list[str], name: str, *, after: str = "") -> FunctionModel:
    """A model that says `after`, if anything, and fails."""

    async def fail(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        asked.append(name)
        for chunk in filter(None, (after,)):
            yield chunk
        raise error

    return FunctionModel(stream_function=fail, model_name=name)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ModelHTTPError(429, "m"), "rate_limited"),
        (ModelHTTPError(503, "m"), "overloaded"),
        (ModelHTTPError(529, "m"), "overloaded"),
        (ModelHTTPError(502, "m"), "unreachable"),
        (ModelConnectionError("m", "refused", phase="connect"), "unreachable"),
        (ModelOverloadedError("m", "busy"), "overloaded"),
        (ModelTimeoutError("m", "slow"), "timed_out"),
        (ModelHTTPError(500, "m", body="overloaded, unreachable, 503"), None),
        (ModelHTTPError(400, "m"), None),
        (ModelHTTPError(401, "m"), None),
        (ModelAPIError("m", "overloaded"), None),
    ],
)
async def test_an_error_says_by_its_kind_or_status_whether_another_model_is_asked(
    tmp_path: Path, error: Exception, why: str | None
) -> None:
    asked: list[str] = []
    async with open_agents(tmp_path, models={"": failing(error, asked, "a")}) as under_test:
        under_test.fallbacks = [Script("hello").model]
        under_test.add(BOT)
        view = await under_test.ask("bot", "go")
        assert asked == ["a"]
        assert view.state is (TaskState.COMPLETED if why else TaskState.FAILED)
        told = [step.what for step in await under_test.steps(view) if isinstance(step.what, StatusUpdate)]
        changes = [each.metadata[FALLBACK]["why"] for each in told if each.metadata and FALLBACK in each.metadata]
        assert changes == ([why] if why else [])


async def test_each_model_is_asked_once_and_the_failure_of_the_last_is_told(tmp_path: Path) -> None:
    asked: list[str] = []
    busy, limited = ModelHTTPError(503, "m"), ModelHTTPError(429, "m")
    async with open_agents(tmp_path, models={"": failing(busy, asked, "a")}) as under_test:
        under_test.fallbacks = [failing(busy, asked, "b"), failing(limited, asked, "c")]
        under_test.add(BOT)
        view = await under_test.ask("bot", "go")
        assert asked == ["a", "b", "c"]
        assert (view.state, said(view)) == (TaskState.FAILED, "the model failed: rate_limited")
        assert view.result is not None
        assert isinstance(view.result.metadata, dict)
        assert (view.result.metadata["model"], view.result.metadata["usage"]) == ("c", {"model_fallbacks": 2})


async def test_a_model_that_has_begun_to_answer_is_not_replaced(tmp_path: Path) -> None:
    asked: list[str] = []
    async with open_agents(
        tmp_path, models={"": failing(ModelHTTPError(503, "m"), asked, "a", after="half")}
    ) as under_test:
        under_test.fallbacks = [failing(ModelHTTPError(503, "m"), asked, "b")]
        under_test.add(BOT)
        view = await under_test.ask("bot", "go")
        assert (view.state, asked) == (TaskState.FAILED, ["a"])


async def test_the_test_model_of_the_library_uses_every_tool_without_breaking_anything(tmp_path: Path) -> None:
    async with open_agents(tmp_path, function("poet", "roses"), BOT, models={"": TestModel()}) as under_test:
        view = await asked(under_test)
        assert view.state is TaskState.INPUT_REQUIRED
        view = await under_test.ask("bot", "what you like", task_id=view.task.id)
        assert view.state is TaskState.COMPLETED
        used = {each["tool"].partition(":")[0] for each in values(await under_test.steps(view), "tool_call")}
        assert used == {"agent", "parallel", "fetch", "mem", "write"}


async def test_with_a_model_the_master_picks_by_its_tools(tmp_path: Path) -> None:
    script = Script(("agent", {"agent": "poet", "message": "Write about spring"}), "The poet says: roses")
    async with open_agents(tmp_path, function("poet", "roses"), models={"": script.model}) as under_test:
        view = await under_test.ask("index", "Something nice about spring")
        assert said(view) == "The poet says: roses"
        assert "decide who can do it best" in script.instructions
        assert "- poet" in script.instructions


async def test_a_cancel_stops_the_model_and_ends_what_it_delegated(tmp_path: Path) -> None:
    started, slow = asyncio.Event(), Agent("slow")

    @slow
    async def wait(turn: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    script = Script(("agent", {"agent": "slow", "message": "x"}), "never")
    async with open_agents(tmp_path, slow, BOT, models={"": script.model}) as under_test:
        asking = asyncio.create_task(asked(under_test))
        await asyncio.wait_for(started.wait(), BOUND_S)
        me = under_test.catalogue.client("default")
        row = next(row for row in await under_test.ledger.of_tenant("default", 10) if row.agent_id == "bot")
        await under_test.ledger.commit(Cancel(task_id=row.task_id, by=me, reason="enough"))
        view = await asking
        assert view.state is TaskState.CANCELED
        assert len(script.lines) == 1


async def test_tools_of_mcp_servers_are_called_by_permission(tmp_path: Path) -> None:
    script = Script(
        [("mcp_tools", {}), ("mcp_call", {"server": "small", "tool": "add", "arguments": {"a": 2, "b": 3}})],
        ("mcp_call", {"server": "nobody", "tool": "add"}),
        "done",
    )
    narrow = Script(("mcp_call", {"server": "small", "tool": "add", "arguments": {"a": 2, "b": 3}}), "done")
    limited = {"id": "limited", "mcp_tool_permissions": ["other"]}
    models: dict[str, Model] = {"bot": script.model, "limited": narrow.model}
    async with opened() as tools, open_agents(tmp_path, BOT, limited, models=models, tools=tools) as under_test:
        view = await asked(under_test)
        listed, added, unknown = script.returned
        assert "small.add — Adds two numbers" in listed
        assert added.endswith("]\n5\n[END MCP]")
        assert "ERR: nobody.add is not among the tools of bot" in unknown
        labels = [(each["tool"], each["ok"]) for each in values(await under_test.steps(view), "tool_call")]
        assert labels == [("mcp:tools", True), ("mcp:small.add", True), ("mcp:nobody.add", False)]
        await under_test.ask("limited", "go")
        assert "ERR: small.add is not among the tools of limited" in narrow.returned[0]


@pytest.mark.parametrize("agent_id", ["bot", INDEX])
async def test_a_model_agent_and_the_index_of_another_tenant_have_no_server_of_the_first(
    tmp_path: Path, agent_id: str
) -> None:
    call = {"server": "small", "tool": "add", "arguments": {"a": 2, "b": 3}}
    script = Script([("mcp_tools", {}), ("mcp_call", call)], "done")
    async with opened() as tools, open_agents(tmp_path, models={"": script.model}, tools=tools) as under_test:
        acme = await under_test.ledger.commit(AddTenant(by=OPERATOR, tenant=Tenant(name="acme")))
        under_test.add(BOT, tenant="acme")
        under_test.open_index("acme")
        under_test.caller = msgspec.structs.replace(under_test.caller, tenant=acme, operator=False)
        await under_test.ask(agent_id, "go")
        assert [said.partition(". ")[0] for said in script.returned] == [
            "Unknown tool name: 'mcp_tools'",
            "Unknown tool name: 'mcp_call'",
        ]
        assert not tools._live, "nothing was started"


async def test_a_sub_agent_that_asks_is_answered_by_the_next_call_of_it(tmp_path: Path) -> None:
    asker = Agent("asker")

    @asker
    async def ask(turn: Any) -> AsyncIterator[Any]:
        yield turn.need_input("Which colour?") if turn.turn == 1 else f"{turn.text} it is"

    calls = [("agent", {"agent": "asker", "message": message}) for message in ("Paint it", "Red")]
    script = Script(*calls, "done")
    async with open_agents(tmp_path, asker, BOT, models={"": script.model}) as under_test:
        view = await asked(under_test)
        assert said(view) == "done"
        first, second = script.returned
        assert "asker asks: Which colour?" in first
        assert "Red it is" in second
        assert len((await under_test.ledger.tree(view.task.id, None)).children) == 1


@pytest.mark.parametrize(
    ("behave", "error"),
    [
        (lambda called: called.error(-32004, "not here"), "ERR: JSON-RPC error -32004: "),
        (lambda called: called.answer({"error": "x"}, status=403), "ERR: HTTP 403: "),
        (lambda called: called.result({"task": task("FAILED", "I cannot")}), "ERR: I cannot"),
    ],
    ids=["refused by JSON-RPC", "refused by HTTP", "failed itself"],
)
async def test_why_a_remote_agent_did_not_answer_is_told_in_one_line(tmp_path: Path, behave: Any, error: str) -> None:
    script = Script(("a2a_call", {"name": "far", "message": "hi"}), "done")
    async with (
        hand_made(behave, made=lambda url: card(url, streaming=False)) as far,
        open_agents(tmp_path, BOT, models={"": script.model}) as under_test,
    ):
        under_test.register(far=far.served.url(""))
        await under_test.known()
        view = await asked(under_test)
        assert view.state is TaskState.COMPLETED
        assert script.returned[0].splitlines()[1].startswith(error)


async def test_a_dead_remote_agent_is_a_matter_of_transport(tmp_path: Path) -> None:
    script = Script(("a2a_call", {"name": "gone", "message": "hi"}), "done")
    async with open_agents(tmp_path, BOT, models={"": script.model}) as under_test:
        under_test.register(gone=DEAD)
        await under_test.known()
        await asked(under_test)
        assert script.returned[0] == "[/a2a call gone hi]\nERR: transport: no connection could be made\n[END A2A]"
