"""Strangers: the official SDK's own types read what we write, we read what its clients write, and nothing is lost."""

import base64
from typing import Any

import msgspec
import pytest
from a2a.compat.v0_3 import conversions
from a2a.compat.v0_3 import types as v03
from a2a.types import a2a_pb2 as v1
from google.protobuf import json_format
from google.protobuf.message import Message
from hypothesis import example, given
from hypothesis import strategies as st

from covenant.model import a2a_requests as asking
from covenant.model.content import Content, Embedded, Json, Resource, ResourceLink, Text
from covenant.model.task import Ending
from covenant.model.task_event import ArtifactUpdate, Began, Ended
from covenant.model.task_view import TaskState
from covenant.wire.a2a.dialects import V03, V1
from tests.wire.a2a.a2a_samples import AT, CONTEXT, DONE, STORY, TASK, TASK_ID, contents, folded, json, read, steps

PARTS = (
    Text("t", "text/markdown", "t.md", {"k": [1, None]}),
    Resource(Embedded("", "image/png", blob=base64.b64encode(b"\xff\xfe\x00").decode()), "p.png", {"k": 1}),
    ResourceLink("https://example.com/x", "x", "text/html", metadata={"k": 1}),
    Json({"a": [1, "b", None]}, "application/json"),
    Json(None),
    Json([1, 2]),
)
RICH = msgspec.structs.replace(TASK, parts=PARTS, metadata={"k": 1}, extensions=("urn:x",), reference_task_ids=("r",))
TOLD = (Began(RICH), *STORY[1:6], ArtifactUpdate("files", PARTS, description="d", metadata={"m": 1}), *STORY[6:])
BARE = folded((Began(TASK), Ended(Ending.COMPLETED, msgspec.structs.replace(DONE, reply=True))))
PUSH = asking.PushConfig(
    url="https://example.com", id="p", authentication=asking.PushAuthentication(scheme="Basic", credentials="c")
)


def parse(data: bytes, kind: type[Message]) -> Any:
    """Strictly: an unknown field would be an error."""
    return json_format.Parse(data, kind())


def test_the_official_types_read_every_frame_as_we_wrote_it() -> None:
    for step in steps(*TOLD):
        told = V1.responses.encode_step(RICH, step)
        assert json_format.MessageToDict(parse(told, v1.StreamResponse)) == read(told)


def test_the_official_types_read_every_answer_as_we_wrote_it() -> None:
    view = folded(TOLD)
    page = asking.TaskPage(tasks=(view,), total_size=1, page_size=50, next_page_token="n")
    for told, kind in (
        (V1.responses.encode_task(view), v1.Task),
        (V1.responses.encode_sent(view), v1.SendMessageResponse),
        (V1.responses.encode_sent(BARE), v1.SendMessageResponse),
        (V1.responses.encode_message(BARE), v1.StreamResponse),
        (V1.responses.encode_snapshot(view), v1.StreamResponse),
        (V1.responses.encode_page(page, asking.ListTasks(include_artifacts=True)), v1.ListTasksResponse),
        (V1.responses.encode_push(TASK_ID, PUSH), v1.TaskPushNotificationConfig),
        (V1.responses.encode_pushes(TASK_ID, [PUSH], "n"), v1.ListTaskPushNotificationConfigsResponse),
    ):
        assert json_format.MessageToDict(parse(told, kind)) == read(told)
    task = parse(V1.responses.encode_task(view), v1.Task)
    assert task.status.state == v1.TaskState.TASK_STATE_COMPLETED
    assert task.history[0].parts[1].raw == b"\xff\xfe\x00"
    assert task.status.timestamp.ToMilliseconds() == AT + len(TOLD)


def test_every_state_is_one_of_theirs() -> None:
    for state in TaskState:
        told = parse(V1.responses.encode_task(msgspec.structs.replace(folded(), state=state)), v1.Task)
        named = f"TASK_STATE_{state.name}"
        assert v1.TaskState.Name(told.status.state) == named
        number = v1.TaskState.Value(named)
        assert V1.requests.decode_list_tasks(json({"status": number})).state is state
        old = v03.Task.model_validate_json(V03.responses.encode_task(msgspec.structs.replace(folded(), state=state)))
        assert old.status.state.value == state.value


