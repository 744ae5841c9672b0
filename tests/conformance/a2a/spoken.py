"""Every binding that is spoken here, and what several of them are called together."""

from __future__ import annotations

from typing import Final

from tests.conformance.a2a.bindings import Binding
from tests.conformance.a2a.grpc_binding import Grpc
from tests.conformance.a2a.http_bindings import NewRpc, Rest, Rpc, SlashRpc

BINDINGS: Final[dict[str, type[Binding]]] = {"jsonrpc": NewRpc, "slash": SlashRpc, "rest": Rest, "grpc": Grpc}
GROUPS: Final = {
    "all": tuple(BINDINGS),
    "new": tuple(name for name, kind in BINDINGS.items() if not kind.old),
    "rpc": tuple(name for name, kind in BINDINGS.items() if issubclass(kind, Rpc)),
    "http": tuple(name for name, kind in BINDINGS.items() if issubclass(kind, Rpc | Rest)),
}
