"""The A2A dialects that Covenant speaks: 1.0; 0.3 in JSON-RPC (the slash methods); 0.3 as protocol buffers.

0.3 has two forms of the same objects: one in JSON-RPC, another over HTTP+JSON and gRPC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from covenant.model.agent_card import JSONRPC
from covenant.wire.a2a.client_codec import CLIENT_PROTO_V03, CLIENT_V03, CLIENT_V1, ClientCodec
from covenant.wire.a2a.error_codes import Version
from covenant.wire.a2a.request_decoder import (
    RequestDecoder,
    RequestDecoderProtoV03,
    RequestDecoderV03,
    RequestDecoderV1,
)
from covenant.wire.a2a.response_encoder import RESPONSES_PROTO_V03, RESPONSES_V03, RESPONSES_V1, ResponseEncoder


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """One version of A2A on the wire, with the codecs of a server (`requests`, `responses`) and of a client."""

    version: Version
    requests: RequestDecoder
    responses: ResponseEncoder
    client: ClientCodec
    named_events: bool
    """Whether each frame of an SSE stream has an event name."""


V1: Final = Dialect(Version.V1, RequestDecoderV1(), RESPONSES_V1, CLIENT_V1, named_events=False)
V03: Final = Dialect(Version.V03, RequestDecoderV03(), RESPONSES_V03, CLIENT_V03, named_events=True)
PROTO_V03: Final = Dialect(
    Version.V03, RequestDecoderProtoV03(), RESPONSES_PROTO_V03, CLIENT_PROTO_V03, named_events=False
)
BY_VERSION: Final[dict[str, Dialect]] = {dialect.version.value: dialect for dialect in (V1, V03)}


def dialect_of(version: str, binding: str) -> Dialect:
    """The dialect of a card's interface."""
    return PROTO_V03 if version == PROTO_V03.version and binding != JSONRPC else BY_VERSION[version]
