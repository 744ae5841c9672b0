"""The host names that a request may use for this daemon, and the web pages that it may come from.

A web page whose name was rebound to a loopback address can reach a local daemon, but its requests still have the page's
own name in `Host`. A request without `Host` is allowed: every browser sends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

from starlette.types import Scope

from covenant.doors.http.responses import send_answer
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, Header, HttpExchange

PREFLIGHT_AGE_S: Final = 600

_CORS_REQUEST_HEADERS: Final = (
    b"Authorization, Content-Type, A2A-Version, A2A-Extensions, Idempotency-Key, Last-Event-ID, Traceparent"
)
_CORS_RESPONSE_HEADERS: Final = b"ETag, Retry-After, WWW-Authenticate"
ANY_HOST: Final = "*"
LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")
_DECISIONS_MAX: Final = 1_024
_match_host = re.compile(r"(?:[A-Za-z0-9._\-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?").fullmatch
_PROXY_HEADERS: Final = (b"x-forwarded-", b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"true-client-ip", b"cf-")
"""Beginnings of headers that proxies add: a request with one of them came through a proxy."""


class AllowedOrigins:
    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(origin.lower().encode() for origin in allowed)

    def __bool__(self) -> bool:
        return bool(self._allowed)

    def of(self, scope: Scope) -> bytes | None:
        """The request's origin, if it is allowed."""
        origin: bytes | None = scope[HEADERS_BY_NAME].get(b"origin")
        return origin if origin is not None and origin.lower() in self._allowed else None

    def is_foreign_page(self, scope: Scope) -> bool:
        """Whether the request comes from a web page that is neither this daemon's own nor of an allowed origin."""
        headers: dict[bytes, bytes] = scope[HEADERS_BY_NAME]
        origin = headers.get(b"origin")
        if origin is None or origin.lower() in self._allowed:
            return False
        return origin.lower().partition(b"://")[2] != headers.get(b"host", b"").lower()


async def reply_preflight(exchange: HttpExchange) -> None:
    """Answers with the methods and headers that a page may use. The caller adds `cors_headers` to the answer."""
    headers: list[Header] = [
        (b"access-control-allow-methods", b"GET, POST, PATCH, DELETE, OPTIONS"),
        (b"access-control-allow-headers", _CORS_REQUEST_HEADERS),
        (b"access-control-max-age", b"%d" % PREFLIGHT_AGE_S),
    ]
    await send_answer(exchange, 204, headers)


def cors_headers(origin: bytes) -> tuple[Header, ...]:
    """The headers that let a page of that origin read an answer."""
    return (
        (b"access-control-allow-origin", origin),
        (b"access-control-allow-credentials", b"true"),
        (b"access-control-expose-headers", _CORS_RESPONSE_HEADERS),
        (b"vary", b"Origin"),
    )


class AllowedHosts:
    """`allowed` are names and addresses without port, IPv6 in brackets; `*` allows all."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(name.lower() for name in allowed)
        self._any_host = ANY_HOST in self._allowed
        self.decisions: dict[bytes, bool] = {}
        """Whether each value of `Host` that came before is allowed."""

    def allows(self, scope: Scope) -> bool:
        if self._any_host:
            return True
        host = scope[HEADERS_BY_NAME].get(b"host")
        if host is None:
            return True
        known = self.decisions.get(host)
        return self._decide(host) if known is None else known

    def _decide(self, value: bytes) -> bool:
        host = without_port(value.decode("latin-1").strip().lower())
        allowed = host in self._allowed
        if len(self.decisions) < _DECISIONS_MAX and len(value) < 300:
            self.decisions[value] = allowed
        return allowed


def without_port(host: str) -> str:
    head, colon, port = host.rpartition(":")
    return head if colon and port.isdigit() else host


def as_host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class BaseUrl:
    """`public` is the setting's value, perhaps empty; `trusted` are networks of proxies."""

    def __init__(self, public: str = "", trusted: Iterable[str] = ()) -> None:
        self._public = public.rstrip("/")
        self._trusted = tuple(map(ip_network, trusted))
        names = ("Host", "X-Forwarded-Host", "X-Forwarded-Proto") if self._trusted else ("Host",)
        self.varies: Final[tuple[str, ...]] = () if self._public else names
        """The headers that the answer depends on."""

    def of(self, scope: Scope) -> str:
        """The base URL, without a slash at its end."""
        if self._public:
            return self._public
        headers: dict[bytes, bytes] = scope[HEADERS_BY_NAME]
        scheme, host = scope.get("scheme", "http"), headers.get(b"host", b"").decode("latin-1").strip()
        if self._trusted and self._trusts(scope):
            scheme = _nearest(headers.get(b"x-forwarded-proto"), scheme).lower()
            host = _nearest(headers.get(b"x-forwarded-host"), host)
        if _match_host(host) is None:
            host = _listening_host(scope)
        return f"{scheme if scheme in ('http', 'https') else 'http'}://{host}"

    def _trusts(self, scope: Scope) -> bool:
        try:
            address: IPv4Address | IPv6Address = ip_address(peer_address(scope) or "")
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._trusted)


def peer_address(scope: Scope) -> str | None:
    client = scope.get("client")
    return client[0] if client else None


def forwarded(scope: Scope) -> bool:
    """Whether a proxy stands between the caller and us, by its headers or by a `Host` that is not this machine."""
    return any(
        name.startswith(_PROXY_HEADERS) or (name == b"host" and not _names_this_machine(value))
        for name, value in scope["headers"]
    )


def _names_this_machine(host: bytes) -> bool:
    name = without_port(host.decode("latin-1").strip().lower())
    if name in LOOPBACK:
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _nearest(values: bytes | None, otherwise: str) -> str:
    """The value that the nearest proxy added: the caller may have made up the values before it."""
    return (values or b"").rpartition(b",")[2].decode("latin-1").strip() or otherwise


def _listening_host(scope: Scope) -> str:
    server = scope.get("server")
    if not server or not server[1]:
        return "localhost"
    return f"{as_host(server[0])}:{server[1]}"
