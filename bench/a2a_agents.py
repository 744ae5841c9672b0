"""The agents that are measured: what the others' servers have too, written for Covenant."""

import asyncio
from collections.abc import AsyncIterator

from covenant import Agent, Turn

WORDS = 100
CHUNKS = 2_200

echo = Agent("echo", description="Says it again", concurrency=256)
words = Agent("words", description="Says a hundred words", concurrency=256)
long = Agent("long", description="Says two thousand words, one at a time")


@echo
async def say_again(turn: Turn) -> str:
    return turn.text


@words
async def say_words(_: Turn) -> AsyncIterator[str]:
    for number in range(WORDS):
        yield f"word {number} "


@long
async def say_much(_: Turn) -> AsyncIterator[str]:
    for number in range(CHUNKS):
        yield f"word {number} "
        await asyncio.sleep(0)
