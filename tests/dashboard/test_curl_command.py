"""The request for a shell that sends a task again."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.agents.api import Agent
from covenant.dashboard.curl_command import curl_command
from covenant.model.task import Task
from tests.daemon_under_test import open_daemon_under_test
from tests.dashboard.browser import open_browser

URL = "https://host.example"
AGENT = {"display": "echo@default", "pubkey": "0" * 64}
QUOTED = 'it\'s $HOME `x` \\ "quoted"\nand a line'


def words_of(**chosen: Any) -> list[str]:
    task = {"id": "11111111-1111-4111-8111-111111111111", "sender": AGENT, "recipient": AGENT, "intent_text": QUOTED}
    return shlex.split(curl_command(msgspec.convert({**task, **chosen}, Task), URL).replace("\\\n", ""))


def test_an_a2a_task_is_a_message_with_its_parts_and_its_key() -> None:
    file = {"type": "file", "space": "ab", "task_id": "t", "sha256": "0" * 64, "size": 1, "mimeType": "text/plain"}
    parts = [{"type": "text", "text": QUOTED}, {"type": "json", "value": {"a": None}}, file]
    safe = {"duplicate_safety": "idempotent", "key": "k'1"}
    words = words_of(origin="a2a", parts=parts, idempotency=safe)
    assert words[:3] == ["curl", "-s", f"{URL}/v1/a2a/agents/echo"]
    assert words[4] == "Authorization: Bearer $COVENANT_TOKEN"
    assert "Idempotency-Key: k'1" in words
    sent = json.loads(words[-1])
    assert sent["params"]["metadata"] == {"covenant.idempotency": safe}
    assert sent["method"] == "SendMessage"
    text, data, link = sent["params"]["message"]["parts"]
    assert (text, data) == ({"text": QUOTED}, {"data": {"a": None}})
    assert link["url"] == f"{URL}/v1/files/ab/t/{'0' * 64}"


def test_a_key_that_no_header_can_hold_is_in_the_metadata() -> None:
    for key in ("a\nb", chr(0x202E) + "k", "schl\u00fcssel", " k"):
        words = words_of(origin="a2a", idempotency={"duplicate_safety": "unsafe", "key": key})
        assert not any(word.startswith("Idempotency-Key") for word in words)
        assert json.loads(words[-1])["params"]["metadata"]["covenant.idempotency"]["key"] == key


async def test_the_request_of_a_task_with_a_key_is_answered_by_that_task(short_path: Path) -> None:
    agent = Agent("echo")

    @agent
    async def say(turn: Any) -> Any:
        return turn.text

    message = {
        "messageId": "m1",
        "role": "ROLE_USER",
        "parts": [{"text": "x"}],
        "contextId": "mine",
        "metadata": {"a": 1},
    }
    params = {
        "message": message,
        "configuration": {"acceptedOutputModes": ["text/plain"]},
        "metadata": {"from": "a test"},
    }
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}
    async with open_daemon_under_test(short_path / "home", agent) as daemon:

        async def send(content: Any, *headers: str) -> Any:
            said = dict(header.split(": ", 1) for header in headers)
            return (await daemon.ask("POST", "/v1/a2a/agents/echo", json=content, headers=said)).json()["result"][
                "task"
            ]

        task = await send(body, "A2A-Version: 1.0", "Idempotency-Key: order-7")
        async with open_browser(daemon, daemon.token) as browser:
            (found,) = (await browser.read("a2a/tasks?key=order-7"))["tasks"]
            assert (found["task_id"], found["key"]) == (task["id"], "order-7")
            shown = (await browser.read(f"a2a/tasks/{task['id']}/show"))["task"]
            assert shown["idempotency"] == {"duplicate_safety": "unsafe", "key": "order-7"}
            command = (await browser.read(f"curl?task_id={task['id']}"))["text"]
            words = shlex.split(command.replace("\\\n", ""))
            headers = [
                value for flag, value in pairwise(words) if flag == "-H" and not value.startswith("Authorization")
            ]
            again = await send(json.loads(words[-1]), *headers)
            assert (again["id"], again["contextId"]) == (task["id"], "mine"), "the key says that it is the same"
            async with open_browser(daemon, await daemon.add_tenant("acme")) as tenant:
                assert (await tenant.read("a2a/tasks?key=order-7"))["tasks"] == []


def test_what_turns_the_direction_of_writing_is_escaped_and_sent_all_the_same() -> None:
    turned = "".join(map(chr, (0x202E, 0x2066, 0x200F, 0x061C)))
    words = words_of(origin="mailbox", intent_text=f"invoice {turned}gpj.exe")
    assert not {*turned} & {*words[-1]}
    assert json.loads(words[-1])["intent_text"] == f"invoice {turned}gpj.exe"


def test_a_mailbox_task_is_sent_anew_and_one_of_another_door_is_read() -> None:
    sent = json.loads(words_of()[-1])
    assert (sent["recipient"], sent["intent_text"]) == ({"display": "echo@default"}, QUOTED)
    assert sent["id"] != "11111111-1111-4111-8111-111111111111"
    assert set(sent) == {"id", "recipient", "intent_text"}
    words = words_of(origin="native")
    assert words[2] == f"{URL}/a2a/tasks/11111111-1111-4111-8111-111111111111/show"
    assert "-d" not in words


@pytest.mark.parametrize("origin", ["a2a", "mailbox", "native"])
def test_the_shell_reads_the_token_and_the_command_has_none(origin: str) -> None:
    assert words_of(origin=origin)[3:5] == ["-H", "Authorization: Bearer $COVENANT_TOKEN"]
