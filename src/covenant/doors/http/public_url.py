"""Where callers reach this daemon: the start of every URL that is told to them.

A setting says it, or else the request does: its `Host`, and what a proxy says was called. A proxy is believed only if
its address is one of those the operator trusts; anybody else could make us tell strangers a URL of its choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

from starlette.types import Scope

from covenant.doors.http.hosts import LOOPBACK, as_host, without_port

_HOST = re.compile(r"(?:[A-Za-z0-9._\-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?").fullmatch
_FORWARDED: Final = frozenset(
    (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")
)


class BaseUrl:
    """`public` as the setting has it, empty if it has none; `trusted` are networks."""

    def __init__(self, public: str = "", trusted: Iterable[str] = ()) -> None:
        self._public = public.rstrip("/")
        self._trusted = tuple(map(ip_network, trusted))
        told = ("Host", "X-Forwarded-Host", "X-Forwarded-Proto") if self._trusted else ("Host",)
        self.varies: Final[tuple[str, ...]] = () if self._public else told
        """The headers that the answer depends on."""

    def of(self, scope: Scope) -> str:
        """Without a slash at its end."""
        if self._public:
            return self._public
        found: dict[bytes, str] = {}
        for name, value in scope["headers"]:
            if name in (b"host", b"x-forwarded-host", b"x-forwarded-proto"):
                found[name] = value.decode("latin-1")
        scheme, host = "http", found.get(b"host", "").strip()
        if self._trusted and self._trusts(scope):
            scheme = _nearest(found.get(b"x-forwarded-proto"), scheme).lower()
            host = _nearest(found.get(b"x-forwarded-host"), host)
        if _HOST(host) is None:
            host = _listening(scope)
        return f"{scheme if scheme in ('http', 'https') else 'http'}://{host}"

    def _trusts(self, scope: Scope) -> bool:
        peer = peer_of(scope)
        try:
            address: IPv4Address | IPv6Address = ip_address(peer or "")
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._trusted)


def peer_of(scope: Scope) -> str | None:
    client = scope.get("client")
    return client[0] if client else None


def forwarded(scope: Scope) -> bool:
    """Whether a proxy says that it stands between us and the caller, or passes on a `Host` that is not this machine."""
    return any(
        name in _FORWARDED or (name == b"host" and not _names_this_machine(value)) for name, value in scope["headers"]
    )


def _names_this_machine(host: bytes) -> bool:
    name = without_port(host.decode("latin-1").strip().lower())
    if name in LOOPBACK:
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _nearest(said: str | None, otherwise: str) -> str:
    """Of several proxies, what the one next to us says: what stands before it may be the caller's own words."""
    return (said or "").rpartition(",")[2].strip() or otherwise


def _listening(scope: Scope) -> str:
    server = scope.get("server")
    if not server or not server[1]:
        return "localhost"
    return f"{as_host(server[0])}:{server[1]}"
