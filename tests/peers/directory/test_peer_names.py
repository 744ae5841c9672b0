"""Names and addresses of peers, as people and settings write them."""

import pytest

from covenant.model.errors import Invalid
from covenant.model.ids import check_display, check_pubkey
from covenant.model.peers.delegation import Peer
from covenant.peers.directory.peer_directory import (
    PeerEntry,
    check_name,
    distinct_name,
    name_from,
    read_peer_entry,
    read_peer_url,
)
from covenant.seal.identity import InstanceIdentity, new_prekey, sign_bundle

KEY = b"\1" * 32
ID = InstanceIdentity(KEY).id
NOW = 1_800_000_000_000


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("https://host", "https://host"),
        ("https://host/", "https://host"),
        (" HTTPS://Host.Example.:443/ ", "https://host.example"),
        ("http://127.0.0.1:8421", "http://127.0.0.1:8421"),
        ("http://[::1]:80/", "http://[::1]"),
        ("https://host/base/of-all/", "https://host/base/of-all"),
    ],
)
def test_an_address_has_one_spelling(written: str, read: str) -> None:
    assert read_peer_url(written) == read


@pytest.mark.parametrize(
    "written",
    [
        "",
        "host",
        "ftp://host",
        "file:///etc/passwd",
        "https://user:word@host",
        "https://host?x=1",
        "https://host/#x",
        "https://host/a/../b",
        "https://host//a",
        "https://host/a b",
        "https://host/%2e%2e",
        "http://2130706433/",
        "http://127.1",
        "https://host/" + "a" * 300,
        "https://host:99999",
    ],
)
def test_what_is_no_address_or_could_be_read_in_two_ways_is_refused(written: str) -> None:
    with pytest.raises(Invalid) as refused:
        read_peer_url(written)
    assert refused.value.code == "invalid_url"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("https://host", PeerEntry("https://host", None, None)),
        (f"{ID}@https://host", PeerEntry("https://host", ID, None)),
        ("north=https://host/", PeerEntry("https://host", None, "north")),
        (f"north={ID}@https://host", PeerEntry("https://host", ID, "north")),
        (f"north={ID}", PeerEntry(None, ID, "north")),
    ],
)
def test_settings_name_peers_in_several_ways(written: str, read: PeerEntry) -> None:
    assert read_peer_entry(written) == read


@pytest.mark.parametrize("written", ["", "north", "a b=https://host", "frd1_short@https://host", "=https://host"])
def test_an_entry_that_says_nothing_is_refused(written: str) -> None:
    with pytest.raises(Invalid):
        read_peer_entry(written)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a@b", "x" * 65, "frd1_like-an-id", "é"])
def test_a_name_that_could_be_taken_for_something_else_is_refused(name: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_name(name)
    assert refused.value.code == "invalid_name"


@pytest.mark.parametrize(
    ("said", "name"),
    [("north", "north"), ("My  House!", "My-House"), ("", ID[-8:]), ("日本", ID[-8:]), (ID, ID[-8:]), ("-", ID[-8:])],
)
def test_a_peer_is_called_what_it_says_as_far_as_that_can_be_a_name(said: str, name: str) -> None:
    assert check_name(name_from(said, ID)) == name
    assert check_name(distinct_name(name, ID)).endswith(ID[-8:])
    assert len(distinct_name("x" * 64, ID)) == 64


def test_a_peer_is_an_agent_with_a_name_and_its_own_key_once_that_is_known() -> None:
    bundle = sign_bundle(KEY, [new_prekey(KEY, NOW).prekey], NOW)
    unknown, known = Peer(id=ID, name="north").agent, Peer(id=ID, name="north", keys=bundle).agent
    assert known.pubkey == bundle.identity_key
    for agent in (unknown, known):
        assert check_display(agent.display) == "north@peer"
        check_pubkey(agent.pubkey)
    assert unknown.pubkey != known.pubkey
