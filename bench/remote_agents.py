"""The agents of part `remote`: one that the master picks, one that passes a task on, one that takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from covenant import Agent, Turn

weather = Agent("weather", description="Tells the weather forecast")
relay = Agent("relay", description="Passes it on", concurrency=1_000)
sleeper = Agent("sleeper", description="Sleeps", concurrency=1_000)


@weather
async def tell(turn: Turn) -> str:  # noqa: ARG001
    return "sunny"


@relay
async def pass_on(turn: Turn) -> str:
    return (await turn.call("there", turn.text)).text


@sleeper
async def sleep(turn: Turn) -> AsyncIterator[str]:
    yield "begun "
    await asyncio.sleep(float(turn.text.split()[0]))
    yield "x" * 1_000
