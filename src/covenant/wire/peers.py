"""Messages between peer instances: the nine delegation messages, the introduction (our name and keys) and the poll.

The envelope's signed header has the message's type; the body is the message alone. The size of a delegation tree is
bounded. A poll is sealed like any message; its answer is a list of envelopes, each sealed to the peer that polls.
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
    STATUS_TREE_MAX,
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
from covenant.model.peers.instance import (
    CHANGES_MAX,
    WHOLE_MAX,
    IdentityChange,
    KeyBundle,
    KeyCertificate,
    KeyRevocation,
    Prekey,
)
from covenant.wire.json_input import decode as decode_json
from covenant.wire.json_input import members
from covenant.wire.mailbox import StrictRequest

SEALED_DELEGATION: Final = "urn:covenant:sealed-delegation:v1"
"""The URI of the A2A extension for these messages."""
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

_TYPE_OF: Final = {kind: name for name, kind in TYPES.items()}
_DECODERS: Final[dict[str, msgspec.json.Decoder[Any]]] = {
    name: msgspec.json.Decoder(kind) for name, kind in TYPES.items()
}
_ENCODER: Final = msgspec.json.Encoder()
POLL: Final = "poll"
ACKS: Final = "delivery_acks"
RELAY_PATH: Final = "/relay"
"""A relay serves the paths of each instance that it keeps envelopes for below this path and the instance's id."""
WAIT_MS_MAX: Final = 30_000
ENVELOPES_MAX: Final = 50
ACKS_MAX: Final = 1_000


def type_of(message: DelegationMessage) -> str:
    return _TYPE_OF[type(message)]


def encode(message: msgspec.Struct) -> bytes:
    return _ENCODER.encode(message)


def decode(kind: str, body: bytes) -> DelegationMessage:
    """Decodes a message; `kind` is the header's `typ`. Every refusal is an `Invalid`."""
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise Invalid("type_not_supported", f"no message has the type {kind[:64]!r}")
    message: DelegationMessage = decode_json(decoder, body)
    if isinstance(message, DelegationResult):
        _check_tree(message.sub_delegations, TREE_NODES_MAX)
    elif isinstance(message, StatusReport):
        _check_tree(message.sub_delegations or (), STATUS_TREE_MAX)
    if isinstance(message, DelegationOffer | DelegationResult | StatusReport | DelegationInput):
        _check_numbers(msgspec.to_builtins(message.parts))
    return message


def _check_tree(roots: tuple[SubDelegation, ...], most: int) -> None:
    level, nodes = list(roots), 0
    for _ in range(TREE_DEPTH_MAX):
        nodes += len(level)
        if nodes > most:
            raise Invalid("invalid_request", f"more than {most} sub-delegations")
        level = [inner for outer in level for inner in outer.sub_delegations]
        if not level:
            return
    raise Invalid("invalid_request", f"sub-delegations are nested more than {TREE_DEPTH_MAX} levels deep")


def _check_numbers(value: Any) -> None:
    """Refuses whole numbers that canonical JSON, which is hashed, cannot hold. Works level by level."""
    level: list[Any] = [value]
    while level:
        below: list[Any] = []
        for each in level:
            if isinstance(each, int) and abs(each) > WHOLE_MAX:
                raise Invalid("invalid_request", "a whole number in parts is beyond 2^53 - 1")
            below.extend(members(each))
        level = below


class Introduction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """An instance's name, present keys and former identities. Everything but the name is signed."""

    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    keys: KeyBundle
    changes: Annotated[tuple[IdentityChange, ...], msgspec.Meta(max_length=CHANGES_MAX)] = ()
    """The instance's identity changes, newest last."""
    revocations: Annotated[tuple[KeyRevocation, ...], msgspec.Meta(max_length=CHANGES_MAX)] = ()
    """Revoked keys, each revoked by itself."""
    hybrid_prekey: Prekey | None = None
    """Outside the bundle: earlier releases must read the bundle, which refuses unknown fields."""


class Ack(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel"):
    """All messages about this offer up to number `seq` were received. `role` is the role of their sender."""

    role: DelegationRole
    offer_id: Uuid
    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]


