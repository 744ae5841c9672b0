"""A listener of its own for peers: the three sealed routes, and nothing else of the daemon."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.certificates import Authority
from tests.cli.daemons import covenant
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.peer_daemons import API, PeerDaemons, call, introduce, open_peer_daemons, until
from tests.places import free_port, short_folder

ELSEWHERE = (
    "/",
    "/healthz",
    "/metrics",
    "/version",
    "/docs",
    "/openapi.json",
    "/.well-known/agent-card.json",
    "/v1/a2a/agents/echo",
    "/ui",
    "/a2a/queue",
    "/mcp",
    f"{API}/peers",
    f"{API}/usage",
    f"{API}/identity/",
)


@pytest.fixture
def daemons() -> Iterator[PeerDaemons]:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made


def test_peers_delegate_over_the_own_listener_and_find_nothing_else_there(daemons: PeerDaemons) -> None:
    port = free_port()
    alice = daemons.node("alice", AGENTS)
    bob = daemons.node("bob", AGENTS, listen=f"127.0.0.1:{port}")
    introduce(alice, bob, a_calls=f"http://127.0.0.1:{port}")
    assert alice.ended(alice.delegate("there", "echo", "bob"))["result"] == "echo there"
    assert call(port, "GET", f"{API}/identity").body["keys"]["id"] == bob.id
    for path in ELSEWHERE:
        for method in ("GET", "POST"):
            answer = call(port, method, path, token=bob.token)
            assert (answer.status, answer.body["code"]) == (404, "unknown_route"), (method, path, answer)
    for path, method in (("receive", "GET"), ("poll", "GET"), ("identity", "DELETE")):
        assert call(port, method, f"{API}/{path}").status == 405
    assert call(port, "POST", f"{API}/receive", {}).code == "refused"
    made = alice.delegate("gate", "held", "bob")
    alice.stands(made, "running")
    bob.kill()
    bob.start()
    daemons.touch("gate")
    bob.cli("a2a", "status")
    assert call(port, "GET", f"{API}/identity").status == 200
    bob.stop()


@pytest.mark.parametrize("given", ["8443", "localhost:8443", "127.0.0.1", "127.0.0.1:99999", "::1:80", "[127.0.0.1]:x"])
def test_a_listener_that_cannot_be_is_refused_before_anything_starts(daemons: PeerDaemons, given: str) -> None:
    refused = covenant("--home", str(daemons.folder / "home"), "settings", "show", env={"COVENANT_PEERS_LISTEN": given})
    assert refused.code != 0
    assert "0.0.0.0:8443" in refused.err + refused.out


def test_a_place_that_is_taken_is_named_with_the_setting_to_change(daemons: PeerDaemons) -> None:
    alice = daemons.node("alice", AGENTS)
    env: dict[str, Any] = {"COVENANT_PEERS_ENABLED": "1", "COVENANT_PEERS_LISTEN": f"127.0.0.1:{alice.port}"}
    refused = covenant("--home", str(daemons.folder / "other"), "serve", "--http-port", "0", env=env)
    assert refused.code != 0
    assert "peers.listen" in refused.err


def test_the_own_listener_has_the_certificate_of_http_and_is_announced(daemons: PeerDaemons) -> None:
    port, authority = free_port(), Authority(daemons.folder / "certificates")
    certified = authority.issue("127.0.0.1")
    found: dict[str, Any] = {"mdns": "true", "mdns_interfaces": "127.0.0.1"}
    env = {"COVENANT_HTTP_TLS_CERT": str(certified.cert), "COVENANT_HTTP_TLS_KEY": str(certified.key)}
    alice = daemons.node("alice", AGENTS, env={"SSL_CERT_FILE": str(authority.file)}, **found)
    bob = daemons.node("bob", AGENTS, env=env, listen=f"127.0.0.1:{port}", **found)
    bob_id = bob.cli("peers", "list")["id"]

    def seen() -> list[dict[str, Any]]:
        discovered = alice.cli("peers", "discover", "--wait-ms", "1000")["discovered"]
        return [each for each in discovered if each["instanceId"] == bob_id]

    (announced,) = until(seen, bool)
    assert announced["url"] == f"https://127.0.0.1:{port}"
    with pytest.raises(ConnectionError):
        call(port, "GET", f"{API}/identity")
    alice.cli("peers", "add", announced["url"], "--id", bob_id, "--name", "bob")
    bob.cli("peers", "add", alice.url, "--id", alice.id, "--name", "alice")
    until(lambda: alice.peer("bob")["trustLevel"], lambda trust: trust == "verified")
    assert alice.ended(alice.delegate("under a certificate", "echo", "bob"))["result"] == "echo under a certificate"
    bob.stop()
