"""Noticing that a caller has gone, or may not go on: whatever is done for it alone is ended. Its tasks are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from starlette.types import Receive

from covenant.doors.a2a.operations import Asked, Office, Operation
from covenant.exchange.tenancy import Tenancy, unauthenticated

NOTICE_S: Final = 1.0
"""Listening costs a task, and most callers are answered before they could have gone."""

Session = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""While it is open, what it was given is called when the caller may not go on."""


class Departure:
    """A context around work for one caller, whose request was read to its end. It swallows the end that it brings."""

    __slots__ = ("_held", "_listener", "_notice_s", "_receive", "_session", "_timer", "_work", "gone", "turned_out")

    def __init__(self, receive: Receive, *, notice_s: float = NOTICE_S, session: Session | None = None) -> None:
        self.gone = False
        self.turned_out = False
        self._receive = receive
        self._notice_s = notice_s
        self._session = session
        self._held: AbstractContextManager[None] | None = None
        self._listener: asyncio.Task[None] | None = None

    def end(self) -> None:
        if not self.gone and self._work is not None:
            self.gone = True
            self._work.cancel()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._work = asyncio.current_task(loop)
        self._timer = loop.call_later(self._notice_s, self._listen)
        return self

    def _turn_out(self) -> None:
        self.turned_out = True
        self.end()

    def _listen(self) -> None:
        self._listener = asyncio.get_running_loop().create_task(self._wait())
        if self._session is not None:
            self._held = self._session(self._turn_out)
            self._held.__enter__()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.end()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        work, self._work = self._work, None
        self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()
        if self._held is not None:
            self._held.__exit__(None, None, None)
        if self.gone and kind is not None and issubclass(kind, asyncio.CancelledError):
            assert work is not None
            work.uncancel()
            return True
        return False


async def answered(
    operation: Operation, office: Office, asked: Asked, receive: Receive, tenancy: Tenancy
) -> tuple[Any, bool]:
    """The answer of an operation, and whether its caller has left meanwhile. Only what works takes long enough.

    A caller who may not go on is refused; what it has begun goes on.
    """
    if not operation.works:
        return await operation.run(office, asked), False
    answer = None
    with Departure(receive, session=partial(tenancy.session, asked.ask.caller)) as departure:
        answer = await operation.run(office, asked)
    if departure.turned_out:
        raise unauthenticated()
    return answer, departure.gone
