"""`a2a_agents.json`: what an entry may say, how a wrong one is named, and that a change is noticed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from covenant.daemon.connect import connect
from covenant.model.errors import Invalid, NotFound
from covenant.outbound.remote.remote_registry import RemoteRegistry
from tests.outbound.remotes import Called, hand_made


def write(home: Path, agents: Any) -> None:
    (home / "a2a_agents.json").write_text(agents if isinstance(agents, str) else json.dumps({"agents": agents}))


def test_without_a_file_there_are_no_remotes(tmp_path: Path) -> None:
    remotes = RemoteRegistry(tmp_path)
    assert (list(remotes), remotes.problems) == ([], {})
    with pytest.raises(NotFound, match="'weather'"):
        remotes.entry("weather")


def test_an_entry_is_read(tmp_path: Path) -> None:
    auth = {"type": "bearer", "token_env": "W"}
    write(tmp_path, {"weather": {"url": "https://w.example/a2a", "auth": auth, "timeout": 5, "headers": {"X": "y"}}})
    entry = RemoteRegistry(tmp_path).entry("weather")
    assert (entry.url, entry.timeout, entry.headers) == ("https://w.example/a2a", 5, {"X": "y"})
    assert (entry.token({"W": "secret"}), entry.token({}), entry.host_and_port) == ("secret", None, "w.example:443")


def test_a_token_in_the_file_wins_and_is_not_shown(tmp_path: Path) -> None:
    write(tmp_path, {"w": {"url": "https://w.example", "auth": {"token": "in-file", "token_env": "W"}}})
    entry = RemoteRegistry(tmp_path).entry("w")
    assert entry.token({"W": "in-environment"}) == "in-file"
    assert "in-file" not in repr(entry)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({}, "url"),
        ({"url": 5}, "url"),
        ({"url": "ftp://x"}, "http"),
        ({"url": "https://x", "auth": {"type": "oauth2"}}, "oauth2"),
        ({"url": "https://x", "timeout": 0}, "timeout"),
        ({"url": "https://x", "enabeld": False}, "enabeld"),
        ("https://x", "object"),
    ],
)
def test_a_wrong_entry_is_named_and_does_not_take_the_others_with_it(tmp_path: Path, entry: Any, why: str) -> None:
    write(tmp_path, {"wrong": entry, "right": {"url": "https://right.example"}})
    remotes = RemoteRegistry(tmp_path)
    assert remotes.entry("right").url == "https://right.example"
    with pytest.raises(Invalid, match=f"(?s)'wrong'.*{why}"):
        remotes.entry("wrong")
    assert set(remotes.problems) == {"wrong"}


@pytest.mark.parametrize("text", ["{", "[]", '{"agents": []}'])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    with pytest.raises(Invalid, match=r"a2a_agents\.json cannot be read"):
        RemoteRegistry(tmp_path).entry("any")


def test_a_disabled_one_is_known_and_not_called(tmp_path: Path) -> None:
    write(tmp_path, {"off": {"url": "https://off.example", "enabled": False}})
    remotes = RemoteRegistry(tmp_path)
    assert list(remotes) == []
    with pytest.raises(Invalid, match="disabled"):
        remotes.entry("off")


def test_a_change_is_noticed(tmp_path: Path) -> None:
    remotes = RemoteRegistry(tmp_path)
    write(tmp_path, {"a": {"url": "https://a.example"}})
    assert list(remotes) == ["a"]
    write(tmp_path, {"b": {"url": "https://b.example"}})
    os.utime(remotes.path, ns=(1, 1))
    assert list(remotes) == ["b"]
    remotes.path.unlink()
    assert list(remotes) == []


async def test_a_name_is_connected_to_with_what_its_entry_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAND_TOKEN", "by-entry")

    def behave(called: Called) -> None:
        called.result({"message": {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": "hi"}]}})

    async with hand_made(behave) as hand:
        entry = {"url": hand.served.url(""), "auth": {"token_env": "HAND_TOKEN"}, "headers": {"X-Team": "blue"}}
        write(tmp_path, {"hand": entry})
        # Its host is private, and in the operator's own file: that is permission enough.
        async with connect("hand", home=tmp_path) as remote:
            assert (await remote.send("go")).text == "hi"
        headers = hand.calls[0].headers
        assert (headers["authorization"], headers["x-team"]) == ("Bearer by-entry", "blue")


def test_whoever_reads_it_is_told_once_for_each_change(tmp_path: Path) -> None:
    told: list[dict[str, str]] = []
    write(tmp_path, {"wrong": {}, "right": {"url": "https://right.example"}})
    remotes = RemoteRegistry(tmp_path, on_read=lambda read: told.append(dict(read.problems)))
    assert (list(remotes), list(remotes), len(told), list(told[0])) == (["right"], ["right"], 1, ["wrong"])
    write(tmp_path, "{")
    assert list(remotes) == []
    assert [list(each) for each in told] == [["wrong"], ["a2a_agents.json"]]


def test_a_variable_that_is_not_set_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"w": {"url": "https://w.example", "auth": {"token_env": "W"}}, "x": {"url": "https://x.example"}})
    remotes = RemoteRegistry(tmp_path)
    assert (remotes.entry("w").missing_variable({}), remotes.entry("w").missing_variable({"W": "t"})) == ("W", None)
    assert remotes.entry("x").missing_variable({}) is None


def test_an_entry_belongs_to_the_first_tenant_unless_it_lists_its_tenants(tmp_path: Path) -> None:
    url = "https://w.example/a2a"
    write(
        tmp_path,
        {
            "own": {"url": url},
            "shared": {"url": url, "tenants": ["default", "acme"]},
            "theirs": {"url": url, "tenants": ["acme"]},
            "nobodys": {"url": url, "tenants": []},
            "off": {"url": url, "tenants": ["acme"], "enabled": False},
            "wrong": {"url": url, "tenant": ["acme"]},
        },
    )
    remotes = RemoteRegistry(tmp_path)
    assert remotes.names_of("default") == {"own", "shared"}
    assert remotes.names_of("acme") == {"shared", "theirs"}
    assert remotes.names_of("other") == frozenset()
    assert remotes.tenants == {"default", "acme"}
    assert remotes.entry_of("acme", "theirs").url == url
    for tenant, name in (
        ("acme", "own"),
        ("default", "theirs"),
        ("default", "nobodys"),
        ("other", "off"),
        ("acme", "x"),
    ):
        with pytest.raises(NotFound) as unknown:
            remotes.entry_of(tenant, name)
        assert unknown.value.message == f"there is no remote agent {name!r} here"
    for tenant, name, kind in (("acme", "off", Invalid), ("default", "wrong", Invalid), ("acme", "wrong", NotFound)):
        with pytest.raises(kind) as refused:
            remotes.entry_of(tenant, name)
        assert str(tmp_path) not in str(refused.value)
