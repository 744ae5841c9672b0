"""What is remembered of a credential: never that it is good, only whose it was."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from covenant.doors.http import bearer_auth as tenant
from covenant.doors.http.bearer_auth import TenantGate
from covenant.exchange.access.tenants import TenantLimiter
from covenant.model.tenants import DEFAULT, TenantLimits
from tests.doors.clients import HttpConnection
from tests.doors.world import World, now_ms
from tests.waits import BOUND_S

Change = Callable[[World], Awaitable[object]]

CHANGES: dict[str, Change] = {
    "the tenant is disabled": lambda w: w.tenancy.disable(w.principal, "acme"),
    "its token is rotated": lambda w: w.tenancy.rotate(w.principal, "acme"),
    "its limits change": lambda w: w.tenancy.change(w.principal, "acme", limits=TenantLimits(concurrency=3)),
    "the first tenant is disabled": lambda w: w.tenancy.disable(w.principal, DEFAULT),
    "the first tenant has other limits": lambda w: w.tenancy.change(
        w.principal, DEFAULT, limits=TenantLimits(concurrency=3)
    ),
    "the operator is revoked": lambda w: w.registry.revoke(w.principal, "operator@test", force=True),
    "the operator has a new token": lambda w: w.registry.rotate(w.principal, None),
    "somebody else is rotated": lambda w: w.tenancy.rotate(w.principal, "other"),
}


def gate_of(world: World) -> TenantGate:
    return TenantGate(world.tenancy, TenantLimiter(now_ms))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_a_remembered_credential_means_at_every_request_what_its_token_means_then(
    world: World, change: Change
) -> None:
    gate = gate_of(world)
    tokens = [(await world.tenancy.add(world.principal, name)).token for name in ("acme", "other")]
    tokens.append(world.operator.token)
    for _ in range(2):
        for token in tokens:
            assert gate.recognised(b"Bearer " + token.encode()) == world.tenancy.recognise(token) is not None
    await change(world)
    for _ in range(2):
        for token in tokens:
            assert gate.recognised(b"Bearer " + token.encode()) == world.tenancy.recognise(token)


async def test_a_tenant_that_is_enabled_again_is_known_again(world: World) -> None:
    gate = gate_of(world)
    credential = b"Bearer " + (await world.tenancy.add(world.principal, "acme")).token.encode()
    assert gate.recognised(credential) is not None
    await world.tenancy.disable(world.principal, "acme")
    assert gate.recognised(credential) is None
    await world.tenancy.enable(world.principal, "acme")
    assert gate.recognised(credential) is not None


async def test_who_is_known_is_not_hashed_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_of(world)
    credential = b"Bearer " + (await world.tenancy.add(world.principal, "acme")).token.encode()
    known = gate.recognised(credential)
    monkeypatch.setattr(world.tenancy, "recognise", None)
    assert known is not None
    assert gate.recognised(credential) is known


async def test_only_those_who_are_let_in_are_remembered_and_no_more_than_a_few(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, remembered = gate_of(world), 2
    monkeypatch.setattr(tenant, "RECOGNISED_MAX", remembered)
    for credential in (b"", b"Bearer", b"Bearer x", b"Basic " + world.operator.token.encode()):
        assert gate.recognised(credential) is None
    assert gate._recognised == {}
    for number in range(5):
        minted = await world.tenancy.add(world.principal, f"t{number}")
        assert gate.recognised(b"Bearer " + minted.token.encode()) is not None
        assert len(gate._recognised) <= remembered


async def test_nobody_is_remembered_for_long(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_of(world)
    monkeypatch.setattr(tenant, "RECOGNISED_S", 0.0)
    for _ in range(2):
        assert gate.recognised(b"Bearer " + world.operator.token.encode()) is not None
        assert len(gate._recognised) == 1
        async with asyncio.timeout(BOUND_S):
            while gate._recognised:  # noqa: ASYNC110  (a timer empties it, and tells nobody)
                await asyncio.sleep(0)


async def test_a_tenant_is_out_at_its_next_request_on_the_same_connection(world: World) -> None:
    acme = await world.tenant("acme")
    credential = {"Authorization": f"Bearer {acme.token}"}
    async with HttpConnection(world.port) as connection:

        async def status() -> int:
            await connection.say("GET", "/v1/agents", credential, b"")
            return (await connection.hear()).status

        assert [await status() for _ in range(3)] == [200] * 3
        await world.tenancy.disable(world.principal, "acme")
        assert await status() == 401
        await world.tenancy.enable(world.principal, "acme")
        assert await status() == 200
        await world.tenancy.rotate(world.principal, "acme")
        assert await status() == 401
