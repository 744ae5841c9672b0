"""Secrets: shown to the origin they were given for, as its card asks, and to nobody else, whatever a card says."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from covenant.daemon.connect import connect
from covenant.model.errors import Invalid
from covenant.outbound.call_errors import RemoteRefused
from covenant.outbound.remote.remote_registry import Credentials
from tests.outbound.http_servers import HERE, Request, Served, http_server, redirect, reply
from tests.outbound.remotes import Called, card, hand_made

CANARY = "canary-5f2e9c"
OTHER = "127.0.0.2"
BOTH = (HERE, OTHER)
ANSWER = {"message": {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": "hi"}]}}


def answered(called: Called) -> None:
    called.result(ANSWER)


@asynccontextmanager
async def listener(status: int = 200) -> AsyncIterator[Served]:
    """Another origin, that answers whatever it is asked."""

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "result": ANSWER}).encode()
        writer.write(reply(status, body if status == 200 else b"", content_type="application/json"))

    async with http_server(speak, host=OTHER) as served:
        yield served


def everything_sent_to(served: Served) -> str:
    return repr([(request.target, request.headers, request.body) for request in served.requests])


async def test_a_bearer_goes_to_the_card_and_to_the_agent_at_the_origin_that_was_named() -> None:
    async with hand_made(answered) as hand, hand.connect(token=CANARY) as remote:
        await remote.send("go")
        assert {request.headers["authorization"] for request in hand.served.requests} == {f"Bearer {CANARY}"}


@pytest.mark.parametrize("newer", [True, False], ids=["1.0", "0.3"])
async def test_an_api_key_goes_into_the_header_that_the_card_names(newer: bool) -> None:
    scheme = {"apiKeySecurityScheme": {"location": "header", "name": "X-Key"}}
    said: dict[str, Any] = (
        {"securitySchemes": {"k": scheme}, "securityRequirements": [{"schemes": {"k": {}}}]}
        if newer
        else {"securitySchemes": {"k": {"type": "apiKey", "in": "header", "name": "X-Key"}}, "security": [{"k": []}]}
    )
    async with hand_made(answered, made=lambda url: card(url, **said)) as hand, hand.connect(token=CANARY) as remote:
        await remote.send("go")
        headers = hand.calls[0].headers
        assert (headers["x-key"], "authorization" in headers) == (CANARY, False)


@pytest.mark.parametrize("name", ["A2A-Version", "Content-Type", "Cookie", "Idempotency-Key"])
async def test_a_card_cannot_put_a_key_into_a_header_that_means_something_else(name: str) -> None:
    scheme = {"apiKeySecurityScheme": {"location": "header", "name": name}}
    said: dict[str, Any] = {"securitySchemes": {"k": scheme}, "securityRequirements": [{"schemes": {"k": {}}}]}
    async with hand_made(answered, made=lambda url: card(url, **said)) as hand, hand.connect(token=CANARY) as remote:
        await remote.send("go")
        assert hand.calls[0].headers["authorization"] == f"Bearer {CANARY}"
        assert hand.calls[0].headers.get(name.lower()) != CANARY


async def test_a_card_that_names_another_origin_gets_no_secret_there() -> None:
    async with (
        listener() as elsewhere,
        hand_made(answered, made=lambda url: card(elsewhere.url("/rpc"))) as hand,
        hand.connect(token=CANARY, headers={"X-Mine": CANARY}, allow_private=BOTH) as remote,
    ):
        assert (await remote.send("go")).text == "hi"
        assert elsewhere.connections == 1
        assert CANARY not in everything_sent_to(elsewhere)


async def test_whoever_is_refused_there_hears_why() -> None:
    async with (
        listener(401) as elsewhere,
        hand_made(answered, made=lambda url: card(elsewhere.url("/rpc"))) as hand,
        hand.connect(token=CANARY, allow_private=BOTH) as remote,
    ):
        with pytest.raises(RemoteRefused, match="another origin, to which the credential is not sent") as raised:
            await remote.send("go")
        assert raised.value.code == "unauthenticated"
        assert CANARY not in str(raised.value)


async def test_an_origin_that_the_caller_trusts_gets_it() -> None:
    async with (
        listener() as elsewhere,
        hand_made(answered, made=lambda url: card(elsewhere.url("/rpc"))) as hand,
        hand.connect(token=CANARY, allow_private=BOTH, trusted_origins=[elsewhere.url()]) as remote,
    ):
        await remote.send("go")
        assert elsewhere.requests[0].headers["authorization"] == f"Bearer {CANARY}"


async def test_another_port_of_the_same_host_is_another_origin() -> None:
    async with (
        http_server(lambda request, writer: _say(writer)) as elsewhere,
        hand_made(answered, made=lambda url: card(elsewhere.url("/rpc"))) as hand,
        hand.connect(token=CANARY) as remote,
    ):
        await remote.send("go")
        assert elsewhere.connections == 1
        assert CANARY not in everything_sent_to(elsewhere)


async def _say(writer: asyncio.StreamWriter) -> None:
    writer.write(reply(200, json.dumps({"jsonrpc": "2.0", "id": 1, "result": ANSWER}).encode()))


async def test_a_card_s_redirect_to_another_origin_takes_no_secret_along() -> None:
    async with listener() as elsewhere, http_server(redirect(elsewhere.url("/agent-card.json"))) as server:
        with pytest.raises(Invalid):
            await connect(server.url(), token=CANARY, headers={"X-Mine": CANARY}, allow_private=BOTH)
        assert elsewhere.connections == 1
        assert CANARY not in everything_sent_to(elsewhere)


@pytest.mark.parametrize("status", [302, 307, 308])
async def test_an_agent_s_redirect_to_another_origin_takes_neither_secret_nor_message_along(status: int) -> None:
    async with (
        listener() as elsewhere,
        http_server(redirect(elsewhere.url("/rpc"), status)) as middle,
        hand_made(answered, made=lambda url: card(middle.url("/rpc"))) as hand,
        hand.connect(token=CANARY, allow_private=BOTH, trusted_origins=[middle.url()]) as remote,
    ):
        with pytest.raises(Exception, match=r"redirect|HTTP 302") as raised:
            await remote.send("go")
        assert raised.value is not None
        assert elsewhere.connections == 0


async def test_a_token_comes_from_the_environment_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_TOKEN", CANARY)
    async with hand_made(answered) as hand, hand.connect(token_env="AGENT_TOKEN") as remote:
        await remote.send("go")
        assert hand.calls[0].headers["authorization"] == f"Bearer {CANARY}"
    async with hand_made(answered) as hand:
        with pytest.raises(Invalid, match="NO_SUCH_TOKEN"):
            await hand.connect(token_env="NO_SUCH_TOKEN")


async def test_a_remote_gets_the_message_and_nothing_else_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVENANT_TOKEN", CANARY)
    async with hand_made(answered) as hand, hand.connect() as remote:
        await remote.send("the text")
        call = hand.calls[0]
        assert CANARY not in everything_sent_to(hand.served)
        assert call.params["message"] == {
            "messageId": call.params["message"]["messageId"],
            "role": "ROLE_USER",
            "parts": [{"text": "the text"}],
        }
        ours = {"a2a-version", "accept", "accept-encoding", "connection", "content-length", "content-type", "host"}
        assert set(call.headers) == {*ours, "user-agent"}


def test_credentials_do_not_show_themselves() -> None:
    assert CANARY not in repr(Credentials("https://example.com", token=CANARY, headers={"X-Key": CANARY}))
