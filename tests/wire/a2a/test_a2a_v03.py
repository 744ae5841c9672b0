"""The slash methods: `kind` on everything, lowercase states, `final`, and the metadata that their clients know."""

from typing import Any

import msgspec
import pytest

from covenant.model import a2a_requests as asking
from covenant.model.content import Audio, Content, Embedded, Image, Json, Resource, ResourceLink, Text
from covenant.model.errors import InvalidParams
from covenant.model.task import Ending
from covenant.model.task_event import ArtifactUpdate, Began, Ended, Started, StatusUpdate
from covenant.model.task_view import TaskState
from covenant.wire.a2a.dialects import BY_VERSION, V03, V1
from covenant.wire.a2a.error_codes import Version
from tests.wire.a2a.a2a_samples import CONTEXT, DONE, FAILED, STORY, TASK, TASK_ID, USED, folded, json, read, steps

MESSAGE = {"kind": "message", "messageId": "m", "role": "user", "parts": [{"kind": "text", "text": "hi"}]}
PLACE = {"taskId": TASK_ID, "contextId": CONTEXT}


def says(message_id: str, text: str, role: str = "agent") -> dict[str, Any]:
    return {
        **PLACE,
        "kind": "message",
        "messageId": message_id,
        "role": role,
        "parts": [{"kind": "text", "text": text}],
    }


def status(at: int, state: str, *, final: bool = False, message: Any = None, metadata: Any = None) -> dict[str, Any]:
    said: dict[str, Any] = {"state": state, "timestamp": f"2025-10-28T10:30:00.{at:03d}Z"}
    event = {**PLACE, "kind": "status-update", "status": said, "final": final}
    if message is not None:
        said["message"] = message
    return event if metadata is None else {**event, "metadata": metadata}


def chunk(text: str, *, append: bool, last: bool = False, **more: str) -> dict[str, Any]:
    artifact = {"artifactId": f"{TASK_ID}-text-0", "parts": [{"kind": "text", "text": text}], **more}
    return {**PLACE, "kind": "artifact-update", "artifact": artifact, "append": append, "lastChunk": last}


ARBITER = {"x-arbiter.agent_id": "echo"}
SPENT = {
    **ARBITER,
    "x-arbiter.input_tokens": 3,
    "x-arbiter.output_tokens": 5,
    "x-arbiter.stop_reason": "end_turn",
    "covenant.usage": USED,
}
FRAMES = [
    {
        "kind": "task",
        "id": TASK_ID,
        "contextId": CONTEXT,
        "status": {"state": "submitted", "timestamp": "2025-10-28T10:30:00.001Z"},
        "history": [says("m-1", "hello", "user")],
        "metadata": {**ARBITER, "covenant.generation": 1, "covenant.created_at": "2025-10-28T10:30:00.001Z"},
    },
    status(2, "working"),
    status(3, "working", message=says(f"{TASK_ID}-s3", "looking"), metadata={"step": 1}),
    status(4, "working", message=says("m-2", "by the way")),
    chunk("hel", append=False, name="response"),
    chunk("lo", append=True),
    chunk("", append=True, last=True),
    status(8, "input-required", final=True, message=says(f"{TASK_ID}-s8", "which language?")),
    status(9, "working"),
    status(10, "completed", final=True, message=says(f"{TASK_ID}-r", "hello back"), metadata=SPENT),
]


def test_each_step_is_one_frame_and_the_first_two_are_a_task_and_working() -> None:
    assert [read(V03.responses.encode_step(TASK, step)) for step in steps()] == FRAMES
    assert V03.responses.encode_step(TASK, steps()[0]).startswith(b'{"kind":"task"')


