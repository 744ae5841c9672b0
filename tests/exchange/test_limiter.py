"""A tenant's limits: what fits, what does not, and when to come back."""

import pytest

from covenant.exchange.limiter import Limiter
from covenant.exchange.tenancy import Caller
from covenant.model.errors import OverLimit
from covenant.model.tenant import Tenant, TenantLimits
from covenant.testing.clock import FakeClock


def caller(name: str = "acme", **limits: int) -> Caller:
    return Caller(Tenant(name=name, limits=TenantLimits(**limits)), "", operator=False, name=f"client@{name}")


def admitted(limiter: Limiter, who: Caller, count: int) -> int:
    """How many of so many requests are let in."""
    let_in = 0
    for _ in range(count):
        try:
            limiter.admit(who)
            let_in += 1
        except OverLimit:
            pass
    return let_in


def test_without_limits_everything_fits() -> None:
    limiter = Limiter(FakeClock())
    assert admitted(limiter, caller(), 1_000) == 1_000
    with limiter.running(caller()), limiter.running(caller()):
        pass


def test_a_minutes_requests_may_come_at_once_and_no_more() -> None:
    clock = FakeClock()
    limiter = Limiter(clock)
    who = caller(rate_per_min=60)
    assert admitted(limiter, who, 100) == 60
    clock.advance(999)
    assert admitted(limiter, who, 1) == 0
    clock.advance(1)
    assert admitted(limiter, who, 2) == 1
    clock.advance(3_600_000)
    assert admitted(limiter, who, 100) == 60


def test_a_burst_bounds_what_comes_at_once() -> None:
    clock = FakeClock()
    limiter = Limiter(clock)
    who = caller(rate_per_min=60, burst=5)
    assert admitted(limiter, who, 100) == 5
    clock.advance(60_000)
    assert admitted(limiter, who, 100) == 5


def test_a_refusal_says_when_the_next_one_fits() -> None:
    clock = FakeClock()
    limiter = Limiter(clock)
    who = caller(rate_per_min=7, burst=1)
    limiter.admit(who)
    with pytest.raises(OverLimit) as refused:
        limiter.admit(who)
    assert (refused.value.code, refused.value.message) == ("rate_limit", "rate limit exceeded")
    assert refused.value.retry_after_ms is not None
    clock.advance(refused.value.retry_after_ms - 1)
    assert admitted(limiter, who, 1) == 0
    clock.advance(1)
    assert admitted(limiter, who, 1) == 1


def test_a_clock_that_is_set_back_costs_nothing_and_gives_nothing() -> None:
    clock = FakeClock()
    limiter = Limiter(clock)
    who = caller(rate_per_min=60, burst=2)
    assert admitted(limiter, who, 1) == 1
    clock.advance(-3_600_000)
    assert admitted(limiter, who, 5) == 1
    clock.advance(1_000)
    assert admitted(limiter, who, 5) == 1


def test_tenants_do_not_use_up_each_others_limits() -> None:
    limiter = Limiter(FakeClock(), TenantLimits(concurrency=1, rate_per_min=1))
    assert admitted(limiter, caller("a"), 2) == admitted(limiter, caller("b"), 2) == 1
    with limiter.running(caller("a")), limiter.running(caller("b")):
        pass


def test_as_many_run_at_once_as_may_and_a_place_is_free_again_whatever_ends_it() -> None:
    limiter = Limiter(FakeClock())
    who = caller(concurrency=2)
    with limiter.running(who):
        with limiter.running(who):
            with pytest.raises(OverLimit) as refused, limiter.running(who):
                pytest.fail("there was no place")
            assert refused.value.code == "concurrent_request_limit"
            assert refused.value.retry_after_ms
        with pytest.raises(ZeroDivisionError), limiter.running(who):
            _ = 1 / 0
        with limiter.running(who):
            pass


def test_reads_take_no_place_among_the_running() -> None:
    limiter = Limiter(FakeClock())
    who = caller(concurrency=1)
    with limiter.running(who):
        assert admitted(limiter, who, 100) == 100


def test_own_limits_come_before_the_settings() -> None:
    limiter = Limiter(FakeClock(), TenantLimits(concurrency=1, rate_per_min=10, burst=3))
    assert admitted(limiter, caller("a"), 100) == 3
    assert admitted(limiter, caller("b", burst=5), 100) == 5
    assert admitted(limiter, caller("c", rate_per_min=20), 100) == 20
    who = caller("d", concurrency=2)
    with limiter.running(who), limiter.running(who):
        pass


def test_a_changed_limit_counts_from_the_next_request() -> None:
    limiter = Limiter(FakeClock())
    assert admitted(limiter, caller(rate_per_min=100), 10) == 10
    assert admitted(limiter, caller(rate_per_min=100, burst=3), 10) == 3
