"""What two instances say besides the eight messages: our name and keys, to anybody; and the sealed poll.

A poll is sealed like any message, under the type `poll`. Its answer is a list of envelopes, each sealed to the one who
asks: whoever looks on learns how many there are and how large, and nothing else.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from covenant.model.delegating import Role
from covenant.model.delegation import Uuid
from covenant.model.errors import Conflict
from covenant.model.peer import KeyBundle
from covenant.wire.decoding import decode as decode_json

POLL: Final = "poll"
WAIT_MS_MAX: Final = 30_000
ENVELOPES_MAX: Final = 50
ACKS_MAX: Final = 1_000


class Introduction(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Who we are, to anybody who asks."""

    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    keys: KeyBundle


class Ack(msgspec.Struct, frozen=True, gc=False, kw_only=True, rename="camel"):
    """All that was said of this offer through this number has been taken in. `role` is that of who said it."""

    role: Role
    offer_id: Uuid
    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]


class Poll(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    keys: KeyBundle
    """Of the one who asks: what there is for it is sealed to these."""
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


class Refused(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
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


_POLL: Final = msgspec.json.Decoder(Poll)
_POLLED: Final = msgspec.json.Decoder(Polled)
_RECEIVED: Final = msgspec.json.Decoder(Received)
_REFUSED: Final = msgspec.json.Decoder(Refused)
_INTRODUCTION: Final = msgspec.json.Decoder(Introduction)


def decode_poll(body: bytes) -> Poll:
    poll: Poll = decode_json(_POLL, body)
    return poll


def decode_polled(body: bytes) -> Polled:
    polled: Polled = decode_json(_POLLED, body)
    return polled


def decode_received(body: bytes) -> Received:
    received: Received = decode_json(_RECEIVED, body)
    return received


def decode_refused(body: bytes) -> Refused:
    refused: Refused = decode_json(_REFUSED, body)
    return refused


def decode_introduction(body: bytes) -> Introduction:
    introduction: Introduction = decode_json(_INTRODUCTION, body)
    return introduction


def encode(message: Any) -> bytes:
    return msgspec.json.encode(message)
