"""JSON-RPC 2.0: decodes calls and encodes answers for a server, encodes requests and decodes answers for a client.

A call's method is read first; `params` are decoded later and once, by the method's type. `id` may be a string, a
number, null or missing; it is echoed as it was written, and a missing one as null. Input that is not one request
(malformed JSON, a batch, another version of JSON-RPC) is refused as `UnreadableCall`, which carries the id if it could
be read. An answer that is no JSON-RPC response is a `BadResponse`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.model.errors import CovenantError, Invalid
from covenant.wire.a2a.error_codes import PARSE_ERROR, ErrorObject, Version, rpc_error

NULL: Final = b"null"
ID_BYTES_MAX: Final = 1024
"""Every frame of a stream repeats the id, so it is bounded."""

_NO_PARAMS: Final = b"{}"
_ID_BEGINS: Final = frozenset(b'"-0123456789')
_encode = msgspec.json.Encoder().encode
_TEXT_MAX: Final = 500


class JsonRpcRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A call as clients write it."""

    jsonrpc: str
    method: str
    id: str | int | None = None
    params: dict[str, Any] = {}


class JsonRpcResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call: a result or an error."""

    jsonrpc: str
    id: str | int | None
    result: Any = None
    error: dict[str, Any] | None = None


class RpcCall(msgspec.Struct, frozen=True, gc=False):
    """`id` and `params` are JSON as it was received."""

    id: bytes
    method: str
    params: bytes


class UnreadableCall(Invalid):
    """The input is not a JSON-RPC request. `id` is the id to echo."""

    def __init__(self, code: str, message: str, call_id: bytes = NULL) -> None:
        super().__init__(code, message)
        self.id = call_id


class _Envelope(msgspec.Struct, frozen=True, gc=False):
    jsonrpc: str
    method: str
    id: msgspec.Raw = msgspec.Raw(NULL)
    params: msgspec.Raw = msgspec.Raw(_NO_PARAMS)


class _Loose(msgspec.Struct, frozen=True, gc=False):
    """The fields that are read from an invalid envelope: its id, and those that may be wrong."""

    jsonrpc: msgspec.Raw = msgspec.Raw(b"")
    method: msgspec.Raw = msgspec.Raw(b"")
    id: msgspec.Raw = msgspec.Raw(NULL)


_strict = msgspec.json.Decoder(_Envelope).decode
_loose = msgspec.json.Decoder(_Loose).decode


def decode_call(body: bytes) -> RpcCall:
    try:
        # The decoder does not look into raw fields: without this check, an id could be invalid UTF-8.
        if not body.isascii():
            body.decode()
        envelope = _strict(body)
    except msgspec.ValidationError:
        raise _misfit(body) from None
    except (ValueError, RecursionError) as wrong:
        raise _unreadable(wrong) from None
    call_id = _echo(envelope.id)
    if envelope.jsonrpc != "2.0":
        raise UnreadableCall("invalid_envelope", 'jsonrpc must be the string "2.0"', call_id)
    params = bytes(envelope.params)
    return RpcCall(call_id, envelope.method, params if params != NULL else _NO_PARAMS)


def _unreadable(wrong: ValueError | RecursionError) -> UnreadableCall:
    if isinstance(wrong, RecursionError):
        return UnreadableCall("invalid_json", "the request is nested too deeply")
    return UnreadableCall("invalid_json", f"the request is not JSON: {wrong}")


def _misfit(body: bytes) -> UnreadableCall:
    try:
        loose = _loose(body)
    except msgspec.ValidationError:
        return UnreadableCall("invalid_envelope", "the request must be one JSON object; batches are not supported")
    except (ValueError, RecursionError) as wrong:
        # The decoder noticed the wrong shape before it had read the malformed rest.
        return _unreadable(wrong)
    try:
        call_id = _echo(loose.id)
    except UnreadableCall as wrong:
        return wrong
    if bytes(loose.jsonrpc) != b'"2.0"':
        return UnreadableCall("invalid_envelope", 'jsonrpc must be the string "2.0"', call_id)
    return UnreadableCall("invalid_envelope", "method must be a string", call_id)


def _echo(given: msgspec.Raw) -> bytes:
    call_id = bytes(given)
    if call_id[0] not in _ID_BEGINS and call_id != NULL:
        raise UnreadableCall("invalid_envelope", "id must be a string, a number or null")
    if len(call_id) > ID_BYTES_MAX:
        raise UnreadableCall("invalid_envelope", f"id may be at most {ID_BYTES_MAX} bytes long")
    return call_id


def unknown_method(call: RpcCall) -> UnreadableCall:
    return UnreadableCall("unknown_method", f"unknown method: {call.method[:100]}", call.id)


def result_frame(call_id: bytes) -> tuple[bytes, bytes]:
    """The bytes before and after a result, in a response and in each frame of a stream."""
    return b'{"jsonrpc":"2.0","id":' + call_id + b',"result":', b"}"


def encode_error(call_id: bytes, error: ErrorObject) -> bytes:
    """Encodes an error. A request that could not be parsed has the id null, whatever was found of its id."""
    known = NULL if error.code == PARSE_ERROR else call_id
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (known, _encode(error))


def encode_refusal(call_id: bytes, refusal: BaseException, version: Version) -> bytes:
    return encode_error(call_id, rpc_error(refusal, version))


class RpcError(CovenantError):
    """The server's answer was an error object."""

    def __init__(self, code: int, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        """`reason` from the error's details, if there is one."""


class BadResponse(CovenantError):
    """The server's answer has not the expected form."""


class _Error(msgspec.Struct, frozen=True):
    code: int | float = 0
    message: Any = ""
    data: Any = None


class _Response(msgspec.Struct, frozen=True):
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: _Error | None = None


_response = msgspec.json.Decoder(_Response).decode


def encode_request(call_id: int, method: str, params: bytes) -> bytes:
    """Encodes a request. `params` are encoded JSON; `method` is one of ours."""
    return b'{"jsonrpc":"2.0","id":%d,"method":"%b","params":%b}' % (call_id, method.encode(), params)


def decode_result(body: bytes) -> bytes:
    """The result of a response, as JSON. Raises RpcError and BadResponse."""
    try:
        read = _response(body)
    except (ValueError, RecursionError) as error:
        raise BadResponse("the answer is not a JSON-RPC response") from error
    if read.error is not None:
        raise RpcError(int(read.error.code), one_line(read.error.message), reason_in(read.error.data))
    if isinstance(read.result, msgspec.UnsetType):
        raise BadResponse("the answer has neither result nor error")
    return bytes(read.result)


def one_line(text: Any) -> str:
    """A foreign text as one line of bounded length."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text) if isinstance(text, str) else ""
    kept = " ".join(shown.split())
    return kept if len(kept) <= _TEXT_MAX else f"{kept[:_TEXT_MAX]}…"


def reason_in(details: Any) -> str | None:
    """The `reason` of the first detail that has one (`google.rpc.ErrorInfo`)."""
    if not isinstance(details, list):
        return None
    found = (each["reason"] for each in details if isinstance(each, dict) and isinstance(each.get("reason"), str))
    return next(found, None)
