"""The bell: waiting for something to happen, without polling and without missing it."""

from __future__ import annotations

import asyncio

Topic = tuple[str, ...]


class Bell:
    """Whoever waits on a topic is woken by the next ring of it. Rung and awaited on one loop."""

    def __init__(self) -> None:
        self.waiting: dict[Topic, set[asyncio.Future[None]]] = {}

    def ring(self, topic: Topic) -> None:
        waiting = self.waiting.pop(topic, None)
        if waiting is not None:
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    async def wait(self, topic: Topic, timeout_ms: int) -> bool:
        """True if it rang; False when the time is over."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(topic, set()).add(future)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await future
        except TimeoutError:
            return False
        finally:
            waiting = self.waiting.get(topic)
            if waiting is not None:
                waiting.discard(future)
                if not waiting:
                    del self.waiting[topic]
        return True
