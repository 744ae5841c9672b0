"""Every answer of the mailbox, by `kind`: one shape over HTTP and the local socket.

Fields without a default are always there, `null` included; the others are left out when they say nothing. Tasks and
results leave out what is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from covenant.model.errors import Invalid, Refusal
from covenant.wire.ipc_frames import FRAME_BYTES_MAX

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


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


encode: Final[Callable[[Any], bytes]] = msgspec.json.Encoder().encode

# The tag comes first, so the older spelling is a matter of the first bytes.
_KIND: Final = b'{"kind":"a2a_'
_LEGACY_KIND: Final = b'{"kind":"a2_a_'


def encode_legacy(answer: ApiAnswer) -> bytes:
    """`a2_a_…` instead of `a2a_…`, for clients of the protocol's first implementation."""
    body = encode(answer)
    return _LEGACY_KIND + body[len(_KIND) :] if body.startswith(_KIND) else body


def error_of(refusal: Refusal) -> ErrorAnswer:
    return ErrorAnswer(code=refusal.code, message=refusal.message, retry_after_ms=refusal.retry_after_ms)


INTERNAL_ERROR: Final = ErrorAnswer(code="internal", message="internal error")


def fill(answer: type[S], source: object, /, **given: Any) -> S:
    """An answer whose fields are the attributes of `source` by the same name, except those that are given."""
    names = answer.__struct_fields__
    return answer(
        **{name: getattr(source, name) for name in names if name not in given and hasattr(source, name)}, **given
    )


def page_limit(asked: int | None, default: int, most: int | None = None) -> int:
    limit = default if asked is None else asked
    if most is not None and not 1 <= limit <= most:
        raise Invalid("invalid_limit", f"limit must be between 1 and {most}")
    return limit


# The rest of the frame is for what stands around the page.
PAGE_BYTES_MAX: Final = FRAME_BYTES_MAX - 64 * 1024


def fit(items: Sequence[T], bytes_max: int = PAGE_BYTES_MAX) -> tuple[T, ...]:
    """As many of the first items as fit."""
    size = 0
    for index, item in enumerate(items):
        size += len(encode(item)) + 1
        if size > bytes_max:
            return tuple(items[:index])
    return tuple(items)


def size_of(items: Sequence[object]) -> int:
    return sum(len(encode(item)) + 1 for item in items)
