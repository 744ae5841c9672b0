"""Which names a request may call this daemon by.

A web page whose name was rebound to a loopback address can reach a local daemon, but its requests still carry the
page's own name in `Host`. Requests without the header come from no browser.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.types import Scope

ANY: Final = "*"
LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")
_REMEMBERED_MAX: Final = 1_024


class Hosts:
    """`allowed` are names and addresses without port, IPv6 in brackets; `*` allows all."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._any = ANY in self._allowed
        self._remembered: dict[bytes, bool] = {}

    def allows(self, scope: Scope) -> bool:
        if self._any:
            return True
        for name, value in scope["headers"]:
            if name == b"host":
                known = self._remembered.get(value)
                return self._judge(value) if known is None else known
        return True

    def _judge(self, value: bytes) -> bool:
        host = without_port(value.decode("latin-1").strip().lower())
        allowed = host in self._allowed
        if len(self._remembered) < _REMEMBERED_MAX and len(value) < 300:
            self._remembered[value] = allowed
        return allowed


def without_port(host: str) -> str:
    head, colon, port = host.rpartition(":")
    return head if colon and port.isdigit() else host


def as_host(address: str) -> str:
    """An address as it stands in a `Host` header."""
    return f"[{address}]" if ":" in address else address
