"""The gRPC port of a daemon, where it is switched on: its own gate to the same office, and its place in every card."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from covenant.daemon.cards import publishing_of
from covenant.daemon.listening import CannotListen
from covenant.daemon.settings import Settings
from covenant.doors.a2a.admission import Admission
from covenant.doors.a2a.operations import A2AServices
from covenant.doors.http.request_body import AnonymousPool
from covenant.exchange.cards import Cards
from covenant.model.errors import SettingsError

if TYPE_CHECKING:
    from covenant.doors.a2a.grpc import GrpcServer


def open_grpc(settings: Settings, gate: Admission, office: A2AServices, cards: Cards) -> GrpcServer | None:
    """Bound, and not started; None if it is switched off. From here on cards name its port."""
    chosen = settings.grpc
    if not chosen.enabled:
        return None
    try:
        from covenant.doors.a2a.grpc import GrpcCalls, GrpcServer, GrpcTenants  # noqa: PLC0415  an extra
    except ModuleNotFoundError as missing:
        raise SettingsError(
            f"grpc.enabled needs the package {missing.name}, which is not installed: pip install 'covenant[grpc]'"
        ) from missing
    # Who is on this machine is a matter of where this port listens, not of where HTTP does.
    publishing = publishing_of(settings)._replace(bind_addr=chosen.bind_addr)
    tenants = GrpcTenants(gate.tenants.tenancy, gate.tenants.limiter)
    # A pool of its own: over gRPC nobody says how long a message is, so that each takes room for the longest.
    pool = AnonymousPool(bytes_max=settings.http.stranger_bytes_max, body_ms=settings.http.stranger_body_ms)
    calls = GrpcCalls(
        replace(gate, tenants=tenants, admits=publishing.admits),
        office,
        pool,
        message_bytes_max=chosen.message_bytes_max,
        published=settings.a2a.publish,
    )
    try:
        server = GrpcServer(
            calls,
            bind_addr=chosen.bind_addr,
            port=chosen.port,
            calls_max=chosen.calls_max,
        )
    except OSError as error:
        raise CannotListen(
            f"gRPC cannot listen on {chosen.bind_addr} port {chosen.port}; stop what uses it, or choose another with "
            "--grpc-port or --grpc-bind-addr"
        ) from error
    cards.offer = msgspec.structs.replace(cards.offer, grpc_port=server.port)
    return server
