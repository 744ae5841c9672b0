"""Both dialects from the caller's side: what we ask is what doors and the official types read, and the other way."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from a2a.compat.v0_3 import types as v03_types
from a2a.types import a2a_pb2 as v1_types
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from covenant.model import a2a_requests as asking
from covenant.model.content import Content, Text
from covenant.model.errors import Invalid
from covenant.model.task import Ending
from covenant.model.task_event import Began, Ended
from covenant.model.task_view import RemoteArtifact, RemoteMessage, RemoteStatus, RemoteTask, TaskState
from covenant.outbound.remote.remote_task import RemoteTaskView
from covenant.wire.a2a.client_codec import ClientCodec
from covenant.wire.a2a.dialects import V03, V1, Dialect
from covenant.wire.jsonrpc import BadResponse, RpcError, decode_result, encode_request
from tests.wire.a2a.a2a_samples import CONTEXT, DONE, STORY, TASK, TASK_ID, contents, folded, json, read, steps

DIALECTS = {"1.0": V1, "0.3": V03}
both = pytest.mark.parametrize("dialect", DIALECTS)


def sides(dialect: str) -> tuple[Dialect, ClientCodec]:
    return DIALECTS[dialect], DIALECTS[dialect].client


def asked(*parts: Content, **more: Any) -> asking.SendMessage:
    message = asking.Message(message_id="m", parts=parts or (Text("hi"),), context_id="c", metadata={"k": 1}, **more)
    return asking.SendMessage(message=message, blocking=False, output_modes=("text/plain",), metadata={"r": 2})


@both
@given(parts=st.lists(contents, min_size=1, max_size=3))
def test_a_door_reads_what_a_client_writes(dialect: str, parts: list[Content]) -> None:
    door, client = sides(dialect)
    ask = asked(*parts, task_id="t", extensions=("urn:x",), reference_task_ids=("r",))
    assert door.requests.decode_send(client.encode_send(ask)) == ask


@both
def test_a_door_reads_whom_a_client_names(dialect: str) -> None:
    door, client = sides(dialect)
    assert door.requests.decode_get_task(client.encode_task_request("t")) == asking.GetTask(task_id="t")
    assert door.requests.decode_cancel(client.encode_task_request("t")).task_id == "t"
    assert door.requests.decode_subscribe(client.encode_task_request("t")) == asking.Subscribe(task_id="t")


def test_the_official_types_read_what_a_client_writes() -> None:
    new = json_format.Parse(V1.client.encode_send(asked(), "acme"), v1_types.SendMessageRequest())
    assert (new.tenant, new.message.parts[0].text, new.configuration.return_immediately) == ("acme", "hi", True)
    old = v03_types.MessageSendParams.model_validate_json(V03.client.encode_send(asked()))
    assert old.configuration is not None
    assert (old.message.message_id, old.configuration.blocking) == ("m", False)


@both
def test_a_client_reads_the_task_that_a_door_tells(dialect: str) -> None:
    door, client = sides(dialect)
    view = folded()
    for heard in (
        client.decode_task(door.responses.encode_task(view)),
        client.decode_reply(door.responses.encode_sent(view)),
    ):
        assert isinstance(heard, RemoteTask)
        assert (heard.task_id, heard.context_id, heard.state) == (TASK_ID, CONTEXT, TaskState.COMPLETED)
        assert (heard.artifacts, heard.history, heard.text) == (view.artifacts, view.messages, "hello back")


@both
def test_a_client_that_hears_every_frame_knows_the_task(dialect: str) -> None:
    door, client = sides(dialect)
    known = RemoteTaskView()
    for step in steps():
        list(known.take(client.decode_reply(door.responses.encode_step(TASK, step))))
    view = folded()
    assert (known.state, known.artifacts, known.task_id) == (view.state, view.artifacts, TASK_ID)
    assert known.message is not None
    assert known.message.parts == (Text("hello back"),)


@both
@pytest.mark.parametrize("break_at", range(1, len(STORY)))
def test_a_snapshot_at_any_break_says_nothing_twice(dialect: str, break_at: int) -> None:
    """Frames, a break, a snapshot of any later moment, and the frames after it: the text comes once and in order."""
    door, client = sides(dialect)
    for snapshot_at in range(break_at, len(STORY) + 1):
        known, told = RemoteTaskView(), ""
        heard = [client.decode_reply(door.responses.encode_step(TASK, step)) for step in steps()[:break_at]]
        heard.append(client.decode_reply(door.responses.encode_snapshot(folded(STORY[:snapshot_at]))))
        heard += [client.decode_reply(door.responses.encode_step(TASK, step)) for step in steps()[snapshot_at:]]
        for each in heard:
            told += "".join(news.text for news in known.take(each) if isinstance(news, RemoteArtifact))
        assert told == "hello"
        assert (known.state, known.artifacts) == (TaskState.COMPLETED, folded().artifacts)


@both
def test_a_bare_message_is_one(dialect: str) -> None:
    door, client = sides(dialect)
    bare = folded((Began(TASK), Ended(Ending.COMPLETED, msgspec.structs.replace(DONE, reply=True))))
    heard = client.decode_reply(door.responses.encode_message(bare))
    assert isinstance(heard, RemoteMessage)
    assert (heard.text, heard.task_id) == ("hello back", None)


@both
def test_every_state_is_read_and_an_unknown_one_is_taken_for_work(dialect: str) -> None:
    door, client = sides(dialect)
    for state in TaskState:
        assert (
            client.decode_task(door.responses.encode_task(msgspec.structs.replace(folded(), state=state))).state
            is state
        )
    for unknown in ("TASK_STATE_UNSPECIFIED", "unknown", "pondering", None):
        assert client.decode_task(json({"id": "t", "status": {"state": unknown}})).state is TaskState.WORKING


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"id": "t", "status": {"state": "working"}}, RemoteTask),
        ({"taskId": "t", "status": {"state": "working"}, "final": True}, RemoteStatus),
        ({"taskId": "t", "artifact": {"artifactId": "a", "parts": [{"type": "text", "text": "x"}]}}, RemoteArtifact),
        ({"messageId": "m", "role": "agent", "parts": [{"type": "text", "text": "x"}]}, RemoteMessage),
    ],
)
def test_older_agents_that_leave_out_the_kind_are_understood(said: dict[str, Any], kind: type) -> None:
    assert isinstance(V03.client.decode_reply(json(said)), kind)


def test_snake_case_and_numbers_of_enums_are_understood() -> None:
    update = {"task_id": "t", "context_id": "c", "status": {"state": 3}}
    heard = V1.client.decode_reply(json({"status_update": update}))
    assert heard == RemoteStatus(task_id="t", context_id="c", state=TaskState.COMPLETED)


@both
@pytest.mark.parametrize("said", [{}, {"kind": "poem"}, {"task": {"status": {}}}, {"kind": "task"}])
def test_what_is_nothing_known_is_said_to_be_so(dialect: str, said: Any) -> None:
    _, client = sides(dialect)
    with pytest.raises(BadResponse):
        client.decode_reply(json(said))


@both
@given(
    said=st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(
                    ["task", "kind", "id", "status", "parts", "artifacts", "artifactUpdate", "message", "state"]
                ),
                x,
            )
        ),
    )
)
def test_nothing_that_is_said_makes_a_client_fall_over(dialect: str, said: Any) -> None:
    _, client = sides(dialect)
    with suppress(Invalid, BadResponse):
        client.decode_reply(json(said))


def test_a_request_is_read_by_our_own_door() -> None:
    assert read(encode_request(1, "GetTask", b'{"id":"t"}')) == {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "GetTask",
        "params": {"id": "t"},
    }


def test_a_response_is_a_result_or_an_error_or_nothing() -> None:
    assert decode_result(b'{"jsonrpc":"2.0","id":1,"result":{"a":1}}') == b'{"a":1}'
    with pytest.raises(RpcError, match="it is gone") as raised:
        decode_result(json({"error": {"code": -32001, "message": " it\n is \x1b gone", "data": [{"reason": "WHY"}]}}))
    assert (raised.value.code, raised.value.reason) == (-32001, "WHY")
    for nothing in (b"", b"<html>", b"[]", b'{"id":1}', b'{"error":"no"}'):
        with pytest.raises(BadResponse):
            decode_result(nothing)
