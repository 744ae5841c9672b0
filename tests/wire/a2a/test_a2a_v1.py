"""A2A 1.0: what is asked becomes the model, and what is told has exactly the specification's shapes."""

from typing import Any

import msgspec
import pytest

from covenant.model import a2a_requests as asking
from covenant.model.content import Audio, Content, Embedded, Image, Json, Resource, ResourceLink, Text
from covenant.model.errors import InvalidParams
from covenant.model.task import Ending, ResultStatus
from covenant.model.task_event import ArtifactUpdate, Began, Ended, MessageUpdate, Started, StatusUpdate
from covenant.model.task_view import TaskState
from covenant.wire.a2a.dialects import V1
from covenant.wire.a2a.request_decoder import query_params
from tests.wire.a2a.a2a_samples import AT, CONTEXT, DONE, FAILED, STORY, TASK, TASK_ID, USED, folded, json, read, steps

MESSAGE = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "hi"}]}
PLACE = {"taskId": TASK_ID, "contextId": CONTEXT}


def agent_says(message_id: str, text: str) -> dict[str, Any]:
    return {**PLACE, "messageId": message_id, "role": "ROLE_AGENT", "parts": [{"text": text}]}


def status(at: int, state: str, **more: Any) -> dict[str, Any]:
    return {"state": f"TASK_STATE_{state}", "timestamp": f"2025-10-28T10:30:00.{at:03d}Z", **more}


FRAMES = [
    {
        "task": {
            "id": TASK_ID,
            "contextId": CONTEXT,
            "status": status(1, "SUBMITTED"),
            "history": [{**PLACE, "messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": "hello"}]}],
            "metadata": {
                "covenant.generation": 1,
                "covenant.agent": "echo",
                "covenant.created_at": "2025-10-28T10:30:00.001Z",
            },
        }
    },
    {"statusUpdate": {**PLACE, "status": status(2, "WORKING")}},
    {
        "statusUpdate": {
            **PLACE,
            "status": status(3, "WORKING", message=agent_says(f"{TASK_ID}-s3", "looking")),
            "metadata": {"step": 1},
        }
    },
    {"statusUpdate": {**PLACE, "status": status(4, "WORKING", message=agent_says("m-2", "by the way"))}},
    {
        "artifactUpdate": {
            **PLACE,
            "artifact": {"artifactId": f"{TASK_ID}-text-0", "parts": [{"text": "hel"}], "name": "response"},
        }
    },
    {
        "artifactUpdate": {
            **PLACE,
            "artifact": {"artifactId": f"{TASK_ID}-text-0", "parts": [{"text": "lo"}]},
            "append": True,
        }
    },
    {
        "artifactUpdate": {
            **PLACE,
            "artifact": {"artifactId": f"{TASK_ID}-text-0", "parts": [{"text": ""}]},
            "append": True,
            "lastChunk": True,
        }
    },
    {
        "statusUpdate": {
            **PLACE,
            "status": status(8, "INPUT_REQUIRED", message=agent_says(f"{TASK_ID}-s8", "which language?")),
        }
    },
    {"statusUpdate": {**PLACE, "status": status(9, "WORKING")}},
    {
        "statusUpdate": {
            **PLACE,
            "status": status(10, "COMPLETED", message=agent_says(f"{TASK_ID}-r", "hello back")),
            "metadata": {"covenant.stop_reason": "end_turn", "covenant.usage": USED},
        }
    },
]


def test_each_step_is_one_frame() -> None:
    assert [read(V1.responses.encode_step(TASK, step)) for step in steps()] == FRAMES


def test_a_task_is_told_whole() -> None:
    told = read(V1.responses.encode_task(folded()))
    assert told["status"] == status(10, "COMPLETED", message=agent_says(f"{TASK_ID}-r", "hello back"))
    assert told["artifacts"] == [{"artifactId": f"{TASK_ID}-text-0", "parts": [{"text": "hello"}], "name": "response"}]
    assert [message["messageId"] for message in told["history"]] == [
        "m-1", f"{TASK_ID}-s3", "m-2", f"{TASK_ID}-s8", "m-3", f"{TASK_ID}-r",
    ]  # fmt: skip
    assert told["metadata"] == {
        "covenant.generation": 10,
        "covenant.agent": "echo",
        "covenant.created_at": "2025-10-28T10:30:00.001Z",
        "covenant.stop_reason": "end_turn",
        "covenant.usage": USED,
    }


def test_the_first_frame_of_a_subscription_is_the_task_as_it_stood_at_the_cursor() -> None:
    assert read(V1.responses.encode_snapshot(folded(STORY[:1]))) == FRAMES[0]
    told = read(V1.responses.encode_snapshot(folded(STORY[:6])))["task"]
    assert told["metadata"]["covenant.generation"] == 6
    assert told["artifacts"][0]["parts"] == [{"text": "hello"}]


