"""What is inside envelopes between instances: bytes to messages and back.

The type stands in the envelope's header and is signed there; the body is the message alone. What does not fit is a
refusal that says where. A tree of delegations is bounded as a whole, and no number is beyond what can be signed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from covenant.model.delegation import (
    TREE_DEPTH_MAX,
    TREE_NODES_MAX,
    Accept,
    Cancel,
    CapabilityQuery,
    CapabilityResponse,
    DelegationResult,
    Message,
    Offer,
    Reject,
    StatusReport,
    SubDelegation,
)
from covenant.model.errors import Invalid
from covenant.model.peer import WHOLE_MAX
from covenant.wire.decoding import decode as decode_json

TYPES: Final[dict[str, type[Message]]] = {
    "delegation_offer": Offer,
    "delegation_accept": Accept,
    "delegation_reject": Reject,
    "delegation_status": StatusReport,
    "delegation_result": DelegationResult,
    "delegation_cancel": Cancel,
    "capability_query": CapabilityQuery,
    "capability_response": CapabilityResponse,
}
REQUESTER_SENDS: Final = frozenset({"delegation_offer", "delegation_cancel", "capability_query"})
PROVIDER_SENDS: Final = frozenset(TYPES) - REQUESTER_SENDS

_TYPE_OF: Final = {kind: name for name, kind in TYPES.items()}
_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    name: msgspec.json.Decoder(kind) for name, kind in TYPES.items()
}
_ENCODER: Final = msgspec.json.Encoder()


def type_of(message: Message) -> str:
    return _TYPE_OF[type(message)]


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(kind: str, body: bytes) -> Message:
    """`kind` is the header's `typ`. Every refusal is an `Invalid`."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise Invalid("type_not_supported", f"no message has the type {kind[:64]!r}")
    message: Message = decode_json(decoder, body)
    if isinstance(message, DelegationResult):
        _check_tree(message.sub_delegations)
    if isinstance(message, Offer | DelegationResult):
        _check_numbers(msgspec.to_builtins(message.parts))
    return message


def _check_tree(roots: tuple[SubDelegation, ...]) -> None:
    level, nodes = list(roots), 0
    for _ in range(TREE_DEPTH_MAX):
        nodes += len(level)
        if nodes > TREE_NODES_MAX:
            raise Invalid("invalid_request", f"more than {TREE_NODES_MAX} sub-delegations")
        level = [inner for outer in level for inner in outer.sub_delegations]
        if not level:
            return
    raise Invalid("invalid_request", f"sub-delegations are nested more than {TREE_DEPTH_MAX} levels deep")


def _check_numbers(value: Any) -> None:
    """Level by level: offers and results are hashed in canonical form, which has no greater whole numbers."""
    level: list[Any] = [value]
    while level:
        below: list[Any] = []
        for each in level:
            if isinstance(each, int) and abs(each) > WHOLE_MAX:
                raise Invalid("invalid_request", "a whole number in parts is beyond 2^53 - 1")
            below.extend(_inside(each))
        level = below


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
