"""What a remote's error means: from JSON-RPC codes, HTTP statuses and reasons to one small set of words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from covenant.outbound.remote_errors import RefusalCode, RemoteRefused
from covenant.wire.jsonrpc import RpcError, reason_in, one_line

RETRY_AFTER_S_MAX: Final = 3_600.0

# -32009 is what 1.0 says of a version that it does not speak, -32007 what some say; -32601 names an unknown method.
_BY_RPC: Final[dict[int, RefusalCode]] = {
    -32001: "unknown_task",
    -32004: "unsupported",
    -32007: "other_dialect",
    -32009: "other_dialect",
    -32601: "other_dialect",
}
_BY_REASON: Final[dict[str, RefusalCode]] = {
    "TASK_NOT_FOUND": "unknown_task",
    "UNSUPPORTED_OPERATION": "unsupported",
    "VERSION_NOT_SUPPORTED": "other_dialect",
    "METHOD_NOT_FOUND": "other_dialect",
    "UNAUTHENTICATED": "unauthenticated",
    "PERMISSION_DENIED": "forbidden",
    "RESOURCE_EXHAUSTED": "over_limit",
    "UNAVAILABLE": "unavailable",
}
_BY_STATUS: Final[dict[int, RefusalCode]] = {
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "other_dialect",
    429: "over_limit",
    501: "other_dialect",
}


def refused_by_rpc(error: RpcError) -> RemoteRefused:
    code = _BY_RPC.get(error.code) or _BY_REASON.get(error.reason or "", "refused")
    said = f"the remote refused: {error.message}" if error.message else "the remote refused"
    return RemoteRefused(code, f"{said} (JSON-RPC {error.code})", rpc_code=error.code)


def refused_by_status(status: int, headers: Mapping[str, str], body: bytes) -> RemoteRefused:
    """`google.rpc.Status`, or any JSON that has a message, or the status alone."""
    error = _error_in(body)
    code = _BY_REASON.get(reason_in(error.get("details")) or "") or _BY_STATUS.get(status)
    said = one_line(error.get("message"))
    return RemoteRefused(
        code or ("unavailable" if status >= 500 else "refused"),
        f"the remote refused: {said} (HTTP {status})" if said else f"the remote answered HTTP {status}",
        status=status,
        retry_after_s=retry_after(headers),
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """In seconds; a date is not read."""
    said = headers.get("retry-after", "").strip()
    if not (said.isascii() and said.isdigit() and len(said) <= 9):
        return None
    return min(float(said), RETRY_AFTER_S_MAX)


def _error_in(body: bytes) -> Mapping[str, Any]:
    try:
        read = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    if not isinstance(read, dict):
        return {}
    error = read.get("error")
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, dict) else read
