"""LateTimer that a caller has gone, or may not go on: whatever is done for it alone is ended. Its tasks are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self

from starlette.types import Receive

from covenant.doors.a2a.late_timer import LateTimer
from covenant.doors.a2a.operations import A2ACall, A2AOperation, A2AServices
from covenant.exchange.access.tenants import TenantAccess, unauthenticated

Session = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""While it is open, what it was given is called when the caller may not go on."""


class Disconnect:
    """A context around work for one caller, whose request was read to its end. It swallows the end that it brings.

    Listening costs a task, and most callers are answered before they could have gone: `noticing` says when to begin,
    and without it that is at once.
    """

    _work: asyncio.Task[Any] | None = None
    _held: AbstractContextManager[None] | None = None
    _listener: asyncio.Task[None] | None = None
    gone = False
    turned_out = False

    def __init__(self, receive: Receive, *, noticing: LateTimer | None = None, session: Session | None = None) -> None:
        self._receive = receive
        self._noticing = noticing
        self._session = session

    def end(self) -> None:
        if not self.gone and self._work is not None:
            self.gone = True
            self._work.cancel()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._work = asyncio.current_task(loop)
        if self._noticing is not None:
            self._noticing.begin(self, loop)
        else:
            loop.call_soon(self.late)
        return self

    def _turn_out(self) -> None:
        self.turned_out = True
        self.end()

    def late(self) -> None:
        if self._work is None:
            return
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
        if self._noticing is not None:
            self._noticing.end(self)
        if self._listener is not None:
            self._listener.cancel()
        if self._held is not None:
            self._held.__exit__(None, None, None)
        if self.gone and kind is not None and issubclass(kind, asyncio.CancelledError):
            assert work is not None
            work.uncancel()
            return True
        return False


async def run_while_connected(
    operation: A2AOperation, office: A2AServices, asked: A2ACall, receive: Receive, tenancy: TenantAccess
) -> tuple[Any, bool]:
    """The answer of an operation, and whether its caller has left meanwhile. Only what works takes long enough.

    A caller who may not go on is refused; what it has begun goes on.
    """
    if not operation.works:
        return await operation.run(office, asked), False
    answer = None
    session = partial(tenancy.session, asked.ask.caller)
    with Disconnect(receive, noticing=office.noticing, session=session) as departure:
        answer = await operation.run(office, asked)
    if departure.turned_out:
        raise unauthenticated()
    return answer, departure.gone
