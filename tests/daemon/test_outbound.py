"""The daemon's own calls, as its settings allow them."""

from pathlib import Path

import pytest

import covenant
from covenant.daemon.connect import open_outbound
from covenant.daemon.settings_loader import load
from covenant.model.errors import SettingsError
from covenant.outbound.call_errors import AddressRefused, CallFailed
from covenant.outbound.outbound_settings import OutboundSettings
from tests.outbound.dns_server import name_server
from tests.outbound.http_servers import always, http_server, reply


def outbound(home: Path, **variables: str) -> OutboundSettings:
    named = {f"COVENANT_OUTBOUND_{name.upper()}": text for name, text in variables.items()}
    return load({}, named, home=home).settings.outbound


async def test_nothing_inside_is_called_unless_it_is_allowed(tmp_path: Path) -> None:
    async with http_server(always(reply(body=b"inside"))) as server:
        async with open_outbound(outbound(tmp_path)) as (guard, fetcher):
            for host in ("localhost", "127.0.0.1"):
                with pytest.raises(AddressRefused):
                    await guard.check(server.url(host=host))
                with pytest.raises(AddressRefused):
                    await fetcher.fetch("GET", server.url(host=host))
        async with open_outbound(outbound(tmp_path, allow=f"127.0.0.1:{server.port}")) as (_, fetcher):
            assert (await fetcher.fetch("GET", server.url())).body == b"inside"
    assert server.requests[0].headers["user-agent"] == f"covenant/{covenant.__version__}"


async def test_name_servers_and_limits_are_those_that_were_set(tmp_path: Path) -> None:
    async with (
        name_server({"agent.example": ["127.0.0.1"]}) as names,
        http_server(always(reply(body=bytes(2000)))) as server,
    ):
        set_to = outbound(
            tmp_path, allow="agent.example", name_servers=f"127.0.0.1:{names.port}", body_bytes_max="1024"
        )
        async with open_outbound(set_to) as (_, fetcher):
            with pytest.raises(CallFailed) as failed:
                await fetcher.fetch("GET", server.url(host="agent.example"))
    assert failed.value.code == "too_large"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("allow", "*"),
        ("allow", "http://agent.example"),
        ("allow", "10.0.0.1/8"),
        ("allow", "127.1"),
        ("allow", "ok.example,agent example"),
        ("name_servers", "ns.example"),
        ("name_servers", "192.0.2.1:x"),
        ("name_servers", "2001:db8::1:x"),
    ],
)
def test_what_cannot_be_read_refuses_to_start(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=rf"^outbound\.{name}: .* is not allowed; give "):
        outbound(tmp_path, **{name: text})
