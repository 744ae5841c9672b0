"""Every bound of the HTTP layer, in one table. `docs/operating.md` has the same table for operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBounds:
    """The most memory and time that one connection may cost the server."""

    head_bytes_max: int = 64 * KIB
    """The request line and the headers (431 above)."""
    headers_max: int = 256
    """Headers of a request (431 above): a short header costs far more memory than its bytes."""
    head_s_max: float = 10.0
    """From the connection's opening, or from the first byte of a later head, until the head is complete (408)."""
    body_idle_s_max: float = 30.0
    """Between two pieces of a body (408)."""
    body_s_max: float = 300.0
    """From the head until the body is complete (408)."""
    body_bytes_max: int = 8 * MIB
    """A whole body (413). Some doors take less."""
    body_kept_bytes_max: int = 64 * KIB
    """Bytes of a body that its door has not read yet: above this, the connection is not read."""
    body_discarded_bytes_max: int = 64 * MIB
    """Bytes of a body that is refused, or whose request is answered already: above this, the connection is closed."""
    trailer_bytes_max: int = 8 * KIB
    """Trailers after the last chunk of a body, or bytes between two chunks without any data (431)."""
    pipelined_max: int = 16
    """Requests that wait behind the running one: with so many, the connection is not read."""
    pipelined_bytes_max: int = 128 * KIB
    """Bytes of those requests: above this, the connection is not read."""
    keep_alive_s_max: float = 75.0
    """From an answer until the next request begins; then the connection is closed."""
    backlog: int = 2_048
    """Connections that wait to be accepted; the system refuses more."""
    connections_max: int = 4_096
    """Connections in total. For another one, the connection that was silent longest is closed."""
    connections_per_address_max: int = 1_024
    """Connections of one IPv4 address, or of one IPv6 network of 64 bits."""
    connections_reserved_max: int = 64
    """Connections above the two bounds before. They are answered 503, except requests for health."""
    handshakes_max: int = 1_024
    """Running TLS handshakes: above this, the oldest is aborted. A handshake may take as long as a head."""
    handshakes_per_address_max: int = 256
    """The same for one address."""
    response_bytes_max: int = 64 * KIB
    """Bytes written and not sent yet: above this, a stream waits, and so does the next answer."""
    unsent_bytes_max: int = 256 * MIB
    """Unread answers of all connections together: above this, the connection whose client has read nothing for longest
    is aborted."""
    unsent_bytes_per_address_max: int = 64 * MIB
    """The same for one address; a proxy has no bound of its own."""
    unread_s_max: float = 30.0
    """How long a client may read nothing of an answer; then the connection is aborted."""
    unread_stream_s_max: float = 600.0
    """The same, for a stream of events."""
    linger_s_max: float = 2.0
    """From the refusal of a malformed request until the connection is closed: a client that still sends can read it."""
    linger_bytes_max: int = 1 * MIB
    """Bytes that such a client may still send."""


DEFAULTS: Final = HttpBounds()