def test_a_task_is_told_whole() -> None:
    told = read(V03.responses.encode_task(folded()))
    assert told["kind"] == "task"
    assert told["status"]["state"] == "completed"
    assert told["artifacts"] == [
        {"artifactId": f"{TASK_ID}-text-0", "name": "response", "parts": [{"kind": "text", "text": "hello"}]}
    ]
    assert [message["role"] for message in told["history"]] == ["user", "agent", "agent", "agent", "user", "agent"]
    assert told["metadata"].items() >= SPENT.items()
    assert read(V03.responses.encode_sent(folded())) == told == read(V03.responses.encode_snapshot(folded()))


def test_a_failure_has_its_error_in_metadata_and_on_the_message() -> None:
    story = (Began(TASK), Started(), Ended(Ending.FAILED, FAILED))
    told = read(V03.responses.encode_task(folded(story)))
    assert told["metadata"]["x-arbiter.error"] == "it broke"
    assert told["status"]["message"] == says(f"{TASK_ID}-err", "it broke")
    frame = read(V03.responses.encode_step(TASK, steps(*story)[-1]))
    assert frame["final"] is True
    assert frame["metadata"] == {**ARBITER, "x-arbiter.error": "it broke"}


@pytest.mark.parametrize("ending", list(Ending))
def test_every_ending_is_final(ending: Ending) -> None:
    frame = read(V03.responses.encode_step(TASK, steps(Began(TASK), Ended(ending, FAILED))[1]))
    assert (frame["status"]["state"], frame["final"]) == (ending.value, True)


def test_waiting_for_its_client_ends_an_interaction() -> None:
    frame = read(V03.responses.encode_step(TASK, steps(Began(TASK), StatusUpdate(state="auth-required"))[1]))
    assert (frame["status"]["state"], frame["final"]) == ("auth-required", True)


def test_a_bare_reply_is_a_message() -> None:
    bare = folded((Began(TASK), Ended(Ending.COMPLETED, msgspec.structs.replace(DONE, reply=True))))
    told = {key: value for key, value in says(f"{TASK_ID}-r", "hello back").items() if key != "taskId"}
    told["metadata"] = {"covenant.usage": USED}
    assert read(V03.responses.encode_sent(bare)) == told == read(V03.responses.encode_message(bare))


@pytest.mark.parametrize(("length", "kept"), [(None, 6), (0, 0), (2, 2), (9, 6)])
def test_the_newest_messages_are_kept(length: int | None, kept: int) -> None:
    whole = read(V03.responses.encode_task(folded()))["history"]
    assert read(V03.responses.encode_task(folded(), length)).get("history", []) == whole[len(whole) - kept :]


def test_a_page_of_tasks() -> None:
    page = asking.TaskPage(tasks=(folded(),), total_size=8, page_size=1, next_page_token="next")
    told = read(V03.responses.encode_page(page, asking.ListTasks()))
    assert (told["nextPageToken"], told["pageSize"], told["totalSize"]) == ("next", 1, 8)
    assert "artifacts" not in told["tasks"][0]


def test_push_configurations_have_a_list_of_schemes() -> None:
    config = asking.PushConfig(
        version="0.3",
        url="https://example.com",
        id="p",
        token="t",
        authentication=asking.PushAuthentication(scheme="Bearer", credentials="c"),
    )
    told = {
        "taskId": TASK_ID,
        "pushNotificationConfig": {
            "id": "p",
            "url": "https://example.com",
            "token": "t",
            "authentication": {"schemes": ["Bearer"], "credentials": "c"},
        },
    }
    assert read(V03.responses.encode_push(TASK_ID, config)) == told
    assert read(V03.responses.encode_pushes(TASK_ID, [config, config])) == [told, told]
    assert V03.requests.decode_create_push(json(told)) == asking.CreatePush(task_id=TASK_ID, config=config)
    assert V03.responses.deleted == b"null"
    told["pushNotificationConfig"] = {"url": "https://example.com", "authentication": {"schemes": []}}
    assert V03.requests.decode_create_push(json(told)).config == asking.PushConfig(
        url="https://example.com", id="default", version="0.3"
    ), "a client that has one configuration names none"


