"""A hop (call context) on the wire: in a message's metadata, and in headers beside it, so that no binding loses it.

| member        | metadata               | header                 |                                                  |
|---------------|------------------------|------------------------|--------------------------------------------------|
| `depth`       | `covenant.depth`       | `Covenant-Depth`       | a whole number                                   |
| `chain`       | `covenant.chain`       | `Covenant-Chain`       | a list; in the header percent-encoded, by commas |
| `deadline_ms` | `covenant.deadline_ms` | `Covenant-Deadline-Ms` | epoch milliseconds                               |
| `traceparent`, `tracestate` | the same | the same               | as W3C has them                                  |

Where both are given and differ, the stricter value counts: the greater depth, the longer chain, the earlier deadline.
Of two traces the one in the headers counts.
An unreadable value counts as absent, except that an unreadable depth counts as the greatest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

from covenant.model.task import CHAIN_MAX, CLAIMED_DEPTH_MAX, NAME_CHARS_MAX, Hop

DEPTH: Final = "covenant.depth"
CHAIN: Final = "covenant.chain"
DEADLINE: Final = "covenant.deadline_ms"
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

MEMBERS: Final = frozenset({DEPTH, CHAIN, DEADLINE, TRACEPARENT, TRACESTATE})
"""Metadata keys of a call's hop, which are not part of the message itself."""

DEPTH_HEADER: Final = "covenant-depth"
CHAIN_HEADER: Final = "covenant-chain"
DEADLINE_HEADER: Final = "covenant-deadline-ms"
HEADERS: Final = {
    name.encode(): name for name in (DEPTH_HEADER, CHAIN_HEADER, DEADLINE_HEADER, TRACEPARENT, TRACESTATE)
}
"""Header names by their bytes on the wire."""

_DIGITS_MAX: Final = 18
_TRACE_CHARS_MAX: Final = 512


def call_context_metadata(hop: Hop) -> dict[str, Any]:
    fields = {
        DEPTH: hop.depth,
        CHAIN: list(hop.chain),
        DEADLINE: hop.deadline_ms,
        TRACEPARENT: hop.traceparent,
        TRACESTATE: hop.tracestate,
    }
    return {name: value for name, value in fields.items() if value}


def call_context_headers(hop: Hop) -> dict[str, str]:
    fields = {
        DEPTH_HEADER: str(hop.depth) if hop.depth else None,
        CHAIN_HEADER: ",".join(quote(name, safe="@:/") for name in hop.chain) or None,
        DEADLINE_HEADER: str(hop.deadline_ms) if hop.deadline_ms is not None else None,
        TRACEPARENT: hop.traceparent,
        TRACESTATE: hop.tracestate,
    }
    return {name: value for name, value in fields.items() if value is not None}


def read_call_context(metadata: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Hop:
    """Reads the hop of a call from its metadata and headers. `headers` have lower-case names."""
    fields = metadata or {}
    listed = [unquote(name.strip()) for name in headers.get(CHAIN_HEADER, "").split(",")]
    moments = [
        moment
        for given in (fields.get(DEADLINE), headers.get(DEADLINE_HEADER))
        if (moment := _whole(given)) is not None
    ]
    return Hop(
        depth=max(_depth(fields.get(DEPTH)), _depth(headers.get(DEPTH_HEADER))),
        chain=max(_chain(fields.get(CHAIN)), _chain(listed), key=len),
        deadline_ms=min(moments) if moments else None,
        traceparent=_trace(headers.get(TRACEPARENT)) or _trace(fields.get(TRACEPARENT)),
        tracestate=_trace(headers.get(TRACESTATE)) or _trace(fields.get(TRACESTATE)),
    )


def _whole(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _DIGITS_MAX:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _depth(value: Any) -> int:
    if value is None:
        return 0
    depth = _whole(value)
    return CLAIMED_DEPTH_MAX if depth is None else min(depth, CLAIMED_DEPTH_MAX)


def _chain(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        return ()
    return tuple(name[:NAME_CHARS_MAX] for name in value[-CHAIN_MAX:] if isinstance(name, str) and name)


def _trace(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= _TRACE_CHARS_MAX and value.isprintable() else None
