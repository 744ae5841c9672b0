"""The way in for other instances over HTTP: true statuses, one answer for strangers, nothing that costs a token."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant.doors.metrics import Meter
from covenant.doors.peer_envelopes import DESCRIBED, sealed_routes
from covenant.model.errors import Refusal
from covenant.model.peers.instance import KeyBundle
from covenant.peers.peer_settings import PeerSettings
from covenant.seal.envelope import ENVELOPE_BYTES_MAX, receipt_holds
from covenant.seal.identity import bundle_holds
from covenant.wire.peers import (
    IDENTITY_PATH,
    POLL_PATH,
    RECEIVE_PATH,
    Introduction,
    Polled,
    Received,
    Relayed,
    decode_introduction,
)
from tests.peers.transport_under_test import (
    TransportUnderTest,
    listening,
    offer,
    serving,
    stranger_pool,
    transport_under_test,
)
from tests.waits import BOUND_S


@pytest.fixture
async def alice(tmp_path: Path) -> AsyncIterator[TransportUnderTest]:
    async with transport_under_test(tmp_path / "alice") as opened:
        yield opened


@pytest.fixture
async def bob(tmp_path: Path, alice: TransportUnderTest) -> AsyncIterator[TransportUnderTest]:
    strict = PeerSettings(messages_per_min=3)
    async with transport_under_test(tmp_path / "bob", settings=strict) as opened, listening(opened):
        await opened.knows(alice, url=None)
        yield opened


async def call(
    at: TransportUnderTest, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """One request by hand, and the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", at.keys.port)
    said = {"host": f"127.0.0.1:{at.keys.port}", "connection": "close", "content-length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in said.items())
    writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    async with asyncio.timeout(BOUND_S):
        answer = await reader.read()
    writer.close()
    top, _, rest = answer.partition(b"\r\n\r\n")
    first, *lines = top.decode().split("\r\n")
    return int(first.split()[1]), {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}, rest


async def test_anybody_hears_who_we_are_under_our_signature(bob: TransportUnderTest) -> None:
    code, headers, body = await call(bob, "GET", IDENTITY_PATH)
    assert (code, headers["content-type"], headers["cache-control"]) == (200, "application/json", "public, max-age=60")
    keys = decode_introduction(body).keys
    assert isinstance(keys, KeyBundle)
    assert bundle_holds(keys, bob.id, bob.clock())


async def test_an_envelope_is_answered_once_it_is_taken(alice: TransportUnderTest, bob: TransportUnderTest) -> None:
    envelope = alice.sealed(offer(), bob, seq=1)
    code, headers, body = await call(bob, "POST", RECEIVE_PATH, envelope)
    said = json.loads(body)
    assert receipt_holds(bob.keyring.identity.key, envelope, said.pop("receipt"))
    assert (code, headers["cache-control"], said) == (200, "no-store", {"status": "accepted", "duplicate": False})
    code, _, body = await call(bob, "POST", RECEIVE_PATH, envelope)
    assert (code, json.loads(body)["code"]) == (409, "replayed")
    code, _, body = await call(bob, "POST", RECEIVE_PATH, alice.sealed(offer(), bob, seq=1))
    assert (code, json.loads(body)["duplicate"]) == (200, True)


async def test_what_is_missing_and_when_to_come_back_is_told(
    alice: TransportUnderTest, bob: TransportUnderTest
) -> None:
    await call(bob, "POST", RECEIVE_PATH, alice.sealed(offer(1), bob, seq=1))
    code, _, body = await call(bob, "POST", RECEIVE_PATH, alice.sealed(offer(1), bob, seq=3))
    said = json.loads(body)
    assert (code, said["code"], said["expected"]) == (409, "out_of_order", 2)
    await call(bob, "POST", RECEIVE_PATH, alice.sealed(offer(2), bob, seq=1))
    code, headers, body = await call(bob, "POST", RECEIVE_PATH, alice.sealed(offer(3), bob, seq=1))
    assert (code, json.loads(body)["code"]) == (429, "rate_limited")
    assert 1 <= int(headers["retry-after"]) <= 20


async def test_a_stranger_hears_the_same_bytes_whatever_is_wrong(
    alice: TransportUnderTest, bob: TransportUnderTest, tmp_path: Path
) -> None:
    async with transport_under_test(tmp_path / "mallory") as mallory:
        envelope = alice.sealed(offer(), bob, seq=1)
        parts = json.loads(envelope)
        wrong: list[bytes] = [
            b"",
            b"nonsense",
            b"[" * 100_000,
            json.dumps({**parts, "signature": "A" * 86}).encode(),
            json.dumps({**parts, "ciphertext": parts["signature"]}).encode(),
            mallory.sealed(offer(), bob, seq=1),
            bob.sealed(offer(), bob, seq=1),
            b" " * (ENVELOPE_BYTES_MAX + 1),
        ]
        heard: set[Any] = set()
        for body in wrong:
            for path in (RECEIVE_PATH, POLL_PATH):
                code, headers, said = await call(bob, "POST", path, body)
                heard.add((code, said, headers["content-type"], headers["cache-control"]))
    assert len(heard) == 1
    code, said, *_ = heard.pop()
    assert (code, json.loads(said)["code"]) == (400, "refused")


async def test_other_methods_are_told_which_there_are(bob: TransportUnderTest) -> None:
    for route in DESCRIBED:
        code, headers, body = await call(bob, "DELETE", route.path)
        allowed = ", ".join(sorted(each.method for each in DESCRIBED if each.path == route.path))
        assert (code, headers["allow"], json.loads(body)["code"]) == (405, allowed, "method_not_allowed")


class Hanging:
    """A letterbox that answers nobody, and says when it was broken off."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    async def poll(self, body: bytes, address: str | None) -> Polled:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        raise AssertionError

    async def receive(self, body: bytes, address: str | None) -> Received:
        raise AssertionError

    async def receive_introduction(self, body: bytes, address: str | None) -> Received:
        raise AssertionError

    async def deposit(self, body: bytes, address: str | None, recipient: str) -> Relayed:
        raise AssertionError

    async def introduction_of(self, recipient: str) -> bytes:
        raise AssertionError

    async def refuse_too_large(self, address: str | None) -> Refusal:
        raise AssertionError


async def test_a_wait_ends_when_the_one_who_waits_has_left(bob: TransportUnderTest) -> None:
    hanging = Hanging()
    routes = sealed_routes(
        hanging,
        lambda: Introduction(keys=bob.keyring.bundle(bob.clock())),
        Meter(),
        stranger_pool(),
    )
    async with serving(routes) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST {POLL_PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        await asyncio.wait_for(hanging.begun.wait(), BOUND_S)
        writer.close()
        await asyncio.wait_for(hanging.ended.wait(), BOUND_S)
