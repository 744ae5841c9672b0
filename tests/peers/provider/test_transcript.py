"""A transcript: what was asked, said, made and used, line by line, the same whenever it is made, and bounded."""

import base64
import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from covenant.model.content import Embedded, Json, Resource, Text
from covenant.model.peers.delegation_messages import TRANSCRIPT_MAX, TranscriptEntry
from covenant.model.task import Ending, Result
from covenant.model.task_event import (
    ArtifactUpdate,
    Began,
    Continued,
    Ended,
    MessageUpdate,
    Started,
    StatusUpdate,
    Step,
)
from covenant.peers.provider.result_builder import CHARS_MAX, TranscriptBuilder
from covenant.seal.keys import new_private_key
from covenant.seal.proofs import line_salt, transcript_root
from tests.ledger_contract.samples import make_task, task_id

TASK = make_task(1)
DONE = Ended(Ending.COMPLETED, Result.ok(task_id(1), "the end"))


def transcribed(transitions: Iterable[Any]) -> tuple[TranscriptEntry, ...]:
    transcriber = TranscriptBuilder()
    for number, what in enumerate(transitions, 1):
        transcriber.add(Step(number, 1_000 + number, what))
    return transcriber.entries(lambda seq: f"salt-{seq}")


def test_each_line_says_who_said_what_and_when() -> None:
    lines = transcribed(
        [
            Began(TASK),
            Started(),
            StatusUpdate("on it"),
            StatusUpdate(metadata={"progress": 0.5}),
            ArtifactUpdate("a", (Text("one "),), "response"),
            ArtifactUpdate("t", (Json({"tool": "search", "ok": True}),), "tool_call"),
            ArtifactUpdate("a", (Text("two"),), append=True),
            Continued(MessageUpdate("user", (Text("and?"),))),
            DONE,
        ]
    )
    assert [(line.seq, line.role, line.content, line.tool_result) for line in lines] == [
        (1, "user", TASK.intent_text, None),
        (2, "assistant", "on it", None),
        (3, "assistant", "one two", None),
        (4, "tool", "", '{"ok":true,"tool":"search"}'),
        (5, "user", "and?", None),
        (6, "assistant", "the end", None),
    ]
    assert [line.at_ms for line in lines] == [1_001, 1_003, 1_005, 1_006, 1_008, 1_009]
    assert [line.salt for line in lines] == [f"salt-{seq}" for seq in range(1, 7)]


def test_an_answer_that_was_made_is_not_said_again_at_the_end() -> None:
    lines = transcribed([Began(TASK), ArtifactUpdate("a", (Text("the end"),)), DONE])
    assert [line.content for line in lines] == [TASK.intent_text, "the end"]


def test_what_an_attempt_writes_anew_takes_the_place_of_what_was_written_before() -> None:
    first = [ArtifactUpdate("a", (Text("half"),)), ArtifactUpdate("b", (Text("other"),))]
    lines = transcribed([Began(TASK), *first, ArtifactUpdate("a", (Text("whole"),)), DONE])
    assert [line.content for line in lines] == [TASK.intent_text, "whole", "other", "the end"]


def test_bytes_are_told_by_their_hash() -> None:
    blob = base64.b64encode(b"\x00\xff").decode()
    part = Resource(Embedded(uri="", mimeType="image/png", blob=blob))
    (_, line, _) = transcribed([Began(TASK), ArtifactUpdate("a", (part,)), DONE])
    told = msgspec.json.decode(line.content)
    assert told["type"] == "image/png"
    assert told["sha256"] == hashlib.sha256(msgspec.json.encode(part)).hexdigest()
    assert blob not in line.content


def test_a_long_conversation_is_cut_and_says_so() -> None:
    lines = transcribed([Began(TASK), *(StatusUpdate(f"line {number}") for number in range(TRANSCRIPT_MAX + 5)), DONE])
    assert len(lines) == TRANSCRIPT_MAX
    assert (lines[-1].role, lines[-1].content) == ("system", "8 more were left out")


def test_a_large_conversation_is_cut_and_says_so() -> None:
    much = "x" * (CHARS_MAX // 2 + 1)
    lines = transcribed([Began(TASK), StatusUpdate(much), StatusUpdate(much), StatusUpdate("short")])
    assert [line.content for line in lines[2:]] == ["short", "1 more were left out"]


def test_a_line_that_is_cut_goes_whole_since_half_a_secret_looks_like_none() -> None:
    first = "x" * (CHARS_MAX // 2) + " ghp_16C7e42F29"
    second = "2c6912E7710c838347Ae178B4a" + "x" * (CHARS_MAX // 2)
    pieces = [ArtifactUpdate("a", (Text(piece),), append=True) for piece in (first, second, "the end")]
    lines = transcribed([Began(TASK), *pieces, StatusUpdate("short")])
    assert [line.content for line in lines[1:]] == ["short", "2 more were left out"]


def test_salts_are_the_same_for_the_same_line_and_unlike_for_any_other() -> None:
    key, other = new_private_key(), new_private_key()
    salts = {line_salt(key, "a", 1), line_salt(key, "a", 2), line_salt(key, "b", 1), line_salt(other, "a", 1)}
    assert len(salts) == 4
    assert line_salt(key, "a", 1) == line_salt(key, "a", 1)
    lines = transcribed([Began(TASK), DONE])
    assert transcript_root(lines) != transcript_root((*lines[:1], msgspec.structs.replace(lines[1], salt="other")))
