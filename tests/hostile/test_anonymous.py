"""Callers without a token are nobody in particular: each has the task ids that it was told, and nothing of others."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import grpc  # type: ignore[import-untyped]
import pytest
from a2a.types import a2a_pb2 as pb

from tests.cli.daemons import Daemon, covenant
from tests.hostile.client import operator_token, request
from tests.hostile.conftest import StartDaemon
from tests.hostile.doors import A2A_DOORS, GRPC_ON, Client, message_v03, message_v1

AGENTS: Final = """
from covenant import Agent, Turn

table = Agent("table")


@table
async def book(turn: Turn):
    if turn.text == "ask":
        yield turn.need_input("For how many?")
    else:
        yield f"{turn.text} in {turn.context_id}"
"""
PROXY_HEADERS = (
    "X-Forwarded-For",
    "X-Forwarded-Port",
    "X-Forwarded-Server",
    "Via",
    "X-Real-IP",
    "X-Client-IP",
    "True-Client-IP",
    "CF-RemoteConnection-IP",
)
OPEN: Final = {
    "COVENANT_A2A_PUBLISH": "table",
    "COVENANT_A2A_PUBLISH_ANONYMOUS": "loopback",
    "COVENANT_A2A_PUSH_NOTIFICATIONS": "1",
    "COVENANT_OUTBOUND_ALLOW": "127.0.0.1",
}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("a")
    (folder / "agents.py").write_text(AGENTS)
    daemon = Daemon(folder / "h", str(folder / "agents.py"), env=GRPC_ON | OPEN)
    yield daemon
    daemon.stop()


@pytest.fixture
def stranger(serving: Daemon) -> Client:
    return Client(serving, None)


@pytest.fixture
def tenant(serving: Daemon) -> Client:
    return Client(serving, operator_token(serving.home))


def test_a_request_that_a_proxy_passed_on_needs_a_token(start_daemon: StartDaemon) -> None:
    """By a header of the proxy's, or by the name that was called: neither is this machine."""
    daemon = start_daemon(
        env={
            "COVENANT_A2A_PUBLISH": "index",
            "COVENANT_A2A_PUBLISH_ANONYMOUS": "loopback",
            "COVENANT_HTTP_ALLOWED_HOSTS": "localhost,127.0.0.1,agents.example",
        }
    )
    call = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message_v1("hello")}}
    for headers, status in (
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "agents.example"}, 401),
        ({"Host": "agents.example:443"}, 401),
        *(({name: "203.0.113.9"}, 401) for name in PROXY_HEADERS),
        ({"Forwarded": "for=203.0.113.9"}, 401),
        ({"Host": "evil.example"}, 403),
    ):
        answer = request(daemon.url, "POST", "/v1/a2a/agents/index", body=call, headers=headers)
        assert answer.status == status, headers


def test_a_daemon_with_a_public_address_is_called_by_it_and_refuses_to_take_callers_for_local(
    start_daemon: StartDaemon, short_path: Path
) -> None:
    public = {"COVENANT_PUBLIC_BASE_URL": "https://agents.example/under"}
    daemon = start_daemon(env=public)
    for host, status in (("agents.example", 200), ("agents.example:443", 200), ("other.example", 403)):
        assert request(daemon.url, "GET", "/healthz", headers={"Host": host}).status == status
    refused = covenant(
        "serve",
        *("--home", str(short_path / "other"), "--http-port", "0"),
        env=public | {"COVENANT_A2A_PUBLISH_ANONYMOUS": "loopback"},
    )
    assert refused.code != 0
    assert "http.public_base_url" in refused.err
    assert "Traceback" not in refused.err


