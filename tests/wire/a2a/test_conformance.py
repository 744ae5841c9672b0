"""What breaks the specification: one broken answer for each rule, and answers that break none."""

from pathlib import Path
from typing import Any

import pytest

from covenant.wire.a2a import conformance
from covenant.wire.a2a.conformance import FORMS, RULES, CheckedReply, StreamCheck, check_card, check_reply, check_rpc
from covenant.wire.a2a.dialects import PROTO_V03, V03, V1

PART: Any = {"text": "x"}
MESSAGE: Any = {"messageId": "m", "role": "ROLE_AGENT", "parts": [PART]}
STATUS: Any = {"state": "TASK_STATE_COMPLETED", "timestamp": "2026-01-02T03:04:05.678Z"}
TASK: Any = {"id": "t", "contextId": "c", "status": STATUS, "artifacts": [{"artifactId": "a", "parts": [PART]}]}
CARD: Any = {
    "name": "n",
    "description": "d",
    "version": "1",
    "supportedInterfaces": [{"url": "https://h/", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}],
    "capabilities": {"streaming": True},
    "defaultInputModes": ["text/plain"],
    "defaultOutputModes": ["text/plain"],
    "skills": [{"id": "s", "name": "s", "description": "d", "tags": ["t"]}],
}
TASK_V03: Any = {
    "kind": "task",
    "id": "t",
    "contextId": "c",
    "status": {"state": "completed", "message": {"kind": "message", "messageId": "m", "role": "agent", "parts": []}},
}


def rules(reply: CheckedReply) -> list[str]:
    return [finding.rule for finding in reply.findings]


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"id": ""}, "Task.id"),
        ({"id": None}, "Task.id"),
        ({"id": 7}, "Task.id"),
        ({"status": None}, "Task.status"),
        ({"status": "done"}, "TaskStatus"),
        ({"status": {}}, "TaskStatus.state"),
        ({"status": {"state": "completed"}}, "TaskStatus.state"),
        ({"status": {"state": 3}}, "TaskStatus.state"),
        ({"status": {"state": "TASK_STATE_UNSPECIFIED"}}, "TaskStatus.state"),
        ({"status": {**STATUS, "timestamp": "yesterday"}}, "TaskStatus.timestamp"),
        ({"status": {**STATUS, "message": {**MESSAGE, "role": "agent"}}}, "Message.role"),
        ({"status": {**STATUS, "message": {**MESSAGE, "parts": []}}}, "Message.parts"),
        ({"status": {**STATUS, "message": {**MESSAGE, "messageId": None}}}, "Message.messageId"),
        ({"artifacts": {}}, "Task.artifacts"),
        ({"artifacts": [{"parts": [PART]}]}, "Artifact.artifactId"),
        ({"artifacts": [{"artifactId": "a", "parts": [{}]}]}, "Part.content"),
        ({"artifacts": [{"artifactId": "a", "parts": [{"text": "x", "url": "y"}]}]}, "Part.content"),
    ],
)
def test_a_task_that_breaks_a_rule_is_found_by_it(changed: Any, rule: str) -> None:
    form = FORMS[V1]
    assert rules(check_reply(form, {"task": TASK})) == []
    assert rules(check_reply(form, {"task": {**TASK, **changed}})) == [rule]
    assert rules(check_reply(form, {**TASK, **changed}, task_alone=True)) == [rule]


def test_an_answer_is_one_thing() -> None:
    form = FORMS[V1]
    for said in ({}, {"task": TASK, "message": MESSAGE}, {"kind": "task", **TASK}):
        assert rules(check_reply(form, said)) == ["reply"]
    assert rules(check_reply(FORMS[V03], {"task": TASK_V03})) == ["reply"]
    assert rules(check_reply(FORMS[V03], TASK_V03)) == ["Message.parts"]
    assert (
        rules(check_reply(FORMS[PROTO_V03], {"message": {"messageId": "m", "role": "ROLE_AGENT", "content": [PART]}}))
        == []
    )


def test_a_part_of_the_older_dialect_has_what_its_kind_names() -> None:
    message = {"kind": "message", "messageId": "m", "role": "agent"}
    for part, found in (({"kind": "text"}, "Part.text"), ({"kind": "x"}, "Part.kind"), ({"text": "x"}, "Part.kind")):
        assert found in rules(check_reply(FORMS[V03], {**message, "parts": [part]}))


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"jsonrpc": "2.0", "id": 1, "result": {}}, []),
        ({"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "no"}}, []),
        ({"id": 1, "result": {}}, ["jsonrpc.envelope"]),
        ({"jsonrpc": "2.0", "id": 1}, ["jsonrpc.envelope"]),
        ({"jsonrpc": "2.0", "id": 1, "result": {}, "error": {"code": 1, "message": "m"}}, ["jsonrpc.envelope"]),
        ({"jsonrpc": "2.0", "id": "1", "result": {}}, ["jsonrpc.id"]),
        ({"jsonrpc": "2.0", "id": True, "result": {}}, ["jsonrpc.id"]),
        ({"jsonrpc": "2.0", "id": 1, "error": {"code": "x"}}, ["jsonrpc.error", "jsonrpc.error"]),
        ({"jsonrpc": "2.0", "id": 1, "error": "no"}, ["jsonrpc.error"]),
    ],
)
def test_the_envelope_of_json_rpc(said: Any, found: list[str]) -> None:
    assert [finding.rule for finding in check_rpc(said, 1)] == found


