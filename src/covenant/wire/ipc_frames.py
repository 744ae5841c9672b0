"""Frames of the local socket: four bytes of length, most significant first, then JSON.

A frame is a request with its `kind` beside its fields. Four requests come wrapped in a field of their own, as the
protocol has always had them: `task`, `result`, `request` and `policy`.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from covenant.wire.mailbox import PostResult, RepairTask, Request, RetryStaleRequest, SendTask

FRAME_BYTES_MAX: Final = 8 * 1024 * 1024
HEADER_BYTES: Final = 4

_LENGTH = struct.Struct(">I")


def frame_length(header: bytes | bytearray) -> int:
    """The length announced by the first four bytes."""
    length: int = _LENGTH.unpack_from(header)[0]
    return length


def encode_frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def canonical_kind(kind: str) -> str:
    """One spelling for all: `send_a2a_task`, `send_a2_a_task` and `SendA2ATask` are the same kind."""
    return kind.replace("_", "").lower()


class FrameHeader(msgspec.Struct, frozen=True, gc=False):
    """What is read of every frame before its kind is known."""

    kind: str
    token_b58: str | None = None


class WrappedTask(msgspec.Struct, frozen=True):
    task: SendTask

    def request(self) -> Request:
        return self.task


class WrappedResult(msgspec.Struct, frozen=True):
    """`lease_id` may stand in the result or beside it."""

    result: PostResult
    lease_id: str | None = None

    def request(self) -> Request:
        if self.lease_id is None:
            return self.result
        return msgspec.structs.replace(self.result, lease_id=self.lease_id)


class WrappedRepair(msgspec.Struct, frozen=True):
    # Named by the protocol; the method below would hide it under the same name.
    repair: RepairTask = msgspec.field(name="request")

    def request(self) -> Request:
        return self.repair


class WrappedPolicy(msgspec.Struct, frozen=True):
    policy: RetryStaleRequest | None = None

    def request(self) -> Request:
        return self.policy if self.policy is not None else RetryStaleRequest()


Wrapped = WrappedTask | WrappedResult | WrappedRepair | WrappedPolicy
