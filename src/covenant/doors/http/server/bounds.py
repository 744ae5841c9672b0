"""Every bound of the HTTP layer, in one table. `docs/operating.md` has the same table for operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBounds:
    """What one connection may make the server keep, and how long it may make the server wait."""

    head_bytes_max: int = 64 * KIB
    """The request line and the headers (431 above)."""
    headers_max: int = 256
    """Headers of a request (431 above): a short one costs far more memory than its bytes."""
    head_s_max: float = 10.0
    """From the connection's opening, or from the first byte of a later head, until the head is complete (408)."""
    body_idle_s_max: float = 30.0
    """Between two pieces of a body (408)."""
    body_s_max: float = 300.0
    """From the head until the body is complete (408)."""
    body_bytes_max: int = 8 * MIB
    """A whole body (413). Some doors take less."""
    body_kept_bytes_max: int = 64 * KIB
    """Of a body that its door has not read yet: above this, the connection is not read."""
    body_discarded_bytes_max: int = 64 * MIB
    """Of a body that is refused, or whose request is answered already: above this, the connection is closed."""
    trailer_bytes_max: int = 8 * KIB
    """After the last chunk of a body, or between two chunks without any data (431)."""
    pipelined_max: int = 16
    """Requests that wait behind the one that is being answered: with so many, the connection is not read."""
    pipelined_bytes_max: int = 128 * KIB
    """Bytes of those requests: above this, the connection is not read."""
    keep_alive_s_max: float = 75.0
    """From an answer until the next request begins; then the connection is closed."""
    backlog: int = 2_048
    """Connections that wait to be accepted; the system refuses more."""
    connections_max: int = 4_096
    """Connections in all. For another one, the connection that was silent for the longest time is closed."""
    connections_per_address_max: int = 1_024
    """Connections of one IPv4 address, or of one IPv6 network of 64 bits."""
    connections_reserved_max: int = 64
    """Connections above the two bounds before. They are answered 503, except where health is asked for."""
    handshakes_max: int = 1_024
    """Connections whose TLS handshake is under way: of more, the oldest is cut off. It takes as long as a head may."""
    handshakes_per_address_max: int = 256
    """The same of one address."""
    response_bytes_max: int = 64 * KIB
    """Written and not sent yet: above this, a stream waits, and so does the next answer."""
    unsent_bytes_max: int = 256 * MIB
    """Answers that their clients do not read, of all connections together: above this, the connection whose client has
    read nothing for the longest time is cut off."""
    unsent_bytes_per_address_max: int = 64 * MIB
    """The same of one address; a proxy has no bound of its own."""
    unread_s_max: float = 30.0
    """Without any progress of an answer that its client does not read; then the connection is cut off."""
    unread_stream_s_max: float = 600.0
    """The same, for a stream of events."""
    linger_s_max: float = 2.0
    """From the refusal of a malformed request until the connection is closed: a client that still sends can read it."""
    linger_bytes_max: int = 1 * MIB
    """What such a client may still send."""


DEFAULTS: Final = HttpBounds()