@pytest.mark.parametrize(
    ("block", "part"),
    [
        (Image("aGk=", "image/png"), {"kind": "file", "file": {"bytes": "aGk=", "mimeType": "image/png"}}),
        (Audio("aGk=", "audio/wav"), {"kind": "file", "file": {"bytes": "aGk=", "mimeType": "audio/wav"}}),
        (
            Resource(Embedded("", "application/pdf", blob="aGk="), "a.pdf", {"k": 1}),
            {
                "kind": "file",
                "file": {"bytes": "aGk=", "name": "a.pdf", "mimeType": "application/pdf"},
                "metadata": {"k": 1},
            },
        ),
        (
            Resource(Embedded("file:x", "text/x", text="t")),
            {
                "kind": "text",
                "text": "t",
                "metadata": {"covenant.mcp": {"uri": "file:x"}, "covenant.media_type": "text/x"},
            },
        ),
        (
            ResourceLink("https://x", "n", "a/b"),
            {"kind": "file", "file": {"uri": "https://x", "name": "n", "mimeType": "a/b"}},
        ),
        (Json({"tool": "t", "ok": True}), {"kind": "data", "data": {"tool": "t", "ok": True}}),
        (Json([1]), {"kind": "data", "data": {"value": [1]}, "metadata": {"data_part_compat": True}}),
        (
            Text("x", "text/markdown"),
            {"kind": "text", "text": "x", "metadata": {"covenant.media_type": "text/markdown"}},
        ),
    ],
    ids=repr,
)
def test_every_kind_of_content_has_its_part(block: Content, part: dict[str, Any]) -> None:
    step = steps(Began(TASK), ArtifactUpdate("a", (block,)))[1]
    assert read(V03.responses.encode_step(TASK, step))["artifact"]["parts"] == [part]


def test_nothing_is_an_empty_text() -> None:
    told = read(V03.responses.encode_step(TASK, steps(Began(TASK), ArtifactUpdate("a"))[1]))
    assert told["artifact"]["parts"] == [{"kind": "text", "text": ""}]


def test_every_request_is_read() -> None:
    assert V03.requests.decode_send(json({"message": MESSAGE})) == asking.SendMessage(
        message=asking.Message(message_id="m", parts=(Text("hi"),))
    )
    assert V03.requests.decode_send(
        json(
            {
                "message": {**MESSAGE, "taskId": "t", "contextId": "c", "referenceTaskIds": ["r"], "extensions": ["e"]},
                "configuration": {
                    "blocking": False,
                    "historyLength": 3,
                    "acceptedOutputModes": ["text/plain"],
                    "pushNotificationConfig": {"url": "https://x"},
                },
                "metadata": {"k": 1},
            }
        )
    ) == asking.SendMessage(
        message=asking.Message(
            message_id="m",
            parts=(Text("hi"),),
            task_id="t",
            context_id="c",
            reference_task_ids=("r",),
            extensions=("e",),
        ),
        blocking=False,
        history_length=3,
        output_modes=("text/plain",),
        push=asking.PushConfig(url="https://x", id="default", version="0.3"),
        metadata={"k": 1},
    )
    assert V03.requests.decode_get_task(json({"id": "t", "historyLength": 2})) == asking.GetTask(
        task_id="t", history_length=2
    )
    assert V03.requests.decode_list_tasks(
        json({"status": "input-required", "lastUpdatedAfter": 5, "pageSize": 9, "contextId": "c"})
    ) == asking.ListTasks(state=TaskState.INPUT_REQUIRED, updated_after_ms=5, page_size=9, context_id="c")
    assert V03.requests.decode_list_tasks(json({"statusTimestampAfter": "1970-01-01T00:00:00Z"})).updated_after_ms == 0
    assert V03.requests.decode_cancel(json({"id": "t"})) == asking.CancelTask(task_id="t")
    assert V03.requests.decode_subscribe(json({"id": "t"})) == asking.Subscribe(task_id="t")
    assert V03.requests.decode_get_push(json({"id": "t"})) == asking.GetPush(task_id="t")
    assert V03.requests.decode_get_push(json({"id": "t", "pushNotificationConfigId": "p"})).id == "p"
    assert V03.requests.decode_list_push(json({"id": "t"})).task_id == "t"
    assert V03.requests.decode_delete_push(json({"id": "t", "pushNotificationConfigId": "p"})) == asking.DeletePush(
        task_id="t", id="p"
    )
    V03.requests.decode_nothing(b"{}")


