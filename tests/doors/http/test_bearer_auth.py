"""What is remembered of a credential: never that it is good, only whose it was."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from covenant.doors.http import bearer_auth as tenant
from covenant.doors.http.bearer_auth import TenantAuth
from covenant.exchange.access.tenants import TenantLimiter
from covenant.model.tenants import DEFAULT, TenantLimits
from tests.doors.clients import HttpConnection
from tests.doors.doors_under_test import DoorsUnderTest, now_ms
from tests.waits import BOUND_S

Change = Callable[[DoorsUnderTest], Awaitable[object]]

CHANGES: dict[str, Change] = {
    "the tenant is disabled": lambda w: w.tenancy.change(w.principal, "acme", disabled=True),
    "its token is rotated": lambda w: w.tenancy.rotate(w.principal, "acme"),
    "its limits change": lambda w: w.tenancy.change(w.principal, "acme", limits=TenantLimits(concurrency=3)),
    "the first tenant is disabled": lambda w: w.tenancy.change(w.principal, DEFAULT, disabled=True),
    "the first tenant has other limits": lambda w: w.tenancy.change(
        w.principal, DEFAULT, limits=TenantLimits(concurrency=3)
    ),
    "the operator is revoked": lambda w: w.registry.revoke(w.principal, "operator@test", force=True),
    "the operator has a new token": lambda w: w.registry.rotate(w.principal, None),
    "somebody else is rotated": lambda w: w.tenancy.rotate(w.principal, "other"),
}


def gate_of(under_test: DoorsUnderTest) -> TenantAuth:
    return TenantAuth(under_test.tenancy, TenantLimiter(now_ms))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_a_remembered_credential_means_at_every_request_what_its_token_means_then(
    under_test: DoorsUnderTest, change: Change
) -> None:
    gate = gate_of(under_test)
    tokens = [(await under_test.tenancy.add(under_test.principal, name)).token for name in ("acme", "other")]
    tokens.append(under_test.operator.token)
    for _ in range(2):
        for token in tokens:
            assert gate.recognised(b"Bearer " + token.encode()) == under_test.tenancy.recognise(token) is not None
    await change(under_test)
    for _ in range(2):
        for token in tokens:
            assert gate.recognised(b"Bearer " + token.encode()) == under_test.tenancy.recognise(token)


async def test_a_tenant_that_is_enabled_again_is_known_again(under_test: DoorsUnderTest) -> None:
    gate = gate_of(under_test)
    credential = b"Bearer " + (await under_test.tenancy.add(under_test.principal, "acme")).token.encode()
    assert gate.recognised(credential) is not None
    await under_test.tenancy.change(under_test.principal, "acme", disabled=True)
    assert gate.recognised(credential) is None
    await under_test.tenancy.change(under_test.principal, "acme", disabled=False)
    assert gate.recognised(credential) is not None


async def test_who_is_known_is_not_hashed_again(under_test: DoorsUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_of(under_test)
    credential = b"Bearer " + (await under_test.tenancy.add(under_test.principal, "acme")).token.encode()
    known = gate.recognised(credential)
    monkeypatch.setattr(under_test.tenancy, "recognise", None)
    assert known is not None
    assert gate.recognised(credential) is known


async def test_only_those_who_are_let_in_are_remembered_and_no_more_than_a_few(
    under_test: DoorsUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, remembered = gate_of(under_test), 2
    monkeypatch.setattr(tenant, "RECOGNISED_MAX", remembered)
    for credential in (b"", b"Bearer", b"Bearer x", b"Basic " + under_test.operator.token.encode()):
        assert gate.recognised(credential) is None
    assert gate.known == {}
    for number in range(5):
        minted = await under_test.tenancy.add(under_test.principal, f"t{number}")
        assert gate.recognised(b"Bearer " + minted.token.encode()) is not None
        assert len(gate.known) <= remembered


async def test_nobody_is_remembered_for_long(under_test: DoorsUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_of(under_test)
    monkeypatch.setattr(tenant, "RECOGNISED_S", 0.0)
    for _ in range(2):
        assert gate.recognised(b"Bearer " + under_test.operator.token.encode()) is not None
        assert len(gate.known) == 1
        async with asyncio.timeout(BOUND_S):
            while gate.known:  # noqa: ASYNC110  (a timer empties it, and tells nobody)
                await asyncio.sleep(0)


async def test_a_tenant_is_out_at_its_next_request_on_the_same_connection(under_test: DoorsUnderTest) -> None:
    acme = await under_test.tenant("acme")
    credential = {"Authorization": f"Bearer {acme.token}"}
    async with HttpConnection(under_test.port) as connection:

        async def status() -> int:
            await connection.say("GET", "/v1/agents", credential, b"")
            return (await connection.hear()).status

        assert [await status() for _ in range(3)] == [200] * 3
        await under_test.tenancy.change(under_test.principal, "acme", disabled=True)
        assert await status() == 401
        await under_test.tenancy.change(under_test.principal, "acme", disabled=False)
        assert await status() == 200
        await under_test.tenancy.rotate(under_test.principal, "acme")
        assert await status() == 401
