"""The scenario agent of `covenant prove`, for fasta2a with what it has, which is memory: `fasta2a_agent.py PORT`."""

import asyncio
import os
import sys
from contextlib import asynccontextmanager

import uvicorn
from fasta2a import FastA2A, Worker
from fasta2a.broker import InMemoryBroker
from fasta2a.schema import Artifact, Part
from fasta2a.storage import InMemoryStorage


class Scenario(Worker):
    async def run_task(self, params):
        task_id, context_id = params["id"], params["context_id"]
        verb, key, *rest = params["message"]["parts"][0]["text"].split()
        numbers = [int(word) for word in rest]
        with open(os.environ["PROVE_RUNS"], "a", encoding="utf-8") as runs:
            runs.write(f"{key}\n")
        await self.storage.update_task(task_id, state="working")
        text = f"{key} done"
        if verb == "stream":
            count, pause_ms, size = (*numbers, 0)[:3]
            text = ""
            for number in range(count):
                chunk = f"{number} ".ljust(size)
                artifact = Artifact(artifact_id="text", parts=[Part(text=chunk)])
                await self.publish_artifact(task_id, context_id, artifact, append=number > 0)
                await asyncio.sleep(pause_ms / 1000)
                text += chunk
        elif verb == "run":
            await asyncio.sleep(numbers[0] / 1000)
        ended = {"ask": "input-required", "fail": "failed"}.get(verb, "completed")
        made = [Artifact(artifact_id="text", parts=[Part(text=text)])] if ended == "completed" else None
        await self.storage.update_task(task_id, state=ended, new_artifacts=made)

    async def cancel_task(self, params):
        task = await self.storage.load_task(params["id"])
        if task is not None and task["status"]["state"] in {"submitted", "working", "input-required"}:
            await self.storage.update_task(params["id"], state="canceled")

    def build_message_history(self, history):
        return history

    def build_artifacts(self, result):
        return []


def main(port: str) -> None:
    storage, broker = InMemoryStorage(), InMemoryBroker()
    worker = Scenario(broker=broker, storage=storage)

    @asynccontextmanager
    async def lifespan(app):
        async with app.task_manager, worker.run():
            yield

    app = FastA2A(storage=storage, broker=broker, url=f"http://127.0.0.1:{port}", name="prove", lifespan=lifespan)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