@pytest.mark.parametrize(("length", "kept"), [(None, 6), (0, 0), (1, 1), (4, 4), (6, 6), (99, 6)])
def test_the_newest_messages_are_kept(length: int | None, kept: int) -> None:
    whole = read(V1.responses.encode_task(folded()))["history"]
    told = read(V1.responses.encode_task(folded(), length))
    assert told.get("history", []) == whole[len(whole) - kept :]
    assert ("history" in told) is (kept > 0)
    assert read(V1.responses.encode_sent(folded(), length))["task"] == told


def test_a_partial_result_is_completed_and_says_so() -> None:
    partial = msgspec.structs.replace(DONE, status=ResultStatus.PARTIAL)
    story = (Began(TASK), Started(), Ended(Ending.COMPLETED, partial))
    told = read(V1.responses.encode_task(folded(story)))
    assert told["status"]["state"] == "TASK_STATE_COMPLETED"
    assert told["metadata"]["covenant.partial"] is True
    frame = read(V1.responses.encode_step(TASK, steps(*story)[-1]))
    assert frame["statusUpdate"]["metadata"]["covenant.partial"] is True


def test_a_failure_says_why_and_a_lost_worker_is_told() -> None:
    told = read(V1.responses.encode_task(folded((Began(TASK), Started(), Ended(Ending.FAILED, FAILED)))))
    assert told["status"]["message"] == agent_says(f"{TASK_ID}-err", "it broke")
    lost = msgspec.structs.replace(folded(STORY[:2]), holder_lost=True)
    assert read(V1.responses.encode_task(lost))["metadata"]["covenant.holder_lost"] == "worker lost, awaiting repair"


def test_a_bare_reply_is_a_message_without_a_task() -> None:
    bare = folded((Began(TASK), Ended(Ending.COMPLETED, msgspec.structs.replace(DONE, reply=True))))
    message = {
        "messageId": f"{TASK_ID}-r",
        "contextId": CONTEXT,
        "role": "ROLE_AGENT",
        "parts": [{"text": "hello back"}],
        "metadata": {"covenant.usage": USED},
    }
    assert read(V1.responses.encode_sent(bare)) == {"message": message} == read(V1.responses.encode_message(bare))


def test_a_task_without_a_context_is_its_own_and_nameless_messages_get_names() -> None:
    task = msgspec.structs.replace(TASK, context_id=None, message_id=None, parts=())
    nameless = MessageUpdate(parts=(Text("x"),))
    told = read(V1.responses.encode_task(folded((Began(task), nameless, StatusUpdate("y")))))
    assert told["contextId"] == TASK_ID
    assert [message["messageId"] for message in told["history"]] == [f"{TASK_ID}-m", f"{TASK_ID}-h1", f"{TASK_ID}-s3"]
    assert read(V1.responses.encode_step(task, steps(Began(task), nameless)[1]))["statusUpdate"]["status"]["message"][
        "messageId"
    ]


@pytest.mark.parametrize("asked_for", [False, True])
def test_a_page_has_all_its_fields_and_artifacts_only_where_asked_for(asked_for: bool) -> None:
    page = asking.TaskPage(tasks=(folded(), folded(STORY[:1])), total_size=2, page_size=50, next_page_token="")
    told = read(V1.responses.encode_page(page, asking.ListTasks(include_artifacts=asked_for, history_length=0)))
    assert (told["nextPageToken"], told["pageSize"], told["totalSize"]) == ("", 50, 2)
    assert [len(task.get("artifacts", "absent")) for task in told["tasks"]] == ([1, 0] if asked_for else [6, 6])
    assert not any("history" in task for task in told["tasks"])
    empty = asking.TaskPage(tasks=(), total_size=0, page_size=50, next_page_token="")
    assert read(V1.responses.encode_page(empty, asking.ListTasks())) == {
        "tasks": [], "nextPageToken": "", "pageSize": 50, "totalSize": 0,
    }  # fmt: skip


def test_push_configurations_are_flat() -> None:
    config = asking.PushConfig(
        url="https://example.com/hook",
        id="p",
        token="t",
        authentication=asking.PushAuthentication(scheme="Bearer", credentials="c"),
    )
    told = {
        "id": "p",
        "taskId": TASK_ID,
        "url": "https://example.com/hook",
        "token": "t",
        "authentication": {"scheme": "Bearer", "credentials": "c"},
    }
    assert read(V1.responses.encode_push(TASK_ID, config)) == told
    assert read(V1.responses.encode_pushes(TASK_ID, [config])) == {"configs": [told]}
    assert read(V1.responses.encode_pushes(TASK_ID, [config], "next")) == {"configs": [told], "nextPageToken": "next"}
    assert V1.requests.decode_create_push(json(told)) == asking.CreatePush(task_id=TASK_ID, config=config)
    assert V1.responses.deleted == b"{}"


