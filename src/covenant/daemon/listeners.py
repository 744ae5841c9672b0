"""The sockets that a daemon listens on. They are bound before anything is built, so that their ports are known."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covenant.daemon.environment import now_ms
from covenant.daemon.settings import GrpcSettings, HttpSettings, Settings
from covenant.daemon.telemetry import Log
from covenant.daemon.tls_files import TlsFiles, key_is_exposed, open_tls
from covenant.doors.http.health import ALIVE_PATHS
from covenant.doors.http.server.bounds import HttpBounds
from covenant.doors.http.server.http_exchange import Door, HttpExchange, NewExchange
from covenant.doors.http.server.http_refusals import RefusalForm, plain_form
from covenant.doors.http.server.http_server import HttpServer
from covenant.doors.http.server.tls_handshakes import ServerTls
from covenant.model.errors import CovenantError
from covenant.model.extras import not_installed

if TYPE_CHECKING:
    from covenant.doors.a2a.grpc import GrpcServer


PEER_CONNECTIONS_MAX: Final = 256
"""Connections at the listener for peers. Peers are few, and keep their connections."""


class CannotListen(CovenantError):
    """The address cannot be listened on; the message says what to change."""


@contextmanager
def _bound_at(bind_addr: str, port: int, what: str, choose: str) -> Iterator[socket.socket]:
    """`choose`: how the user can choose another address."""
    family = socket.AF_INET6 if ":" in bind_addr else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((bind_addr, port))
        except OSError as error:
            raise CannotListen(
                f"{what} cannot listen on {bind_addr} port {port}: {error.strerror}; "
                f"stop what uses it, or choose another with {choose}"
            ) from error
        yield made


def bound(settings: HttpSettings) -> AbstractContextManager[socket.socket]:
    return _bound_at(settings.bind_addr, settings.port, "HTTP", "--http-port or --http-bind-addr")


@dataclass(frozen=True, slots=True)
class Listeners:
    http: socket.socket
    grpc: GrpcServer | None
    """None: switched off."""
    tls: TlsFiles | None
    """None: every listener speaks without TLS."""
    peers: socket.socket | None
    """The listener for the sealed routes alone. None: HTTP serves them."""

    @property
    def http_at(self) -> tuple[str, int]:
        host, port = self.http.getsockname()[:2]
        return host, port

    @property
    def peers_at(self) -> tuple[str, int]:
        """The address that peers are given."""
        host, port = (self.peers or self.http).getsockname()[:2]
        return host, port

    @property
    def url(self) -> str:
        return url_of(self.http, "http" if self.tls is None else "https")


@asynccontextmanager
async def open_listeners(settings: Settings, log: Log) -> AsyncIterator[Listeners]:
    """Binds the addresses of HTTP, gRPC and peers. Raises CannotListen, and SettingsError if gRPC is not installed."""
    tls = await asyncio.to_thread(open_tls, settings.http, now_ms)
    if tls is not None and key_is_exposed(settings.http.tls_key):
        log.warning("tls.key_exposed", file=settings.http.tls_key, why="others can read it", do="chmod 600")
    with bound(settings.http) as http, _bound_for_peers(settings) as peers:
        grpc = _bind_grpc(settings.grpc, tls) if settings.grpc.enabled else None
        if tls is None and not ipaddress.ip_address(settings.http.bind_addr).is_loopback:
            log.warning("http.exposed", bind_addr=settings.http.bind_addr, why="tokens travel in the clear")
        if tls is None and grpc is not None and not ipaddress.ip_address(settings.grpc.bind_addr).is_loopback:
            log.warning("grpc.exposed", bind_addr=settings.grpc.bind_addr, why="tokens travel in the clear")
        try:
            yield Listeners(http, grpc, tls, peers)
        finally:
            if grpc is not None:
                await grpc.stop(0)


@contextmanager
def _bound_for_peers(settings: Settings) -> Iterator[socket.socket | None]:
    if not settings.peers.enabled or not settings.peers.listen:
        yield None
        return
    host, _, port = settings.peers.listen.rpartition(":")
    with _bound_at(host.strip("[]"), int(port), "The listener for peers", "peers.listen") as made:
        yield made


def _bind_grpc(settings: GrpcSettings, tls: TlsFiles | None) -> GrpcServer:
    try:
        from covenant.doors.a2a.grpc import GrpcServer  # noqa: PLC0415  an extra
    except ModuleNotFoundError as missing:
        raise not_installed("grpc.enabled", "grpc", missing.name) from missing
    try:
        return GrpcServer(
            bind_addr=settings.bind_addr,
            port=settings.port,
            message_bytes_max=settings.message_bytes_max,
            calls_max=settings.calls_max,
            tls=tls,
        )
    except OSError as error:
        raise CannotListen(
            f"gRPC cannot listen on {settings.bind_addr} port {settings.port}; stop what uses it, or choose another "
            "with --grpc-port or --grpc-bind-addr"
        ) from error


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def http_bounds(settings: HttpSettings) -> HttpBounds:
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


def make_server(
    door: Door,
    settings: HttpSettings,
    refusal_form: RefusalForm = plain_form,
    tls: ServerTls | None = None,
    new_exchange: NewExchange = HttpExchange,
) -> HttpServer:
    return HttpServer(
        door,
        http_bounds(settings),
        now_ms=now_ms,
        refusal_form=refusal_form,
        exempt_paths=ALIVE_PATHS,
        proxies=settings.trusted_proxies,
        tls=tls,
        new_exchange=new_exchange,
    )
