"""Push configurations at the A2A door: the four operations in both dialects and over REST, and one with a message."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from covenant import Agent, Turn
from tests.doors.a2a.a2a_under_test import A2AOptions, A2AUnderTest, open_a2a
from tests.outbound.receivers import owed, pushing, receiver

echo, asking = Agent("echo"), Agent("asking")


@echo
async def answer(turn: Turn) -> str:
    return turn.text


@asking
async def ask(turn: Turn) -> AsyncIterator[Any]:
    if turn.text == "begin":
        yield turn.need_input("which one?")
    else:
        yield f"that was {turn.text}"


HOOK = {
    "url": "https://hooks.example/a?b=c",
    "token": "tok",
    "authentication": {"scheme": "Bearer", "credentials": "cred"},
}
HOOK_03 = {**HOOK, "authentication": {"schemes": ["Bearer"], "credentials": "cred"}}


@asynccontextmanager
async def a_stage(home: Path, **options: Any) -> AsyncIterator[A2AUnderTest]:
    set_up = A2AOptions(push_notifications=options.pop("on", True), **options)
    async with open_a2a(home, echo, asking, options=set_up) as opened:
        yield opened


def message(text: str, **fields: Any) -> dict[str, Any]:
    return {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}], **fields}


async def parked(s: A2AUnderTest) -> str:
    """A task that waits for its sender, and so goes on."""
    sent = await s.result("asking", "SendMessage", {"message": message("begin")})
    task_id: str = sent["task"]["id"]
    return task_id


async def rest(s: A2AUnderTest, method: str, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
    response = await s.http.request(
        method,
        f"{s.url('asking')}/{path}",
        json=body,
        headers={"authorization": f"Bearer {token or s.token}", "a2a-version": "1.0"},
    )
    return response.status_code, response.json() if response.content else None


async def test_the_four_operations_of_1_0(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as s:
        task_id = await parked(s)
        made = await s.result("asking", "CreateTaskPushNotificationConfig", {"taskId": task_id, **HOOK})
        assert made == {**HOOK, "id": made["id"], "taskId": task_id}
        named = await s.result("asking", "CreateTaskPushNotificationConfig", {"taskId": task_id, "id": "x", **HOOK})
        which = {"taskId": task_id, "id": "x"}
        assert await s.result("asking", "GetTaskPushNotificationConfig", which) == named
        replaced = {**which, "url": "https://other.example/"}
        assert await s.result("asking", "CreateTaskPushNotificationConfig", replaced) == replaced
        listed = await s.result("asking", "ListTaskPushNotificationConfigs", {"taskId": task_id})
        assert listed == {"configs": [made, replaced]}
        first = await s.result("asking", "ListTaskPushNotificationConfigs", {"taskId": task_id, "pageSize": 1})
        assert first["configs"] == [made]
        query = {"taskId": task_id, "pageSize": 1, "pageToken": first["nextPageToken"]}
        assert await s.result("asking", "ListTaskPushNotificationConfigs", query) == {"configs": [replaced]}
        for _ in range(2):
            assert await s.result("asking", "DeleteTaskPushNotificationConfig", which) == {}
        assert await s.refused("asking", "GetTaskPushNotificationConfig", which) == -32001


async def test_the_four_operations_of_0_3(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as s:
        task_id = await parked(s)
        name = "tasks/pushNotificationConfig/"
        asked = {"taskId": task_id, "pushNotificationConfig": {**HOOK_03, "id": "x"}}
        made = await s.result("asking", f"{name}set", asked)
        assert made == {"taskId": task_id, "pushNotificationConfig": {**HOOK_03, "id": "x"}}
        assert await s.result("asking", f"{name}get", {"id": task_id}) == made
        which = {"id": task_id, "pushNotificationConfigId": "x"}
        assert await s.result("asking", f"{name}get", which) == made
        assert await s.result("asking", f"{name}list", {"id": task_id}) == [made]
        for _ in range(2):
            assert await s.result("asking", f"{name}delete", which) is None
        assert await s.refused("asking", f"{name}get", which) == -32001


async def test_the_four_operations_over_rest(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as s:
        task_id = await parked(s)
        path = f"tasks/{task_id}/pushNotificationConfigs"
        status, made = await rest(s, "POST", path, {**HOOK, "id": "x"})
        assert (status, made) == (200, {**HOOK, "id": "x", "taskId": task_id})
        assert await rest(s, "GET", f"{path}/x") == (200, made)
        assert await rest(s, "GET", path) == (200, {"configs": [made]})
        for _ in range(2):
            status, _ = await rest(s, "DELETE", f"{path}/x")
            assert status == 200
        assert (await rest(s, "GET", f"{path}/x"))[0] == 404


async def test_switched_off_each_is_refused_with_its_code(tmp_path: Path) -> None:
    async with a_stage(tmp_path, on=False) as s:
        task_id = await parked(s)
        for operation in ("Create", "Get", "Delete"):
            params = {"taskId": task_id, "id": "x", **HOOK}
            assert await s.refused("asking", f"{operation}TaskPushNotificationConfig", params) == -32003
        assert await s.refused("asking", "ListTaskPushNotificationConfigs", {"taskId": task_id}) == -32003
        for operation in ("set", "get", "list", "delete"):
            params = {
                "id": task_id,
                "taskId": task_id,
                "pushNotificationConfigId": "x",
                "pushNotificationConfig": HOOK_03,
            }
            assert await s.refused("asking", f"tasks/pushNotificationConfig/{operation}", params) == -32004
        anything: list[Any] = [{}, {"id": 7}, [], "what", None, {"taskId": "no such"}]
        for given in anything:
            for operation in ("set", "get", "list", "delete"):
                assert await s.refused("asking", f"tasks/pushNotificationConfig/{operation}", given) == -32004
            assert await s.refused("asking", "CreateTaskPushNotificationConfig", given) == -32003
        path = f"tasks/{task_id}/pushNotificationConfigs"
        for method, where in (("POST", path), ("GET", path), ("GET", f"{path}/x"), ("DELETE", f"{path}/x")):
            status, refused = await rest(s, method, where, HOOK if method == "POST" else None)
            assert status == 400
            assert refused["error"]["details"][0]["reason"] == "PUSH_NOTIFICATION_NOT_SUPPORTED"
        inline = {"message": message("hi"), "configuration": {"taskPushNotificationConfig": HOOK}}
        assert await s.refused("echo", "SendMessage", inline) == -32003
        assert await s.ledger.outbox() == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", "ftp://hooks.example/"),
        ("url", "/relative"),
        ("url", "https://user:password@hooks.example/"),
        ("url", "http://127.1/"),
        ("url", "https://hooks.example/" + "x" * 5_000),
        ("id", "a/b"),
        ("id", "x" * 257),
        ("id", "zwölf"),
        ("token", "two\r\nlines"),
        ("token", "x" * 5_000),
        ("authentication", {"scheme": "Be arer", "credentials": "c"}),
        ("authentication", {"scheme": "Bearer", "credentials": "c\nd"}),
        ("authentication", {"scheme": "Bearer", "credentials": "ключ"}),
    ],
)
async def test_what_cannot_be_kept_or_sent_is_refused_and_named(tmp_path: Path, field: str, value: Any) -> None:
    async with a_stage(tmp_path) as s:
        task_id = await parked(s)
        wrong = {**HOOK, field: value}
        told = await s.rpc("asking", "CreateTaskPushNotificationConfig", {"taskId": task_id, **wrong})
        assert told["error"]["code"] == -32602
        assert f"pushNotificationConfig.{field}" in told["error"]["message"]
        inline = {"message": message("hi"), "configuration": {"taskPushNotificationConfig": wrong}}
        assert await s.refused("echo", "SendMessage", inline) == -32602
        assert await s.ledger.outbox() == ()


async def test_where_an_address_leads_is_not_told_when_it_is_given(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as s:
        task_id = await parked(s)
        places = (
            "http://127.0.0.1:25/",
            "http://169.254.169.254/latest",
            "http://localhost/",
            "http://nowhere.invalid/",
        )
        for place in places:
            made = await s.result("asking", "CreateTaskPushNotificationConfig", {"taskId": task_id, "url": place})
            assert made["url"] == place


async def test_a_foreign_task_is_not_found_by_any_of_them(tmp_path: Path) -> None:
    async with a_stage(tmp_path, tenants=("acme",)) as s:
        task_id = await parked(s)
        await s.result("asking", "CreateTaskPushNotificationConfig", {"taskId": task_id, "id": "x", **HOOK})
        other = {"authorization": f"Bearer {s.tokens['acme']}"}
        params = {"taskId": task_id, "id": "x", **HOOK}
        for operation in ("Create", "Get", "Delete", "List"):
            method = f"{operation}TaskPushNotificationConfig{'s' if operation == 'List' else ''}"
            assert await s.refused("asking", method, params, **other) == -32001
            assert await s.refused("echo", method, params) == -32001, "nor at another agent's door"
            assert await s.refused("asking", method, {**params, "taskId": "nobody's"}) == -32001
        assert len(await s.ledger.outbox()) == 1


async def test_a_task_has_so_many_and_no_more(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as s:
        task_id = await parked(s)
        for _ in range(s.ledger.limits.pushes_per_task_max):
            await s.result("asking", "CreateTaskPushNotificationConfig", {"taskId": task_id, **HOOK})
        status, told = await rest(s, "POST", f"tasks/{task_id}/pushNotificationConfigs", HOOK)
        assert (status, told["error"]["details"][0]["metadata"]["code"]) == (429, "too_many_pushes")


async def test_one_of_a_task_that_has_ended_is_kept_and_owes_nothing(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as s:
        sent = await s.result("echo", "SendMessage", {"message": message("hi")})
        which = {"taskId": sent["task"]["id"], "id": "x"}
        made = await s.result("echo", "CreateTaskPushNotificationConfig", {**which, **HOOK})
        assert await s.result("echo", "GetTaskPushNotificationConfig", which) == made
        assert (await s.ledger.outbox())[0].done


async def test_one_that_comes_with_the_first_message_hears_everything(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as s, receiver() as hook, pushing(s.ledger) as runner:
        params = {"message": message("hi"), "configuration": {"taskPushNotificationConfig": {"url": hook.url()}}}
        sent = await s.result("echo", "SendMessage", params)
        await owed(runner, s.ledger, lambda found: not found)
        task_id = sent["task"]["id"]
        first, *_, last = hook.bodies
        assert first["task"]["id"] == task_id
        assert last["statusUpdate"]["status"]["state"] == "TASK_STATE_COMPLETED"
        assert hook.generations == list(range(1, sent["task"]["metadata"]["covenant.generation"] + 1))


async def test_one_that_comes_with_every_message_is_one_and_hears_each_turn(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as s, receiver() as hook, pushing(s.ledger) as runner:
        configuration = {"pushNotificationConfig": {"url": hook.url(), "token": "t"}}
        said = {"kind": "message", "messageId": "m", "role": "user", "parts": [{"kind": "text", "text": "begin"}]}
        first = await s.result("asking", "message/send", {"message": said, "configuration": configuration})
        again = {**said, "taskId": first["id"], "parts": [{"kind": "text", "text": "red"}]}
        await s.result("asking", "message/send", {"message": again, "configuration": configuration})
        await owed(runner, s.ledger, lambda found: not found)
        # A client of 0.3 is told the task; only chunks that others follow are not told by themselves.
        assert hook.generations == sorted(set(hook.generations))
        assert [body["kind"] for body in hook.bodies] == ["task"] * len(hook.bodies)
        assert {"submitted", "working", "input-required"} <= {body["status"]["state"] for body in hook.bodies}
        assert {request.headers["covenant-push-id"] for request in hook.taken} == {
            hook.taken[0].headers["covenant-push-id"]
        }
        assert hook.bodies[-1]["status"]["state"] == "completed"


async def test_the_same_key_with_another_webhook_is_another_request(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as s:

        def params(url: str) -> dict[str, Any]:
            configuration = {"taskPushNotificationConfig": {"url": url}}
            return {"message": message("begin"), "configuration": configuration}

        first = await s.result("asking", "SendMessage", params("https://a.example/"), Idempotency_Key="k")
        again = await s.result("asking", "SendMessage", params("https://a.example/"), Idempotency_Key="k")
        assert again["task"]["id"] == first["task"]["id"]
        assert len(await s.ledger.outbox()) == 1
        assert await s.refused("asking", "SendMessage", params("https://b.example/"), Idempotency_Key="k") == -32602


async def test_a_stream_and_a_webhook_are_told_the_same(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as s, receiver() as hook, pushing(s.ledger) as runner:
        configuration = {"taskPushNotificationConfig": {"url": hook.url()}}
        params = {"message": message("hi"), "configuration": configuration}
        frames = await s.streamed("echo", "SendStreamingMessage", params)
        await owed(runner, s.ledger, lambda found: not found)
        assert [(number, frame) for number, frame in frames] == list(zip(hook.generations, hook.bodies, strict=True))


async def test_many_tasks_at_once_each_hear_their_own(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as s, receiver() as hook, pushing(s.ledger) as runner:
        configuration = {"taskPushNotificationConfig": {"url": hook.url()}, "returnImmediately": True}

        async def send(number: int) -> str:
            sent = await s.result(
                "echo", "SendMessage", {"message": message(f"{number}"), "configuration": configuration}
            )
            task_id: str = sent["task"]["id"]
            return task_id

        sent = await asyncio.gather(*(send(number) for number in range(50)))
        await owed(runner, s.ledger, lambda found: not found)
        heard: dict[str, list[int]] = {}
        for request, generation in zip(hook.taken, hook.generations, strict=True):
            heard.setdefault(request.headers["covenant-task-id"], []).append(generation)
        assert set(heard) == set(sent)
        assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in heard.values())
