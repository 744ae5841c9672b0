"""The scenario agent of `covenant prove`, for the official Python SDK: `a2a_sdk.py PORT memory|DATABASE [HOME]`."""

import asyncio
import hashlib
import os
import sys
from contextlib import asynccontextmanager

import httpx
import uvicorn
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes, create_rest_routes
from a2a.server.tasks import (
    BasePushNotificationSender,
    InMemoryPushNotificationConfigStore,
    InMemoryTaskStore,
    TaskUpdater,
)
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, Part, Task, TaskState, TaskStatus
from starlette.applications import Starlette


class Scenario(AgentExecutor):
    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        verb, key, *rest = context.get_user_input().split()
        numbers = [int(word) for word in rest]
        with open(os.environ["PROVE_RUNS"], "a", encoding="utf-8") as runs:
            runs.write(f"{key}\n")
        task_id, context_id = context.task_id, context.context_id
        if context.current_task is None:
            submitted = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
            await event_queue.enqueue_event(
                Task(id=task_id, context_id=context_id, status=submitted, history=[context.message])
            )
        updater = TaskUpdater(event_queue, task_id, context_id)
        await updater.start_work()
        if verb == "stream":
            count, pause_ms, size = (*numbers, 0)[:3]
            for number in range(count):
                part = Part(text=f"{number} ".ljust(size))
                await updater.add_artifact([part], artifact_id="text", append=number > 0)
                await asyncio.sleep(pause_ms / 1000)
        elif verb == "ask":
            return await updater.requires_input(updater.new_agent_message([Part(text="what now?")]))
        elif verb == "fail":
            return await updater.failed()
        elif verb == "run":
            await asyncio.sleep(numbers[0] / 1000)
        if verb != "stream":
            await updater.add_artifact([Part(text=f"{key} done")], artifact_id="text")
        return await updater.complete()

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


def stores(where: str, table: str):
    if where == "memory":
        return InMemoryTaskStore(), InMemoryPushNotificationConfigStore()
    from a2a.server.tasks import DatabasePushNotificationConfigStore, DatabaseTaskStore  # noqa: PLC0415
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415

    engine = create_async_engine(where.replace("postgresql:", "postgresql+asyncpg:"))
    table = "t" + hashlib.sha256(table.encode()).hexdigest()[:16]  # one for each home
    return DatabaseTaskStore(engine, table_name=f"{table}_tasks"), DatabasePushNotificationConfigStore(
        engine, table_name=f"{table}_push"
    )


def main(port: str, where: str, home: str = "") -> None:
    url = f"http://127.0.0.1:{port}"
    card = AgentCard(
        name="prove",
        version="1",
        description="Does what the durability kit asks",
        capabilities=AgentCapabilities(streaming=True, push_notifications=True),
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        supported_interfaces=[
            AgentInterface(url=f"{url}/rpc", protocol_binding="JSONRPC", protocol_version="1.0"),
            AgentInterface(url=f"{url}/rpc", protocol_binding="JSONRPC", protocol_version="0.3"),
            AgentInterface(url=url, protocol_binding="HTTP+JSON", protocol_version="1.0"),
        ],
    )
    tasks, configs = stores(where, home)
    sender = BasePushNotificationSender(httpx_client=httpx.AsyncClient(), config_store=configs)
    handler = DefaultRequestHandler(
        agent_executor=Scenario(), task_store=tasks, agent_card=card, push_config_store=configs, push_sender=sender
    )
    routes = [
        *create_agent_card_routes(card),
        *create_jsonrpc_routes(handler, "/rpc", enable_v0_3_compat=True),
        *create_rest_routes(handler),
    ]

    @asynccontextmanager
    async def lifespan(_):
        for store in (tasks, configs) if where != "memory" else ():
            await store.initialize()
        yield

    uvicorn.run(Starlette(routes=routes, lifespan=lifespan), host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
