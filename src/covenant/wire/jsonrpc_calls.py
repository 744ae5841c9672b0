"""JSON-RPC from the caller's side: requests written, responses read.

An answer is believed only as far as it can be read: one that is no JSON-RPC response is an `Unanswerable`.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from covenant.model.errors import CovenantError

_TEXT_MAX: Final = 500


class RpcError(CovenantError):
    """The other side refused, by the error object of its response."""

    def __init__(self, code: int, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        """The machine's word in its details, where there is one."""


class Unanswerable(CovenantError):
    """What came back is not what was asked for."""


class _Error(msgspec.Struct, frozen=True):
    code: int | float = 0
    message: Any = ""
    data: Any = None


class _Response(msgspec.Struct, frozen=True):
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: _Error | None = None


_response = msgspec.json.Decoder(_Response).decode


def request(call_id: int, method: str, params: bytes) -> bytes:
    """`params` are JSON already; `method` is one of ours."""
    return b'{"jsonrpc":"2.0","id":%d,"method":"%b","params":%b}' % (call_id, method.encode(), params)


def result(body: bytes) -> bytes:
    """The result of a response, as JSON. Raises RpcError and Unanswerable."""
    try:
        read = _response(body)
    except (ValueError, RecursionError) as error:
        raise Unanswerable("the answer is no JSON-RPC response") from error
    if read.error is not None:
        raise RpcError(int(read.error.code), words(read.error.message), reason_in(read.error.data))
    if isinstance(read.result, msgspec.UnsetType):
        raise Unanswerable("the answer has neither result nor error")
    return bytes(read.result)


def words(said: Any) -> str:
    """What a stranger wrote, in one line of a bounded length."""
    shown = "".join(letter if letter.isprintable() else " " for letter in said) if isinstance(said, str) else ""
    kept = " ".join(shown.split())
    return kept if len(kept) <= _TEXT_MAX else f"{kept[:_TEXT_MAX]}…"


def reason_in(details: Any) -> str | None:
    """`reason` of the first detail that has one (`google.rpc.ErrorInfo`)."""
    if not isinstance(details, list):
        return None
    found = (each["reason"] for each in details if isinstance(each, dict) and isinstance(each.get("reason"), str))
    return next(found, None)