EnvelopeName = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class RelayFetch(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The part of a poll for a relay: the client's introduction, for others that ask, and the envelopes that it has
    received.
    """

    introduction: Introduction
    taken: Annotated[tuple[EnvelopeName, ...], msgspec.Meta(max_length=ACKS_MAX)] = ()


class RelayedEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """An envelope of another sender, unchanged. `id`: the relay's id for it."""

    id: EnvelopeName
    envelope: msgspec.Raw


class Relayed(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The relay keeps an envelope until this time, and the recipient has not fetched it yet."""

    status: Literal["relayed"]
    until_ms: int
    duplicate: bool = False


class DeliveryAcks(msgspec.Struct, frozen=True, kw_only=True):
    """Acknowledges messages that came through a relay."""

    acks: Annotated[tuple[Ack, ...], msgspec.Meta(min_length=1, max_length=ACKS_MAX)]


class Poll(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    keys: KeyBundle
    """The keys of the peer that polls: its messages are sealed to these, or to its hybrid prekey."""
    hybrid_prekey: Prekey | None = None
    acks: Annotated[tuple[Ack, ...], msgspec.Meta(max_length=ACKS_MAX)] = ()
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)] = 0
    max: Annotated[int, msgspec.Meta(ge=1, le=ENVELOPES_MAX)] = ENVELOPES_MAX
    relay: RelayFetch | None = None
    """If a relay is polled: also fetches the envelopes that it keeps."""


class Polled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The envelopes in the order in which they must be received. `relayed`: those of other senders."""

    envelopes: tuple[msgspec.Raw, ...]
    relayed: tuple[RelayedEnvelope, ...] = ()


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """An envelope was received. `envelope`: the sealed answer to a query, if it is ready at once.

    `status` has no default, so that another server's `{}` is not mistaken for this answer.
    """

    status: Literal["accepted"]
    duplicate: bool = False
    receipt: str = ""
    """The recipient's signature over the envelope as it was received."""
    certificate: KeyCertificate | msgspec.UnsetType = msgspec.UNSET
    """The certificate of the key that signed the receipt, if that is not the identity key."""
    envelope: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class EnvelopeRefusal(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An envelope was refused. `expected`: the number of the missing message, if it came out of order."""

    error: str = ""
    code: str = ""
    expected: int | None = None
    retry_after_seconds: int | None = None


class OutOfOrder(Conflict):
    """An earlier message is missing. The sender must send from the missing one on, in order."""

    def __init__(self, expected: int) -> None:
        super().__init__("out_of_order", f"number {expected} is missing; send the messages in order")
        self.expected = expected


decode_poll: Final = partial(decode_json, msgspec.json.Decoder(Poll))
decode_polled: Final = partial(decode_json, msgspec.json.Decoder(Polled))
decode_acks: Final = partial(decode_json, msgspec.json.Decoder(DeliveryAcks))
decode_relayed: Final = partial(decode_json, msgspec.json.Decoder(Relayed))
decode_received: Final = partial(decode_json, msgspec.json.Decoder(Received))
decode_refused: Final = partial(decode_json, msgspec.json.Decoder(EnvelopeRefusal))
decode_introduction: Final = partial(decode_json, msgspec.json.Decoder(Introduction))


NameOrId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class DelegateRequest(StrictRequest, frozen=True, kw_only=True, rename="camel"):
    task: Annotated[str, msgspec.Meta(min_length=1, max_length=TASK_CHARS_MAX)]
    profile: NameOrId | None = None
    peer_id: NameOrId | None = None
    context: Annotated[str, msgspec.Meta(max_length=CONTEXT_CHARS_MAX)] | None = None
    max_token_budget: Annotated[int, msgspec.Meta(ge=1, le=BUDGET_MAX)] | None = None
    timeout: Annotated[int, msgspec.Meta(ge=1, le=TIMEOUT_MS_MAX)] | None = None
    id: Annotated[str, msgspec.Meta(max_length=36)] | None = None
    """The id of the local task. A repeated request under this id is the same delegation."""