@pytest.mark.parametrize(
    ("block", "part"),
    [
        (Image("aGk=", "image/png"), {"raw": "aGk=", "mediaType": "image/png"}),
        (Audio("aGk=", "audio/wav"), {"raw": "aGk=", "mediaType": "audio/wav"}),
        (
            Resource(Embedded("file:x", "text/x", text="t")),
            {"text": "t", "mediaType": "text/x", "metadata": {"covenant.mcp": {"uri": "file:x"}}},
        ),
        (Resource(Embedded("file:x")), {"text": "", "metadata": {"covenant.mcp": {"uri": "file:x"}}}),
        (Json(None), {"data": None}),
        (ResourceLink("https://x", "n"), {"url": "https://x", "filename": "n"}),
    ],
    ids=repr,
)
def test_every_kind_of_content_has_its_part(block: Content, part: dict[str, Any]) -> None:
    step = steps(Began(TASK), ArtifactUpdate("a", (block,), metadata={"k": 1}, extensions=("urn:x",)))[1]
    assert read(V1.responses.encode_step(TASK, step))["artifactUpdate"]["artifact"] == {
        "artifactId": "a", "parts": [part], "metadata": {"k": 1}, "extensions": ["urn:x"],
    }  # fmt: skip


def test_nothing_is_an_empty_text() -> None:
    """The protocol wants a part in everything, and somebody else's code may have made none."""
    story = (Began(TASK), ArtifactUpdate("a"), MessageUpdate())
    assert read(V1.responses.encode_step(TASK, steps(*story)[1]))["artifactUpdate"]["artifact"]["parts"] == [
        {"text": ""}
    ]
    task = read(V1.responses.encode_task(folded(story)))
    assert [told["parts"] for told in (task["artifacts"][0], task["history"][-1])] == [[{"text": ""}]] * 2


def test_every_request_is_read() -> None:
    assert V1.requests.decode_send(json({"message": MESSAGE})) == asking.SendMessage(
        message=asking.Message(message_id="m", parts=(Text("hi"),))
    )
    assert V1.requests.decode_get_task(json({"id": "t", "historyLength": 0})) == asking.GetTask(
        task_id="t", history_length=0
    )
    assert V1.requests.decode_list_tasks(b"{}") == asking.ListTasks()
    assert V1.requests.decode_list_tasks(
        json({"contextId": "c", "status": "TASK_STATE_WORKING", "pageToken": "p", "includeArtifacts": True})
    ) == asking.ListTasks(context_id="c", state=TaskState.WORKING, page_token="p", include_artifacts=True)
    assert V1.requests.decode_cancel(json({"id": "t", "metadata": {"a": 1}})) == asking.CancelTask(
        task_id="t", metadata={"a": 1}
    )
    assert V1.requests.decode_subscribe(json({"id": "t"})) == asking.Subscribe(task_id="t")
    assert V1.requests.decode_get_push(json({"taskId": "t", "id": "p"})) == asking.GetPush(task_id="t", id="p")
    assert V1.requests.decode_list_push(json({"taskId": "t"})) == asking.ListPush(task_id="t")
    assert V1.requests.decode_list_push(json({"taskId": "t", "pageSize": 1000})).page_size == asking.PAGE_SIZE_MAX
    assert V1.requests.decode_delete_push(json({"task_id": "t", "id": "p"})) == asking.DeletePush(task_id="t", id="p")
    V1.requests.decode_nothing(b"{}")
    V1.requests.decode_nothing(b"")


def test_a_path_names_the_task_before_the_body_does() -> None:
    assert V1.requests.decode_cancel(b"", "t").task_id == "t"
    assert V1.requests.decode_subscribe(json({"id": "other"}), "t").task_id == "t"
    assert V1.requests.decode_create_push(json({"url": "https://x"}), "t").task_id == "t"


