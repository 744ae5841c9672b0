"""Threads for plain functions: each turn runs in its own thread, and talks to the event loop by a `ThreadChannel`.

A thread cannot be stopped from outside. When its turn is canceled or times out, the channel is closed: the next `send`
or `ask` raises `TurnStopped`. A thread that goes on regardless is abandoned: it is counted, and keeps its place among
its agent's threads until it ends, so that a function that hangs uses up only its own agent's threads. They are daemon
threads: none of them delays the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, Final

ITEMS_MAX: Final = 256
"""The most texts and requests in a channel. A thread that is further ahead of the event loop waits."""

log = logging.getLogger(__name__)


class TurnStopped(asyncio.CancelledError):
    """The turn is over. Not an `Exception`: agents catch those and go on."""


class ThreadRequest:
    """Work that the event loop does for a waiting thread."""

    __slots__ = ("_do", "answer")

    def __init__(self, do: Callable[[], Any]) -> None:
        self._do = do
        self.answer: Future[Any] = Future()

    async def perform(self) -> None:
        """Runs on the event loop. An exception is raised in the thread, which may catch it."""
        try:
            done = self._do()
            if inspect.isawaitable(done):
                done = await done
        except asyncio.CancelledError:
            self.answer.set_exception(TurnStopped())
            raise
        except BaseException as error:  # noqa: BLE001  (the thread, which waits for an answer, handles it)
            self.answer.set_exception(error)
        else:
            self.answer.set_result(done)


class ThreadChannel:
    """Carries texts and requests, in order, from one thread to the event loop. The loop ends it with `close`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[str | ThreadRequest | None] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._arrived = asyncio.Event()

    def send(self, text: str) -> None:
        """Sends a text. Does not wait, unless the loop is far behind."""
        self._put(text)

    def ask(self, do: Callable[[], Any]) -> Any:
        """Runs a function on the event loop, awaits its result there if need be, and returns the result."""
        question = ThreadRequest(do)
        self._put(question)
        return question.answer.result()

    def end(self) -> None:
        with contextlib.suppress(TurnStopped):
            self._put(None)

    def _put(self, item: str | ThreadRequest | None) -> None:
        with self._changed:
            while len(self._items) >= ITEMS_MAX and not self._closed:
                self._changed.wait()
            if self._closed:
                raise TurnStopped
            self._items.append(item)
            first = len(self._items) == 1
        if first:
            try:
                self._loop.call_soon_threadsafe(self._arrived.set)
            except RuntimeError:
                raise TurnStopped from None  # the loop is closed: the process ends

    async def next(self) -> deque[str | ThreadRequest | None]:
        """All items since the last call; at least one. None is the last of all."""
        while True:
            self._arrived.clear()
            with self._changed:
                items, self._items = self._items, deque()
                self._changed.notify_all()
            if items:
                return items
            await self._arrived.wait()

    def close(self) -> None:
        """Drops all further items. A thread that waits for an answer gets `TurnStopped`."""
        with self._changed:
            self._closed = True
            items, self._items = self._items, deque()
            self._changed.notify_all()
        stop_waiting(items)


def stop_waiting(items: deque[str | ThreadRequest | None]) -> None:
    """Raises `TurnStopped` in each thread that waits for one of these requests."""
    for item in items:
        if isinstance(item, ThreadRequest) and not item.answer.done():
            item.answer.set_exception(TurnStopped())


class AgentThreads:
    """The threads of one agent, at most `threads_max` at once. Must be used on the event loop."""

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self.running = 0
        self.abandoned = 0
        """How many running threads belong to turns that are over."""
        self._freed = asyncio.Event()

    def resize(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._freed.set()

    async def run(
        self, work: Callable[[ThreadChannel], None], on_text: Callable[[str], Awaitable[None] | None], name: str
    ) -> None:
        """Does this work in a thread and passes its texts to `on_text`, until both have ended.

        Raises the work's exception. A first cancel closes the channel and waits for the thread; a second one leaves the
        thread running.
        """
        await self._wait_for_place(name)
        loop = asyncio.get_running_loop()
        channel, ended = ThreadChannel(loop), loop.create_future()
        try:
            _start(loop, channel, work, ended, name)
        except RuntimeError:
            self._free()
            raise  # the system has no more threads
        ended.add_done_callback(lambda _: self._free())
        try:
            await _relay(channel, on_text)
        except BaseException:
            channel.close()
            self.abandoned += 1
            ended.add_done_callback(lambda _: self._thread_ended(name))
            await asyncio.wait((ended,))
            raise
        channel.close()
        error = await ended
        if error is not None:
            raise error

    def _thread_ended(self, name: str) -> None:
        self.abandoned -= 1
        log.debug("agent.thread_ended", extra={"agent": name, "abandoned": self.abandoned})

    async def _wait_for_place(self, name: str) -> None:
        if self.running >= self._threads_max:
            extra = {"agent": name, "abandoned": self.abandoned, "most": self._threads_max}
            log.warning("agent.threads_used_up", extra=extra)
        while self.running >= self._threads_max:
            self._freed.clear()
            await self._freed.wait()
        self.running += 1

    def _free(self) -> None:
        self.running -= 1
        self._freed.set()


async def _relay(channel: ThreadChannel, on_text: Callable[[str], Awaitable[None] | None]) -> None:
    while True:
        items = await channel.next()
        try:
            while items:
                item = items.popleft()
                if item is None:
                    return
                if isinstance(item, ThreadRequest):
                    await item.perform()
                elif (waiting := on_text(item)) is not None:
                    await waiting
        finally:
            stop_waiting(items)


def _start(
    loop: asyncio.AbstractEventLoop,
    channel: ThreadChannel,
    work: Callable[[ThreadChannel], None],
    ended: asyncio.Future[BaseException | None],
    name: str,
) -> None:
    def settle(error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            work(channel)
        except TurnStopped:
            pass
        except BaseException as raised:  # noqa: BLE001  (it is raised again where the turn is awaited)
            error = raised
        channel.end()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(settle, error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=f"agent {name}", daemon=True).start()
