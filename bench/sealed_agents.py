"""The agent that a peer delegates to while it is measured."""

from __future__ import annotations

from collections.abc import AsyncIterator

from covenant import Agent, Turn

agent = Agent("worker", description="Answers at once")


@agent
async def work(turn: Turn) -> AsyncIterator[str]:
    yield turn.text
