"""The sliding window: exact, for each key by itself, and bounded."""

import pytest

from covenant.exchange.simple import KEYS_MAX, SlidingWindow
from covenant.model.errors import OverLimit
from tests.ledger_contract.fake_clock import FakeClock


def refused_for_ms(window: SlidingWindow, key: str = "a") -> int | None:
    with pytest.raises(OverLimit) as refusal:
        window.spend(key)
    return refusal.value.retry_after_ms


def test_a_key_spends_so_many_in_any_stretch_and_is_told_when_there_is_room() -> None:
    clock = FakeClock()
    window = SlidingWindow(2, 1_000, clock)
    window.spend("a")
    clock.advance(600)
    window.spend("a")
    window.spend("b")
    assert refused_for_ms(window) == 400
    clock.advance(399)
    assert refused_for_ms(window) == 1
    clock.advance(1)
    window.spend("a")
    assert refused_for_ms(window) == 600


def test_without_a_limit_nothing_is_counted() -> None:
    window = SlidingWindow(0, 1_000, FakeClock())
    for _ in range(100):
        window.spend("a")


def test_a_clock_that_was_set_back_makes_nobody_wait_for_it() -> None:
    clock = FakeClock()
    window = SlidingWindow(1, 1_000, clock)
    window.spend("a")
    clock.advance(-60_000)
    window.spend("a")
    assert refused_for_ms(window) == 1_000


def test_keys_that_have_been_quiet_are_forgotten() -> None:
    clock = FakeClock()
    window = SlidingWindow(1, 1_000, clock)
    for number in range(KEYS_MAX):
        window.spend(str(number))
    clock.advance(1_000)
    window.spend("new")
    assert list(window._spent) == ["new"]
