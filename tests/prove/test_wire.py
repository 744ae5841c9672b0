"""What the kit sends and reads, and how it checks a signature."""

import asyncio
from urllib.parse import urlsplit

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.prove import ed25519
from covenant.prove.protocol import (
    Interface,
    ServerRefused,
    Unreadable,
    build_configuration,
    build_message,
    build_request,
    read_answer,
    read_event,
    read_interfaces,
)
from covenant.prove.trial import gap_or_repeat
from covenant.prove.webhook import Webhook
from tests.waits import BOUND_S, eventually

RPC = Interface("http://x/rpc", "1.0", "JSONRPC")
OLD = Interface("http://x/rpc", "0.3", "JSONRPC")
REST = Interface("http://x/", "1.0", "HTTP+JSON")
OLD_REST = Interface("http://x", "0.3", "HTTP+JSON")


def test_each_way_to_speak_names_the_operation_in_its_own_words() -> None:
    made = [build_request(interface, "cancel", {"id": "t"}, {}, 1) for interface in (RPC, OLD, REST, OLD_REST)]
    assert [msgspec.json.decode(each.body or b"")["method"] for each in made[:2]] == ["CancelTask", "tasks/cancel"]
    assert [(each.verb, each.url) for each in made[2:]] == [
        ("POST", "http://x/tasks/t:cancel"),
        ("POST", "http://x/v1/tasks/t:cancel"),
    ]
    assert [each.headers["a2a-version"] for each in made] == ["1.0", "0.3", "1.0", "0.3"]


def test_an_operation_that_a_version_lacks_is_not_offered() -> None:
    with pytest.raises(ServerRefused) as refused:
        build_request(OLD, "list", {"pageSize": 5}, {}, 1)
    assert refused.value.code == -32601
    assert build_request(REST, "list", {"pageSize": 5}, {}, 1).query == {"pageSize": "5"}


@pytest.mark.parametrize(
    ("interface", "parts"),
    [(RPC, [{"text": "hi"}]), (REST, [{"text": "hi"}]), (OLD, [{"kind": "text", "text": "hi"}])],
)
def test_a_message_has_the_shape_of_its_version(interface: Interface, parts: object) -> None:
    message = build_message(interface.version, interface.binding, "m", "hi", None)
    assert message["parts"] == parts
    assert build_message("0.3", "HTTP+JSON", "m", "hi", None)["content"] == [{"text": "hi"}]
    assert build_configuration("1.0", waits=True, push=None) == {"returnImmediately": False}
    assert build_configuration("0.3", waits=True, push=None) == {"blocking": True}


@pytest.mark.parametrize(
    "result",
    [
        {"task": {"id": "t", "status": {"state": "TASK_STATE_INPUT_REQUIRED"}}},
        {"kind": "task", "id": "t", "status": {"state": "input-required"}},
        {"id": "t", "status": {"state": "TASK_STATE_INPUT_REQUIRED"}},
        {"statusUpdate": {"taskId": "t", "status": {"state": "TASK_STATE_INPUT_REQUIRED"}}},
        {"kind": "status-update", "taskId": "t", "status": {"state": "input-required"}},
    ],
)
def test_a_state_is_read_from_every_shape(result: dict[str, object]) -> None:
    event = read_event(result)
    assert (event.task_id, event.state) == ("t", "input-required")


@pytest.mark.parametrize(
    ("interface", "status", "body", "code"),
    [
        (RPC, 200, b'{"error": {"code": -32001, "message": "no"}}', -32001),
        (REST, 404, b'{"error": {"code": 404, "message": "no"}}', 404),
        (REST, 400, b'{"detail": "no"}', 400),
        (REST, 502, b"<html>", 502),
        (RPC, 500, b"[]", 500),
    ],
)
def test_an_error_is_read_from_every_shape(interface: Interface, status: int, body: bytes, code: int) -> None:
    with pytest.raises(ServerRefused) as refused:
        read_answer(interface, status, body)
    assert refused.value.code == code


