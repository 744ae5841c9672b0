"""The JSON-RPC envelope: the method is read first, `params` later and once, by the type that the method asks for.

`id` may be a string, a number, null or missing; it is echoed as it was written, and a missing one as null. Whatever
cannot be read as one request (malformed JSON, a batch, another version of JSON-RPC) is refused as `Unreadable`, which
carries the id wherever there was one to be read.
"""

from __future__ import annotations

from typing import Final

import msgspec

from covenant.model.errors import Invalid
from covenant.wire.a2a_errors import PARSE_ERROR, Dialect, Error, rpc_error

NULL: Final = b"null"
ID_BYTES_MAX: Final = 1024
"""An id comes back with every frame of a stream."""

_NO_PARAMS: Final = b"{}"
_ID_BEGINS: Final = frozenset(b'"-0123456789')


class Call(msgspec.Struct, frozen=True, gc=False):
    """`id` and `params` are JSON, as they came."""

    id: bytes
    method: str
    params: bytes


class Unreadable(Invalid):
    """No call could be made of it. `id` is what to echo."""

    def __init__(self, code: str, message: str, call_id: bytes = NULL) -> None:
        super().__init__(code, message)
        self.id = call_id


class _Envelope(msgspec.Struct, frozen=True, gc=False):
    jsonrpc: str
    method: str
    id: msgspec.Raw = msgspec.Raw(NULL)
    params: msgspec.Raw = msgspec.Raw(_NO_PARAMS)


class _Loose(msgspec.Struct, frozen=True, gc=False):
    """What is looked at of an envelope that does not fit: its id, and then what is wrong with it."""

    jsonrpc: msgspec.Raw = msgspec.Raw(b"")
    method: msgspec.Raw = msgspec.Raw(b"")
    id: msgspec.Raw = msgspec.Raw(NULL)


_strict = msgspec.json.Decoder(_Envelope).decode
_loose = msgspec.json.Decoder(_Loose).decode


def decode(body: bytes) -> Call:
    try:
        # What is kept raw is not looked into by the decoder: without this, an id could be anything but text.
        if not body.isascii():
            body.decode()
        envelope = _strict(body)
    except msgspec.ValidationError:
        raise _misfit(body) from None
    except (ValueError, RecursionError) as wrong:
        raise _unreadable(wrong) from None
    call_id = _echo(envelope.id)
    if envelope.jsonrpc != "2.0":
        raise Unreadable("invalid_envelope", 'jsonrpc must be the string "2.0"', call_id)
    params = bytes(envelope.params)
    return Call(call_id, envelope.method, params if params != NULL else _NO_PARAMS)


def _unreadable(wrong: ValueError | RecursionError) -> Unreadable:
    if isinstance(wrong, RecursionError):
        return Unreadable("invalid_json", "the request is nested too deeply")
    return Unreadable("invalid_json", f"the request is not JSON: {wrong}")


def _misfit(body: bytes) -> Unreadable:
    try:
        loose = _loose(body)
    except msgspec.ValidationError:
        return Unreadable("invalid_envelope", "the request must be one JSON object; batches are not taken")
    except (ValueError, RecursionError) as wrong:
        # What is wrong with its shape was seen before the rest was read.
        return _unreadable(wrong)
    try:
        call_id = _echo(loose.id)
    except Unreadable as wrong:
        return wrong
    if bytes(loose.jsonrpc) != b'"2.0"':
        return Unreadable("invalid_envelope", 'jsonrpc must be the string "2.0"', call_id)
    return Unreadable("invalid_envelope", "method must be a string", call_id)


def _echo(given: msgspec.Raw) -> bytes:
    call_id = bytes(given)
    if call_id[0] not in _ID_BEGINS and call_id != NULL:
        raise Unreadable("invalid_envelope", "id must be a string, a number or null")
    if len(call_id) > ID_BYTES_MAX:
        raise Unreadable("invalid_envelope", f"id may be at most {ID_BYTES_MAX} bytes long")
    return call_id


def unknown_method(method: str) -> Invalid:
    return Invalid("unknown_method", f"unknown method: {method[:100]}")


def result(call_id: bytes, encoded: bytes) -> bytes:
    """A response around a result that is JSON already."""
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (call_id, encoded)


def around(call_id: bytes) -> tuple[bytes, bytes]:
    """What stands before and after each result of a stream."""
    return b'{"jsonrpc":"2.0","id":%b,"result":' % call_id, b"}"


_encode = msgspec.json.Encoder().encode


def error(call_id: bytes, error: Error) -> bytes:
    """A request that could not be parsed has no id, whatever was guessed of it."""
    known = NULL if error.code == PARSE_ERROR else call_id
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (known, _encode(error))


def refused(call_id: bytes, refusal: BaseException, dialect: Dialect) -> bytes:
    return error(call_id, rpc_error(refusal, dialect))
