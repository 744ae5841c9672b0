"""Agents elsewhere, as a daemon knows them: by its own settings, and by what `a2a_agents.json` says now."""

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.remote_agent import RemoteAgents
from covenant.daemon.connect import open_outbound
from covenant.daemon.environment import environment
from covenant.daemon.settings_loader import load
from covenant.ledger.embedded.open import memory_ledger
from covenant.model.errors import Invalid, NotFound
from covenant.model.task import Target
from covenant.model.tenants import DEFAULT
from covenant.outbound.call_errors import AddressRefused, CallFailed
from tests.agents.pool_under_test import now_ms
from tests.outbound.dns_server import name_server
from tests.outbound.http_servers import Request, always, http_server, reply
from tests.outbound.remotes import card, hand_made, task


def write(home: Path, **agents: Any) -> None:
    (home / "a2a_agents.json").write_text(json.dumps({"agents": agents}))


@asynccontextmanager
async def elsewhere(home: Path, **outbound: str) -> AsyncIterator[RemoteAgents]:
    named = {f"COVENANT_OUTBOUND_{name.upper()}": text for name, text in outbound.items()}
    ledger = await memory_ledger(clock=now_ms)
    async with open_outbound(load({}, named, home=home).settings.outbound) as (_, fetcher):
        made = RemoteAgents(home, fetcher, ledger, depth_max=3, environment=environment, chance=random.random)
        try:
            yield made
        finally:
            await made.close()
            await ledger.close()


async def test_a_registered_agent_is_asked_by_the_name_servers_and_within_the_limits_that_were_set(
    tmp_path: Path,
) -> None:
    async with (
        name_server({"agent.example": ["127.0.0.1"]}) as names,
        http_server(always(reply(body=bytes(2000)))) as server,
        elsewhere(tmp_path, name_servers=f"127.0.0.1:{names.port}", body_bytes_max="1024") as agents,
    ):
        write(tmp_path, big={"url": server.url(host="agent.example")})
        with pytest.raises(CallFailed) as failed:
            await agents.card("big")
        assert failed.value.code == "too_large"
        with pytest.raises(AddressRefused):
            await agents.card(server.url(host="agent.example"))


async def test_an_address_that_nobody_means_is_called_only_if_the_settings_have_it(tmp_path: Path) -> None:
    write(tmp_path, zero={"url": "http://0.0.0.0:9999/"})
    async with elsewhere(tmp_path) as agents:
        with pytest.raises(AddressRefused):
            await agents.open(DEFAULT, Target(name="zero"))
    async with elsewhere(tmp_path, allow="0.0.0.0") as agents:
        with pytest.raises(CallFailed) as failed:
            await agents.open(DEFAULT, Target(name="zero"))
        assert failed.value.code == "connect_failed"


async def test_many_calls_at_once_look_for_a_card_once(tmp_path: Path) -> None:
    async with hand_made(lambda called: called.result({"task": task("COMPLETED", "done")})) as hand:
        write(tmp_path, hand={"url": hand.served.url("")})
        async with elsewhere(tmp_path) as agents:
            remotes = await asyncio.gather(*(agents.open(DEFAULT, Target(name="hand")) for _ in range(50)))
            assert all(remote.card is not None for remote in remotes)
            assert len([each for each in hand.served.requests if each.method == "GET"]) == 1


async def test_an_agent_that_did_not_answer_is_asked_again_by_the_next_call(tmp_path: Path) -> None:
    async def cut_off(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with http_server(cut_off) as server, elsewhere(tmp_path) as agents:
        write(tmp_path, hand={"url": server.url("/card.json")})
        for _ in range(3):
            with pytest.raises(CallFailed):
                await agents.open(DEFAULT, Target(name="hand"))
        assert len(server.requests) == 3


async def test_without_a_card_the_address_is_called_and_the_card_not_looked_for_each_time(tmp_path: Path) -> None:
    async with http_server(always(reply(404, b"{}"))) as server, elsewhere(tmp_path) as agents:
        write(tmp_path, bare={"url": server.url("/rpc")})
        for _ in range(3):
            remote = await agents.open(DEFAULT, Target(name="bare"))
            assert (remote.card, remote.interface.url) == (None, server.url("/rpc"))
        assert len(server.requests) == 3


async def test_what_is_wrong_with_the_file_is_in_the_log_once_and_told_to_callers_without_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = {"token_env": "NO_SUCH_VARIABLE_HERE"}
    write(
        tmp_path,
        typo={"url": "https://x", "tiemout": 1},
        poor={"url": "https://y", "auth": token},
        fine=card("https://z"),
    )
    with caplog.at_level(logging.WARNING, "covenant"):
        async with elsewhere(tmp_path) as agents:
            for _ in range(2):
                with pytest.raises(Invalid, match=r"the entry 'typo' of a2a_agents\.json") as refused:
                    agents.registered("default", "typo")
                assert str(tmp_path) not in str(refused.value)
            assert agents.registered("default", "poor") == "https://y"
            assert agents.registered("default", "nobody") is None
            assert agents.registered("acme", "poor") is None
    said = [(each.getMessage(), each.entry) for each in caplog.records]  # type: ignore[attr-defined]
    assert sorted(said) == [("remotes.no_token", "poor"), ("remotes.unusable", "fine"), ("remotes.unusable", "typo")]


async def test_an_entry_is_opened_for_its_tenants_alone(tmp_path: Path) -> None:
    async with (
        hand_made(lambda called: called.result({"task": task("COMPLETED", "done")})) as hand,
        elsewhere(tmp_path) as agents,
    ):
        write(tmp_path, hand={"url": hand.served.url("")}, theirs={"url": hand.served.url(""), "tenants": ["acme"]})
        for tenant, name in (("acme", "hand"), (DEFAULT, "theirs"), ("other", "theirs")):
            with pytest.raises(NotFound):
                await agents.open(tenant, Target(name=name))
            with pytest.raises(NotFound):
                await agents.open(tenant, Target(name=name, url=hand.served.url("")))
        assert hand.served.requests == []
        for tenant, name in ((DEFAULT, "hand"), ("acme", "theirs")):
            assert (await agents.open(tenant, Target(name=name))).card is not None
