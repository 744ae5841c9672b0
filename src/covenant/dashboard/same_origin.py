"""Tells requests of the dashboard's own pages from others, and has the security headers and cookies of its answers."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.types import Scope

from covenant.doors.http.host_names import LOOPBACK, BaseUrl
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, Header
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
# A browser sends `Sec-Fetch-Site` only to https and to loopback. Elsewhere `Origin` is needed, and under no-referrer a
# form sends `Origin: null`. The policy same-origin tells other sites no more than no-referrer does.
_SAME_ORIGIN: Final[tuple[Header, ...]] = (*_SECURITY, (b"referrer-policy", b"same-origin"))


def security_headers(url: str) -> tuple[Header, ...]:
    """The headers for `url`, the address by which the browser reached the daemon."""
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
    """Refuses a request from another site's page. A request that changes something must come from our own page."""
    headers: dict[bytes, bytes] = scope[HEADERS_BY_NAME]
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        allowed = site == b"same-origin" or (site == b"none" and not unsafe)
    elif origin is not None:
        here = f"{scope.get('scheme', 'http')}://{headers.get(b'host', b'').decode('latin-1')}"
        allowed = origin.decode("latin-1").lower() in (here.lower(), _origin(base_url.of(scope)))
    else:
        allowed = not unsafe
    if not allowed:
        raise Forbidden("cross_site", "this request comes from another site's page; open the dashboard and try again")


def _origin(url: str) -> str:
    parts = urlsplit(url.lower())
    return f"{parts.scheme}://{parts.netloc}"


def cookie_name(scope: Scope, *, secure: bool) -> str:
    """The cookie's name has the port: cookies ignore ports, and several daemons may share a host."""
    server = scope.get("server")
    port = server[1] if server else 0
    return f"{'__Host-' if secure else ''}covenant_ui_{port}"


def write_cookie(scope: Scope, base_url: BaseUrl, secret: str) -> Header:
    """The header that sets the session's secret; an empty secret removes the cookie."""
    secure = base_url.of(scope).startswith("https://")
    # The prefix __Host- requires the path `/`.
    path = "/" if secure else "/ui"
    made = f"{cookie_name(scope, secure=secure)}={secret}; Path={path}; HttpOnly; SameSite=Strict"
    made += "; Secure" if secure else ""
    made += "" if secret else "; Max-Age=0"
    return b"set-cookie", made.encode()


def read_cookie(scope: Scope, base_url: BaseUrl) -> str:
    """The session's secret; empty if the browser sent none."""
    wanted = cookie_name(scope, secure=base_url.of(scope).startswith("https://"))
    for name, value in scope["headers"]:
        if name != b"cookie":
            continue
        cookies: str = value.decode("latin-1")
        for pair in cookies.split(";"):
            key, _, secret = pair.strip().partition("=")
            if key == wanted:
                return secret
    return ""
