"""The table of agent kinds: a row for each, and nobody else asks for a kind by name."""

import re
from pathlib import Path
from typing import Final, get_args

from covenant.model.agent_definition import AgentDefinition
from covenant.model.kinds import KINDS, STORED_KINDS, AgentKind

SOURCE: Final = Path(__file__).parents[2] / "src" / "covenant"
COMPARED: Final = re.compile(r"\.kind\b (?:==|!=|in|not in) ")


def test_each_kind_has_a_row() -> None:
    assert set(KINDS) == set(get_args(AgentKind))


def test_the_keys_of_the_rows_are_keys_of_a_definition() -> None:
    keys = [rules.key for rules in KINDS.values() if rules.key]
    assert len(keys) == len(set(keys))
    assert set(keys) <= set(AgentDefinition.__struct_fields__)


def test_what_only_code_declares_is_not_stored() -> None:
    assert set(STORED_KINDS) == set(KINDS) - {"function"}


def test_a_turn_takes_as_long_as_the_definition_says_or_else_its_kind() -> None:
    assert AgentDefinition(id="a", kind="process", command=("true",)).turn_timeout_ms == 300_000
    assert AgentDefinition(id="a", kind="process", command=("true",), timeout_ms=7).turn_timeout_ms == 7
    assert AgentDefinition(id="a", kind="worker").turn_timeout_ms is None


def test_no_module_compares_the_kind_of_an_agent() -> None:
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if COMPARED.search(line) and re.search(r"\b(?:definition|agent|made)\.kind\b", line)
    ]
    assert found == []
