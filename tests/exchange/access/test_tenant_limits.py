"""A tenant's limits: what fits, what does not, and when to come back."""

import msgspec
import pytest

from covenant.exchange.access.tenants import Caller, TenantLimiter
from covenant.model.errors import OverLimit
from covenant.model.settings import TenantSettings
from covenant.model.tenants import LimitUse, Tenant, TenantLimits
from tests.ledger_contract.fake_clock import FakeClock


def caller(name: str = "acme", **limits: int) -> Caller:
    return Caller(
        Tenant(name=name, limits=TenantLimits(**limits)), f"{name}'s hash", operator=False, name=f"client@{name}"
    )


def admitted(limiter: TenantLimiter, who: Caller, count: int) -> int:
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
    limiter = TenantLimiter(FakeClock())
    assert admitted(limiter, caller(), 1_000) == 1_000
    with limiter.connected(caller()), limiter.connected(caller()), limiter.streaming(caller()):
        pass


def test_a_minutes_requests_may_come_at_once_and_no_more() -> None:
    clock = FakeClock()
    limiter = TenantLimiter(clock)
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
    limiter = TenantLimiter(clock)
    who = caller(rate_per_min=60, burst=5)
    assert admitted(limiter, who, 100) == 5
    clock.advance(60_000)
    assert admitted(limiter, who, 100) == 5


def test_what_is_used_is_told_beside_the_limit_in_force() -> None:
    clock = FakeClock()
    limiter = TenantLimiter(clock, TenantSettings(rate_per_min=30, burst=0, connections=7, streams=0))
    own, other = caller(rate_per_min=60, burst=5, streams=2), caller("other")
    assert limiter.requests(own.tenant) == LimitUse(0, 5)
    admitted(limiter, own, 4)
    admitted(limiter, other, 100)
    assert limiter.requests(own.tenant) == LimitUse(4, 5)
    assert limiter.requests(other.tenant) == LimitUse(30, 30)
    clock.advance(2_000)
    assert (limiter.requests(own.tenant).used, limiter.requests(other.tenant).used) == (2, 29)
    clock.advance(3_600_000)
    assert limiter.requests(own.tenant).used == 0
    with limiter.connected(own), limiter.connected(own), limiter.streaming(own):
        assert (limiter.connections(own.tenant), limiter.streams(own.tenant)) == (LimitUse(2, 7), LimitUse(1, 2))
        assert (limiter.connections(other.tenant), limiter.streams(other.tenant)) == (LimitUse(0, 7), LimitUse(0, 0))
    assert TenantLimiter(clock).requests(own.tenant) == LimitUse(0, 5)
    assert TenantLimiter(clock).requests(other.tenant) == LimitUse(0, 0), "without a rate nothing is counted"


def test_a_refusal_says_when_the_next_one_fits() -> None:
    clock = FakeClock()
    limiter = TenantLimiter(clock)
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
    limiter = TenantLimiter(clock)
    who = caller(rate_per_min=60, burst=2)
    assert admitted(limiter, who, 1) == 1
    clock.advance(-3_600_000)
    assert admitted(limiter, who, 5) == 1
    clock.advance(1_000)
    assert admitted(limiter, who, 5) == 1


def test_tenants_do_not_use_up_each_others_limits() -> None:
    limiter = TenantLimiter(FakeClock(), TenantSettings(connections=1, streams=1, rate_per_min=1))
    assert admitted(limiter, caller("a"), 2) == admitted(limiter, caller("b"), 2) == 1
    with limiter.connected(caller("a")), limiter.connected(caller("b")):
        pass
    with limiter.streaming(caller("a")), limiter.streaming(caller("b")):
        pass


def test_callers_without_a_token_do_not_use_up_the_places_of_those_with_one() -> None:
    limiter = TenantLimiter(FakeClock(), TenantSettings(connections=1, streams=1))
    owner = caller("default")
    stranger = msgspec.structs.replace(owner, token_sha256="", name="anonymous@default")
    with limiter.connected(stranger), limiter.streaming(stranger):
        with pytest.raises(OverLimit), limiter.connected(stranger):
            pytest.fail("there was no place")
        with limiter.connected(owner), limiter.streaming(owner):
            pass


@pytest.mark.parametrize(("kind", "code"), [("connections", "concurrent_request_limit"), ("streams", "stream_limit")])
def test_as_many_are_open_at_once_as_may_and_a_place_is_free_again_whatever_ends_it(kind: str, code: str) -> None:
    limiter = TenantLimiter(FakeClock())
    who = caller(connections=2, streams=2)
    place = limiter.connected if kind == "connections" else limiter.streaming
    with place(who):
        with place(who):
            with pytest.raises(OverLimit) as refused, place(who):
                pytest.fail("there was no place")
            assert refused.value.code == code
            assert refused.value.retry_after_ms
        with pytest.raises(ZeroDivisionError), place(who):
            _ = 1 / 0
        with place(who):
            pass


def test_streams_and_connections_are_counted_apart() -> None:
    limiter = TenantLimiter(FakeClock())
    who = caller(connections=1, streams=1)
    with limiter.streaming(who), limiter.connected(who):
        assert admitted(limiter, who, 100) == 100


def test_own_limits_come_before_the_settings() -> None:
    limiter = TenantLimiter(FakeClock(), TenantSettings(connections=1, rate_per_min=10, burst=3))
    assert admitted(limiter, caller("a"), 100) == 3
    assert admitted(limiter, caller("b", burst=5), 100) == 5
    assert admitted(limiter, caller("c", rate_per_min=20), 100) == 20
    who = caller("d", connections=2)
    with limiter.connected(who), limiter.connected(who):
        pass


def test_a_changed_limit_counts_from_the_next_request() -> None:
    limiter = TenantLimiter(FakeClock())
    assert admitted(limiter, caller(rate_per_min=100), 10) == 10
    assert admitted(limiter, caller(rate_per_min=100, burst=3), 10) == 3
