"""Captures requests and answers of the doors that tasks come through, for the frame log.

A daemon that keeps no frames makes plain exchanges, and runs nothing of this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from starlette.types import Scope

from covenant.doors.http.server.http_exchange import Header, HttpExchange, NewExchange
from covenant.exchange.frame_log import CapturedCall, FrameLog

if TYPE_CHECKING:
    from covenant.doors.http.server.http_connection import HttpConnection

DOORS: Final = (
    ("/v1/a2a/", "a2a"),
    ("/v1/agents/", "native"),
    ("/v1/orchestrate", "native"),
    ("/v1/conversations", "native"),
    ("/v1/requests/", "native"),
    ("/a2a/", "mailbox"),
)
"""The doors where tasks are sent, worked on and read, by the beginning of a path. The simple door counts as mailbox."""
READ_ENDINGS: Final = ("/show", "/tree", "/log", "/frames", "/recent", "/counts", "/queue", "/events")
"""Endings of paths by which an operator only reads tasks: their frames are not captured."""


def door_of(path: str, method: str) -> str | None:
    """The name of the captured door that this request is for; None if it is not captured."""
    door = next((name for prefix, name in DOORS if path.startswith(prefix)), None)
    if door == "mailbox" and (path.endswith(READ_ENDINGS) or (path == "/a2a/tasks" and method == "GET")):
        return None
    return door


class CapturedExchange(HttpExchange):
    __slots__ = ("_call",)

    def __init__(
        self,
        connection: HttpConnection,
        scope: Scope,
        keep_alive: bool,  # noqa: FBT001  (as the plain one)
        expects: bool,  # noqa: FBT001
        *,
        log: FrameLog,
        door: str,
    ) -> None:
        super().__init__(connection, scope, keep_alive, expects)
        title = f"{scope['method']} {scope['path']}"
        self._call: CapturedCall | None = CapturedCall(log, "in", door, title, _decode(scope["headers"]))

    def take_body(self, data: bytes) -> None:
        if self._call is not None:
            self._call.sent(data)
        super().take_body(data)

    def answer(self, status: int, headers: tuple[Header, ...], body: bytes) -> None:
        self._note_head(status, headers)
        if self._call is not None:
            self._call.received(body)
        super().answer(status, headers, body)

    def _begin(self, status: int, headers: Iterable[Header]) -> None:
        fields = tuple(headers)
        self._note_head(status, fields)
        super()._begin(status, fields)

    def _write(self, body: bytes, *, more: bool) -> None:
        if self._call is not None:
            self._call.received(body)
        super()._write(body, more=more)

    def _finish(self, data: bytes) -> None:
        super()._finish(data)
        self._offer()

    def disconnect(self) -> None:
        super().disconnect()
        self._offer()

    def _note_head(self, status: int, headers: Iterable[Header]) -> None:
        if self._call is not None:
            self._call.answered(status, _decode(headers))

    def _offer(self) -> None:
        """Offers the call to the frame log once, after the answer or after the client has left."""
        call, self._call = self._call, None
        if call is not None:
            call.ended()


def _decode(headers: Iterable[Header]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


def capture_into(log: FrameLog) -> NewExchange:
    def new_exchange(connection: HttpConnection, scope: Scope, keep_alive: bool, expects: bool) -> HttpExchange:  # noqa: FBT001
        door = door_of(scope["path"], scope["method"])
        if door is None:
            return HttpExchange(connection, scope, keep_alive, expects)
        return CapturedExchange(connection, scope, keep_alive, expects, log=log, door=door)

    return new_exchange
