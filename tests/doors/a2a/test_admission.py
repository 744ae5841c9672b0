"""An operation that works is ended when its caller has left or may not go on, and not before its grace is over."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from starlette.types import Message

from covenant.doors.a2a import admission
from covenant.doors.a2a.admission import CallerScope
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


class Client:
    """An ASGI client that leaves when it is told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, _: Message) -> None:
        raise AssertionError("nothing is sent here")


def scope_of(client: Client, sessions: Sessions) -> CallerScope:
    return CallerScope(cast("TenantAccess", sessions), CALLER, client.send, client.receive)


def not_canceled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() == 0


async def test_a_caller_who_has_left_ends_what_is_done_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GRACE_S", 0.0)
    client, sessions = Client(), Sessions()
    client.left.set()

    async def work() -> None:
        with scope_of(client, sessions):
            await asyncio.Event().wait()

    with pytest.raises(CallerGoneError):
        await asyncio.wait_for(work(), BOUND_S)
    assert not_canceled()
    assert sessions.open == []


async def test_a_caller_who_may_not_go_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "GRACE_S", 0.0)
    client, sessions = Client(), Sessions()

    async def work() -> None:
        with scope_of(client, sessions):
            sessions.open[0]()
            await asyncio.Event().wait()

    with pytest.raises(Unauthenticated):
        await asyncio.wait_for(work(), BOUND_S)
    assert not_canceled()
    assert sessions.open == []


async def test_what_ends_within_the_grace_is_not_broken_off() -> None:
    client, sessions = Client(), Sessions()
    client.left.set()
    with scope_of(client, sessions):
        sessions.open[0]()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not_canceled()


async def test_nobody_listens_for_a_caller_who_is_answered() -> None:
    client, sessions = Client(), Sessions()
    before = asyncio.all_tasks()
    with scope_of(client, sessions):
        await asyncio.sleep(0)
        listening = asyncio.all_tasks() - before
    await asyncio.gather(*listening, return_exceptions=True)
    assert listening
    assert all(each.cancelled() for each in listening)


async def test_without_a_connection_only_the_session_is_watched() -> None:
    sessions, before = Sessions(), asyncio.all_tasks()
    scope: Any = CallerScope(cast("TenantAccess", sessions), CALLER)
    with scope:
        assert len(sessions.open) == 1
        assert asyncio.all_tasks() == before
