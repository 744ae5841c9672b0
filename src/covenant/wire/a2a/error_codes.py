"""Errors for A2A clients: one table for both dialects and every binding.

A `Refusal` finds its row by its code, else by its class. Any other exception is an internal error, sent without its
text. Codes of JSON-RPC, HTTP and gRPC are the specification's (its sections 5.4, 9.5, 10.6 and 11.6), except two of
0.3: a refused version is -32007, refused push notifications are an unsupported operation.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec

from covenant.model.errors import (
    Conflict,
    Forbidden,
    Invalid,
    InvalidParams,
    NotFound,
    OverLimit,
    Refusal,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from covenant.model.task import ERROR_CODE, Result, ResultStatus

DOMAIN: Final = "a2a-protocol.org"
PARSE_ERROR: Final = -32700

_TYPE: Final = "type.googleapis.com/google.rpc."
_PRECONDITION: Final = "FAILED_PRECONDITION"
_encode = msgspec.json.Encoder().encode
_NAMES_V03: Final = {
    -32001: "TaskNotFoundError",
    -32002: "TaskNotCancelableError",
    -32003: "PushNotificationNotSupportedError",
    -32004: "UnsupportedOperationError",
    -32005: "ContentTypeNotSupportedError",
    -32006: "InvalidAgentResponseError",
    -32007: "ExtendedAgentCardNotConfiguredError",
    -32008: "ExtensionSupportRequiredError",
    -32009: "VersionNotSupportedError",
    -32600: "InvalidRequestError",
    -32601: "MethodNotFoundError",
    -32602: "InvalidParamsError",
    PARSE_ERROR: "JSONParseError",
}


class Version(enum.StrEnum):
    V1 = "1.0"
    V03 = "0.3"


class ErrorCode(msgspec.Struct, frozen=True, gc=False):
    """A row: the JSON-RPC code in each dialect, the HTTP status, the gRPC status, and the reason for the details."""

    v1: int
    v03: int
    http: int
    grpc: str
    reason: str

    def code(self, version: Version) -> int:
        return self.v1 if version is Version.V1 else self.v03


def _row(code: int, http: int, grpc: str, reason: str, *, v03: int | None = None) -> ErrorCode:
    return ErrorCode(code, code if v03 is None else v03, http, grpc, reason)


TASK_NOT_FOUND: Final = _row(-32001, 404, "NOT_FOUND", "TASK_NOT_FOUND")
UNSUPPORTED_OPERATION: Final = _row(-32004, 400, _PRECONDITION, "UNSUPPORTED_OPERATION")
INVALID_PARAMS: Final = _row(-32602, 400, "INVALID_ARGUMENT", "INVALID_PARAMS")
INTERNAL: Final = _row(-32603, 500, "INTERNAL", "INTERNAL_ERROR")

BY_CODE: Final[dict[str, ErrorCode]] = {
    "unknown_task": TASK_NOT_FOUND,
    "not_cancelable": _row(-32002, 400, _PRECONDITION, "TASK_NOT_CANCELABLE"),
    "push_not_supported": _row(-32003, 400, _PRECONDITION, "PUSH_NOTIFICATION_NOT_SUPPORTED", v03=-32004),
    "unsupported_operation": UNSUPPORTED_OPERATION,
    "content_type_not_supported": _row(-32005, 400, "INVALID_ARGUMENT", "CONTENT_TYPE_NOT_SUPPORTED"),
    "invalid_agent_response": _row(-32006, 500, "INTERNAL", "INVALID_AGENT_RESPONSE"),
    "extended_card_not_configured": _row(-32007, 400, _PRECONDITION, "EXTENDED_AGENT_CARD_NOT_CONFIGURED"),
    "extension_required": _row(-32008, 400, _PRECONDITION, "EXTENSION_SUPPORT_REQUIRED"),
    "version_not_supported": _row(-32009, 400, _PRECONDITION, "VERSION_NOT_SUPPORTED", v03=-32007),
    "invalid_json": _row(PARSE_ERROR, 400, "INVALID_ARGUMENT", "INVALID_JSON"),
    "invalid_envelope": _row(-32600, 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
    "unknown_method": _row(-32601, 404, "NOT_FOUND", "METHOD_NOT_FOUND"),
    "method_not_allowed": _row(-32601, 405, "UNIMPLEMENTED", "METHOD_NOT_ALLOWED"),
    "invalid_params": INVALID_PARAMS,
    "idempotency_key_reused": _row(-32602, 409, "ALREADY_EXISTS", "IDEMPOTENCY_KEY_REUSED"),
    "agent_failed": INTERNAL,
}
AGENT_CODES: Final = {row.v1: code for code, row in reversed(BY_CODE.items())}
"""Our code for each 1.0 JSON-RPC code that an agent may raise; where several fit, the first one."""
# A conflict means that the task's state forbids the operation: to A2A clients, an unsupported operation.
BY_CLASS: Final[dict[type[Refusal], ErrorCode]] = {
    Invalid: INVALID_PARAMS,
    Unauthenticated: _row(-32600, 401, "UNAUTHENTICATED", "UNAUTHENTICATED"),
    Forbidden: _row(-32600, 403, "PERMISSION_DENIED", "PERMISSION_DENIED"),
    NotFound: TASK_NOT_FOUND,
    Conflict: UNSUPPORTED_OPERATION,
    TooLarge: _row(-32600, 413, "RESOURCE_EXHAUSTED", "REQUEST_TOO_LARGE"),
    OverLimit: _row(-32603, 429, "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"),
    Unavailable: _row(-32603, 503, "UNAVAILABLE", "UNAVAILABLE"),
}


class ErrorObject(msgspec.Struct, frozen=True, omit_defaults=True):
    """The error object of a JSON-RPC response."""

    code: int
    message: str
    data: list[dict[str, Any]] | None = None


def error_code_of(error: BaseException) -> ErrorCode:
    if not isinstance(error, Refusal):
        return INTERNAL
    known = BY_CODE.get(error.code)
    if known is not None:
        return known
    return next((BY_CLASS[kind] for kind in type(error).__mro__ if kind in BY_CLASS), INTERNAL)


def agent_error(result: Result | None) -> Refusal | None:
    """The A2A error that the agent raised, with its message; None if its task did not fail that way."""
    if result is None or result.status is not ResultStatus.ERROR or not result.metadata:
        return None
    code = result.metadata.get(ERROR_CODE)
    if not isinstance(code, str) or code not in BY_CODE:
        return None
    return Invalid(code, result.error_message if isinstance(result.error_message, str) else code)


def rpc_error(error: BaseException, version: Version) -> ErrorObject:
    row = error_code_of(error)
    return ErrorObject(row.code(version), message_of(error), details(error))


def message_of(error: BaseException) -> str:
    return error.message if isinstance(error, Refusal) else "Internal error"


def details(error: BaseException) -> list[dict[str, Any]]:
    """The details of an error in the JSON form of `Any`: the reason, then the invalid field, then the retry delay."""
    info: dict[str, Any] = {"@type": f"{_TYPE}ErrorInfo", "reason": error_code_of(error).reason, "domain": DOMAIN}
    if not isinstance(error, Refusal):
        return [info]
    found = [info | {"metadata": {"code": error.code}}]
    if isinstance(error, InvalidParams):
        violation = {"field": error.field, "description": error.description}
        found.append({"@type": f"{_TYPE}BadRequest", "fieldViolations": [violation]})
    if error.retry_after_ms is not None:
        found.append({"@type": f"{_TYPE}RetryInfo", "retryDelay": f"{error.retry_after_ms / 1000:.3f}s"})
    return found


def rest_error(error: BaseException, version: Version = Version.V1) -> tuple[int, bytes]:
    """The HTTP status and the body, a `google.rpc.Status` as JSON. Clients of 0.3 also get `type` and `message`."""
    row = error_code_of(error)
    status = {"code": row.http, "status": row.grpc, "message": message_of(error), "details": details(error)}
    older = {} if version is Version.V1 else {"type": name_v03(error), "message": message_of(error)}
    return row.http, _encode({"error": status, **older})


def name_v03(error: BaseException) -> str:
    """The name of an error in 0.3 over HTTP+JSON and gRPC, which have no codes."""
    return _NAMES_V03.get(error_code_of(error).v1, "InternalError")
