"""Routes by path and method. A method that a path does not have is told which there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.doors.http.openapi import Described
from covenant.doors.http.reply import reply_not_allowed, speaks_plainly


class ByMethod:
    """The routes of one path."""

    def __init__(self, calls: Mapping[str, ASGIApp]) -> None:
        self.calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self.calls.get(scope["method"])
        if call is None:
            await reply_not_allowed(send, tuple(self.calls), plain=speaks_plainly(scope["path"]))
        else:
            await call(scope, receive, send)


def described_routes(described: Iterable[Described], calls: Mapping[str, ASGIApp]) -> list[BaseRoute]:
    """The routes that the OpenAPI document describes so, each with what answers it, by name."""
    paths: dict[str, dict[str, ASGIApp]] = {}
    for each in described:
        paths.setdefault(each.path, {})[each.method] = calls[each.name]
    return [Route(path, ByMethod(by_method), name=path) for path, by_method in paths.items()]
