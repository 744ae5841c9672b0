# ruff: noqa: RUF001  (letters and digits that look like others are the point)
"""Hosts that somebody named, by hand or in `a2a_agents.json`: called inside, and never where nobody means to call."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.daemon.connect import Options, open_card, open_remote
from covenant.outbound.address_guard import AddressGuard
from covenant.outbound.call_errors import AddressRefused, CallFailed
from covenant.outbound.urls import InvalidUrl, host_text, read_url
from tests.cli.daemons import covenant
from tests.outbound.corpus import HOSTS, ZONE
from tests.outbound.dns_server import NameServer, name_server
from tests.outbound.http_servers import always, http_server, redirect, reply
from tests.outbound.remotes import Called, card, hand_made

# Of the corpus, all that is this machine or a private network, in spellings that mean one thing.
INSIDE = frozenset(
    """
    127.0.0.1 127.0.0.1:8080 127.0.0.1. 127.8.8.8 127.255.255.255 １２７.０.０.１ ①②⑦.⓪.⓪.① 127。0。0。1 127．0．0．1
    [::1] [0:0:0:0:0:0:0:1] [::1]:80 localhost LOCALHOST localhost. a.localhost ｌocalhost localhost:8421
    loopback.example xn--n3h.example 10.0.0.1 10.255.255.255 172.16.0.1 172.31.255.254 192.168.0.1 100.64.0.1
    100.127.255.255 [fd00::1] [fc00::1] private.example printer.local db.internal mixed.example mixed-families.example
    """.split()
)
METADATA = """
    169.254.169.254 169.254.169.254. 2852039166 0xa9fea9fe 0251.0376.0251.0376 0xa9.0xfe.0xa9.0xfe 169.254.43518
    169.16689662 [::ffff:169.254.169.254] [::ffff:a9fe:a9fe] [0:0:0:0:0:ffff:a9fe:a9fe] [::169.254.169.254]
    [64:ff9b::a9fe:a9fe] [2002:a9fe:a9fe::] [fd00:ec2::254] 100.100.100.200 168.63.129.16 １６９.２５４.１６９.２５４
    169。254。169。254 metadata.google.internal instance-data
""".split()


NO_URL = "the server redirects to a URL that cannot be called"


@pytest.fixture
async def names() -> AsyncIterator[NameServer]:
    async with name_server(dict(ZONE)) as server:
        yield server


def meaning(names: NameServer, url: str) -> AddressGuard:
    guard = AddressGuard((), resolver=names.resolver())
    try:
        location = read_url(url)
    except InvalidUrl:
        return guard
    return guard.allowing((f"{host_text(location.host)}:{location.port}",))


@pytest.mark.parametrize("host", sorted(INSIDE))
async def test_a_host_that_is_meant_may_be_this_machine_or_a_private_one(names: NameServer, host: str) -> None:
    assert (await meaning(names, f"http://{host}/").check(f"http://{host}/")).addresses


@pytest.mark.parametrize("host", sorted({*HOSTS, *METADATA} - INSIDE), ids=ascii)
async def test_nobody_means_metadata_link_local_multicast_or_what_is_spelled_to_deceive(
    names: NameServer, host: str
) -> None:
    with pytest.raises(AddressRefused):
        await meaning(names, f"http://{host}/").check(f"http://{host}/")


async def test_to_mean_one_host_is_to_mean_no_other_and_no_other_port(names: NameServer) -> None:
    guard = AddressGuard((), resolver=names.resolver()).allowing(("private.example:8000",))
    assert (await guard.check("http://private.example:8000/")).port == 8000
    for url in ("http://private.example:8001/", "http://db.internal:8000/", "http://10.1.2.3:8000/"):
        with pytest.raises(AddressRefused):
            await guard.check(url)


PLACES = [*(f"http://{host}/" for host in METADATA), "http://{inside}/", "//{inside}/", "http://0.0.0.0:{port}/"]


@pytest.mark.parametrize("place", PLACES, ids=ascii)
@pytest.mark.parametrize("status", [302, 307])
async def test_a_host_that_is_meant_cannot_send_us_on_inside(place: str, status: int) -> None:
    async with (
        http_server(always(reply(200, b"{}")), host="127.0.0.2") as inside,
        http_server(redirect(place.format(inside=f"127.0.0.2:{inside.port}", port=inside.port), status)) as server,
    ):
        with pytest.raises((AddressRefused, CallFailed)) as raised:
            await open_card(server.url(), Options(typed_by_user=True), verify=False)
        assert isinstance(raised.value, AddressRefused) or raised.value.args == (NO_URL,)
        assert inside.connections == 0


async def test_a_card_of_a_host_that_is_meant_cannot_lead_to_metadata() -> None:
    def say(called: Called) -> None:
        raise AssertionError(called)

    async with hand_made(say, made=lambda _: card("http://169.254.169.254/rpc")) as hand:
        remote = await open_remote(hand.served.url(""), Options(typed_by_user=True))
        with pytest.raises(AddressRefused, match="may not be called"):
            await remote.send("go")
        await remote.close()


async def test_an_entry_of_the_registry_cannot_mean_metadata_either(tmp_path: Path) -> None:
    (tmp_path / "a2a_agents.json").write_text(json.dumps({"agents": {"m": {"url": "http://169.254.169.254/"}}}))
    with pytest.raises(AddressRefused) as refused:
        await open_remote("m", Options(home=tmp_path))
    assert "link-local, a cloud's metadata" in refused.value.detail


@pytest.mark.parametrize(
    ("host", "code", "why"),
    [
        ("169.254.169.254", 1, "link-local, a cloud's metadata"),
        ("169.254.169.254.", 1, "link-local, a cloud's metadata"),
        ("[::ffff:169.254.169.254]", 1, "IPv4 inside IPv6"),
        ("[fe80::1]", 1, "link-local"),
        ("[ff02::1]", 1, "multicast"),
        ("224.0.0.1", 1, "multicast"),
        ("0.0.0.0", 1, "this host"),
        ("[::]", 1, "unspecified"),
        ("2852039166", 2, "ends in a number"),
        ("0xa9fea9fe", 2, "ends in a number"),
        ("0251.0376.0251.0376", 2, "ends in a number"),
    ],
)
def test_a_command_refuses_what_nobody_means_and_says_why_and_what_to_set(
    tmp_path: Path, host: str, code: int, why: str
) -> None:
    ran = covenant("call", f"http://{host}/", "hello", "--home", str(tmp_path))
    assert (ran.code, ran.out) == (code, "")
    assert why in " ".join(ran.err.split())
    assert code == 2 or len(ran.err.splitlines()) == 1
    assert code == 2 or "outbound.allow" in ran.err


def test_what_the_settings_allow_by_address_can_be_called_all_the_same(tmp_path: Path) -> None:
    env = {"COVENANT_OUTBOUND_ALLOW": "0.0.0.0"}
    ran = covenant("call", "http://0.0.0.0:9/", "hello", "--home", str(tmp_path), "--json", env=env)
    assert (ran.code, ran.json["code"]) == (1, "address_refused")
    ran = covenant("call", "http://0.0.0.0:9999/", "hello", "--home", str(tmp_path), "--json", env=env)
    assert (ran.code, ran.json["code"]) == (3, "connect_failed")
