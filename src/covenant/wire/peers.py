"""Messages between peer instances: the eight delegation messages, the introduction (our name and keys) and the poll.

The type stands in the envelope's signed header; the body is the message alone. A tree of delegations is bounded as a
whole. A poll is sealed like any message; its answer is a list of envelopes, each sealed to the one who asks.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec

from covenant.model.errors import Conflict, Invalid
from covenant.model.peers.delegation import DelegationRole
from covenant.model.peers.delegation_messages import (
    BUDGET_MAX,
    CONTEXT_CHARS_MAX,
    TASK_CHARS_MAX,
    TIMEOUT_MS_MAX,
    TREE_DEPTH_MAX,
    TREE_NODES_MAX,
    CapabilityQuery,
    CapabilityResponse,
    DelegationAccept,
    DelegationCancel,
    DelegationInput,
    DelegationMessage,
    DelegationOffer,
    DelegationReject,
    DelegationResult,
    StatusReport,
    SubDelegation,
    Uuid,
)
from covenant.model.peers.instance import CHANGES_MAX, WHOLE_MAX, IdentityChange, KeyBundle, KeyRevocation, Prekey
from covenant.wire.json_input import decode as decode_json
from covenant.wire.json_input import members
from covenant.wire.mailbox import StrictRequest

SEALED_DELEGATION: Final = "urn:covenant:sealed-delegation:v1"
"""The URI of the A2A extension that these messages are."""
IDENTITY_PATH: Final = "/api/v1/a2a/identity"
RECEIVE_PATH: Final = "/api/v1/a2a/receive"
POLL_PATH: Final = "/api/v1/a2a/poll"
TYPES: Final[dict[str, type[DelegationMessage]]] = {
    "delegation_offer": DelegationOffer,
    "delegation_accept": DelegationAccept,
    "delegation_reject": DelegationReject,
    "delegation_status": StatusReport,
    "delegation_result": DelegationResult,
    "delegation_cancel": DelegationCancel,
    "delegation_input": DelegationInput,
    "capability_query": CapabilityQuery,
    "capability_response": CapabilityResponse,
}
REQUESTER_SENDS: Final = frozenset({"delegation_offer", "delegation_cancel", "delegation_input", "capability_query"})
PROVIDER_SENDS: Final = frozenset(TYPES) - REQUESTER_SENDS

_TYPE_OF: Final = {kind: name for name, kind in TYPES.items()}
_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    name: msgspec.json.Decoder(kind) for name, kind in TYPES.items()
}
_ENCODER: Final = msgspec.json.Encoder()


def type_of(message: DelegationMessage) -> str:
    return _TYPE_OF[type(message)]


def encode(message: msgspec.Struct) -> bytes:
    return _ENCODER.encode(message)


def decode(kind: str, body: bytes) -> DelegationMessage:
    """`kind` is the header's `typ`. Every refusal is an `Invalid`."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise Invalid("type_not_supported", f"no message has the type {kind[:64]!r}")
    message: DelegationMessage = decode_json(decoder, body)
    if isinstance(message, DelegationResult):
        _check_tree(message.sub_delegations)
    if isinstance(message, DelegationOffer | DelegationResult | StatusReport | DelegationInput):
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
            below.extend(members(each))
        level = below


POLL: Final = "poll"
WAIT_MS_MAX: Final = 30_000
ENVELOPES_MAX: Final = 50
ACKS_MAX: Final = 1_000


class Introduction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Who an instance is, and who it was before. All but the name proves itself."""

    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    keys: KeyBundle
    changes: Annotated[tuple[IdentityChange, ...], msgspec.Meta(max_length=CHANGES_MAX)] = ()
    """How it came to have its key, the newest change last."""
    revocations: Annotated[tuple[KeyRevocation, ...], msgspec.Meta(max_length=CHANGES_MAX)] = ()
    """Keys that are dead, each by its own word."""
    hybrid_prekey: Prekey | None = None
    """Beside the bundle, which is closed, and which earlier releases must be able to read."""


class Ack(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel"):
    """All that was said of this offer through this number has been taken in. `role` is that of who said it."""

    role: DelegationRole
    offer_id: Uuid
    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]


class Poll(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    keys: KeyBundle
    """Of the one who asks: what there is for it is sealed to these, or to the hybrid prekey."""
    hybrid_prekey: Prekey | None = None
    acks: Annotated[tuple[Ack, ...], msgspec.Meta(max_length=ACKS_MAX)] = ()
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)] = 0
    max: Annotated[int, msgspec.Meta(ge=1, le=ENVELOPES_MAX)] = ENVELOPES_MAX


class Polled(msgspec.Struct, frozen=True, kw_only=True):
    """The envelopes as they are, in the order in which they are to be taken in."""

    envelopes: tuple[msgspec.Raw, ...]


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """An envelope was taken in. `envelope`: the answer to a question, sealed, where it is given at once.

    `status` has no default: somebody else's `{}` must not be taken for it.
    """

    status: Literal["accepted"]
    duplicate: bool = False
    receipt: str = ""
    """Under the recipient's signature, over the envelope as it came."""
    envelope: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class EnvelopeRefusal(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An envelope was not taken in. `expected`: the number that is missing before it, if it came out of order."""

    error: str = ""
    code: str = ""
    expected: int | None = None
    retry_after_seconds: int | None = None


class OutOfOrder(Conflict):
    """What was said before this has not come here. Sent again in its order, it is taken in."""

    def __init__(self, expected: int) -> None:
        super().__init__("out_of_order", f"number {expected} is missing; send what was said in its order")
        self.expected = expected


decode_poll: Final = partial(decode_json, msgspec.json.Decoder(Poll))
decode_polled: Final = partial(decode_json, msgspec.json.Decoder(Polled))
decode_received: Final = partial(decode_json, msgspec.json.Decoder(Received))
decode_refused: Final = partial(decode_json, msgspec.json.Decoder(EnvelopeRefusal))
decode_introduction: Final = partial(decode_json, msgspec.json.Decoder(Introduction))


Named = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class DelegateRequest(StrictRequest, frozen=True, kw_only=True, rename="camel"):
    task: Annotated[str, msgspec.Meta(min_length=1, max_length=TASK_CHARS_MAX)]
    profile: Named | None = None
    peer_id: Named | None = None
    context: Annotated[str, msgspec.Meta(max_length=CONTEXT_CHARS_MAX)] | None = None
    max_token_budget: Annotated[int, msgspec.Meta(ge=1, le=BUDGET_MAX)] | None = None
    timeout: Annotated[int, msgspec.Meta(ge=1, le=TIMEOUT_MS_MAX)] | None = None
    id: Annotated[str, msgspec.Meta(max_length=36)] | None = None
    """Of the task that it becomes here: the same request again under this id is the same delegation."""
