"""Protocol buffers as JSON and back: what the protobuf library's own conversion says, only faster."""

import json
from typing import Any

import pytest
from a2a.types import a2a_pb2 as pb
from google.protobuf import json_format

from covenant.doors.a2a.protobuf_json import RequestReader, ResponseWriter
from covenant.model.errors import InvalidParams

VALUES = [None, True, False, 0, 3, -7, 2.5, 2**53, 1e300, "", "text", [], {}, [1, [None, {"a": []}]], {"b": {"c": 1}}]

TOLD: list[tuple[type[Any], dict[str, Any]]] = [
    (pb.SendMessageResponse, {"message": {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": ""}]}}),
    (pb.Task, {"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}, "artifacts": []}),
    (pb.Task, {"id": "t", "status": {"state": "TASK_STATE_FAILED", "timestamp": "2026-01-02T03:04:05.678Z"}}),
    (pb.Task, {"id": "t", "status": {"state": "TASK_STATE_FAILED", "timestamp": "1969-12-31T23:59:59.500Z"}}),
    (pb.Part, {"raw": "AP8=", "filename": "f", "mediaType": "x/y", "metadata": {"deep": [1, None]}}),
    (pb.ListTasksResponse, {"tasks": [], "nextPageToken": "", "pageSize": 0, "totalSize": 7}),
    (pb.AgentCard, {"securitySchemes": {"b": {"httpAuthSecurityScheme": {"scheme": "bearer"}}}}),
    (pb.AgentCard, {"securityRequirements": [{"schemes": {"b": {"list": ["one"]}, "c": {}}}]}),
    (pb.AgentCard, {"capabilities": {"streaming": True, "extensions": [{"uri": "u", "params": {"n": 1}}]}}),
]


@pytest.mark.parametrize(("kind", "told"), TOLD, ids=range(len(TOLD)))
def test_an_answer_is_what_the_library_would_make_of_it(kind: type[Any], told: dict[str, Any]) -> None:
    text = json.dumps(told).encode()
    assert ResponseWriter(kind).message(text) == json_format.Parse(text, kind())


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_any_value_goes_out_and_comes_back(value: Any) -> None:
    part = ResponseWriter(pb.Part).message(json.dumps({"data": value}).encode())
    assert part.WhichOneof("content") == "data"
    assert part == json_format.ParseDict({"data": value}, pb.Part())
    assert json.loads(RequestReader(pb.Part).params(part)) == {"data": value}


def test_what_is_null_is_left_out_unless_null_is_a_value() -> None:
    told = b'{"id":null,"taskId":"t","url":"u"}'
    assert ResponseWriter(pb.TaskPushNotificationConfig).message(told) == pb.TaskPushNotificationConfig(
        task_id="t", url="u"
    )


def test_a_request_keeps_what_was_set_and_leaves_out_what_was_not() -> None:
    request = pb.ListTasksRequest(tenant="a", page_size=0, include_artifacts=False, status=pb.TASK_STATE_WORKING)
    request.status_timestamp_after.FromJsonString("2026-01-02T03:04:05.678Z")
    assert json.loads(RequestReader(pb.ListTasksRequest).params(request)) == {
        "tenant": "a",
        "status": 2,
        "pageSize": 0,
        "statusTimestampAfter": "2026-01-02T03:04:05.678Z",
        "includeArtifacts": False,
    }


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_has_no_word_for_is_refused(number: float) -> None:
    part = pb.Part()
    part.data.number_value = number
    with pytest.raises(InvalidParams):
        RequestReader(pb.Part).params(part)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe"])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidParams, match="GetTaskRequest"):
        RequestReader(pb.GetTaskRequest).read(data)
