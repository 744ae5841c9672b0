"""Whatever bytes come in, what comes out is a request or a refusal that says where."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.doors.operator_api.operation_table import OPERATIONS
from covenant.model.content import Json, Text
from covenant.model.errors import Invalid
from covenant.wire.json_input import NESTING_MAX, QUERY_FIELDS_MAX, decode, decode_query
from covenant.wire.mailbox import FrameHeader, PostResult, QueueRequest, ReceiveRequest

RESULT = msgspec.json.Decoder(PostResult)
TASK_ID = "123e4567-e89b-42d3-a456-426614174000"


def result_with(value: str) -> bytes:
    return f'{{"task_id":"{TASK_ID}","status":"ok","content":[{{"type":"json","value":{value}}}]}}'.encode()


def refusal(data: bytes) -> Invalid:
    with pytest.raises(Invalid) as caught:
        decode(RESULT, data)
    return caught.value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"task_id":"x","status":"ok"} trailing',
        b"nonsense",
        b'{"task_id": NaN}',
        b'{"task_id": "\xff\xfe"}',
        b'{"task_id": "\\ud800"}',
        b"\x00\x01",
    ],
)
def test_what_is_not_json_is_refused_as_such(data: bytes) -> None:
    assert refusal(data).code == "invalid_json"
    assert refusal(data).status == 400


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"[]", "Expected `object`"),
        (b'{"status":"ok"}', "task_id"),
        (b'{"task_id":1,"status":"ok"}', "$.task_id"),
        (b'{"task_id":"x","status":"OK"}', "$.status"),
        (b'{"task_id":"x","status":"ok","content":{}}', "$.content"),
        (b'{"task_id":"x","status":"ok","content":[{"type":"video"}]}', "$.content[0].type"),
        (b'{"task_id":"x","status":"ok","content":[{"type":"text"}]}', "$.content[0]"),
        (b'{"task_id":"x","status":"ok","content":[{"type":"json","value":1e999}]}', "$.content[0].value"),
    ],
)
def test_a_wrong_type_or_value_is_refused_with_its_place(data: bytes, place: str) -> None:
    assert refusal(data).code == "invalid_request"
    assert place in refusal(data).message


def test_a_refusal_does_not_repeat_a_long_value_but_keeps_the_place() -> None:
    wrong = refusal(json.dumps({"task_id": TASK_ID, "status": "x" * 100_000}).encode())
    assert len(wrong.message) < 500
    assert wrong.message.endswith("$.status`")


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_what_is_nested_too_deeply_is_refused(opening: str, closing: str) -> None:
    def nested(levels: int) -> bytes:
        return result_with(opening * levels + "1" + closing * levels)

    around = 3  # the request, its content, the block
    assert decode(RESULT, nested(NESTING_MAX - around)).content
    for levels in (NESTING_MAX - around + 1, 5_000, 500_000):
        assert refusal(nested(levels)).code == "invalid_json"
        assert "nested" in refusal(nested(levels)).message


def test_depth_in_a_field_that_nobody_reads_is_refused_too() -> None:
    assert refusal(b'{"ignored":' + b"[" * 100_000 + b"]" * 100_000 + b"}").code == "invalid_json"


def test_many_flat_containers_are_not_depth() -> None:
    assert decode(RESULT, result_with("[" + ",".join(["{}"] * 1_000) + "]")).content


def test_brackets_inside_strings_are_not_depth() -> None:
    assert decode(RESULT, result_with(json.dumps("[" * 1_000))).content == (Json("[" * 1_000),)


def test_null_and_absent_are_the_same_and_unknown_fields_are_ignored() -> None:
    plain = decode(RESULT, b'{"task_id":"x","status":"ok"}')
    nulls = b'{"task_id":"x","status":"ok","content":null,"error_message":null,"lease_id":null,"later":{"v":2}}'
    assert decode(RESULT, nulls) == plain


def test_content_blocks_come_through() -> None:
    data = b'{"task_id":"x","status":"ok","content":[{"type":"text","text":"hi"},{"type":"json","value":{"a":[1]}}]}'
    assert decode(RESULT, data).content == (Text("hi"), Json({"a": [1]}))


def test_a_query_becomes_a_request() -> None:
    query = b"max=3&wait_ms=10&request_id=a%20b&scope=all&other=1"
    assert decode_query(ReceiveRequest, query) == ReceiveRequest(count=3, wait_ms=10, request_id="a b", scope="all")


@pytest.mark.parametrize(
    ("query", "place"),
    [
        (b"limit=ten", "$.limit"),
        (b"limit=", "$.limit"),
        (b"limit=-1", "$.limit"),
        (b"limit=99999999999999999999", "$.limit"),
        (b"state_filter=gone", "$.state_filter"),
    ],
)
def test_a_bad_query_is_refused_with_its_place(query: bytes, place: str) -> None:
    with pytest.raises(Invalid) as caught:
        decode_query(QueueRequest, query)
    assert caught.value.code == "invalid_request"
    assert place in caught.value.message


def test_a_query_has_a_bounded_number_of_fields() -> None:
    with pytest.raises(Invalid, match=f"at most {QUERY_FIELDS_MAX} fields"):
        decode_query(ReceiveRequest, b"&".join(b"a=1" for _ in range(QUERY_FIELDS_MAX + 1)))


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
names = st.sampled_from(
    sorted({field.encode_name for each in OPERATIONS for field in msgspec.structs.fields(each.request)})
)
bodies = st.binary(max_size=200) | st.dictionaries(names | st.text(max_size=5), values, max_size=8).map(
    lambda value: json.dumps(value).encode()
)


def outcome(decoding: Callable[[], Any]) -> Any:
    """The type that came out, or the code of the refusal."""
    try:
        return type(decoding())
    except Invalid as wrong:
        return wrong.code


@given(st.sampled_from(OPERATIONS), bodies)
def test_any_body_is_decoded_or_refused(operation: Any, body: bytes) -> None:
    for kind in (operation.request, operation.frame or FrameHeader):
        outcomes = (kind, "invalid_json", "invalid_request")
        assert outcome(partial(decode, msgspec.json.Decoder(kind), body)) in outcomes


@given(st.sampled_from([each for each in OPERATIONS if not each.in_body]), st.binary(max_size=100))
def test_any_query_is_decoded_or_refused(operation: Any, query: bytes) -> None:
    outcomes = {operation.request, "invalid_request"}
    if getattr(operation.request, "strict", False):
        outcomes.add("unknown_field")
    assert outcome(lambda: decode_query(operation.request, query)) in outcomes


@given(values)
def test_what_is_decoded_can_be_encoded_again(value: Any) -> None:
    try:
        decoded = decode(RESULT, result_with(json.dumps(value)))
    except Invalid:
        return  # integers that no reader could carry
    assert decoded.content is not None
    block = decoded.content[0]
    assert isinstance(block, Json)
    assert msgspec.json.decode(msgspec.json.encode(decoded.result()), type=PostResult).content == decoded.content
