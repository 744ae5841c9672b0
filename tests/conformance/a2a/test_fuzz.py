"""Any request, spoilt in any way: an answer or a refusal, never a fault of ours, and the next caller is served."""

import json
import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.a2a.bindings import Ask, Binding, words
from tests.conformance.a2a.client_answers import Part
from tests.conformance.a2a.http_bindings import Rest, Rpc, is_stream
from tests.conformance.a2a.server_under_test import ServerUnderTest

pytestmark = pytest.mark.asyncio(loop_scope="module")

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)
fuzzing = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a value: what holds it, and under which name or number."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for at, held in inner for place in ((value, at), *places(held))]


def valid(me: Binding, operation: str) -> dict[str, Any]:
    """A request as it should be."""
    if operation in ("send", "stream"):
        message = words(
            "echo", Part("raw", b"x", "a/b"), Part("data", {"a": [1]}), metadata={"k": 1}, references=("r",)
        )
        return me.params_send(Ask(message=message, history=3, modes=("text/plain",), metadata={"m": 1}))
    if operation == "list":
        return {"contextId": "c", "status": me.state("completed"), "pageSize": 3, "includeArtifacts": True}
    if operation.startswith("push."):
        return me.params_push(operation.removeprefix("push."), "x", "p", "https://example.com")
    return {"id": "x", "historyLength": 2}


@st.composite
def spoilt(draw: st.DrawFn, value: dict[str, Any]) -> dict[str, Any]:
    """Here and there something else, or nothing."""
    changed: dict[str, Any] = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        found = places(changed)
        if not found:
            break
        holder, at = draw(st.sampled_from(found))
        if isinstance(holder, dict) and draw(st.booleans()):
            del holder[at]
        else:
            holder[at] = draw(anything)
    return changed


@st.composite
def broken(draw: st.DrawFn, body: bytes) -> bytes:
    """Bytes lost, added or changed."""
    at, to = sorted((draw(st.integers(0, len(body))), draw(st.integers(0, len(body)))))
    if to - at > 40:
        to = at + 40
    return body[:at] + draw(st.binary(max_size=10)) + body[to:]


def check(me: Binding, reply: Any, logged: pytest.LogCaptureFixture) -> None:
    assert reply.status_code < 500, reply.text
    assert "Traceback" not in reply.text
    if is_stream(reply):
        assert reply.text.endswith("\n\n")
    elif isinstance(me, Rpc) and reply.status_code == 200:
        answer = reply.json()
        assert answer.get("error", {"code": 0})["code"] != -32603
    else:
        assert isinstance(reply.json(), dict)
    assert [record.getMessage() for record in logged.records if record.levelno >= logging.ERROR] == []


@fuzzing
@given(data=st.data())
async def test_a_spoilt_request_is_answered_or_refused(
    me: Binding, under_test: ServerUnderTest, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    operation = data.draw(
        st.sampled_from(("send", "stream", "get", "list", "cancel", "subscribe", "push.create", "push.get", "card"))
    )
    params = data.draw(spoilt(valid(me, operation)))
    if isinstance(me, Rest):
        # Names and numbers of an address are text.
        plain = {name: value for name, value in params.items() if isinstance(value, str | int | bool)}
        asked = params if operation in ("send", "stream", "push.create") else plain
        reply = await me.ask(operation, asked)
    else:
        body = json.loads(me.envelope(operation, params))
        reply = await me.raw(json.dumps(data.draw(st.just(body) | spoilt(body))).encode())
    check(me, reply, caplog)


@fuzzing
@given(data=st.data())
async def test_broken_bytes_are_answered_or_refused(
    me: Binding, under_test: ServerUnderTest, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    operation = data.draw(st.sampled_from(("send", "stream")))
    body = me.envelope(operation, valid(me, operation))
    reply = await me.raw(data.draw(broken(body)), operation)
    check(me, reply, caplog)


async def test_after_all_that_every_story_is_whole_and_the_next_caller_is_served(
    me: Binding, under_test: ServerUnderTest
) -> None:
    assert (await me.task("echo")).state == "completed"
    assert await under_test.all_whole() >= 1