def part(**fields: Any) -> dict[str, Any]:
    return {"message": {**MESSAGE, "parts": [fields]}}


@pytest.mark.parametrize(
    ("decode", "params", "field"),
    [
        (V03.requests.decode_send, [], "params"),
        (V03.requests.decode_send, {}, "message"),
        (V03.requests.decode_send, {"message": {**MESSAGE, "messageId": None}}, "message.messageId"),
        (V03.requests.decode_send, {"message": {**MESSAGE, "role": None}}, "message.role"),
        (V03.requests.decode_send, {"message": {**MESSAGE, "role": "ROLE_USER"}}, "message.role"),
        (V03.requests.decode_send, {"message": {**MESSAGE, "parts": []}}, "message.parts"),
        (V03.requests.decode_send, part(text="no kind"), "message.parts[0].kind"),
        (V03.requests.decode_send, part(kind="video"), "message.parts[0].kind"),
        (V03.requests.decode_send, part(kind="text"), "message.parts[0].text"),
        (V03.requests.decode_send, part(kind="file"), "message.parts[0].file"),
        (V03.requests.decode_send, part(kind="file", file={}), "message.parts[0].file"),
        (V03.requests.decode_send, part(kind="file", file={"bytes": "aGk=", "uri": "u"}), "message.parts[0].file"),
        (V03.requests.decode_send, part(kind="file", file={"bytes": "plain text"}), "message.parts[0].file.bytes"),
        (V03.requests.decode_send, part(kind="file", file={"uri": ""}), "message.parts[0].file.uri"),
        (V03.requests.decode_send, part(kind="data"), "message.parts[0].data"),
        (V03.requests.decode_send, {"message": MESSAGE, "configuration": {"blocking": 1}}, "configuration.blocking"),
        (
            V03.requests.decode_send,
            {"message": MESSAGE, "configuration": {"pushNotificationConfig": {}}},
            "configuration.pushNotificationConfig.url",
        ),
        (V03.requests.decode_get_task, {}, "id"),
        (V03.requests.decode_list_tasks, {"status": "running"}, "status"),
        (V03.requests.decode_list_tasks, {"pageSize": 0}, "pageSize"),
        (V03.requests.decode_cancel, {}, "id"),
        (V03.requests.decode_subscribe, {"id": 7}, "id"),
        (V03.requests.decode_create_push, {"pushNotificationConfig": {"url": "u"}}, "taskId"),
        (V03.requests.decode_create_push, {"taskId": "t"}, "pushNotificationConfig"),
        (
            V03.requests.decode_create_push,
            {"taskId": "t", "pushNotificationConfig": {"url": "u", "authentication": {"credentials": "c"}}},
            "pushNotificationConfig.authentication.schemes",
        ),
        (V03.requests.decode_get_push, {}, "id"),
        (V03.requests.decode_list_push, {}, "id"),
        (V03.requests.decode_delete_push, {"id": "t"}, "pushNotificationConfigId"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(decode: Any, params: Any, field: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        decode(json(params))
    assert refused.value.message.partition(": ")[0] == field


def test_both_dialects_are_found_by_their_version() -> None:
    assert BY_VERSION == {"1.0": V1, "0.3": V03}
    assert (V1.version, V03.version) == (Version.V1, Version.V03)


def test_a_snapshot_stands_at_its_cursor() -> None:
    assert read(V03.responses.encode_snapshot(folded(STORY[:1]))) == FRAMES[0]
