"""The ledger's clock: it notices steps, pauses ages for a while, and never makes a stamp older than it is."""

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from covenant.ledger import clock as ledger_clock
from covenant.ledger.clock import PAUSE_MS, STEPS_KEPT, Clock, LongWaits
from covenant.model.clock_steps import STEADY, STEP_MS, Ages, ClockStep
from tests.ledger_contract.fake_clock import FakeClock
from tests.waits import BOUND_S

DAY_MS = 86_400_000
MINUTE_MS = 60_000


def clock_beside(fake: FakeClock) -> Clock:
    return Clock(fake, fake.monotonic_ms)


@pytest.mark.parametrize("step_ms", [STEP_MS + 1, -STEP_MS - 1, DAY_MS, -DAY_MS])
def test_a_step_pauses_ages_until_the_clock_was_steady_for_a_minute(step_ms: int) -> None:
    fake = FakeClock()
    clock = clock_beside(fake)
    fake.step(step_ms)
    assert clock.is_paused()
    assert clock.steps_total == 1
    assert clock.ages.steps[0].step_ms == step_ms
    fake.advance(PAUSE_MS - 1)
    assert clock.paused_ms_left == 1
    fake.advance(1)
    assert not clock.is_paused()
    assert clock.paused_ms_left == 0


def test_another_step_begins_the_pause_anew() -> None:
    fake = FakeClock()
    clock = clock_beside(fake)
    fake.step(DAY_MS)
    assert clock.is_paused()
    fake.advance(PAUSE_MS - 1)
    fake.step(-DAY_MS)
    assert clock.paused_ms_left == PAUSE_MS
    assert clock.steps_total == 2


@pytest.mark.parametrize("drift_ms", [STEP_MS, -STEP_MS])
def test_a_drift_of_a_minute_between_two_readings_is_no_step(drift_ms: int) -> None:
    fake = FakeClock()
    clock = clock_beside(fake)
    for _ in range(10):
        fake.step(drift_ms)
        assert not clock.is_paused()
    assert clock.ages is STEADY


@pytest.mark.parametrize("step_ms", [DAY_MS, -DAY_MS])
def test_an_age_is_counted_without_the_step(step_ms: int) -> None:
    fake = FakeClock()
    clock = clock_beside(fake)
    before = clock.now_ms()
    fake.advance(5_000)
    clock.now_ms()
    fake.step(step_ms)
    assert clock.age_ms(before) == 5_000
    after = clock.now_ms()
    fake.advance(7_000)
    assert clock.age_ms(before) == 12_000
    assert clock.age_ms(after) == 7_000


def test_a_last_record_from_the_future_is_a_step_back_and_one_from_long_ago_is_none() -> None:
    fake = FakeClock()
    clock = clock_beside(fake)
    clock.opened(fake() - 400 * DAY_MS)
    assert not clock.is_paused()
    clock.opened(fake() + STEP_MS)
    assert not clock.is_paused()
    clock.opened(fake() + DAY_MS)
    assert clock.is_paused()
    assert clock.ages.steps == (ClockStep(fake() + DAY_MS, fake(), seen=False),)
    assert clock.age_ms(fake() + DAY_MS - 3_000) == 3_000
    assert clock.age_ms(fake() - 3_000) == 3_000


def test_what_has_expired_stays_expired_while_a_clock_that_was_set_back_is_paused() -> None:
    fake = FakeClock()
    clock = clock_beside(fake)
    before = clock.now_ms()
    fake.step(-DAY_MS)
    assert clock.expiry_ms() == before
    fake.advance(PAUSE_MS)
    assert clock.expiry_ms() == fake()


def test_a_deadline_is_not_judged_while_ages_are_paused() -> None:
    fake = FakeClock()
    clock = clock_beside(fake)
    deadline_ms = clock.now_ms() + MINUTE_MS
    assert clock.left_ms(deadline_ms) == MINUTE_MS
    fake.step(DAY_MS)
    assert clock.left_ms(deadline_ms) is None
    assert clock.left_ms(fake() + 1) == 1
    fake.advance(PAUSE_MS)
    assert clock.left_ms(deadline_ms) == MINUTE_MS - DAY_MS - PAUSE_MS


