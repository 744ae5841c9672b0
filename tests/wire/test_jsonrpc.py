"""The envelope: one request, its id echoed as it was written, and a refusal for everything else."""

from typing import Any

import pytest

from covenant.model.errors import Invalid
from covenant.wire import jsonrpc
from covenant.wire.a2a.error_codes import ErrorObject, Version
from tests.wire.a2a.a2a_samples import read


def test_method_and_params_are_read_apart() -> None:
    call = jsonrpc.decode_call(b'{"jsonrpc":"2.0","id":7,"method":"GetTask","params":{"id":"x"},"more":1}')
    assert (call.id, call.method, bytes(call.params)) == (b"7", "GetTask", b'{"id":"x"}')


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        (b'"id":"a b",', b'"a b"'),
        (b'"id": 1.50 ,', b"1.50"),
        (b'"id":-3,', b"-3"),
        (b'"id":9007199254740993,', b"9007199254740993"),
        (b'"id":"\\u00e9%d",', b'"\\u00e9%d"'),
        ('"id":"é",'.encode(), '"é"'.encode()),
        (b'"id":null,', b"null"),
        (b"", b"null"),
    ],
)
def test_an_id_is_echoed_as_it_was_written(given: bytes, echoed: bytes) -> None:
    call = jsonrpc.decode_call(b'{"jsonrpc":"2.0",%b"method":"m"}' % given)
    assert call.id == echoed
    assert b"{}".join(jsonrpc.result_frame(call.id)) == b'{"jsonrpc":"2.0","id":%b,"result":{}}' % echoed


@pytest.mark.parametrize("params", [b"", b',"params":null', b',"params":{}'])
def test_absent_params_are_an_empty_object(params: bytes) -> None:
    assert bytes(jsonrpc.decode_call(b'{"jsonrpc":"2.0","method":"m"%b}' % params).params) == b"{}"


@pytest.mark.parametrize(
    ("body", "code", "echoed"),
    [
        (b"", -32700, None),
        (b"{", -32700, None),
        (b'{"jsonrpc":"2.0","id":1,"method":"m"} x', -32700, None),
        (b'{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":"\xff"}}', -32700, None),
        (b'{"jsonrpc":"2.0","id":"\xed\xa0\x80","method":"m"}', -32700, None),
        (b'{"jsonrpc":"2.0","id":1,"method":"m","params":' + b"[" * 50_000 + b"]" * 50_000 + b"}", -32700, None),
        (b"[]", -32600, None),
        (b'[{"jsonrpc":"2.0","id":1,"method":"m"}]', -32600, None),
        (b'"text"', -32600, None),
        (b"null", -32600, None),
        (b"{}", -32600, None),
        (b'{"id":5,"method":"m"}', -32600, 5),
        (b'{"jsonrpc":"1.0","id":5,"method":"m"}', -32600, 5),
        (b'{"jsonrpc":2.0,"id":5,"method":"m"}', -32600, 5),
        (b'{"jsonrpc":"2.0","id":"x"}', -32600, "x"),
        (b'{"jsonrpc":"2.0","id":"x","method":7}', -32600, "x"),
        (b'{"jsonrpc":"2.0","id":"x","method":null}', -32600, "x"),
        (b'{"jsonrpc":"2.0","id":{},"method":"m"}', -32600, None),
        (b'{"jsonrpc":"2.0","id":[1],"method":7}', -32600, None),
        (b'{"jsonrpc":"2.0","id":true,"method":"m"}', -32600, None),
        (b'{"jsonrpc":"2.0","id":"' + b"x" * 2000 + b'","method":"m"}', -32600, None),
    ],
)
def test_what_is_no_request_is_refused_with_the_id_where_one_can_be_read(body: bytes, code: int, echoed: Any) -> None:
    with pytest.raises(jsonrpc.UnreadableCall) as refused:
        jsonrpc.decode_call(body)
    for dialect in Version:
        told = read(jsonrpc.encode_refusal(refused.value.id, refused.value, dialect))
        assert (told["jsonrpc"], told["id"], told["error"]["code"]) == ("2.0", echoed, code)
        assert told["error"]["message"]


def test_an_unknown_method_is_named() -> None:
    told = read(
        jsonrpc.encode_refusal(b"1", jsonrpc.unknown_method(jsonrpc.RpcCall(b"1", "tasks/fly", b"{}")), Version.V1)
    )
    assert (told["id"], told["error"]["code"], told["error"]["message"]) == (1, -32601, "unknown method: tasks/fly")


def test_a_parse_error_found_in_the_params_has_no_id_either() -> None:
    assert read(jsonrpc.encode_refusal(b"1", Invalid("invalid_json", "bad"), Version.V03))["id"] is None


def test_an_error_without_details_has_no_data() -> None:
    assert jsonrpc.encode_error(b"1", ErrorObject(-32603, "Internal error")) == (
        b'{"jsonrpc":"2.0","id":1,"error":{"code":-32603,"message":"Internal error"}}'
    )


def test_what_stands_around_results_of_a_stream_is_the_response() -> None:
    before, after = jsonrpc.result_frame(b'"x"')
    assert before + b"{}" + after == b'{"jsonrpc":"2.0","id":"x","result":{}}'
