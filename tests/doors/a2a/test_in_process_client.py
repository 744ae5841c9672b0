"""Calls of a door from inside: an answer that breaks off is an error, as over a connection."""

import asyncio

import httpx2
import pytest

from covenant.doors.a2a.in_process_client import InProcessTransport
from covenant.doors.http.server.http_exchange import HttpExchange
from tests.waits import BOUND_S


class FailingDoor:
    def __init__(self, *, answers: bool) -> None:
        self._answers = answers

    async def serve(self, exchange: HttpExchange) -> None:
        await exchange({"type": "http.response.start", "status": 200, "headers": []})
        await exchange({"type": "http.response.body", "body": b"one", "more_body": True})
        if self._answers:
            exchange.answer(500, (), b"a second answer")


@pytest.mark.parametrize("answers", [False, True])
async def test_a_stream_that_its_door_leaves_is_no_whole_answer(*, answers: bool) -> None:
    transport = InProcessTransport(FailingDoor(answers=answers), {})
    async with (
        httpx2.AsyncClient(transport=transport) as client,
        client.stream("GET", "http://here/stream") as answer,
        asyncio.timeout(BOUND_S),
    ):
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == b"one"
        with pytest.raises(httpx2.RemoteProtocolError):
            await anext(pieces)
