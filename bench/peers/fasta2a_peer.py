"""fasta2a's server with the same two agents, in memory, which is all it has."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fasta2a import FastA2A, Worker
from fasta2a.broker import InMemoryBroker
from fasta2a.schema import Artifact, Message, TaskIdParams, TaskSendParams
from fasta2a.storage import InMemoryStorage
from serving import serve

WORDS = 100


class Echo(Worker[Any]):
    async def run_task(self, params: TaskSendParams) -> None:
        task_id, context_id = params["id"], params["context_id"]
        await self.storage.update_task(task_id, state="working")
        text = params["message"]["parts"][0]["text"]
        artifact_id = str(uuid.uuid4())
        if text == "words":
            for number in range(WORDS):
                artifact = Artifact(artifact_id=artifact_id, parts=[{"kind": "text", "text": f"word {number} "}])
                await self.publish_artifact(task_id, context_id, artifact, append=number > 0)
        artifact = Artifact(artifact_id=artifact_id, parts=[{"kind": "text", "text": text}])
        await self.storage.update_task(task_id, state="completed", new_artifacts=[artifact])

    async def cancel_task(self, params: TaskIdParams) -> None:
        raise NotImplementedError

    def build_message_history(self, history: list[Message]) -> list[Any]:
        return history

    def build_artifacts(self, result: Any) -> list[Artifact]:  # noqa: ARG002
        return []


def main() -> None:
    storage, broker = InMemoryStorage(), InMemoryBroker()
    worker = Echo(broker=broker, storage=storage)

    @asynccontextmanager
    async def living(app: FastA2A) -> AsyncIterator[None]:
        async with app.task_manager, worker.run():
            yield

    serve(FastA2A(storage=storage, broker=broker, lifespan=living))


if __name__ == "__main__":
    main()
