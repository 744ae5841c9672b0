"""Agents for a daemon that is to be killed: `covenant serve served_agents.py`, with the gates in GATES."""

import asyncio
import os
from collections.abc import AsyncIterator

from covenant import Agent, Turn
from tests.conformance.a2a.gate_server import gate

CHUNKS = 6
FLOW = 400

held, single, flowing = Agent("held"), Agent("single", concurrency=1), Agent("flowing")


@held
@single
async def step_by_step(turn: Turn) -> AsyncIterator[str]:
    """Told a name, it waits at a gate before its first word, before each of the others, and before its end."""
    for number in range(CHUNKS):
        await gate(os.environ["GATES"], f"{turn.text} {turn.attempt}.{number}")
        yield f"{turn.attempt}.{number} "
    await gate(os.environ["GATES"], f"{turn.text} {turn.attempt}.end")


@flowing
async def flow(turn: Turn) -> AsyncIterator[str]:
    """As fast as it is let; and it waits at a gate before its end, however slowly it is read."""
    for number in range(FLOW):
        yield f"{turn.attempt}.{number} "
        await asyncio.sleep(0.001)
    await gate(os.environ["GATES"], f"{turn.task_id} {turn.attempt}.end")
