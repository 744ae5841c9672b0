"""The reader of usage: whatever form a report has, it adds up, and none of them lowers a sum."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.usage import AMOUNT_MAX, NAMES_MAX, add_usage, read_usage, tokens_of, usage_beyond, usage_in

BOTH: dict[str, float] = {"input_tokens": 3, "output_tokens": 5, "tokens": 8}
FORMS: list[tuple[Any, dict[str, float]]] = [
    ({"tokens": 7}, {"tokens": 7}),
    ({"input_tokens": 3, "output_tokens": 5}, BOTH),
    ({"tokens": 1, "input_tokens": 3, "output_tokens": 5}, BOTH),
    ({"tokens": 10, "input_tokens": 3}, {"tokens": 10, "input_tokens": 3}),
    ({"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}, BOTH),
    ({"inputTokens": 3, "outputTokens": 5, "totalTokens": 9}, {"input_tokens": 3, "output_tokens": 5, "tokens": 9}),
    ({"input_tokens": 3, "prompt_tokens": 3}, {"input_tokens": 3, "tokens": 3}),
    ({"x-arbiter.input_tokens": 3, "x-arbiter.output_tokens": 5}, BOTH),
    ({"tokens": 2.5, "requests": 1}, {"tokens": 2.5, "requests": 1}),
    ({"tokens": -5, "input_tokens": 3}, {"input_tokens": 3, "tokens": 3}),
    ({"tokens": math.nan}, {}),
    ({"tokens": math.inf}, {"tokens": AMOUNT_MAX}),
    ({"tokens": 10**400}, {"tokens": AMOUNT_MAX}),
    ({"tokens": True, "input_tokens": "800002", "output_tokens": None, "details": {"tokens": 1}, 5: 5}, {}),
    (None, {}),
    ([1], {}),
    ("tokens", {}),
]  # fmt: skip


@pytest.mark.parametrize(("said", "read"), FORMS)
def test_every_form_is_read_as_one(said: Any, read: dict[str, float]) -> None:
    assert read_usage(said) == read
    assert tokens_of(read) == read.get("tokens", 0)


INSIDE: list[tuple[Any, float]] = [
    ({"usage": {"input_tokens": 3, "output_tokens": 5}, "delegated": {"tokens": 2}}, 8),
    ({"input_tokens": 3, "output_tokens": 5, "stop_reason": "end_turn"}, 8),
    ({"covenant.usage": {"usage": {"tokens": 7}, "model": "small"}}, 7),
    ({"covenant.usage": {"input_tokens": 3}}, 3),
    ({"x-arbiter.input_tokens": 3, "x-arbiter.output_tokens": 5, "covenant.generation": 99}, 8),
    ({"usage": {"prompt_tokens": 3, "completion_tokens": 5}}, 8),
    ({"token_usage": {"total_tokens": 9}}, 9),
    ({"covenant.usage": {}, "usage": {"tokens": 9}}, 9),
    ({"covenant.usage": {"requests": 1}, "usage": {"tokens": 9}}, 9),
    ({"usage": {}, "total_tokens": 9}, 9),
    ({"usage_metadata": {"input_tokens": 3, "output_tokens": 5}}, 8),
    ({"adk_usage_metadata": {"promptTokenCount": 3, "candidatesTokenCount": 5, "totalTokenCount": 9}}, 9),
    ({"usageMetadata": {"prompt_token_count": 3, "candidates_token_count": 5}}, 8),
    ({"spent": 50, "code": 12}, 0),
    ({"usage": "much"}, 0),
    ({"usage": {"usage": {"usage": {"usage": {"tokens": 1}}}}}, 0),
    (None, 0),
]


@pytest.mark.parametrize(("metadata", "tokens"), INSIDE)
def test_a_report_is_found_in_metadata(metadata: Any, tokens: float) -> None:
    assert usage_in(metadata).get("tokens", 0) == tokens


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["tokens", "input_tokens", "output_tokens", "prompt_tokens", "total_tokens", "usage"])


@given(st.lists(st.dictionaries(names | st.text(max_size=8), anything, max_size=6) | anything, max_size=6))
def test_sums_of_arbitrary_reports_are_sound(reports: list[Any]) -> None:
    total: dict[str, float] = {}
    for report in reports:
        before = dict(total)
        add_usage(total, usage_in(report))
        add_usage(total, read_usage(report))
        assert all(total[name] >= amount for name, amount in before.items())
    assert all(0 <= amount <= AMOUNT_MAX for amount in total.values())
    assert total.get("tokens", 0) >= min(total.get("input_tokens", 0) + total.get("output_tokens", 0), AMOUNT_MAX)
    assert len(total) <= NAMES_MAX + 3
    assert read_usage(total) == total


def test_a_report_of_many_names_is_bounded() -> None:
    many = {f"n{number}": 1 for number in range(10 * NAMES_MAX)}
    assert len(read_usage(many)) == NAMES_MAX
    assert read_usage({**many, "tokens": 5})["tokens"] == 5
    assert read_usage({**many, "prompt_tokens": 5})["tokens"] == 5
    total = read_usage(many)
    add_usage(total, {"tokens": 5})
    assert total["tokens"] == 5
    assert read_usage({"x" * 65: 1}) == {}


@pytest.mark.parametrize(
    ("report", "before", "added"),
    [
        ({"tokens": 300}, {"tokens": 200}, {"tokens": 100}),
        ({"tokens": 200}, {"tokens": 200}, {}),
        ({"tokens": 50}, {"tokens": 200}, {"tokens": 50}),
        ({"tokens": 300, "requests": 1}, {"tokens": 200}, {"tokens": 100, "requests": 1}),
        ({"tokens": 300}, {"tokens": 200, "requests": 1}, {"tokens": 300}),
        ({"tokens": 300}, {}, {"tokens": 300}),
        ({}, {"tokens": 200}, {}),
    ],
)
def test_a_report_of_all_turns_adds_what_is_new_in_it(
    report: dict[str, float], before: dict[str, float], added: dict[str, float]
) -> None:
    assert usage_beyond(report, before) == added
