"""Hops: what travels with a call, that it only ever gets deeper and sooner, and that nonsense is not believed."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.task import CHAIN_MAX, CLAIMED_DEPTH_MAX, Hop
from covenant.wire.call_headers import call_context_headers, call_context_metadata, read_call_context

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
HOPS = st.builds(
    Hop,
    depth=st.integers(0, CLAIMED_DEPTH_MAX),
    chain=st.lists(NAMES.filter(lambda name: name.strip() == name), max_size=5).map(tuple),
    deadline_ms=st.none() | st.integers(1, 2**50),
    traceparent=st.none() | st.just("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    tracestate=st.none() | st.just("a=1"),
)


@given(HOPS)
def test_each_way_alone_carries_all_of_it(hop: Hop) -> None:
    assert read_call_context(call_context_metadata(hop), {}) == hop
    assert read_call_context(None, call_context_headers(hop)) == hop
    assert read_call_context(call_context_metadata(hop), call_context_headers(hop)) == hop


@given(HOPS)
def test_headers_can_be_sent(hop: Hop) -> None:
    assert all(value.isascii() and value.isprintable() for value in call_context_headers(hop).values())


def test_the_next_hop_is_one_deeper_and_never_later() -> None:
    hop = Hop(depth=1, chain=("a",), deadline_ms=500, traceparent="t")
    assert hop.next("b") == Hop(depth=2, chain=("a", "b"), deadline_ms=500, traceparent="t")
    assert hop.next("b", deadline_ms=400).deadline_ms == 400
    assert hop.next("b", deadline_ms=900).deadline_ms == 500
    assert Hop().next("b", deadline_ms=900).deadline_ms == 900


def test_a_chain_has_an_end() -> None:
    hop = Hop()
    for number in range(CHAIN_MAX + 10):
        hop = hop.next(str(number))
    assert (len(hop.chain), hop.chain[-1], hop.depth) == (CHAIN_MAX, str(CHAIN_MAX + 9), CHAIN_MAX + 10)


def test_where_two_ways_differ_the_stricter_counts() -> None:
    metadata = {"covenant.depth": 3, "covenant.chain": ["a"], "covenant.deadline_ms": 900}
    headers = {"covenant-depth": "2", "covenant-chain": "a,b", "covenant-deadline-ms": "500"}
    assert read_call_context(metadata, headers) == Hop(depth=3, chain=("a", "b"), deadline_ms=500)


@pytest.mark.parametrize("depth", ["deep", -1, 10**30, True, [], 1.5])
def test_a_depth_that_makes_no_sense_is_as_deep_as_can_be(depth: Any) -> None:
    assert read_call_context({"covenant.depth": depth}, {}).depth == CLAIMED_DEPTH_MAX


@pytest.mark.parametrize(
    "metadata",
    [{"covenant.chain": "a"}, {"covenant.chain": [5, None, ""]}, {"covenant.deadline_ms": "soon"}, {"traceparent": 5}],
)
def test_anything_else_that_makes_no_sense_is_not_there(metadata: dict[str, Any]) -> None:
    assert read_call_context(metadata, {}) == Hop()
