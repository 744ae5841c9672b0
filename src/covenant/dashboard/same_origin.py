"""Which requests come from the dashboard's own pages, and what each of its answers says to a browser."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.types import Scope

from covenant.doors.http.host_names import LOOPBACK, BaseUrl
from covenant.doors.http.responses import Header
from covenant.model.errors import Forbidden

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; worker-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types covenant"
)
_SECURITY: Final[tuple[Header, ...]] = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_NO_REFERRER: Final[tuple[Header, ...]] = (*_SECURITY, (b"referrer-policy", b"no-referrer"))
# A browser says `Sec-Fetch-Site` only to https and to this machine. Elsewhere it must say `Origin`, and with
# no-referrer a form says `Origin: null`. This policy tells other sites no more than that one.
_SAME_ORIGIN: Final[tuple[Header, ...]] = (*_SECURITY, (b"referrer-policy", b"same-origin"))


def security_headers(url: str) -> tuple[Header, ...]:
    """`url`: where the browser found us."""
    parts = urlsplit(url)
    trusted = parts.scheme == "https" or _is_this_machine(parts.hostname or "")
    return _NO_REFERRER if trusted else _SAME_ORIGIN


def _is_this_machine(host: str) -> bool:
    if host in LOOPBACK or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def check_same_origin(scope: Scope, base_url: BaseUrl, *, unsafe: bool) -> None:
    """Refuse what another site's page asks; and of what changes something, all that our own page did not ask."""
    said: dict[bytes, bytes] = dict(scope["headers"])
    site, origin = said.get(b"sec-fetch-site"), said.get(b"origin")
    if site is not None:
        allowed = site == b"same-origin" or (site == b"none" and not unsafe)
    elif origin is not None:
        allowed = _host(origin) in (said.get(b"host", b"").lower(), _host(base_url.of(scope).encode()))
    else:
        allowed = not unsafe
    if not allowed:
        raise Forbidden("cross_site", "this comes from a page that is not the dashboard's own")


def _host(url: bytes) -> bytes:
    return url.lower().partition(b"://")[2]


def cookie_name(scope: Scope, *, secure: bool) -> str:
    """Cookies know no ports: daemons on one machine must not take each other's."""
    server = scope.get("server")
    port = server[1] if server else 0
    return f"{'__Host-' if secure else ''}covenant_ui_{port}"


def write_cookie(scope: Scope, base_url: BaseUrl, secret: str) -> Header:
    """Sets the session's secret; an empty one removes it."""
    secure = base_url.of(scope).startswith("https://")
    # The prefix __Host- asks for the whole site's path.
    path = "/" if secure else "/ui"
    made = f"{cookie_name(scope, secure=secure)}={secret}; Path={path}; HttpOnly; SameSite=Strict"
    made += "; Secure" if secure else ""
    made += "" if secret else "; Max-Age=0"
    return b"set-cookie", made.encode()


def read_cookie(scope: Scope, base_url: BaseUrl) -> str:
    """The session's secret; empty if the browser has none."""
    wanted = cookie_name(scope, secure=base_url.of(scope).startswith("https://"))
    for name, value in scope["headers"]:
        if name != b"cookie":
            continue
        said: str = value.decode("latin-1")
        for pair in said.split(";"):
            key, _, secret = pair.strip().partition("=")
            if key == wanted:
                return secret
    return ""
