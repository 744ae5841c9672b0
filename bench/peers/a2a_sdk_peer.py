"""The official SDK's server with the same two agents.

a2a_sdk_peer.py memory | FILE (SQLite) | postgresql+asyncpg://…
"""

import logging
import os
import sys

os.environ["OTEL_INSTRUMENTATION_A2A_SDK_ENABLED"] = "false"

from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, Part, Task, TaskState, TaskStatus
from serving import serve
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette

WORDS = 100


class Echo(AgentExecutor):
    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        task_id, context_id = context.task_id, context.context_id
        submitted = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
        await event_queue.enqueue_event(
            Task(id=task_id, context_id=context_id, status=submitted, history=[context.message])
        )
        updater = TaskUpdater(event_queue, task_id, context_id)
        await updater.start_work()
        text = context.get_user_input()
        if text == "words":
            for number in range(WORDS):
                await updater.add_artifact([Part(text=f"word {number} ")], artifact_id="text", append=number > 0)
        else:
            await updater.add_artifact([Part(text=text)], artifact_id="text")
        await updater.complete(updater.new_agent_message([Part(text=text)]))

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        raise NotImplementedError


def stored(where: str) -> object:
    if where == "memory":
        return InMemoryTaskStore()
    from a2a.server.tasks import DatabaseTaskStore  # noqa: PLC0415  (not needed in memory)

    if where.startswith("postgresql"):
        # A connection for each caller of the largest round: nobody waits for one.
        return DatabaseTaskStore(create_async_engine(where, pool_size=64, max_overflow=0))
    engine = create_async_engine(f"sqlite+aiosqlite:///{where}")

    @event.listens_for(engine.sync_engine, "connect")
    def durable(connection: object, _: object) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")

    return DatabaseTaskStore(engine)


def main() -> None:
    logging.disable(logging.WARNING)
    card = AgentCard(name="echo", version="1", capabilities=AgentCapabilities(streaming=True))
    handler = DefaultRequestHandler(agent_executor=Echo(), task_store=stored(sys.argv[1]), agent_card=card)
    serve(Starlette(routes=create_jsonrpc_routes(handler, "/")))


if __name__ == "__main__":
    main()
