"""What is refused, and as what, on each binding; and that nothing is left behind by it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.a2a.bindings import Ask, Binding, New, Refused, words
from tests.conformance.a2a.client_answers import Part
from tests.conformance.a2a.http_bindings import Rest, Rpc
from tests.conformance.a2a.server_under_test import ServerUnderTest, unique

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def refusal(me: Binding, body: bytes, operation: str = "send", **headers: str) -> Refused:
    reply = await me.raw(body, operation, **headers)
    with pytest.raises(Refused) as refused:
        me.read(reply)
    return refused.value


def sent(me: Binding, **message: Any) -> dict[str, Any]:
    """The params of a send, some of them otherwise; None leaves one out."""
    params = me.params_send(Ask(message=words("echo")))
    changed = {**params["message"], **message}
    return {**params, "message": {name: value for name, value in changed.items() if value is not None}}


NOT_JSON = {
    "half": b"{",
    "no JSON": b"nonsense",
    "Python": b"{'a': 1}",
    "trailing comma": b'{"a": 1,}',
    "not a number": b'{"a": NaN}',
    "two": b"{} {}",
    "a byte": b"\x00",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "not UTF-8": b'{"a": "\xff"}',
    "half a character": b'{"a": "\xc3"}',
    "endless": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON)
async def test_what_is_not_json_is_told_so(me: Binding, body: bytes) -> None:
    assert (await refusal(me, body)).name == "INVALID_JSON"


async def test_nothing_at_all_is_no_call(me: Binding) -> None:
    for body in (b"", b" \n"):
        # To an address that names its operation, nothing is as good as an empty object.
        expected = ("INVALID_JSON",) if isinstance(me, Rpc) else ("INVALID_PARAMS",)
        assert (await refusal(me, body)).name in expected
        assert (await refusal(me, b"[" * 100_000)).name in ("INVALID_REQUEST", "INVALID_PARAMS")


@pytest.mark.parametrize(
    ("envelope", "echoed"),
    [
        ([], None),
        ([{"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": {"id": "x"}}], None),
        ("text", None),
        (1, None),
        (None, None),
        ({}, None),
        ({"id": 7}, 7),
        ({"id": 7, "method": "GetTask"}, 7),
        ({"id": 7, "jsonrpc": "1.0", "method": "GetTask"}, 7),
        ({"id": 7, "jsonrpc": 2.0, "method": "GetTask"}, 7),
        ({"id": "seven", "jsonrpc": "2.0"}, "seven"),
        ({"id": 7, "jsonrpc": "2.0", "method": 5}, 7),
        ({"id": 7, "jsonrpc": "2.0", "method": None}, 7),
        ({"id": [7], "jsonrpc": "2.0", "method": "GetTask"}, None),
        ({"id": {"a": 1}, "jsonrpc": "2.0", "method": "GetTask"}, None),
        ({"id": True, "jsonrpc": "2.0", "method": "GetTask"}, None),
        ({"id": "x" * 2000, "jsonrpc": "2.0", "method": "GetTask"}, None),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
async def test_what_is_no_call_is_told_so_with_its_id_where_it_has_one(me: Binding, envelope: Any, echoed: Any) -> None:
    reply = await me.raw(json.dumps(envelope).encode())
    answer = reply.json()
    assert (reply.status_code, answer["error"]["code"], answer["id"]) == (200, -32600, echoed)


@pytest.mark.parametrize("call_id", [0, -1, 1.5, "", "é", 'a"b%s\n', None])
async def test_a_calls_id_comes_back_as_it_was_also_in_every_frame(me: Binding, call_id: Any) -> None:
    assert isinstance(me, Rpc)
    for operation in ("send", "stream"):
        call = json.loads(me.envelope(operation, sent(me)))
        reply = await me.raw(json.dumps({**call, "id": call_id}).encode())
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
        answers = [reply.json()] if operation == "send" else [json.loads(line) for line in lines]
        assert answers
        assert {json.dumps(answer["id"]) for answer in answers} == {json.dumps(call_id)}
    without = {"jsonrpc": "2.0", "method": me.METHODS["get"], "params": {"id": "x"}}
    assert (await me.raw(json.dumps(without).encode())).json()["id"] is None


@pytest.mark.parametrize(
    "method", ["", "send", "sendMessage", "message/shout", "tasks/pushNotificationConfig", "é", "x" * 5000]
)
async def test_an_unknown_method_is_told_so(me: Binding, method: str) -> None:
    call = {"jsonrpc": "2.0", "id": "call-1", "method": method, "params": {"id": "x"}}
    found = await refusal(me, json.dumps(call).encode())
    assert found.name == "METHOD_NOT_FOUND"
    assert len(found.message) < 300


@pytest.mark.parametrize("params", [[], ["x"], "x", 5, True], ids=json.dumps)
async def test_params_that_are_no_object_are_told_so(me: Binding, params: Any) -> None:
    for operation in ("send", "get", "cancel", "list", "subscribe", "card"):
        if isinstance(me, Rest) and operation not in ("send", "cancel"):
            continue
        body = json.dumps(params).encode() if isinstance(me, Rest) else me.envelope(operation, params)
        if isinstance(me, Rest) and operation == "cancel":
            headers = {"authorization": f"Bearer {me.token}", "content-type": "application/json"}
            reply = await me.http.post(f"{me.url}/tasks/x:cancel", content=body, headers=headers)
            assert reply.json()["error"]["details"][0]["reason"] == "INVALID_PARAMS"
            continue
        assert (await refusal(me, body)).name == "INVALID_PARAMS"


MISSING: list[tuple[str, Callable[[Binding], Any], str]] = [
    ("no message", lambda _: {}, "message"),
    ("null message", lambda _: {"message": None}, "message"),
    ("message is text", lambda _: {"message": "hello"}, "message"),
    ("no messageId", lambda me: sent(me, messageId=None), "message.messageId"),
    ("empty messageId", lambda me: sent(me, messageId=""), "message.messageId"),
    ("messageId is a number", lambda me: sent(me, messageId=5), "message.messageId"),
    ("long messageId", lambda me: sent(me, messageId="x" * 5000), "message.messageId"),
    ("no role", lambda me: sent(me, role=None), "message.role"),
    ("unknown role", lambda me: sent(me, role="boss"), "message.role"),
    ("the agent's role", lambda me: sent(me, role="ROLE_AGENT" if isinstance(me, New) else "agent"), "message.role"),
    ("no parts", lambda me: sent(me, parts=None), "message.parts"),
    ("empty parts", lambda me: sent(me, parts=[]), "message.parts"),
    ("parts are an object", lambda me: sent(me, parts={}), "message.parts"),
    ("too many parts", lambda me: sent(me, parts=sent(me)["message"]["parts"] * 1_001), "message.parts"),
    ("a part is text", lambda me: sent(me, parts=["hello"]), "message.parts[0]"),
    ("an empty part", lambda me: sent(me, parts=[{}]), "message.parts[0]"),
    ("long contextId", lambda me: sent(me, contextId="x" * 5000), "message.contextId"),
    ("metadata is a list", lambda me: sent(me, metadata=[1]), "message.metadata"),
    ("extensions are text", lambda me: sent(me, extensions="urn:x"), "message.extensions"),
    (
        "bad historyLength",
        lambda me: {**sent(me), "configuration": {"historyLength": -1}},
        "configuration.historyLength",
    ),
    ("configuration is text", lambda me: {**sent(me), "configuration": "fast"}, "configuration"),
]


@pytest.mark.parametrize("operation", ["send", "stream"])
@pytest.mark.parametrize(("make", "field"), [row[1:] for row in MISSING], ids=[row[0] for row in MISSING])
async def test_a_message_with_something_missing_or_mistyped_is_refused_by_its_name(
    me: Binding, operation: str, make: Callable[[Binding], Any], field: str
) -> None:
    found = await refusal(me, me.envelope(operation, make(me)), operation)
    assert found.name == "INVALID_PARAMS"
    assert found.message.startswith(field)
    assert all(named.startswith(field) for named in found.fields)
    assert found.fields


@pytest.mark.parametrize(
    "part",
    [
        {"text": 5},
        {"raw": "not base64!"},
        {"raw": 5},
        {"url": ""},
        {"text": "a", "raw": "YQ=="},
        {"blob": "YQ=="},
        {"text": "a", "metadata": 5},
        {"kind": "text", "colour": "red"},
    ],
    ids=json.dumps,
)
async def test_a_part_that_is_none_is_refused(me: Binding, part: Any) -> None:
    found = await refusal(me, me.envelope("send", sent(me, parts=[part])))
    assert found.name == "INVALID_PARAMS"
    assert found.message.startswith("message.parts[0]")


@pytest.mark.parametrize(
    "part",
    [
        {"text": "no kind"},
        {"kind": "video"},
        {"kind": "text"},
        {"kind": "text", "text": 5},
        {"kind": "file"},
        {"kind": "file", "file": {}},
        {"kind": "file", "file": {"bytes": "YQ==", "uri": "https://example.com"}},
        {"kind": "file", "file": {"bytes": "not base64!"}},
        {"kind": "data"},
    ],
    ids=json.dumps,
)
async def test_a_part_that_is_none_is_refused_to_the_slash_methods(me: Binding, part: Any) -> None:
    found = await refusal(me, me.envelope("send", sent(me, parts=[part])))
    assert found.name == "INVALID_PARAMS"
    assert found.message.startswith("message.parts[0]")


async def test_an_id_that_is_missing_or_mistyped_is_refused(me: Binding) -> None:
    for operation in ("get", "cancel", "subscribe"):
        for params in ({}, {"id": ""}, {"id": None}, {"id": 5}):
            found = await refusal(me, me.envelope(operation, params), operation)
            assert (found.name, found.message.split(":")[0]) == ("INVALID_PARAMS", "id")


@pytest.mark.parametrize("levels", [70, 1_000])
async def test_what_is_nested_too_deeply_is_refused(me: Binding, levels: int) -> None:
    deep = json.loads("[" * levels + "]" * levels) if levels < 500 else None
    text = json.dumps(sent(me, metadata={"deep": "DEEP"})).replace('"DEEP"', "[" * levels + "]" * levels)
    params = json.loads(text) if deep is not None else None
    body = me.envelope("send", params) if params is not None else _around(me, text)
    assert (await refusal(me, body)).name == "INVALID_JSON"
    shallow = "[" * 25 + "]" * 25
    assert (await me.raw(_around(me, text.replace("[" * levels + "]" * levels, shallow)))).status_code == 200


def _around(me: Binding, params: str) -> bytes:
    if isinstance(me, Rest):
        return params.encode()
    return me.envelope("send", "PARAMS").decode().replace('"PARAMS"', params).encode()


async def test_a_body_or_message_over_the_limit_is_refused_and_the_connection_lives(me: Binding) -> None:
    for size in (1 << 20, 3 << 20):
        with pytest.raises(Refused, match="REQUEST_TOO_LARGE"):
            await me.send("x" * size)
        with pytest.raises(Refused, match="REQUEST_TOO_LARGE"):
            await me.streamed("x" * size)
    assert (await me.task("echo")).state == "completed"


@pytest.mark.parametrize("key", ["", " ", "x" * 257])
async def test_an_idempotency_key_that_is_none_is_refused(me: Binding, key: str) -> None:
    with pytest.raises(Refused, match="INVALID_PARAMS"):
        await me.task("echo", metadata={"covenant.idempotency": {"key": key}})
    for bad in ("x", {"duplicate_safety": "idempotent"}, {"key": "k", "duplicate_safety": "maybe"}, ["k"]):
        with pytest.raises(Refused, match="INVALID_PARAMS"):
            await me.task("echo", metadata={"covenant.idempotency": bad})
    with pytest.raises(Refused, match="INVALID_PARAMS"):
        await me.saying(idempotency_key="one").task("echo", metadata={"covenant.idempotency": {"key": "other"}})


@pytest.mark.parametrize("verb", ["create", "get", "list", "delete"])
async def test_push_notifications_are_refused_where_they_are_switched_off(me: Binding, verb: str) -> None:
    task = await me.task("echo")
    with pytest.raises(Refused, match="PUSH_NOTIFICATION_NOT_SUPPORTED"):
        await me.push(verb, task.id)


async def test_an_agent_that_nobody_knows_is_not_found(me: Binding) -> None:
    nobody = me.with_(agent="nobody")
    for attempt in (
        nobody.send("echo"),
        nobody.streamed("echo"),
        nobody.get("x"),
        nobody.page(),
        nobody.cancel("x"),
        nobody.followed("x"),
        nobody.card(),
    ):
        with pytest.raises(Refused, match="TASK_NOT_FOUND"):
            await attempt


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("raise", "the agent failed"),
        ("nonsense", "the agent yielded an object, which cannot be sent"),
        ("flood", "the agent's output in one turn exceeds"),
        ("surrogate", "the agent failed"),
        ("deep", "the agent failed"),
    ],
)
async def test_an_agent_that_misbehaves_fails_its_task_and_nobody_elses(
    me: Binding, under_test: ServerUnderTest, verb: str, said: str
) -> None:
    gate = unique()
    beside = await me.task(f"gate {gate}", blocking=False)
    task = await me.task(verb)
    assert task.state == "failed"
    assert task.message is not None
    assert task.message.text.startswith(said)
    await under_test.whole(task.id)
    frames = await me.streamed(verb)
    assert frames[-1].state == "failed"
    under_test.gates.open(gate)
    assert (await me.followed(beside.id, after=1))[-1].state == "completed"


async def test_an_agent_that_hangs_is_timed_out(me: Binding, under_test: ServerUnderTest) -> None:
    brief = me.with_(agent="brief")
    task = await brief.task("hang")
    assert task.state == "failed"
    assert task.message is not None
    assert task.message.text == "Task timed out"
    assert (await brief.streamed("hang"))[-1].state == "failed"
    # Its place is free again. On a busy machine an answer may take longer than this agent may.
    answers: list[str] = []
    while "completed" not in answers and len(answers) < 20:
        answers.append((await brief.task("echo")).state)
    assert answers[-1] == "completed"
    await under_test.whole(task.id)


async def test_a_refused_message_begins_nothing(me: Binding) -> None:
    context = unique()
    for message in (
        words("echo", context=context, role="agent"),
        words("echo", context=context, task=unique()),
        words("echo", Part("url", ""), context=context),
    ):
        with pytest.raises(Refused):
            await me.send(message)
    with pytest.raises(Refused):
        await me.with_(agent="mannered").send(words("echo", context=context))
    assert (await me.page(contextId=context)).total == 0
    assert (await me.with_(agent="mannered").page(contextId=context)).total == 0


async def test_a_refusal_says_what_it_is_in_words_and_in_details(me: Binding) -> None:
    with pytest.raises(Refused) as refused:
        await me.get("nobody")
    (info,) = refused.value.details
    assert info == {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "TASK_NOT_FOUND",
        "domain": "a2a-protocol.org",
        "metadata": {"code": "unknown_task"},
    }
    with pytest.raises(Refused) as refused:
        await me.page(pageSize=1_000)
    assert [detail["@type"].rpartition(".")[2] for detail in refused.value.details] == ["ErrorInfo", "BadRequest"]
    assert refused.value.fields == ["pageSize"]


async def test_get_is_not_for_calls(me: Binding) -> None:
    assert isinstance(me, Rpc)
    said = {"authorization": f"Bearer {me.token}"}
    assert "supportedInterfaces" in (await me.http.get(me.url, headers=said)).json()
    for method in ("PUT", "DELETE"):
        reply = await me.http.request(method, me.url, headers=said)
        assert (reply.status_code, reply.headers["allow"]) == (405, "GET, HEAD, POST")
