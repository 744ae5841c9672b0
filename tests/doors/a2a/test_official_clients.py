"""What official clients of A2A 1.0 and 0.3 do, unchanged, against a whole daemon."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.compat.v0_3.jsonrpc_transport import CompatJsonRpcTransport
from a2a.compat.v0_3.types import AgentCard as OldCard
from a2a.compat.v0_3.types import Task as OldTask
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.types import a2a_pb2 as pb
from a2a.types.a2a_pb2 import AgentCard
from a2a.utils import errors
from a2a.utils.errors import TaskNotFoundError, UnsupportedOperationError
from google.protobuf.json_format import ParseDict

import covenant as covenant_package
from covenant import AddressRefused, Agent, Turn, connect
from covenant.agents.agent_loader import load_agent
from covenant.agents.sdk_executor import SdkExecutorAgent
from covenant.model.ids import TaskId
from covenant.model.task_view import PROGRESS_BYTES_MAX, PROGRESS_MAX
from covenant.wire.sse import EventReader
from tests.cli.daemons import covenant
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.outbound.http_servers import always, http_server, reply
from tests.outbound.receivers import receiver
from tests.waits import BOUND_S

REPOSITORY = Path(__file__).parents[3]
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


def asking(text: str, **message: Any) -> pb.SendMessageRequest:
    said = pb.Message(message_id="m-1", role=pb.ROLE_USER, parts=[pb.Part(text=text)], **message)
    return pb.SendMessageRequest(message=said)


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON"])
async def test_numbers_of_ours_are_taken_as_protobuf_writes_them(short_path: Path, binding: str) -> None:
    async with open_daemon_under_test(short_path / "home", echo()) as daemon:
        said = {"Authorization": f"Bearer {daemon.token}"}
        async with httpx.AsyncClient(headers=said, timeout=BOUND_S) as http:
            card = await A2ACardResolver(http, f"{daemon.url}{ECHO}").get_agent_card()
            config = ClientConfig(httpx_client=http, supported_protocol_bindings=[binding], streaming=False)
            client = ClientFactory(config).create(card)
            asked = asking("soon")
            asked.metadata.update({"covenant.priority": 5, "covenant.not_before_ms": 1_794_859_345_638})
            asked.configuration.return_immediately = True
            (event,) = [event async for event in client.send_message(asked)]
            shown = await daemon.daemon.base.storage.ledger.show(TaskId(event.task.id), None, 0)
            assert shown is not None
            assert (shown.task.priority, shown.task.not_before_ms) == (5, 1_794_859_345_638)
            for wrong in (5.5, -1, float(1 << 60)):
                asked.message.message_id = f"wrong {wrong}"
                asked.metadata.update({"covenant.priority": wrong})
                with pytest.raises(errors.InvalidParamsError):
                    [event async for event in client.send_message(asked)]


def old_client(daemon: DaemonUnderTest, http: httpx.AsyncClient) -> CompatJsonRpcTransport:
    """The official client of 0.3 over JSON-RPC."""
    return CompatJsonRpcTransport(http, None, f"{daemon.url}{ECHO}")


async def test_a_client_of_0_3_is_told_why_its_stream_is_refused(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", echo(), a2a=OPEN) as daemon, httpx.AsyncClient() as http:
        client = old_client(daemon, http)
        with pytest.raises(TaskNotFoundError):
            await anext(client.send_message_streaming(asking("x", task_id="nobody")))
        with pytest.raises(TaskNotFoundError):
            await anext(client.subscribe(pb.SubscribeToTaskRequest(id="nobody")))
        call = {"jsonrpc": "2.0", "id": "7", "method": "tasks/resubscribe", "params": {"id": "nobody"}}
        reply = await daemon.ask("POST", ECHO, json=call)
        assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream")
        (event,) = EventReader(1_000_000).feed(reply.content)
        told = json.loads(event.data)
        assert (told["id"], told["error"]["code"]) == ("7", -32001)
        newer = await daemon.ask("POST", ECHO, json={**call, "method": "SubscribeToTask"})
        assert newer.headers["content-type"] == "application/json"


async def test_a_401_of_a_json_rpc_call_has_an_error_object(short_path: Path) -> None:
    call = {"jsonrpc": "2.0", "id": 7, "method": "GetTask", "params": {"id": "x"}}
    async with open_daemon_under_test(short_path / "home", echo(), a2a=OPEN) as daemon:
        for path in (ECHO, "/v1/a2a"):
            reply = await daemon.ask("POST", path, token="wrong", json=call)
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            told = reply.json()
            assert (told["jsonrpc"], told["id"], told["error"]["code"]) == ("2.0", None, -32600)
            assert told["error"]["data"][0]["reason"] == "UNAUTHENTICATED"
        # Refused after the call was read: then its id is known.
        listed = await daemon.ask("POST", ECHO, token="", json={**call, "method": "ListTasks", "params": {}})
        assert (listed.status_code, listed.json()["id"], listed.json()["error"]["code"]) == (401, 7, -32600)


@pytest.mark.parametrize(
    ("content_type", "code"),
    [("text/plain", -32005), ("application/x-www-form-urlencoded; charset=utf-8", -32005)]
    + [(kind, -32700) for kind in ("application/json", "application/a2a+json", "Application/JSON; charset=utf-8", "")],
)
async def test_a_body_that_neither_is_json_nor_says_so_has_the_wrong_content_type(
    short_path: Path, content_type: str, code: int
) -> None:
    headers = {"content-type": content_type} if content_type else {}
    async with open_daemon_under_test(short_path / "home", echo()) as daemon:
        reply = await daemon.ask("POST", ECHO, content=b"hello", headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (200, code)
        rest = await daemon.ask("POST", f"{ECHO}/message:send", content=b"hello", headers=headers)
        reason = {-32005: "CONTENT_TYPE_NOT_SUPPORTED", -32700: "INVALID_JSON"}[code]
        assert (rest.status_code, rest.json()["error"]["details"][0]["reason"]) == (400, reason)
        call = b'{"jsonrpc":"2.0","id":1,"method":"GetTask","params":{"id":"nobody"}}'
        read = await daemon.ask("POST", ECHO, content=call, headers=headers)
        assert read.json()["error"]["code"] == -32001


async def test_errors_of_rest_are_plain_json_unless_the_caller_asks_for_the_other(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", echo()) as daemon:
        for accept, expected in (
            ("application/json", "application/json"),
            ("*/*", "application/json"),
            ("application/a2a+json, application/json;q=0.5", "application/a2a+json"),
        ):
            for method, path, status in (("GET", "tasks/nobody", 404), ("PUT", "tasks", 405), ("GET", "x", 404)):
                reply = await daemon.ask(method, f"{ECHO}/{path}", headers={"accept": accept})
                assert (reply.status_code, reply.headers["content-type"]) == (status, expected)


PUSHING = {**OPEN, "push_notifications": True}
ALLOWED = {"allow": ("127.0.0.1",)}


async def test_a_push_has_the_body_of_the_dialect_that_asked_for_it(short_path: Path) -> None:
    async with (
        receiver() as hook,
        open_daemon_under_test(short_path / "home", echo(), a2a=PUSHING, outbound=ALLOWED) as daemon,
        httpx.AsyncClient(timeout=BOUND_S) as http,
    ):
        request = asking("hello")
        request.configuration.task_push_notification_config.url = hook.url()
        sent = await old_client(daemon, http).send_message(request)
        await hook.until(lambda: bool(hook.taken) and json.loads(hook.taken[-1].body)["status"]["state"] == "completed")
        for taken in hook.taken:
            assert (taken.headers["content-type"], taken.headers["a2a-version"]) == ("application/json", "0.3")
            assert OldTask.model_validate_json(taken.body).id == sent.task.id
        last = OldTask.model_validate_json(hook.taken[-1].body)
        assert last.artifacts is not None
        assert last.artifacts[0].parts[0].root.model_dump()["text"] == "hello"
        seen = len(hook.taken)
        config = ClientConfig(httpx_client=http, supported_protocol_bindings=["JSONRPC"], streaming=False)
        newer = await ClientFactory(config).create_from_url(daemon.url)
        assert [event async for event in newer.send_message(request)]
        await hook.got(seen + 1)
        assert hook.taken[seen].headers["a2a-version"] == "1.0"
        ParseDict(json.loads(hook.taken[seen].body), pb.StreamResponse())


class Refuses(AgentExecutor):
    """Raises the error that it is asked for by name, or its author's own kind of it."""

    def __init__(self, *, own: bool = False) -> None:
        self._own = own

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        kind = getattr(errors, context.get_user_input())
        raise (type("BadCity", (kind,), {}) if self._own else kind)("bad city")

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("binding", ["JSONRPC", "HTTP+JSON"])
@pytest.mark.parametrize("name", ["InvalidParamsError", "UnsupportedOperationError", "ContentTypeNotSupportedError"])
async def test_an_error_that_an_executor_raises_reaches_the_client(short_path: Path, binding: str, name: str) -> None:
    async with open_daemon_under_test(short_path / "home", a2a=OPEN) as daemon, httpx.AsyncClient() as http:
        daemon.serve(load_agent(echo())[0], SdkExecutorAgent(Refuses(own=binding == "HTTP+JSON")))
        config = ClientConfig(httpx_client=http, supported_protocol_bindings=[binding], streaming=False)
        client = await ClientFactory(config).create_from_url(daemon.url)
        with pytest.raises(getattr(errors, name), match="bad city"):
            await anext(client.send_message(asking(name)))
        (listed,) = (await daemon.ask("GET", f"{ECHO}/tasks")).json()["tasks"]
        assert listed["status"]["state"] == "TASK_STATE_FAILED"
        assert listed["status"]["message"]["parts"] == [{"text": "bad city"}]
        code = {"InvalidParamsError": "invalid_params", "UnsupportedOperationError": "unsupported_operation"}
        assert listed["metadata"]["covenant.error_code"] == code.get(name, "content_type_not_supported")


