"""Token buckets, sliding windows and back-off, at times that the test chooses."""

import pytest

from covenant.model.rate_limits import Backoff, SlidingWindow, TokenBucket, TokenBuckets


def test_a_bucket_gives_its_burst_at_once_and_then_at_its_rate() -> None:
    bucket = TokenBucket(2, 0)
    assert [bucket.take(0, 60, 2) for _ in range(3)] == [None, None, 1_000]
    assert bucket.take(500, 60, 2) == 500
    assert bucket.take(1_000, 60, 2) is None
    assert [bucket.take(3_600_000, 60, 2) for _ in range(3)] == [None, None, 1_000]


def test_a_clock_that_was_set_back_gives_a_bucket_nothing() -> None:
    bucket = TokenBucket(1, 10_000)
    assert bucket.take(10_000, 60, 1) is None
    assert bucket.take(0, 60, 1) == 1_000
    assert bucket.take(1_000, 60, 1) is None


def test_each_key_has_a_bucket_of_its_own() -> None:
    buckets = TokenBuckets()
    assert buckets.take("a", 0, 1) is None
    assert buckets.take("a", 0, 1) == 60_000
    assert buckets.take("b", 0, 1) is None


def test_a_key_spends_so_many_in_any_stretch_and_is_told_when_there_is_room() -> None:
    window = SlidingWindow(2, 1_000)
    assert window.take("a", 0) is None
    assert window.take("a", 600) is None
    assert window.take("b", 600) is None
    assert window.take("a", 600) == 400
    assert window.take("a", 999) == 1
    assert window.take("a", 1_000) is None
    assert window.take("a", 1_000) == 600


def test_a_smaller_limit_holds_at_once_and_says_when_there_is_room_under_it() -> None:
    window = SlidingWindow(3, 1_000)
    assert [window.take("a", now_ms) for now_ms in (0, 200, 400)] == [None] * 3
    assert window.take("a", 500, 2) == 700
    assert window.take("a", 1_200, 2) is None
    assert window.take("a", 1_200, 2) == 200


def test_without_a_limit_a_window_counts_nothing() -> None:
    window = SlidingWindow(0, 1_000)
    assert [window.take("a", 0) for _ in range(100)] == [None] * 100


def test_a_clock_that_was_set_back_makes_nobody_wait_for_it() -> None:
    window = SlidingWindow(1, 1_000)
    assert window.take("a", 60_000) is None
    assert window.take("a", 0) is None
    assert window.take("a", 0) == 1_000


def test_keys_that_have_been_quiet_are_forgotten() -> None:
    window = SlidingWindow(1, 1_000, keys_max=100)
    for number in range(99):
        window.take(number, 0)
    window.take("late", 500)
    window.take("new", 1_000)
    assert list(window._spent) == ["late", "new"]


def test_pauses_grow_to_the_longest() -> None:
    backoff = Backoff(100, 1_000)
    assert [backoff.pause(failures) for failures in (0, 1, 2, 3, 4, 5, 1_000_000)] == [
        100,
        100,
        200,
        400,
        800,
        1_000,
        1_000,
    ]


@pytest.mark.parametrize(("chance", "pause"), [(0.0, 80), (0.5, 100), (1.0, 120)])
def test_jitter_spreads_a_pause_by_chance(chance: float, pause: float) -> None:
    assert Backoff(100, 1_000, jitter=0.2).pause(1, chance) == pytest.approx(pause)