@pytest.mark.parametrize(("given", "words"), [({"id": 99}, "the id 99"), ({"id": "1"}, 'the id "1"'), ({}, "no id")])
def test_another_id_is_said_as_it_stood_in_the_response(given: Any, words: str) -> None:
    (finding,) = check_rpc({"jsonrpc": "2.0", "result": {}, **given}, 1)
    assert finding.text == f"the response has {words}; its request had the id 1"


def stream(*events: Any) -> list[str]:
    check = StreamCheck(FORMS[V1])
    found = [finding.rule for event in events for finding in check.take(check_reply(FORMS[V1], event))]
    return found + [finding.rule for finding in check.end()]


def test_the_order_of_a_stream() -> None:
    working = {"task": {**TASK, "status": {"state": "TASK_STATE_WORKING"}}}
    done = {"statusUpdate": {"taskId": "t", "contextId": "c", "status": STATUS}}
    asks = {"statusUpdate": {"taskId": "t", "contextId": "c", "status": {"state": "TASK_STATE_INPUT_REQUIRED"}}}
    assert stream(working, done) == []
    assert stream(working, asks) == []
    assert stream({"message": MESSAGE}) == []
    assert stream() == ["stream.first"]
    assert stream(done) == ["stream.first"]
    assert stream(working) == ["stream.end"]
    assert stream(working, done, done) == ["stream.order"]
    assert stream({"message": MESSAGE}, working) == ["stream.order"]
    assert stream(working, {"statusUpdate": {**done["statusUpdate"], "taskId": "u"}}) == ["stream.task"]


@pytest.mark.parametrize("name", ["name", "description", "version", "capabilities", "defaultInputModes", "skills"])
def test_a_card_needs_what_the_specification_requires(name: str) -> None:
    assert check_card(CARD) == ()
    assert [finding.rule for finding in check_card({**CARD, name: None})] == [f"AgentCard.{name}"] * (name != "skills")
    assert [each.rule for each in check_card({key: CARD[key] for key in CARD if key != name})] == [f"AgentCard.{name}"]


def test_cards_of_either_version_and_of_none() -> None:
    older = {key: value for key, value in CARD.items() if key != "supportedInterfaces"}
    assert check_card({**older, "url": "https://h/", "protocolVersion": "0.3.0"}) == ()
    assert [each.rule for each in check_card({**older, "url": "https://h/"})] == ["AgentCard.protocolVersion"]
    assert [each.rule for each in check_card(older)] == ["card.interfaces"]
    unsigned = check_card({**CARD, "signatures": [{"protected": "x"}]})
    assert [each.rule for each in unsigned] == ["AgentCardSignature.signature"]


def test_errors_and_media_types() -> None:
    form = FORMS[V1]
    good = {"error": {"code": 404, "status": "NOT_FOUND", "message": "no"}}
    assert list(conformance.check_rest_error(form, 404, good)) == []
    assert [each.rule for each in conformance.check_rest_error(form, 400, good)] == ["rest.error"]
    assert [each.rule for each in conformance.check_rest_error(form, 404, {"detail": "no"})] == ["rest.error"]
    assert list(conformance.check_media_type("application/a2a+json; charset=utf-8", stream=False)) == []
    assert [each.rule for each in conformance.check_media_type("text/html", stream=False)] == ["http.content_type"]
    assert [each.rule for each in conformance.check_media_type("application/json", stream=True)] == [
        "http.content_type"
    ]


def test_what_is_found_is_bounded_and_hostile_answers_are_no_fault() -> None:
    many = {"task": {**TASK, "artifacts": [{}] * 100_000}}
    assert len(check_reply(FORMS[V1], many).findings) == conformance.FINDINGS_MAX
    deep = ("[" * 5_000 + "]" * 5_000).encode()
    for data in (b"", b"7", b"\xff", deep, b'{"a":' + deep + b"}", b"{"):
        assert conformance.parse_object(data) is None
    hostile: tuple[Any, ...] = (
        {"task": 7},
        {"task": [[]]},
        {"message": {"parts": [7]}},
        {"task": {"status": {"state": []}}},
    )
    for said in hostile:
        assert check_reply(FORMS[V1], said).findings


def test_what_is_found_is_named_after_an_object_or_a_rule() -> None:
    objects = {name for form in FORMS.values() for name in form.objects}
    documented = (Path(__file__).parents[3] / "docs" / "dashboard.md").read_text()
    for rule, text in RULES.items():
        assert rule.partition(".")[0] not in objects
        assert f"| `{rule}` | {text} |" in documented
