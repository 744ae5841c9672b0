"""What every answer owes, whatever its agent did, and what is never done with what a client says."""

import asyncio
import json
import logging
from typing import Any

import pytest
from a2a.types import a2a_pb2

from tests.conformance.a2a.bindings import Binding, Refused, words
from tests.conformance.a2a.client_answers import TERMINAL, WAITING, Part, Said
from tests.conformance.a2a.http_bindings import NewRpc, Rpc
from tests.conformance.a2a.required import missing
from tests.conformance.a2a.server_under_test import ServerUnderTest, unique

pytestmark = pytest.mark.asyncio(loop_scope="module")

VERBS = (
    *("echo", "words a b", "silent", "status", "file", "told", "spend", "reply hello", "ask", "auth"),
    *("refuse", "raise", "nonsense", "surrogate"),
)


@pytest.mark.parametrize("verb", VERBS)
async def test_an_answer_has_all_that_is_required_of_it_whatever_the_agent_did(me: Binding, verb: str) -> None:
    """Whoever reads an answer or a frame here looks for all of it: this goes through what agents do."""
    context = unique()
    sent = await me.send(words(verb, context=context))
    frames = await me.streamed(words(verb, context=context))
    page = await me.page(contextId=context, includeArtifacts=True)
    assert len(page.tasks) == 2
    for task in page.tasks:
        assert (await me.get(task.id)).state in TERMINAL | WAITING
    assert frames[0].kind in ("task", "message")
    assert isinstance(sent, Said) == verb.startswith("reply")


async def test_a_card_has_all_that_is_required_of_it(me: Binding) -> None:
    for agent in ("actor", "plain", "mannered", "index"):
        card = await me.with_(agent=agent).card()
        assert [*missing(a2a_pb2.AgentCard.DESCRIPTOR, card)] == []


@pytest.mark.parametrize("shape", ["lists", "objects"])
async def test_whatever_one_binding_takes_every_other_can_tell(
    me: Binding, under_test: ServerUnderTest, shape: str
) -> None:
    """JSON may be nested deeper than protocol buffers can be read: that much is not taken."""
    deep: Any = {"at": "the bottom"}
    for _ in range(26):
        deep = [deep] if shape == "lists" else {"in": deep}
    context = unique()
    message = words("mirror", Part("data", {"it": deep}), context=context, metadata={"it": deep})
    first = under_test.client(NewRpc)
    sent = await first.task(message)
    with pytest.raises(Refused, match="INVALID_JSON"):
        await first.task(words("mirror", Part("data", {"it": {"in": deep}})))
    told = await me.get(sent.id)
    assert (told.state, len(told.artifacts or ())) == ("completed", 1)
    assert "the bottom" in str(told.artifacts)
    assert [task.id for task in (await me.page(contextId=context, includeArtifacts=True)).tasks] == [sent.id]
    assert (await me.followed(sent.id, after=1))[-1].state == "completed"


async def test_a_stream_streams_also_where_it_need_not_block(me: Binding) -> None:
    frames = await me.streamed("words a b", blocking=False)
    assert frames[-1].state == "completed"


async def test_no_version_and_an_empty_one_are_what_the_methods_name_says(me: Binding) -> None:
    assert "a2a-version" not in me.headers
    for client in (me, me.saying(a2a_version="")):
        assert (await client.task("echo")).state == "completed"
        assert (await client.streamed("echo"))[-1].state == "completed"


async def test_a_call_that_needs_no_params_may_leave_them_out(me: Binding) -> None:
    assert isinstance(me, Rpc)
    for operation in ("list", "card"):
        for more in ({}, {"params": None}):
            call = {"jsonrpc": "2.0", "id": "call-1", "method": me.METHODS[operation], **more}
            assert me.read(await me.raw(json.dumps(call).encode()))


async def test_an_address_in_a_message_is_never_called(me: Binding) -> None:
    called = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/secret"
        task = await me.task(words("mirror", Part("url", url, "text/html", "a.html")))
        assert task.artifacts is not None
        assert task.artifacts[0].parts[0].value == url
        await me.get(task.id)
        await me.streamed(words("mirror", Part("url", url)))
    assert not called.is_set()


async def test_neither_words_nor_credentials_get_into_a_log(
    me: Binding, under_test: ServerUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="covenant"):
        secret, stranger = unique("secret"), "atr_" + "5" * 64
        for verb in ("echo", "ask", "refuse", "reply"):
            await me.send(words(f"{verb} {secret}", metadata={"k": secret}, context=secret))
        await me.streamed(f"echo {secret}")
        for refused in (me.send(words(secret, role="agent")), me.with_(token=stranger).send(secret), me.get(secret)):
            with pytest.raises(Refused):
                await refused
        await me.cancel((await me.task("ask")).id)
    # The test's own client logs the addresses that it calls if another test has let it.
    records = [record for record in caplog.records if record.name.partition(".")[0] == "covenant"]
    written = "".join(f"{record.getMessage()} {vars(record)}" for record in records)
    for hidden in (secret, stranger, under_test.a2a.token):
        assert hidden not in written
