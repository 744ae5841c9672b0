"""Which dialect is spoken, which versions of it are known, and what a sender may spell in more than one way."""

import json
from typing import Any

import pytest

from tests.conformance.a2a.bindings import Binding, New, Refused
from tests.conformance.a2a.client_answers import Part
from tests.conformance.a2a.http_bindings import NewRpc, Rest, Rpc, SlashRpc
from tests.conformance.a2a.server_under_test import ServerUnderTest, unique

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_both_dialects_are_spoken_at_one_address_by_the_methods_name(under_test: ServerUnderTest) -> None:
    new, old = under_test.client(NewRpc), under_test.client(SlashRpc)
    assert new.url == old.url
    tasks = [await new.task("echo"), await old.task("echo")]
    for task in tasks:
        assert await new.get(task.id) == await new.get(task.id)
        in_new, in_old = await new.get(task.id), await old.get(task.id)
        assert (in_new.state, in_new.text, in_new.history, in_new.timestamp) == (
            in_old.state,
            in_old.text,
            in_old.history,
            in_old.timestamp,
        )


@pytest.mark.parametrize("version", ["1.0", "1.0.0", "1.0.7"])
async def test_the_version_that_a_binding_speaks_is_known_whatever_its_patch(me: Binding, version: str) -> None:
    assert (await me.saying(a2a_version=version).task("echo")).state == "completed"


@pytest.mark.parametrize("version", ["0.3", "1", "0.3.0"])
async def test_the_slash_methods_know_the_version_they_are_from(me: Binding, version: str) -> None:
    assert (await me.saying(a2a_version=version).task("echo")).state == "completed"
    assert (await me.streamed("echo"))[-1].state == "completed"


@pytest.mark.parametrize("version", ["2.0", "0.2", "1.1", "0.5", "x", "1.0.x", "1.0.0.0"])
async def test_another_version_is_refused_before_anything_is_done(me: Binding, version: str) -> None:
    context = unique()
    other = me.saying(a2a_version=version)
    for attempt in (
        other.send("echo"),
        other.streamed("echo"),
        other.get("x"),
        other.page(contextId=context),
        other.cancel("x"),
        other.followed("x"),
        other.card(),
    ):
        with pytest.raises(Refused, match="VERSION_NOT_SUPPORTED"):
            await attempt


async def test_the_version_may_be_said_in_the_address(me: Binding) -> None:
    if isinstance(me, Rpc):
        url, body, method = f"{me.url}?A2A-Version=9.9", me.envelope("get", {"id": "x"}), "POST"
    else:
        url, body, method = f"{me.url}/tasks/x?A2A-Version=9.9", None, "GET"
    reply = await me.http.request(method, url, content=body, headers={"authorization": f"Bearer {me.token}"})
    with pytest.raises(Refused, match="VERSION_NOT_SUPPORTED"):
        me.read(reply)


async def test_the_names_of_headers_may_be_written_in_any_case(me: Binding) -> None:
    for name in ("A2A-VERSION", "a2a-version", "A2a-Version"):
        with pytest.raises(Refused, match="VERSION_NOT_SUPPORTED"):
            await me.with_(headers={name: "9.9"}).get("x")


async def test_an_address_may_end_with_a_slash(me: Binding) -> None:
    assert (await me.with_(agent="actor/").task("echo")).state == "completed" if isinstance(me, Rpc) else True
    if isinstance(me, Rest):
        reply = await me.http.get(f"{me.url}/tasks/", headers={"authorization": f"Bearer {me.token}"})
        assert "nextPageToken" in me.read(reply)


def spelled(value: Any) -> Any:
    """Names in snake_case, at every place that the protocol knows."""
    names = {
        "messageId": "message_id",
        "contextId": "context_id",
        "referenceTaskIds": "reference_task_ids",
        "returnImmediately": "return_immediately",
        "historyLength": "history_length",
        "acceptedOutputModes": "accepted_output_modes",
        "mediaType": "media_type",
    }
    if isinstance(value, dict):
        return {names.get(name, name): spelled(inner) for name, inner in value.items()}
    return [spelled(inner) for inner in value] if isinstance(value, list) else value


async def test_names_may_come_in_either_spelling_and_what_is_unknown_is_ignored(me: Binding) -> None:
    assert isinstance(me, New)
    params = {
        "message": {
            "messageId": "m-1",
            "contextId": "c-5",
            "role": 1,
            "parts": [{"text": "told", "colour": "red"}, {"raw": "-_8", "mediaType": "a/b"}],
            "referenceTaskIds": ["r"],
            "metadata": {"snake_case": 1, "camelCase": 2},
            "mood": {"unknown": [1]},
        },
        "configuration": {"historyLength": "1", "acceptedOutputModes": ["text/plain"], "returnImmediately": None},
        "tenant": "whoever",
    }
    for said in (params, spelled(params)):
        task = me._sent(await me.answer("send", said))  # the names are the point
        assert (task.context_id, len(task.history)) == ("c-5", 1)  # type: ignore[union-attr, arg-type]
        told = await me.get(task.id)  # type: ignore[union-attr]
        assert told.history is not None
        assert told.history[0].metadata == {"snake_case": 1, "camelCase": 2}
        assert told.history[0].parts[1] == Part("raw", b"\xfb\xff", "a/b")


async def test_rest_is_answered_in_the_media_type_that_it_is_asked_in(me: Binding) -> None:
    body = me.envelope("send", {"message": {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "echo"}]}})
    for sent, got in {
        "application/json": "application/json",
        "application/json; charset=utf-8": "application/json",
        "application/a2a+json": "application/a2a+json",
    }.items():
        reply = await me.raw(body, **{"content-type": sent})
        assert (reply.status_code, reply.headers["content-type"]) == (200, got)
        reply = await me.raw(b"{", **{"content-type": sent})
        assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")
        reply = await me.raw(b"{", **{"content-type": sent, "accept": "application/a2a+json"})
        assert (reply.status_code, reply.headers["content-type"]) == (400, "application/a2a+json")


async def test_rest_subscribes_by_get_and_post_and_needs_no_body_where_nothing_is_to_be_said(me: Binding) -> None:
    parked = await me.task("ask")
    said = {"authorization": f"Bearer {me.token}", "last-event-id": "1"}
    for method, body in (("GET", None), ("POST", None), ("POST", b""), ("POST", b"{}")):
        url = f"{me.url}/tasks/{parked.id}:subscribe"
        async with me.http.stream(method, url, content=body, headers=said) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    assert json.loads(line[6:])["task"]["id"] == parked.id
                    break
    url = f"{me.url}/tasks/{parked.id}:cancel"
    reply = await me.http.post(url, headers={"authorization": f"Bearer {me.token}"})
    assert me.read(reply)["status"]["state"] == "TASK_STATE_CANCELED"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/message:send", 405),
        ("POST", "/tasks", 405),
        ("DELETE", "/tasks/x", 405),
        ("GET", "/tasks/x:cancel", 405),
        ("POST", "/extendedAgentCard", 405),
        ("GET", "/tasks/x:sleep", 404),
        ("GET", "/tasks/x/y", 404),
        ("POST", "/message:shout", 404),
        ("GET", "/tasks/x/pushNotificationConfigs/y/z", 404),
    ],
)
async def test_what_rest_does_not_serve_is_said_so(me: Binding, method: str, path: str, status: int) -> None:
    reply = await me.http.request(method, me.url + path, headers={"authorization": f"Bearer {me.token}"})
    assert reply.status_code == status
    assert reply.json()["error"]["code"] == status
    assert ("allow" in reply.headers) == (status == 405)