async def test_a_call_of_a_typed_address_goes_to_the_grpc_port_that_its_card_names(short_path: Path) -> None:
    home = short_path / "home"
    async with open_daemon_under_test(home, echo(), a2a=OPEN, grpc={"enabled": True}) as daemon:
        card = await card_at(daemon, ROOT, token="", headers={"A2A-Version": "1.0"})
        ways = [way for way in card["supportedInterfaces"] if way["protocolBinding"] == "GRPC"]
        told = json.dumps({**card, "supportedInterfaces": ways, "signatures": []}).encode()
        async with http_server(always(reply(200, told, content_type="application/json"))) as elsewhere:
            ran = await asyncio.to_thread(covenant, "call", elsewhere.url(), "hello")
            assert (ran.code, ran.out.strip()) == (0, "hello"), ran.err
            with pytest.raises(AddressRefused):
                # To name a URL in a program is not to type it.
                async with connect(elsewhere.url()):
                    pass


def test_what_calling_an_agent_raises_can_be_imported_from_the_package() -> None:
    table = (
        (REPOSITORY / "docs/formats/remote-agents.md")
        .read_text()
        .partition("| raised | when |")[2]
        .partition("\n## ")[0]
    )
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.partition(" | ")[0])}
    assert {"NoCard", "BadCard", "RemoteRefused", "AddressRefused"} <= named
    assert [name for name in sorted(named) if not hasattr(covenant_package, name)] == []


