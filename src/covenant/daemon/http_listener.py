"""Where HTTP listens: the socket, bound before anything is promised, and the server with the operator's bounds."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from covenant.daemon.environment import now_ms
from covenant.daemon.settings import HttpSettings
from covenant.doors.http.health import ALIVE_PATHS
from covenant.doors.http.server.bounds import HttpBounds
from covenant.doors.http.server.http_exchange import Door
from covenant.doors.http.server.http_refusals import RefusalForm, plain_form
from covenant.doors.http.server.http_server import HttpServer
from covenant.model.errors import CovenantError


class CannotListen(CovenantError):
    """The address cannot be listened on; the message says what to change."""


@contextmanager
def bound(settings: HttpSettings) -> Iterator[socket.socket]:
    """A socket bound to the address of the settings."""
    family = socket.AF_INET6 if ":" in settings.bind_addr else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((settings.bind_addr, settings.port))
        except OSError as error:
            raise CannotListen(
                f"HTTP cannot listen on {settings.bind_addr} port {settings.port}: {error.strerror}; "
                "stop what uses it, or choose another with --http-port or --http-bind-addr"
            ) from error
        yield made


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def http_bounds(settings: HttpSettings) -> HttpBounds:
    """The bounds of the HTTP layer, as far as an operator chooses them."""
    return HttpBounds(
        head_s_max=settings.head_ms / 1000,
        body_idle_s_max=settings.body_idle_ms / 1000,
        body_s_max=settings.body_ms / 1000,
        body_bytes_max=settings.body_bytes_max,
        keep_alive_s_max=settings.keep_alive_ms / 1000,
        unread_s_max=settings.unread_ms / 1000,
        connections_max=settings.connections_max,
        connections_per_address_max=settings.connections_per_address_max,
    )


def make_server(door: Door, settings: HttpSettings, refusal_form: RefusalForm = plain_form) -> HttpServer:
    return HttpServer(
        door,
        http_bounds(settings),
        now_ms=now_ms,
        refusal_form=refusal_form,
        always=ALIVE_PATHS,
        proxies=settings.trusted_proxies,
    )