def test_the_official_old_types_read_every_frame_as_we_wrote_it() -> None:
    kinds = v03.SendStreamingMessageSuccessResponse
    for step in steps(*TOLD):
        told = read(V03.responses.encode_step(RICH, step))
        parsed = kinds.model_validate({"id": 1, "jsonrpc": "2.0", "result": told}).result
        assert parsed.kind == told["kind"]
        assert parsed.model_dump(mode="json", by_alias=True, exclude_none=True) == told


def test_the_official_old_types_read_every_answer_as_we_wrote_it() -> None:
    view = folded(TOLD)
    for told, kind in (
        (V03.responses.encode_task(view), v03.Task),
        (V03.responses.encode_sent(BARE), v03.Message),
        (V03.responses.encode_push(TASK_ID, PUSH), v03.TaskPushNotificationConfig),
    ):
        parsed = kind.model_validate_json(told)
        assert parsed.model_dump(mode="json", by_alias=True, exclude_none=True) == read(told)
    listed = {"id": 1, "jsonrpc": "2.0", "result": read(V03.responses.encode_pushes(TASK_ID, [PUSH, PUSH]))}
    assert len(v03.ListTaskPushNotificationConfigSuccessResponse.model_validate(listed).result) == 2


def test_an_old_client_of_the_official_sdk_sees_the_task_that_a_new_one_sees() -> None:
    view = folded(TOLD)
    new = parse(V1.responses.encode_task(view), v1.Task)
    old = conversions.to_core_task(v03.Task.model_validate_json(V03.responses.encode_task(view)))
    assert old.status == new.status
    assert [(each.message_id, each.role) for each in old.history] == [
        (each.message_id, each.role) for each in new.history
    ]
    assert [each.WhichOneof("content") for each in old.artifacts[1].parts] == [
        each.WhichOneof("content") for each in new.artifacts[1].parts
    ]
    assert old.artifacts[1].parts[4:] == new.artifacts[1].parts[4:]


def their_send() -> v1.SendMessageRequest:
    message = v1.Message(
        message_id="m",
        role=v1.Role.ROLE_USER,
        context_id="c",
        task_id="t",
        reference_task_ids=["r"],
        extensions=["urn:x"],
    )
    message.metadata.update({"k": "v"})
    message.parts.add(text="hi", media_type="text/plain")
    message.parts.add(raw=b"\xfb\xff", filename="f", media_type="a/b")
    message.parts.add(url="https://example.com")
    data = message.parts.add()
    json_format.ParseDict({"a": True}, data.data)
    request = v1.SendMessageRequest(message=message, tenant="echo")
    request.configuration.return_immediately = True
    request.configuration.history_length = 0
    request.configuration.accepted_output_modes.append("text/plain")
    push = request.configuration.task_push_notification_config
    push.url, push.authentication.scheme = "https://example.com", "Bearer"
    return request


@pytest.mark.parametrize("snake", [False, True], ids=["camelCase", "snake_case"])
@pytest.mark.parametrize("numbers", [False, True], ids=["names", "numbers"])
def test_we_read_what_a_client_of_the_official_sdk_sends(snake: bool, numbers: bool) -> None:
    body = json_format.MessageToJson(
        their_send(), preserving_proto_field_name=snake, use_integers_for_enums=numbers
    ).encode()
    ask = V1.requests.decode_send(body)
    assert ask == asking.SendMessage(
        message=asking.Message(
            message_id="m",
            context_id="c",
            task_id="t",
            reference_task_ids=("r",),
            extensions=("urn:x",),
            metadata={"k": "v"},
            parts=(
                Text("hi", "text/plain"),
                Resource(Embedded("", "a/b", blob="+/8="), "f"),
                ResourceLink("https://example.com"),
                Json({"a": True}),
            ),
        ),
        blocking=False,
        history_length=0,
        output_modes=("text/plain",),
        push=asking.PushConfig(url="https://example.com", authentication=asking.PushAuthentication(scheme="Bearer")),
    )


