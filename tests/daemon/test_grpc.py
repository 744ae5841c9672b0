"""The gRPC port of a real daemon: found by its card, killed in the middle of a stream, and told apart from HTTP."""

import asyncio
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc  # type: ignore[import-untyped]
import httpx
import pytest
from a2a.client import ClientConfig, ClientFactory
from a2a.client.auth import AuthInterceptor, InMemoryContextCredentialStore
from a2a.client.client import ClientCallContext
from a2a.types import a2a_pb2 as pb
from a2a.types.a2a_pb2_grpc import A2AServiceStub

from tests.cli.daemons import Daemon, covenant
from tests.waits import BOUND_S

ON: Final = {"COVENANT_GRPC_ENABLED": "true", "COVENANT_GRPC_PORT": "0"}
CARD: Final = "v1/a2a/agents/teller/agent-card.json"

AGENTS: Final = """
import asyncio
from covenant import Agent

teller = Agent("teller", idempotent=True, on_lost="requeue")

@teller
async def tell(turn):
    yield "one"
    yield turn.file("a.txt", b"two")
    if turn.attempt == 1 and turn.text == "hang":
        await asyncio.Event().wait()
    yield "three"
"""


@pytest.fixture
def agents(short_path: Path) -> Path:
    path = short_path / "agents.py"
    path.write_text(AGENTS)
    return path


@pytest.fixture
def daemon(short_path: Path, agents: Path) -> Iterator[Daemon]:
    made = Daemon(short_path / "home", str(agents), env=ON)
    try:
        yield made
    finally:
        assert made.stop() == 0


def token_of(daemon: Daemon) -> str:
    return (daemon.home / "operator.token").read_text().strip()


def card_of(daemon: Daemon) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token_of(daemon)}", "A2A-Version": "1.0"}
    found: dict[str, Any] = (
        httpx.get(f"{daemon.url}/{CARD}", headers=headers, timeout=BOUND_S).raise_for_status().json()
    )
    return found


def grpc_address(daemon: Daemon) -> str:
    (found,) = (
        each
        for each in card_of(daemon)["supportedInterfaces"]
        if (each["protocolBinding"], each["protocolVersion"]) == ("GRPC", "1.0")
    )
    assert found["tenant"] == "teller"
    address: str = found["url"]
    return address


def asks(text: str) -> pb.SendMessageRequest:
    said = pb.Message(message_id="m", role=pb.ROLE_USER, parts=[pb.Part(text=text)])
    return pb.SendMessageRequest(tenant="teller", message=said)


def number_of(event: Any) -> int:
    return int(getattr(event, event.WhichOneof("payload")).metadata["covenant.generation"])


async def hear_out(stream: Any, heard: list[Any]) -> None:
    while True:
        heard.append(await stream.read())


async def test_the_official_client_finds_the_port_by_the_card_alone(daemon: Daemon) -> None:
    credentials = InMemoryContextCredentialStore()
    await credentials.set_credentials("s", "bearer", token_of(daemon))
    config = ClientConfig(grpc_channel_factory=grpc.aio.insecure_channel, supported_protocol_bindings=["GRPC"])
    headers = {"Authorization": f"Bearer {token_of(daemon)}", "A2A-Version": "1.0"}
    client = await ClientFactory(config).create_from_url(
        daemon.url,
        interceptors=[AuthInterceptor(credentials)],
        relative_card_path=CARD,
        resolver_http_kwargs={"headers": headers},
    )
    async with asyncio.timeout(BOUND_S), client:
        context = ClientCallContext(state={"sessionId": "s"})
        events = [event async for event in client.send_message(asks("go"), context=context)]
        assert events[-1].status_update.status.state == pb.TASK_STATE_COMPLETED
        extended = await client.get_extended_agent_card(pb.GetExtendedAgentCardRequest(), context=context)
        assert extended.supported_interfaces[0].url == f"{daemon.url}/v1/a2a/agents/teller"


async def test_a_stream_goes_on_over_a_kill_where_it_broke(short_path: Path, agents: Path) -> None:
    first = Daemon(short_path / "home", str(agents), env=ON)
    heard: list[Any] = []
    async with asyncio.timeout(BOUND_S), grpc.aio.insecure_channel(grpc_address(first)) as channel:
        metadata = [("authorization", f"Bearer {token_of(first)}")]
        stream = A2AServiceStub(channel).SendStreamingMessage(asks("hang"), metadata=metadata)  # type: ignore[no-untyped-call]
        while not (heard and heard[-1].artifact_update.artifact.parts and heard[-1].artifact_update.artifact.name):
            heard.append(await stream.read())
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(grpc.aio.AioRpcError):
            await hear_out(stream, heard)
    again = Daemon(first.home, str(agents), env=ON)
    try:
        async with asyncio.timeout(BOUND_S), grpc.aio.insecure_channel(grpc_address(again)) as channel:
            request = pb.SubscribeToTaskRequest(tenant="teller", id=heard[0].task.id)
            resumed = [*metadata, ("last-event-id", str(number_of(heard[-1])))]
            stub = A2AServiceStub(channel)  # type: ignore[no-untyped-call]
            snapshot, *rest = [event async for event in stub.SubscribeToTask(request, metadata=resumed)]
        numbers = [number_of(event) for event in (*heard, *rest)]
        assert number_of(snapshot) == number_of(heard[-1])
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert rest[-1].status_update.status.state == pb.TASK_STATE_COMPLETED
    finally:
        assert again.stop() == 0


def test_without_the_setting_there_is_no_port_and_no_word_of_it_in_a_card(short_path: Path, agents: Path) -> None:
    daemon = Daemon(short_path / "home", str(agents))
    try:
        assert {each["protocolBinding"] for each in card_of(daemon)["supportedInterfaces"]} == {"JSONRPC", "HTTP+JSON"}
        assert "grpc" not in daemon.log
    finally:
        assert daemon.stop() == 0


def test_a_port_in_use_refuses_and_leaves_the_home_free(short_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = covenant(
            "serve", "--home", str(short_path / "home"), "--http-port", "0", env={**ON, "COVENANT_GRPC_PORT": port}
        )
    assert (ran.code, ran.out) == (1, "")
    assert f"gRPC cannot listen on 127.0.0.1 port {port}" in ran.err
    assert Daemon(short_path / "home").stop() == 0


def test_without_the_extra_the_refusal_names_the_command_that_installs_it(short_path: Path) -> None:
    (short_path / "sitecustomize.py").write_text("import sys\nsys.modules['grpc'] = None\n")
    ran = covenant(
        "serve", "--home", str(short_path / "home"), "--http-port", "0", env={**ON, "PYTHONPATH": str(short_path)}
    )
    assert (ran.code, ran.out) == (1, "")
    assert "grpc.enabled" in ran.err
    assert "pip install 'covenant-a2a[grpc]'" in ran.err