def test_nobody_lists_tasks_without_a_token_by_any_binding(stranger: Client, tenant: Client) -> None:
    told = A2A_DOORS["rest"](stranger, "table", "hello", {})
    context_id = told["contextId"]
    for method, params in (
        ("ListTasks", {}),
        ("ListTasks", {"contextId": context_id}),
        ("tasks/list", {}),
        ("tasks/list", {"contextId": context_id}),
    ):
        answer = stranger.ask(
            "POST", "/v1/a2a/agents/table", {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        )
        assert answer.status == 401
        assert "needs a token" in answer.body.decode()
        assert told["id"] not in answer.body.decode()
    for query in ("", f"?contextId={context_id}"):
        refused = stranger.ask("GET", f"/v1/a2a/agents/table/tasks{query}")
        assert refused.status == 401
        assert "needs a token" in refused.body.decode()
    for asked in (pb.ListTasksRequest(tenant="table"), pb.ListTasksRequest(tenant="table", context_id=context_id)):
        with pytest.raises(grpc.RpcError) as failed:
            stranger.grpc("ListTasks", asked)
        assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
    listed = tenant.rpc("table", "ListTasks", {})["result"]["tasks"]
    assert told["id"] in {task["id"] for task in listed}


def test_whoever_was_told_an_id_reads_answers_hooks_and_cancels_that_task(stranger: Client) -> None:
    asked = A2A_DOORS["rest"](stranger, "table", "ask", {})
    found = stranger.rpc("table", "GetTask", {"id": asked["id"]})["result"]
    assert found["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    hook = {"taskId": asked["id"], "url": "http://127.0.0.1:9/", "token": "mine"}
    assert "result" in stranger.rpc("table", "CreateTaskPushNotificationConfig", hook)
    hooks = stranger.rpc("table", "ListTaskPushNotificationConfigs", {"taskId": asked["id"]})["result"]["configs"]
    assert [each["url"] for each in hooks] == ["http://127.0.0.1:9/"]
    told = A2A_DOORS["rest"](stranger, "table", "four", {}, task_id=asked["id"])
    assert told["status"]["state"] == "TASK_STATE_COMPLETED"
    other = A2A_DOORS["rest"](stranger, "table", "ask", {})
    canceled = stranger.rpc("table", "CancelTask", {"id": other["id"]})["result"]
    assert canceled["status"]["state"] == "TASK_STATE_CANCELED"


def test_a_tenants_task_is_unknown_without_a_token_whatever_is_asked_of_it(stranger: Client, tenant: Client) -> None:
    theirs = A2A_DOORS["rest"](tenant, "table", "ask", {})
    hook = {"url": "http://127.0.0.1:9/"}
    assert "result" in tenant.rpc("table", "CreateTaskPushNotificationConfig", {"taskId": theirs["id"], **hook})
    for method, params in (
        ("GetTask", {"id": theirs["id"]}),
        ("CancelTask", {"id": theirs["id"]}),
        ("SubscribeToTask", {"id": theirs["id"]}),
        ("SendMessage", {"message": message_v1("four", taskId=theirs["id"])}),
        ("message/send", {"message": message_v03("four", taskId=theirs["id"])}),
        ("CreateTaskPushNotificationConfig", {"taskId": theirs["id"], **hook}),
        ("ListTaskPushNotificationConfigs", {"taskId": theirs["id"]}),
    ):
        foreign = stranger.rpc("table", method, params)
        assert foreign["error"]["code"] == -32001, (method, foreign)
        nobodys = stranger.rpc("table", method, json.loads(json.dumps(params).replace(theirs["id"], str(uuid4()))))
        assert nobodys["error"]["code"] == -32001, (method, nobodys)
    assert tenant.rpc("table", "GetTask", {"id": theirs["id"]})["result"]["status"] == theirs["status"]


@pytest.mark.parametrize("door", A2A_DOORS)
def test_two_strangers_do_not_come_upon_one_task_by_a_short_key(serving: Daemon, stranger: Client, door: str) -> None:
    key = {"covenant.idempotency": {"key": "order-1"}}
    with pytest.raises((AssertionError, grpc.RpcError)) as failed:
        A2A_DOORS[door](stranger, "table", "hello", key)["id"]
    if isinstance(failed.value, AssertionError):
        assert "random UUID" in str(failed.value)
    else:
        assert "random UUID" in failed.value.details()
    long = {"covenant.idempotency": {"key": str(uuid4())}}
    # The message's own id is part of what is said: with another one it is another request.
    assert A2A_DOORS[door](stranger, "table", "hello", long)["id"]


def test_a_long_key_of_a_stranger_names_one_task_and_the_same_after_a_repeat(stranger: Client) -> None:
    params = {"message": message_v1("hello")}
    first, again = (stranger.rpc("table", "SendMessage", params, Idempotency_Key=f"k-{'x' * 40}") for _ in range(2))
    assert first["result"]["task"]["id"] == again["result"]["task"]["id"]


def _sent(client: Client, context_id: str, door: str) -> dict[str, Any]:
    if door == "rpc 1.0":
        return client.rpc("table", "SendMessage", {"message": message_v1("hello", contextId=context_id)})
    return client.rpc("table", "message/send", {"message": message_v03("hello", contextId=context_id)})


@pytest.mark.parametrize("door", ["rpc 1.0", "rpc 0.3"])
def test_a_context_of_somebody_else_joins_nothing(stranger: Client, tenant: Client, door: str) -> None:
    theirs = str(uuid4())
    begun = _sent(tenant, theirs, door)
    assert "result" in begun
    assert "you have no such context" in _sent(stranger, theirs, door)["error"]["message"]
    assert "random UUID" in _sent(stranger, "chat-1", door)["error"]["message"]
    listed = tenant.rpc("table", "ListTasks", {"contextId": theirs})["result"]["tasks"]
    assert len(listed) == 1
    own = A2A_DOORS[door](stranger, "table", "hello", {})
    on = _sent(stranger, own["contextId"], door)["result"]
    assert on.get("task", on)["contextId"] == own["contextId"]
