"""Every answer of the mailbox, by `kind`: one shape over HTTP and the local socket.

Fields without a default are always there, `null` included; the others are left out when they say nothing. Tasks and
results leave out what is absent.
"""

from __future__ import annotations

from typing import Final

import msgspec

from covenant.model.errors import Refusal


class ApiAnswer(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="kind", omit_defaults=True):
    """The root of everything a caller may be told."""


class ErrorAnswer(ApiAnswer, frozen=True, kw_only=True, tag="error"):
    code: str
    message: str
    retry_after_ms: int | None = None


class ProtocolVersions(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    protocol: str = "covenant.ipc"
    version: int = 1
    min_supported: int = 1
    max_supported: int = 1


class ProtocolInfo(ApiAnswer, frozen=True, kw_only=True, tag="protocol_info"):
    info: ProtocolVersions
    server: str


class Authenticated(ApiAnswer, frozen=True, kw_only=True, tag="authenticated"):
    display: str


class AuthenticationFailed(ApiAnswer, frozen=True, kw_only=True, tag="authentication_failed"):
    reason: str


class Pong(ApiAnswer, frozen=True, kw_only=True, tag="pong"):
    pass


_encode = msgspec.json.Encoder().encode

# The tag comes first, so the older spelling is a matter of the first bytes.
_KIND: Final = b'{"kind":"a2a_'
_LEGACY_KIND: Final = b'{"kind":"a2_a_'


def encode(answer: ApiAnswer) -> bytes:
    return _encode(answer)


def encode_legacy(answer: ApiAnswer) -> bytes:
    """`a2_a_…` instead of `a2a_…`, for clients of the protocol's first implementation."""
    body = _encode(answer)
    return _LEGACY_KIND + body[len(_KIND) :] if body.startswith(_KIND) else body


def error_of(refusal: Refusal) -> ErrorAnswer:
    return ErrorAnswer(code=refusal.code, message=refusal.message, retry_after_ms=refusal.retry_after_ms)


INTERNAL_ERROR: Final = ErrorAnswer(code="internal", message="internal error")