async def test_words_on_progress_are_in_the_history_for_whoever_comes_later(short_path: Path) -> None:
    gate, agent = asyncio.Event(), Agent("echo")

    @agent
    async def work(turn: Turn) -> AsyncIterator[Any]:
        yield turn.status("looking")
        yield turn.status("found it")
        await gate.wait()
        yield "done"

    async with (
        open_daemon_under_test(short_path / "home", agent, a2a=OPEN) as daemon,
        httpx.AsyncClient(timeout=BOUND_S) as http,
        asyncio.timeout(BOUND_S),
    ):
        config = ClientConfig(httpx_client=http, supported_protocol_bindings=["JSONRPC"])
        client = await ClientFactory(config).create_from_url(daemon.url)
        events = client.send_message(asking("go"))
        heard = [await anext(events) for _ in range(4)]
        assert heard[-1].status_update.status.message.parts[0].text == "found it"
        task_id = heard[0].task.id
        told = ["go", "looking", "found it"]
        polled = await client.get_task(pb.GetTaskRequest(id=task_id))
        assert [message.parts[0].text for message in polled.history] == told
        following = client.subscribe(pb.SubscribeToTaskRequest(id=task_id))
        assert [message.parts[0].text for message in (await anext(following)).task.history] == told
        gate.set()
        assert [event async for event in following]
        ended = await client.get_task(pb.GetTaskRequest(id=task_id))
        assert [message.parts[0].text for message in ended.history][:3] == told
        old = await old_client(daemon, http).get_task(pb.GetTaskRequest(id=task_id))
        assert [message.parts[0].text for message in old.history][:3] == told


async def test_the_history_has_the_newest_words_on_progress_and_is_bounded(short_path: Path) -> None:
    agent = Agent("echo")

    @agent
    async def work(turn: Turn) -> AsyncIterator[Any]:
        for number in range(PROGRESS_MAX + 50):
            yield turn.status(turn.text * 1_000 if turn.text == "x" else f"step {number}")

    async with open_daemon_under_test(short_path / "home", agent) as daemon:

        async def history(text: str) -> list[str]:
            message = {"messageId": "1", "role": "ROLE_USER", "parts": [{"text": text}]}
            sent = (await daemon.ask("POST", f"{ECHO}/message:send", json={"message": message})).json()["task"]
            return [said["parts"][0]["text"] for said in sent["history"]]

        assert await history("go") == ["go", *(f"step {number}" for number in range(50, PROGRESS_MAX + 50))]
        first, *large = await history("x")
        assert first == "x"
        assert 0 < sum(map(len, large)) <= PROGRESS_BYTES_MAX
