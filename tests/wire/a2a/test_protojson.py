"""What ProtoJSON lets a sender write, rule by rule, and moments of RFC 3339."""

import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.a2a_requests import ListTasks
from covenant.model.content import Json, Text
from covenant.model.errors import Invalid, InvalidParams
from covenant.model.task_view import TaskState
from covenant.wire import timestamps as moments
from covenant.wire.a2a.dialects import V1
from covenant.wire.a2a.protojson import standard_base64
from tests.wire.a2a.a2a_samples import AT, json

PLAIN = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hi"}]}


def send(**message: Any) -> bytes:
    return json({"message": {**PLAIN, **message}})


FULL = {
    "message": {
        **PLAIN,
        "contextId": "c",
        "taskId": "t",
        "referenceTaskIds": ["r"],
        "parts": [{"text": "hi", "mediaType": "text/plain", "filename": "f", "metadata": {"a_b": 1}}],
        "metadata": {"message_id": "kept as it is"},
    },
    "configuration": {
        "acceptedOutputModes": ["text/plain"],
        "historyLength": 2,
        "returnImmediately": True,
        "taskPushNotificationConfig": {"id": "p", "url": "https://example.com", "token": "t"},
    },
    "metadata": {"x_y": {"context_id": 1}},
}
SNAKE = {
    "message": {
        "message_id": "m",
        "role": 1,
        "context_id": "c",
        "task_id": "t",
        "reference_task_ids": ["r"],
        "parts": [{"text": "hi", "media_type": "text/plain", "filename": "f", "metadata": {"a_b": 1}}],
        "metadata": {"message_id": "kept as it is"},
    },
    "configuration": {
        "accepted_output_modes": ["text/plain"],
        "history_length": "2",
        "return_immediately": True,
        "task_push_notification_config": {"id": "p", "url": "https://example.com", "token": "t"},
    },
    "metadata": {"x_y": {"context_id": 1}},
}


def test_both_spellings_of_every_name_are_read_alike_and_metadata_is_left_alone() -> None:
    ask = V1.requests.decode_send(json(FULL))
    assert ask == V1.requests.decode_send(json(SNAKE))
    assert ask.metadata == {"x_y": {"context_id": 1}}
    assert ask.message.metadata == {"message_id": "kept as it is"}
    assert ask.history_length == 2
    assert not ask.blocking


def test_an_escaped_underscore_is_one() -> None:
    body = b'{"message":{"message\\u005fid":"m","role":"ROLE_USER","parts":[{"text":"hi"}]}}'
    assert V1.requests.decode_send(body).message.message_id == "m"


def test_a_field_in_both_spellings_is_refused_unless_one_is_null() -> None:
    with pytest.raises(InvalidParams, match=r"message\.messageId: given twice"):
        V1.requests.decode_send(send(message_id="n"))
    assert V1.requests.decode_send(send(message_id=None)).message.message_id == "m"
    assert V1.requests.decode_send(send(messageId=None, message_id="n")).message.message_id == "n"


@pytest.mark.parametrize(
    "extra",
    [
        {"unknown": {"deep": [1]}, "tenant": "x"},
        {"taskId": None, "contextId": None, "metadata": None, "extensions": None, "referenceTaskIds": None},
        {"taskId": "", "contextId": "", "extensions": [], "referenceTaskIds": []},
    ],
    ids=["unknown", "null", "default"],
)
def test_unknown_null_and_default_fields_are_absent_ones(extra: dict[str, Any]) -> None:
    assert V1.requests.decode_send(send(**extra)) == V1.requests.decode_send(send())


@pytest.mark.parametrize("role", ["ROLE_USER", 1])
def test_an_enum_is_its_name_or_its_number(role: str | int) -> None:
    assert V1.requests.decode_send(send(role=role)).message.role == "user"


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("TASK_STATE_SUBMITTED", TaskState.SUBMITTED),
        (2, TaskState.WORKING),
        (3, TaskState.COMPLETED),
        (4, TaskState.FAILED),
        (5, TaskState.CANCELED),
        (6, TaskState.INPUT_REQUIRED),
        (7, TaskState.REJECTED),
        ("TASK_STATE_AUTH_REQUIRED", TaskState.AUTH_REQUIRED),
        (8, TaskState.AUTH_REQUIRED),
        (0, None),
        ("TASK_STATE_UNSPECIFIED", None),
        (None, None),
    ],
)
def test_a_state_is_its_name_or_its_number(status: Any, state: TaskState | None) -> None:
    assert V1.requests.decode_list_tasks(json({"status": status})).state is state


