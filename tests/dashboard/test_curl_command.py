"""The request for a shell that sends a task again."""

from __future__ import annotations

import json
import shlex
from typing import Any

import msgspec
import pytest

from covenant.dashboard.curl_command import curl_command
from covenant.model.task import Task

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
    assert sent["method"] == "SendMessage"
    text, data, link = sent["params"]["message"]["parts"]
    assert (text, data) == ({"text": QUOTED}, {"data": {"a": None}})
    assert link["url"] == f"{URL}/v1/files/ab/t/{'0' * 64}"


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