@pytest.mark.parametrize(
    "body",
    [
        b"[]", b"<html>", b'"\xff"', b"[" * 100_000, b"{}", b'{"result": "x"}', b'{"error": {"code": "NO"}}',
        b'{"result": {"task": "x"}}', b'{"result": {"task": {"status": "x"}}}',
        b'{"result": {"task": {"artifacts": "x"}}}', b'{"result": {"task": {"artifacts": [{"parts": ["x"]}]}}}',
        b'{"result": {"task": {"artifacts": [{"parts": [{"text": 1}]}]}}}', b'{"result": {"statusUpdate": "x"}}',
        b'{"result": {"artifactUpdate": {"artifact": "x"}}}', b'{"result": {"message": "x"}}',
    ],
    ids=lambda body: body[:60].decode("latin-1"),
)  # fmt: skip
def test_an_answer_that_is_not_a2a_cannot_be_read(body: bytes) -> None:
    with pytest.raises(Unreadable):
        read_event(read_answer(RPC, 200, body))


@pytest.mark.parametrize(
    "card", [{"supportedInterfaces": "x"}, {"supportedInterfaces": [{"protocolVersion": 1}]}, {"url": 1}]
)
def test_a_card_of_another_shape_cannot_be_read(card: dict[str, object]) -> None:
    with pytest.raises(Unreadable):
        read_interfaces(card)


def test_cards_of_both_versions_say_how_to_speak() -> None:
    new = {
        "supportedInterfaces": [{"url": "u", "protocolBinding": "GRPC"}, {"url": "v", "protocolBinding": "HTTP+JSON"}]
    }
    assert read_interfaces(new) == [Interface("v", "1.0", "HTTP+JSON")]
    old = {"url": "u", "protocolVersion": "0.3.0", "additionalInterfaces": [{"url": "v", "transport": "HTTP+JSON"}]}
    assert read_interfaces(old) == [Interface("u", "0.3", "JSONRPC"), Interface("v", "0.3", "HTTP+JSON")]


@pytest.mark.parametrize(
    ("text", "right"), [("0 1 2 ", True), ("", True), ("0 2 ", False), ("0 1 1 2 ", False), ("1 ", False)]
)
def test_a_gap_and_a_repeat_are_found(text: str, right: bool) -> None:
    assert (gap_or_repeat(text) is None) is right


def test_a_signature_holds_for_its_message_and_key_alone() -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    for length in (0, 1, 1_000):
        message = b"x" * length
        signature = key.sign(message)
        assert ed25519.is_valid(public, signature, message)
        assert not ed25519.is_valid(public, signature, message + b"y")
        assert not ed25519.is_valid(other.public_key().public_bytes_raw(), signature, message)
        for place in (0, 31, 32, 63):
            torn = signature[:place] + bytes([signature[place] ^ 1]) + signature[place + 1 :]
            assert not ed25519.is_valid(public, torn, message)
    assert not ed25519.is_valid(public, b"", b"")
    assert not ed25519.is_valid(b"\xff" * 32, key.sign(b""), b"")
    # A scalar that is one order too large would make a second signature of the same message.
    order = 2**252 + 27742317777372353535851937790883648493
    signature = key.sign(b"m")
    larger = (int.from_bytes(signature[32:], "little") + order).to_bytes(32, "little")
    assert not ed25519.is_valid(public, signature[:32] + larger, b"m")


async def test_whoever_stays_connected_to_the_webhook_is_let_go_when_the_run_ends() -> None:
    async with Webhook() as webhook:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(webhook.url).port)
        taking: list[asyncio.Task[object]] = []

        async def is_taken() -> bool:
            taking.extend(each for each in asyncio.all_tasks() if "Webhook._take" in repr(each.get_coro()))
            return bool(taking)

        await eventually(is_taken)
        taking[0].cancel()
        assert await asyncio.wait_for(reader.read(), BOUND_S) == b""
        writer.close()