@pytest.mark.parametrize("size", [7, "7", 7.0], ids=repr)
def test_an_integer_is_a_number_or_a_string(size: Any) -> None:
    assert V1.requests.decode_list_tasks(json({"pageSize": size})).page_size == 7


@pytest.mark.parametrize("size", ["seven", "", " 7", "7.5", 7.5, True, [7], 10**30, "1" * 30, 0, -1, 101], ids=repr)
def test_an_integer_that_is_none_or_out_of_bounds_is_refused(size: Any) -> None:
    with pytest.raises(InvalidParams, match="pageSize: "):
        V1.requests.decode_list_tasks(json({"pageSize": size}))


@pytest.mark.parametrize("name", ["pageSize", "page_size"])
@pytest.mark.parametrize("digits", [40, 3000, 5000])
def test_an_integer_of_any_length_is_refused_in_few_words(name: str, digits: int) -> None:
    with pytest.raises(InvalidParams) as refused:
        V1.requests.decode_list_tasks(b'{"%b":%b}' % (name.encode(), b"1" * digits))
    assert len(refused.value.message) < 100


@pytest.mark.parametrize(
    ("given", "standard"),
    [
        ("", ""),
        ("aGk=", "aGk="),
        ("aGk", "aGk="),
        ("+/+/", "+/+/"),
        ("-_-_", "+/+/"),
        ("_w", "/w=="),
        ("_w==", "/w=="),
        ("/w=", "/w=="),
    ],
)
def test_base64_is_of_either_alphabet_with_or_without_padding(given: str, standard: str) -> None:
    assert standard_base64(given, "raw") == standard


@pytest.mark.parametrize("given", ["a", "abcde", "a b=", "ab!=", "====", "aGk=aGk=", "aG\nk=", "é"])
def test_what_is_not_base64_is_refused(given: str) -> None:
    with pytest.raises(InvalidParams, match="raw: is not base64"):
        standard_base64(given, "raw")


@pytest.mark.parametrize("value", [None, 1, "x", True, [], {}, {"a": [None]}, 1.5], ids=repr)
def test_data_may_be_any_value_and_null_is_one(value: Any) -> None:
    ask = V1.requests.decode_send(send(parts=[{"data": value}]))
    assert ask.message.parts == (Json(value),)


def test_null_data_beside_text_is_absent() -> None:
    assert V1.requests.decode_send(send(parts=[{"text": "hi", "data": None, "raw": None}])).message.parts == (
        Text("hi"),
    )


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2025-10-28T10:30:00Z", AT),
        ("2025-10-28T10:30:00.000Z", AT),
        ("2025-10-28T10:30:00.5z", AT + 500),
        ("2025-10-28T12:30:00+02:00", AT),
        ("2025-10-28t05:00:00-05:30", AT),
        ("2025-10-28T10:30:00.000000001Z", AT + 1),
        ("1970-01-01T00:00:00Z", 0),
        ("2024-02-29T00:00:00Z", 1_709_164_800_000),
    ],
)
def test_a_moment_is_read(text: str, ms: int) -> None:
    assert V1.requests.decode_list_tasks(json({"statusTimestampAfter": text})) == ListTasks(updated_after_ms=ms)


@pytest.mark.parametrize(
    "text",
    ["", "now", "2025-10-28", "2025-10-28T10:30:00", "2025-13-01T00:00:00Z", "2025-02-29T00:00:00Z", "1761647400"],
)
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(InvalidParams, match="statusTimestampAfter: "):
        V1.requests.decode_list_tasks(json({"statusTimestampAfter": text}))


@given(st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31), timezones=st.just(dt.UTC)))  # noqa: DTZ001
def test_moments_are_those_of_the_calendar(moment: dt.datetime) -> None:
    moment = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
    ms = (moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(milliseconds=1)
    text = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    assert moments.format_ms(ms) == text
    assert moments.parse_ms(text, "at") == ms


def test_what_is_nested_too_deeply_is_no_json_to_us() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = {"a_b": deep}
    for metadata in (deep, [deep]):
        with pytest.raises(Invalid) as refused:
            V1.requests.decode_send(send(metadata={"m": metadata}))
        assert refused.value.code == "invalid_json"
