"""The official SDK's own server, on a socket: an agent that echoes, asks, fails, works until it is told to stop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc  # type: ignore[import-untyped]
import uvicorn
from a2a.compat.v0_3.a2a_v0_3_pb2_grpc import add_A2AServiceServicer_to_server as add_compat_servicer
from a2a.compat.v0_3.grpc_handler import CompatGrpcHandler
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler, GrpcHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes, create_rest_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    Message,
    Part,
    Role,
    Task,
    TaskState,
    TaskStatus,
)
from a2a.types.a2a_pb2_grpc import add_A2AServiceServicer_to_server
from starlette.applications import Starlette

JSONRPC_1 = ("JSONRPC", "1.0", "/rpc")
JSONRPC_03 = ("JSONRPC", "0.3", "/rpc")
REST_1 = ("HTTP+JSON", "1.0", "/rest")
GRPC_1 = ("GRPC", "1.0", "")
REST_03 = ("HTTP+JSON", "0.3", "/rest")
GRPC_03 = ("GRPC", "0.3", "")


@dataclass
class Sample(AgentExecutor):
    """`words` streams, `ask` asks, `fail` fails, `bare` answers without a task, `stay` works until it is canceled."""

    heard: list[str] = field(default_factory=list)
    told: list[object] = field(default_factory=list)
    """What came along with each: headers, metadata."""
    canceled: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        text = context.get_user_input()
        self.heard.append(text)
        state = context.call_context.state
        peer = state.get("grpc_context")
        self.told.append([state, list(peer.invocation_metadata()) if peer is not None else []])
        assert context.task_id is not None
        assert context.context_id is not None
        assert context.message is not None
        if text == "bare":
            parts = [Part(text="just this")]
            await event_queue.enqueue_event(Message(message_id="m", role=Role.ROLE_AGENT, parts=parts))
            return
        if context.current_task is None:
            status = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
            await event_queue.enqueue_event(
                Task(id=context.task_id, context_id=context.context_id, status=status, history=[context.message])
            )
        updater = TaskUpdater(event_queue, context.task_id, context.context_id)
        await updater.start_work(updater.new_agent_message([Part(text="on it")]))
        self.begun.set()
        match text:
            case "words":
                for number in range(5):
                    await updater.add_artifact([Part(text=f"word{number} ")], artifact_id="t", append=number > 0)
                await updater.complete()
            case "ask":
                await updater.requires_input(updater.new_agent_message([Part(text="which one?")]))
            case "fail":
                await updater.failed(updater.new_agent_message([Part(text="it broke")]))
            case "stay":
                await self.canceled.wait()
            case _:
                await updater.add_artifact([Part(text=f"echo: {text}")], artifact_id="t")
                await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        self.canceled.set()
        await TaskUpdater(event_queue, context.task_id or "", context.context_id or "").cancel()


@dataclass
class SdkServer:
    port: int
    agent: Sample

    def url(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@asynccontextmanager
async def sdk_server(
    *interfaces: tuple[str, str, str], streaming: bool = True, compat: bool = True
) -> AsyncIterator[SdkServer]:
    agent = Sample()
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    grpc_server = grpc.aio.server()
    grpc_port = grpc_server.add_insecure_port("127.0.0.1:0")
    card = AgentCard(
        name="Sample",
        description="The official SDK's server",
        version="1.2.3",
        capabilities=AgentCapabilities(streaming=streaming),
        supported_interfaces=[
            AgentInterface(
                protocol_binding=binding,
                protocol_version=version,
                url=f"http://127.0.0.1:{port}{path}" if binding != "GRPC" else f"127.0.0.1:{grpc_port}",
            )
            for binding, version, path in interfaces or (JSONRPC_1,)
        ],
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[AgentSkill(id="s", name="S", description="Says it again", tags=["t"])],
    )
    handler = DefaultRequestHandler(agent_executor=agent, task_store=InMemoryTaskStore(), agent_card=card)
    add_A2AServiceServicer_to_server(GrpcHandler(handler), grpc_server)  # type: ignore[no-untyped-call]
    add_compat_servicer(CompatGrpcHandler(handler), grpc_server)  # type: ignore[no-untyped-call]
    await grpc_server.start()
    routes = [
        *create_agent_card_routes(card),
        *create_jsonrpc_routes(handler, "/rpc", enable_v0_3_compat=compat),
        *create_rest_routes(handler, path_prefix="/rest", enable_v0_3_compat=compat),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes), log_level="critical", lifespan="off", timeout_graceful_shutdown=1, ws="none"
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    try:
        yield SdkServer(port, agent)
    finally:
        agent.canceled.set()
        server.should_exit = True
        await serving
        await grpc_server.stop(0)
