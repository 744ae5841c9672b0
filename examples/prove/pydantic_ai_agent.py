"""The scenario agent of `covenant prove`, for pydantic-ai: `pydantic_ai_agent.py PORT`.

`agent_to_a2a` of fasta2a serves an agent whose model is a function. A model agent cannot ask for input, so `ask` fails.
"""

import asyncio
import os
import sys

import uvicorn
from fasta2a.pydantic_ai import agent_to_a2a
from pydantic_ai import Agent
from pydantic_ai.models.function import FunctionModel


async def scenario(messages, _):
    verb, key, *rest = messages[-1].parts[-1].content.split()
    numbers = [int(word) for word in rest]
    with open(os.environ["PROVE_RUNS"], "a", encoding="utf-8") as runs:
        runs.write(f"{key}\n")
    if verb in {"ask", "fail"}:
        raise RuntimeError(f"asked to {verb}")
    if verb == "stream":
        count, pause_ms, size = (*numbers, 0)[:3]
        for number in range(count):
            yield f"{number} ".ljust(size)
            await asyncio.sleep(pause_ms / 1000)
        return
    if verb == "run":
        await asyncio.sleep(numbers[0] / 1000)
    yield f"{key} done"


def main(port: str) -> None:
    agent = Agent(FunctionModel(stream_function=scenario), name="prove")
    app = agent_to_a2a(agent, url=f"http://127.0.0.1:{port}")
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
