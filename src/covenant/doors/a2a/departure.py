"""Noticing that a caller has gone, or may not go on: whatever is done for it alone is ended. Its tasks are not."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Final, Self

from starlette.types import Receive

from covenant.doors.a2a.operations import Asked, Office, Operation

NOTICE_S: Final = 1.0
"""Listening costs a task, and most callers are answered before they could have gone."""


class Departure:
    """A context around work for one caller, whose request was read to its end. It swallows the end that it brings."""

    __slots__ = ("_listener", "_notice_s", "_receive", "_timer", "_work", "gone")

    def __init__(self, receive: Receive, *, notice_s: float = NOTICE_S) -> None:
        self.gone = False
        self._receive = receive
        self._notice_s = notice_s
        self._listener: asyncio.Task[None] | None = None

    def end(self) -> None:
        if not self.gone and self._work is not None:
            self.gone = True
            self._work.cancel()

    def __enter__(self) -> Self:
        self._work = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(self._notice_s, self._listen)
        return self

    def _listen(self) -> None:
        self._listener = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        work, self._work = self._work, None
        self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()
        if self.gone and kind is not None and issubclass(kind, asyncio.CancelledError):
            assert work is not None
            work.uncancel()
            return True
        return False


async def answered(operation: Operation, office: Office, asked: Asked, receive: Receive) -> tuple[Any, bool]:
    """The answer of an operation, and whether its caller has left meanwhile. Only what works takes long enough."""
    if not operation.works:
        return await operation.run(office, asked), False
    answer = None
    with Departure(receive) as departure:
        answer = await operation.run(office, asked)
    return answer, departure.gone
