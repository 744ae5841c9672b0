"""The error table, against the specification's and the official SDK's, in both dialects and on every binding."""

import ast
from collections.abc import Iterator
from pathlib import Path

import a2a.utils.errors as theirs
import pytest
from a2a.client.transports.jsonrpc import JsonRpcTransport
from a2a.client.transports.rest import _parse_rest_error
from a2a.compat.v0_3 import types as v03

from covenant.model import errors
from covenant.model.errors import InvalidParams
from covenant.wire import jsonrpc
from covenant.wire.a2a import error_codes as a2a_errors
from covenant.wire.a2a.error_codes import BY_CODE, Version, error_code_of, rest_error, rpc_error
from tests.wire.a2a.a2a_samples import read

SPECIFIED = {
    "unknown_task": theirs.TaskNotFoundError,
    "not_cancelable": theirs.TaskNotCancelableError,
    "push_not_supported": theirs.PushNotificationNotSupportedError,
    "unsupported_operation": theirs.UnsupportedOperationError,
    "content_type_not_supported": theirs.ContentTypeNotSupportedError,
    "invalid_agent_response": theirs.InvalidAgentResponseError,
    "extended_card_not_configured": theirs.ExtendedAgentCardNotConfiguredError,
    "extension_required": theirs.ExtensionSupportRequiredError,
    "version_not_supported": theirs.VersionNotSupportedError,
    "invalid_params": theirs.InvalidParamsError,
    "invalid_envelope": theirs.InvalidRequestError,
    "unknown_method": theirs.MethodNotFoundError,
}


@pytest.mark.parametrize("code", SPECIFIED)
def test_a_specified_error_has_the_codes_status_and_reason_that_the_official_sdk_has(code: str) -> None:
    fault, kind = BY_CODE[code], SPECIFIED[code]
    mapped = theirs.A2A_ERROR_MAPPING[kind]
    assert fault.v1 == theirs.JSON_RPC_ERROR_CODE_MAP[kind]
    assert (fault.http, fault.grpc, fault.reason) == (mapped.http_code, mapped.grpc_status, mapped.reason)


def test_the_slash_methods_differ_in_two_places() -> None:
    differing = {code: fault.v03 for code, fault in BY_CODE.items() if fault.v03 != fault.v1}
    assert differing == {"push_not_supported": -32004, "version_not_supported": -32007}


@pytest.mark.parametrize("code", SPECIFIED)
def test_the_official_sdk_raises_its_own_error_from_ours(code: str) -> None:
    refusal = errors.Invalid(code, "message.parts: why")
    response = read(jsonrpc.encode_refusal(b"1", refusal, Version.V1))
    transport = JsonRpcTransport.__new__(JsonRpcTransport)
    raised = transport._create_jsonrpc_error(response["error"])
    assert type(raised) is SPECIFIED[code]
    assert raised.data == {"code": code}
    status, body = rest_error(refusal)
    assert type(_parse_rest_error(read(body), "")) is SPECIFIED[code]
    assert status == BY_CODE[code].http
    old = read(jsonrpc.encode_refusal(b"1", refusal, Version.V03))
    assert v03.JSONRPCErrorResponse.model_validate(old).error.code == BY_CODE[code].v03


@pytest.mark.parametrize(
    ("refusal", "code", "http", "grpc"),
    [
        (errors.Invalid("deadline_past", "x"), -32602, 400, "INVALID_ARGUMENT"),
        (errors.Unauthenticated("unauthenticated", "x"), -32600, 401, "UNAUTHENTICATED"),
        (errors.Forbidden("denied", "x"), -32600, 403, "PERMISSION_DENIED"),
        (errors.NotFound("unknown_agent", "x"), -32001, 404, "NOT_FOUND"),
        (errors.Conflict("already_settled", "x"), -32004, 400, "FAILED_PRECONDITION"),
        (errors.Conflict("idempotency_key_reused", "x"), -32602, 409, "ALREADY_EXISTS"),
        (errors.TooLarge("task_too_large", "x"), -32600, 413, "RESOURCE_EXHAUSTED"),
        (errors.OverLimit("rate", "x"), -32603, 429, "RESOURCE_EXHAUSTED"),
        (errors.outcome_unknown(), -32603, 503, "UNAVAILABLE"),
    ],
    ids=lambda value: value.code if isinstance(value, errors.Refusal) else None,
)
def test_every_other_refusal_goes_by_its_class(refusal: errors.Refusal, code: int, http: int, grpc: str) -> None:
    fault = error_code_of(refusal)
    assert (fault.v1, fault.v03, fault.http, fault.grpc) == (code, code, http, grpc)


def test_details_are_an_array_of_typed_objects() -> None:
    told = rpc_error(InvalidParams("message.parts[0].raw", "is not base64"), Version.V1)
    assert told.message == "message.parts[0].raw: is not base64"
    assert told.data == [
        {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": "INVALID_PARAMS",
            "domain": "a2a-protocol.org",
            "metadata": {"code": "invalid_params"},
        },
        {
            "@type": "type.googleapis.com/google.rpc.BadRequest",
            "fieldViolations": [{"field": "message.parts[0].raw", "description": "is not base64"}],
        },
    ]


def test_a_reused_key_says_so() -> None:
    told = rpc_error(errors.Conflict("idempotency_key_reused", "x"), Version.V1)
    assert told.data is not None
    assert told.data[0]["reason"] == "IDEMPOTENCY_KEY_REUSED"


def test_who_is_over_a_limit_hears_when_to_come_back() -> None:
    _, body = rest_error(errors.OverLimit("rate", "slow down", retry_after_ms=1500))
    assert read(body)["error"]["details"][-1] == {
        "@type": "type.googleapis.com/google.rpc.RetryInfo",
        "retryDelay": "1.500s",
    }


def test_a_rest_error_is_a_status() -> None:
    status, body = rest_error(errors.NotFound("unknown_task", "task x is not known here"))
    told = read(body)
    assert (status, list(told)) == (404, ["error"])
    assert told["error"]["code"] == 404
    assert told["error"]["status"] == "NOT_FOUND"
    assert told["error"]["message"] == "task x is not known here"
    assert told["error"]["details"][0]["reason"] == "TASK_NOT_FOUND"


@pytest.mark.parametrize("raised", [RuntimeError("the secret"), KeyError("the secret"), errors.CovenantError("secret")])
def test_no_word_of_an_internal_error_leaves(raised: Exception) -> None:
    status, body = rest_error(raised)
    assert status == 500
    for told in (body, *(jsonrpc.encode_refusal(b"1", raised, dialect) for dialect in Version)):
        assert b"secret" not in told
        assert b"Internal error" in told


def test_every_class_of_refusal_has_a_row() -> None:
    assert set(a2a_errors.BY_CLASS) == set(errors.Refusal.__subclasses__()) - set(_of_tests())


def _of_tests() -> Iterator[type]:
    """Refusals that other modules derive are found by the class that they derive from."""
    tree = ast.parse(Path(errors.__file__).read_text(encoding="utf-8"))
    declared = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    yield from (kind for kind in errors.Refusal.__subclasses__() if kind.__name__ not in declared)
