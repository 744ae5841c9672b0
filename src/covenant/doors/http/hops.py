"""What a caller says of the calls before this one, in headers: for doors whose bodies have no place for it."""

from __future__ import annotations

from typing import Final

from starlette.types import Scope

from covenant.model.call_context import Hop
from covenant.wire.call_headers import (
    CHAIN_HEADER,
    DEADLINE_HEADER,
    DEPTH_HEADER,
    TRACEPARENT,
    TRACESTATE,
    read_call_context,
)

_NAMES: Final = {name.encode(): name for name in (DEPTH_HEADER, CHAIN_HEADER, DEADLINE_HEADER, TRACEPARENT, TRACESTATE)}


def hop_in(scope: Scope) -> Hop | None:
    """None if nothing is said."""
    said = {_NAMES[name]: value.decode("latin-1") for name, value in scope["headers"] if name in _NAMES}
    return read_call_context(None, said) if said else None
