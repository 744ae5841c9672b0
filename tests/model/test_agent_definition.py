"""Definitions: what is read, and how exactly a refusal points at what is wrong."""

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.agent_definition import (
    INDEX_DEFINITION,
    Advisor,
    AgentDefinition,
    Skill,
    explain_invalid,
    json_pointer,
    read_agent_definition,
)
from covenant.model.errors import Invalid


def test_an_id_is_enough_and_the_rest_has_its_defaults() -> None:
    made = read_agent_definition({"id": "writer"})
    assert made == AgentDefinition(id="writer")
    assert (made.model, made.max_tokens, made.temperature) == ("", 1024, 0.3)
    assert (made.brevity, made.mode, made.channel, made.advisor) == ("full", "", None, None)
    assert (made.memory.age_half_life_days, made.memory.age_floor, made.intent.min_confidence) == (90, 0.5, 0.8)
    assert (made.kind, made.on_lost, made.idempotent, made.mcp_tool_permissions) == ("model", "hold", False, None)


def test_what_was_read_can_be_written_and_read_again() -> None:
    full = {
        "id": "A-z_9",
        "kind": "process",
        "command": ["run", "it"],
        "advisor": {"model": "m", "mode": "gate", "max_redirects": 0},
        "skills": ["sum", {"id": "count", "tags": ["numbers"]}],
        "mcp_tool_permissions": [],
        "idempotent": True,
        "on_lost": "requeue",
        "timeout_ms": 5,
        "temperature": 1,
    }
    made = read_agent_definition(full)
    assert made.skills == (Skill(id="sum"), Skill(id="count", tags=("numbers",)))
    assert made.mcp_tool_permissions == ()
    assert read_agent_definition(json.loads(msgspec.json.encode(made))) == made


@pytest.mark.parametrize("given", [{"advisor": "m"}, {"advisor_model": "m"}, {"advisor": {"model": "m"}}])
def test_an_advisor_may_be_written_in_three_ways(given: dict[str, Any]) -> None:
    assert read_agent_definition({"id": "a", **given}).advisor == Advisor(model="m")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colour": 1}, "unknown key /colour"),
        ({"a/b~c": 1}, "unknown key /a~1b~0c"),
        ({"advisor": {"model": "m", "x": 1}}, "unknown key /advisor/x"),
        ({"skills": [{"id": "a"}, {"id": "b", "x": 1}]}, "unknown key /skills/1/x"),
        ({"memory": {"x": 1}}, "unknown key /memory/x"),
        ({"advisor": {"mode": "off"}}, "/advisor/model: must be given"),
        ({"advisor": {"model": "m", "mode": "loud"}}, "/advisor/mode: "),
        ({"advisor": "m", "advisor_model": "m"}, "/advisor_model: "),
        ({"advisor": 7}, "/advisor: "),
        ({"brevity": "long"}, "/brevity: "),
        ({"mode": "x"}, "/mode: "),
        ({"channel": "fax"}, "/channel: "),
        ({"kind": "robot"}, "/kind: "),
        ({"on_lost": "forget"}, "/on_lost: "),
        ({"on_lost": "requeue"}, "/on_lost: "),
        ({"intent": {"mode": "x"}}, "/intent/mode: "),
        ({"intent": {"min_confidence": 1.1}}, "/intent/min_confidence: "),
        ({"rules": ["a", 5]}, "/rules/1: "),
        ({"rules": "a"}, "/rules: "),
        ({"rules": ["x"] * 201}, "/rules: "),
        ({"name": "x" * 1001}, "/name: "),
        ({"max_tokens": 0}, "/max_tokens: "),
        ({"max_tokens": "many"}, "/max_tokens: "),
        ({"temperature": 2.1}, "/temperature: "),
        ({"timeout_ms": 0}, "/timeout_ms: "),
        ({"kind": "process"}, "/command: "),
        ({"command": ["x"]}, "/command: "),
        ({"id": "index"}, "/id: "),
        ({"id": "client"}, "/id: "),
        ({"id": ""}, "/id: "),
        ({"id": "a b"}, "/id: "),
        ({"id": "a\n"}, "/id: "),
        ({"id": "ä"}, "/id: "),
        ({"id": "x" * 65}, "/id: "),
        ({"id": None}, "/id: "),
    ],
)
def test_a_refusal_points_at_the_key_that_is_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid) as refused:
        read_agent_definition({"id": "a", **given})
    assert refused.value.code == "invalid_agent"
    assert refused.value.message.startswith(message)


def test_a_refused_value_is_answered_with_those_there_are() -> None:
    with pytest.raises(Invalid, match="'hold', 'fail', 'requeue'"):
        read_agent_definition({"id": "a", "on_lost": "forget"})


def test_what_is_too_much_as_a_whole_is_refused() -> None:
    with pytest.raises(Invalid, match="bytes"):
        read_agent_definition({"id": "a", "rules": ["x" * 32_000] * 10})


@pytest.mark.parametrize("given", [None, [], "writer", 5])
def test_only_an_object_is_a_definition(given: object) -> None:
    with pytest.raises(Invalid, match="must be an object"):
        read_agent_definition(given)


def test_an_id_must_be_given() -> None:
    with pytest.raises(Invalid, match="/id: must be given"):
        read_agent_definition({})


def test_the_master_agent_is_as_it_always_was() -> None:
    made = INDEX_DEFINITION
    assert (made.id, made.role, made.mode, made.brevity) == ("index", "orchestrator", "conversational", "lite")
    assert (made.temperature, made.max_tokens, made.intent.mode) == (0.45, 2048, "hybrid")


def test_a_pointer_follows_names_and_numbers() -> None:
    assert json_pointer("$.skills[2].tags[0]") == "/skills/2/tags/0"
    assert json_pointer(None) == json_pointer("$") == ""
    assert explain_invalid("Expected `object`, got `int`", AgentDefinition) == "Expected `object`, got `int`"


keys = st.sampled_from([*AgentDefinition.__struct_fields__, "advisor_model"]) | st.text(max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(keys, values, max_size=6))
def test_whatever_comes_is_read_or_refused(given: dict[str, Any]) -> None:
    with suppress(Invalid):
        made = read_agent_definition(given)
        assert read_agent_definition(msgspec.to_builtins(made)) == made
