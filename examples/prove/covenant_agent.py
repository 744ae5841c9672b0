"""The scenario agent of `covenant prove`, for Covenant: `covenant serve examples/prove/covenant_agent.py`."""

import asyncio
import os

from covenant import Agent, Turn

on_lost = os.environ.get("PROVE_ON_LOST", "fail")
agent = Agent(
    "prove",
    description="Does what the durability kit asks",
    concurrency=4,
    on_lost=on_lost,
    idempotent=on_lost == "requeue",
)


@agent
async def scenario(turn: Turn):
    verb, key, *rest = turn.text.split()
    numbers = [int(word) for word in rest]
    with open(os.environ["PROVE_RUNS"], "a", encoding="utf-8") as runs:
        runs.write(f"{key}\n")
    if verb == "stream":
        count, pause_ms, size = (*numbers, 0)[:3]
        for number in range(count):
            yield f"{number} ".ljust(size)
            await asyncio.sleep(pause_ms / 1000)
    elif verb == "ask":
        yield turn.need_input("what now?")
    elif verb == "fail":
        raise RuntimeError("asked to fail")
    elif verb == "run":
        await asyncio.sleep(numbers[0] / 1000)
        yield f"{key} done"
    else:
        yield f"{key} done"