def test_we_read_what_an_old_client_of_the_official_sdk_sends() -> None:
    request = conversions.to_compat_send_message_request(their_send(), request_id=0)
    body = request.params.model_dump_json(by_alias=True, exclude_none=True).encode()
    ask = V03.requests.decode_send(body)
    new = V1.requests.decode_send(json_format.MessageToJson(their_send()).encode())
    # Its text parts have no place for a media type.
    assert ask.message.parts == (Text("hi"), *new.message.parts[1:])
    assert new.push is not None
    push = msgspec.structs.replace(new.push, id="default", version="0.3")
    assert msgspec.structs.replace(ask, message=new.message) == msgspec.structs.replace(new, push=push)


@pytest.mark.parametrize("snake", [False, True], ids=["camelCase", "snake_case"])
def test_we_read_every_other_request_of_the_official_sdk(snake: bool) -> None:
    def sent(request: Message) -> bytes:
        return json_format.MessageToJson(request, preserving_proto_field_name=snake).encode()

    listing = v1.ListTasksRequest(
        context_id=CONTEXT,
        status=v1.TaskState.TASK_STATE_WORKING,
        page_size=7,
        page_token="p",
        history_length=0,
        include_artifacts=True,
    )
    listing.status_timestamp_after.FromMilliseconds(AT + 5)
    assert V1.requests.decode_list_tasks(sent(listing)) == asking.ListTasks(
        context_id=CONTEXT,
        state=TaskState.WORKING,
        page_size=7,
        page_token="p",
        history_length=0,
        include_artifacts=True,
        updated_after_ms=AT + 5,
    )
    assert V1.requests.decode_get_task(sent(v1.GetTaskRequest(id="t", history_length=3))) == asking.GetTask(
        task_id="t", history_length=3
    )
    assert V1.requests.decode_cancel(sent(v1.CancelTaskRequest(id="t"))).task_id == "t"
    assert V1.requests.decode_subscribe(sent(v1.SubscribeToTaskRequest(id="t"))).task_id == "t"
    push = v1.TaskPushNotificationConfig(task_id="t", url="https://x", id="p", token="k")
    assert V1.requests.decode_create_push(sent(push)).config == asking.PushConfig(url="https://x", id="p", token="k")
    get = v1.GetTaskPushNotificationConfigRequest(task_id="t", id="p")
    assert V1.requests.decode_get_push(sent(get)) == asking.GetPush(task_id="t", id="p")
    delete = v1.DeleteTaskPushNotificationConfigRequest(task_id="t", id="p")
    assert V1.requests.decode_delete_push(sent(delete)) == asking.DeletePush(task_id="t", id="p")
    pushes = v1.ListTaskPushNotificationConfigsRequest(task_id="t", page_size=3, page_token="p")
    assert V1.requests.decode_list_push(sent(pushes)) == asking.ListPush(task_id="t", page_size=3, page_token="p")
    V1.requests.decode_nothing(sent(v1.GetExtendedAgentCardRequest(tenant="x")))


def spoken(told: bytes, *path: str) -> dict[str, Any]:
    """The message that a client would send to say the same again."""
    found = read(told)
    for name in path:
        found = found[name]
    return {"message": found[0]}


@given(st.lists(contents, min_size=1, max_size=3))
@example([Text("")])
@example([Json({"value": 1}, metadata={"data_part_compat": False})])
def test_content_comes_back_as_it_went_out_in_both_dialects(parts: list[Content]) -> None:
    view = folded((Began(msgspec.structs.replace(TASK, parts=tuple(parts))),))
    for dialect in (V1, V03):
        ask = dialect.requests.decode_send(json(spoken(dialect.responses.encode_task(view), "history")))
        assert list(ask.message.parts) == parts


@given(st.lists(contents, min_size=1, max_size=3))
def test_the_official_types_read_any_content(parts: list[Content]) -> None:
    view = folded((Began(msgspec.structs.replace(TASK, parts=tuple(parts))),))
    told = V1.responses.encode_task(view)
    assert json_format.MessageToDict(parse(told, v1.Task)) == read(told)
    old = v03.Task.model_validate_json(V03.responses.encode_task(view))
    assert old.model_dump(mode="json", by_alias=True, exclude_unset=True) == read(V03.responses.encode_task(view))
