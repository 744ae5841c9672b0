"""An operation that works is ended when its caller has left or may not go on, and not before its grace is over."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from covenant.doors.a2a import admission
from covenant.doors.a2a.admission import CallerScope
from covenant.doors.a2a.in_process_client import InProcessExchange
from covenant.doors.waits import CallerGoneError
from covenant.exchange.access.tenants import Caller, TenantAccess
from covenant.model.errors import Unauthenticated
from covenant.model.tenants import Tenant
from tests.waits import BOUND_S

CALLER = Caller(Tenant(name="acme"), "0" * 64, operator=False, name="client@acme")


class Sessions:
    """Who is told when a caller may not go on."""

    def __init__(self) -> None:
        self.open: list[Callable[[], None]] = []

    def open_session(self, _: Caller, end: Callable[[], None]) -> None:
        self.open.append(end)

    def close_session(self, end: Callable[[], None]) -> None:
        self.open.remove(end)


def exchange_of_caller() -> InProcessExchange:
    return InProcessExchange({}, b"")


def scope_of(exchange: InProcessExchange, sessions: Sessions) -> CallerScope:
    task = asyncio.current_task()
    assert task is not None
    exchange.task = task
    return CallerScope(cast("TenantAccess", sessions), CALLER, exchange)


def not_canceled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() == 0


async def test_a_caller_who_has_left_ends_what_is_done_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GRACE_S", 0.0)
    client, sessions = exchange_of_caller(), Sessions()
    client.disconnect()

    async def work() -> None:
        with scope_of(client, sessions):
            await asyncio.Event().wait()

    with pytest.raises(CallerGoneError):
        await asyncio.wait_for(work(), BOUND_S)
    assert not_canceled()
    assert sessions.open == []


async def test_a_caller_who_may_not_go_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GRACE_S", 0.0)
    client, sessions = exchange_of_caller(), Sessions()

    async def work() -> None:
        with scope_of(client, sessions):
            sessions.open[0]()
            await asyncio.Event().wait()

    with pytest.raises(Unauthenticated):
        await asyncio.wait_for(work(), BOUND_S)
    assert not_canceled()
    assert sessions.open == []


async def test_what_ends_within_the_grace_is_not_broken_off() -> None:
    client, sessions = exchange_of_caller(), Sessions()
    client.disconnect()
    with scope_of(client, sessions):
        sessions.open[0]()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not_canceled()


async def test_a_caller_who_leaves_while_it_is_served_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GRACE_S", 0.0)
    client, sessions = exchange_of_caller(), Sessions()

    async def work() -> None:
        with scope_of(client, sessions):
            asyncio.get_running_loop().call_soon(client.disconnect)
            await asyncio.Event().wait()

    with pytest.raises(CallerGoneError):
        await asyncio.wait_for(work(), BOUND_S)
    assert client.on_disconnect is None


async def test_without_a_connection_only_the_session_is_watched() -> None:
    sessions, before = Sessions(), asyncio.all_tasks()
    scope: Any = CallerScope(cast("TenantAccess", sessions), CALLER)
    with scope:
        assert len(sessions.open) == 1
        assert asyncio.all_tasks() == before