def test_a_query_says_what_a_body_would() -> None:
    assert V1.requests.decode_get_task(query_params(b"historyLength=3&A2A-Version=1.0"), "t") == asking.GetTask(
        task_id="t", history_length=3
    )
    asked = b"contextId=c&status=TASK_STATE_WORKING&pageSize=7&pageToken=p&historyLength=0&includeArtifacts=true"
    body = {
        "contextId": "c",
        "status": 2,
        "pageSize": 7,
        "pageToken": "p",
        "historyLength": 0,
        "includeArtifacts": True,
    }
    after = b"&statusTimestampAfter=2025-10-28T10%3A30%3A00Z"
    assert V1.requests.decode_list_tasks(query_params(asked)) == V1.requests.decode_list_tasks(json(body))
    assert V1.requests.decode_list_tasks(
        query_params(b"context_id=c&page_size=7&status=2" + after)
    ) == asking.ListTasks(context_id="c", page_size=7, state=TaskState.WORKING, updated_after_ms=AT)
    assert (
        V1.requests.decode_list_tasks(query_params(b""))
        == V1.requests.decode_list_tasks(query_params(b"pageToken=&status="))
        == asking.ListTasks()
    )
    assert V1.requests.decode_list_push(query_params(b"pageSize=5"), "t") == asking.ListPush(task_id="t", page_size=5)
    for wrong in (b"includeArtifacts=yes", b"pageSize=0", b"pageSize=ten", b"status=RUNNING", b"historyLength=-1"):
        with pytest.raises(InvalidParams, match=wrong.partition(b"=")[0].decode()):
            V1.requests.decode_list_tasks(query_params(wrong))
    with pytest.raises(InvalidParams, match="query"):
        query_params(b"&".join(b"a%d=1" % n for n in range(100)))


def part(**fields: Any) -> dict[str, Any]:
    return {"message": {**MESSAGE, "parts": [fields]}}


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({}, "message"),
        ([], "params"),
        ({"message": None}, "message"),
        ({"message": "hi"}, "message"),
        ({"message": {**MESSAGE, "messageId": ""}}, "message.messageId"),
        ({"message": {**MESSAGE, "messageId": 7}}, "message.messageId"),
        ({"message": {"role": "ROLE_USER", "parts": [{"text": "x"}]}}, "message.messageId"),
        ({"message": {**MESSAGE, "role": None}}, "message.role"),
        ({"message": {**MESSAGE, "role": 0}}, "message.role"),
        ({"message": {**MESSAGE, "role": "user"}}, "message.role"),
        ({"message": {**MESSAGE, "role": 9}}, "message.role"),
        ({"message": {**MESSAGE, "parts": []}}, "message.parts"),
        ({"message": {**MESSAGE, "parts": None}}, "message.parts"),
        ({"message": {**MESSAGE, "parts": {}}}, "message.parts"),
        ({"message": {**MESSAGE, "metadata": []}}, "message.metadata"),
        ({"message": {**MESSAGE, "context_id": 7}}, "message.contextId"),
        (part(), "message.parts[0]"),
        (part(text=None), "message.parts[0]"),
        (part(kind="text"), "message.parts[0]"),
        (part(text="x", url="https://x"), "message.parts[0]"),
        (part(text="x", data={}), "message.parts[0]"),
        (part(raw="aGk=", data=1), "message.parts[0]"),
        (part(raw="not base64"), "message.parts[0].raw"),
        (part(url=""), "message.parts[0].url"),
        (part(text=7), "message.parts[0].text"),
        ({"message": MESSAGE, "configuration": {"historyLength": -1}}, "configuration.historyLength"),
        ({"message": MESSAGE, "configuration": {"returnImmediately": "yes"}}, "configuration.returnImmediately"),
        (
            {"message": MESSAGE, "configuration": {"taskPushNotificationConfig": {}}},
            "configuration.taskPushNotificationConfig.url",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),
)
def test_a_bad_send_is_refused_by_the_name_of_its_field(params: Any, field: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        V1.requests.decode_send(json(params))
    assert refused.value.message.partition(": ")[0] == field


@pytest.mark.parametrize(
    ("decode", "params", "field"),
    [
        (V1.requests.decode_get_task, {}, "id"),
        (V1.requests.decode_get_task, {"id": "t", "historyLength": -5}, "historyLength"),
        (V1.requests.decode_list_tasks, {"status": "TASK_STATE_RUNNING"}, "status"),
        (V1.requests.decode_list_tasks, {"status": 9}, "status"),
        (V1.requests.decode_list_tasks, {"includeArtifacts": "true"}, "includeArtifacts"),
        (V1.requests.decode_cancel, {"id": ""}, "id"),
        (V1.requests.decode_subscribe, {"id": None}, "id"),
        (V1.requests.decode_create_push, {"url": "https://x"}, "taskId"),
        (V1.requests.decode_create_push, {"taskId": "t"}, "url"),
        (V1.requests.decode_create_push, {"taskId": "t", "url": "u", "authentication": {}}, "authentication.scheme"),
        (V1.requests.decode_get_push, {"taskId": "t"}, "id"),
        (V1.requests.decode_list_push, {}, "taskId"),
        (V1.requests.decode_delete_push, {"id": "p"}, "taskId"),
        (V1.requests.decode_nothing, 7, "params"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(decode: Any, params: Any, field: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        decode(json(params))
    assert refused.value.message.partition(": ")[0] == field