def test_without_steps_an_age_is_what_it_seems_and_never_negative() -> None:
    assert STEADY.age_ms(5, 9) == 4
    assert STEADY.age_ms(9, 5) == 0
    assert Ages().moment_ms(5, 9) == 5


STEPS = st.integers(STEP_MS + 1, 400 * DAY_MS).flatmap(lambda ms: st.sampled_from([ms, -ms]))
DRIFT_MS = 1_000
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(0, 3 * DAY_MS)),
        st.tuples(st.just("step"), STEPS),
        st.tuples(st.just("drift"), st.integers(-DRIFT_MS, DRIFT_MS)),
        st.tuples(st.just("stamp"), st.just(0)),
    ),
    max_size=3 * STEPS_KEPT,
)


@example(moves=[("stamp", 0), ("step", -60_001), ("step", 60_002)])
@example(moves=[("step", 60_001), ("step", -60_002), ("stamp", 0)])
@given(moves=MOVES)
def test_no_stamp_is_ever_older_than_it_is(moves: list[tuple[str, int]]) -> None:
    """However often the clock is set: what is destroyed for its age has that age at least."""
    fake = FakeClock()
    clock = clock_beside(fake)
    stamps: list[tuple[int, int]] = []
    drifted_ms = 0
    for move, ms in moves:
        if move == "stamp":
            stamps.append((clock.now_ms(), fake.monotonic_ms()))
        elif move == "pass":
            fake.advance(ms)
        else:
            drifted_ms += abs(ms) if move == "drift" else 0
            fake.step(ms)
        clock.now_ms()
        for stamp_ms, made_ms in stamps:
            assert clock.age_ms(stamp_ms) <= fake.monotonic_ms() - made_ms + drifted_ms


@given(steps=st.lists(st.integers(STEP_MS + 1, 400 * DAY_MS), max_size=STEPS_KEPT))
def test_after_steps_forward_every_age_is_exact(steps: list[int]) -> None:
    fake = FakeClock()
    clock = clock_beside(fake)
    stamps: list[tuple[int, int]] = []
    for step_ms in steps:
        stamps.append((clock.now_ms(), fake.monotonic_ms()))
        fake.advance(1_000)
        clock.now_ms()
        fake.step(step_ms)
        clock.now_ms()
    for stamp_ms, made_ms in stamps:
        assert clock.age_ms(stamp_ms) == fake.monotonic_ms() - made_ms


async def test_a_long_wait_ends_by_the_shared_timer_and_that_stops_when_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_clock, "TICK_S", 0.001)
    loop = asyncio.get_running_loop()
    soon: asyncio.Future[None] = loop.create_future()
    later: asyncio.Future[None] = loop.create_future()
    waits = LongWaits(loop)
    waits.add(soon, 0.01)
    waits.add(later, 3_600.0)
    await asyncio.wait_for(soon, BOUND_S)
    assert not later.done()
    for woken in (soon, later):
        del waits.ends_s[woken]
    again: asyncio.Future[None] = loop.create_future()
    waits.add(again, 0.0)
    await asyncio.wait_for(again, BOUND_S)


def test_a_pause_and_the_steps_outlive_the_process() -> None:
    fake, kept = FakeClock(), list[Ages]()
    before = Clock(fake, fake.monotonic_ms, keep=kept.append)
    stamp_ms = fake()
    fake.step(DAY_MS)
    assert before.is_paused()
    after = clock_beside(fake)
    after.opened(stamp_ms, kept[-1])
    assert after.is_paused()
    fake.advance(PAUSE_MS - 1)
    assert after.is_paused(), "the pause begins again: nobody knows how long the clock was steady"
    fake.advance(1)
    assert not after.is_paused()
    assert after.age_ms(stamp_ms) == PAUSE_MS


def test_a_clock_that_was_corrected_between_two_processes_leaves_ages_as_they_are() -> None:
    fake, kept = FakeClock(), list[Ages]()
    before = Clock(fake, fake.monotonic_ms, keep=kept.append)
    stamp_ms = fake()
    fake.step(DAY_MS)
    assert before.is_paused()
    fake.step(-DAY_MS)
    after = clock_beside(fake)
    after.opened(stamp_ms, kept[-1])
    assert after.is_paused()
    fake.advance(PAUSE_MS)
    assert after.age_ms(stamp_ms) == PAUSE_MS
