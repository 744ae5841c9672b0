"""Peers of tenants: each has the agents of its tenant, and to every other tenant it does not exist."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.peer_daemons import Answer, Node, PeerDaemons, call, open_peer_daemons, until
from tests.places import short_folder


@pytest.fixture
def daemons() -> Iterator[PeerDaemons]:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made


def tenant(node: Node, name: str) -> str:
    """Its token."""
    token: str = node.cli("tenants", "add", name)["token"]
    return token


def send(node: Node, token: str, agent: str, method: str, params: dict[str, Any]) -> Answer:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return call(node.port, "POST", f"/v1/a2a/agents/{agent}", body, token=token)


def say(node: Node, token: str, agent: str, text: str, name: str) -> dict[str, Any]:
    message = {"messageId": name, "role": "ROLE_USER", "parts": [{"text": text}]}
    return send(node, token, agent, "SendMessage", {"message": message}).body


def failure(body: dict[str, Any]) -> str:
    """What the status of a failed task says."""
    message = body.get("result", {}).get("task", {}).get("status", {}).get("message", {})
    return "".join(part.get("text", "") for part in message.get("parts", ()))


def test_a_tenants_agents_delegate_to_its_peers_and_nobody_else_sees_them(daemons: PeerDaemons) -> None:
    alice, bob = daemons.node("alice", AGENTS), daemons.node("bob", AGENTS)
    acme, other = tenant(alice, "acme"), tenant(alice, "other")
    alice.cli("peers", "add", bob.url, "--name", "bob", "--tenant", "acme")
    bob.add(alice.url, "alice")
    until(
        lambda: alice.call("POST", "/peers/bob/verify", {}),
        lambda answer: answer.status == 200 and answer.body["peer"]["trustLevel"] == "verified",
    )
    until(lambda: bob.peer("alice")["trustLevel"], lambda trust: trust == "verified")
    assert alice.peer("bob")["tenant"] == "acme"
    definition = daemons.folder / "far.json"
    definition.write_text(json.dumps({"id": "far", "kind": "peer", "peer": "bob/echo"}))
    for owner in ("acme", "other", "default"):
        alice.cli("agents", "add", "--file", str(definition), "--tenant", owner)
    far = until(lambda: say(alice, acme, "far", "hello", "m1"), lambda body: "result" in body)
    task = far["result"]["task"]
    assert "echo hello" in json.dumps(task)
    for token in (other, alice.token):
        refused = json.dumps(say(alice, token, "far", "let me in", f"m-{token[:6]}"))
        assert "no peer" in refused
        assert "echo let me in" not in refused
        hidden = send(alice, token, "far", "GetTask", {"id": task["id"]}).body
        assert "error" in hidden, hidden
    # What a curious tenant is told of another's peer is what it is told of nobody's.
    for who in ("bob", "nobody"):
        definition.write_text(json.dumps({"id": f"at-{who}", "kind": "peer", "peer": f"{who}/echo"}))
        alice.cli("agents", "add", "--file", str(definition), "--tenant", "other")
    told = [
        until(lambda who=who: failure(say(alice, other, f"at-{who}", "x", f"m-{who}")), bool)  # type: ignore[misc]
        for who in ("bob", "nobody")
    ]
    assert told[0].replace("bob", "nobody") == told[1]
    assert [each["profile"] for each in bob.delegations(role="provider")] == ["echo"]
    refused_removal = alice.run("tenants", "remove", "acme", "--yes", "--reason", "over", "--json")
    assert "tenant_has_peers" in refused_removal.out + refused_removal.err
    assert {each["profile"]: each["peerId"] for each in alice.delegations(status="completed")} == {"echo": bob.id}
    alice.cli("peers", "remove", "bob")
    # What is left is what the operator's own tenant asked of a peer that it has not: it was offered to nobody.
    (refused_here,) = alice.delegations()
    assert (refused_here["status"], refused_here["peerId"], refused_here["delegationId"]) == ("failed", "bob", None)
    assert alice.get("/usage")["usage"] == []


def test_a_peer_of_a_tenant_has_the_agents_of_that_tenant_alone(daemons: PeerDaemons) -> None:
    alice, bob = daemons.node("alice", AGENTS), daemons.node("bob", AGENTS)
    tenant(bob, "acme")
    bob.cli("agents", "add", "own", "--kind", "worker", "--tenant", "acme")
    bob.cli("peers", "add", alice.url, "--name", "alice", "--tenant", "acme")
    alice.add(bob.url, "bob")
    offered = until(
        lambda: alice.call("GET", "/capabilities?peerId=bob&fresh=true"),
        lambda answer: answer.status == 200 and bool(answer.body["capabilities"]["profiles"]),
    )
    assert [each["name"] for each in offered.body["capabilities"]["profiles"]] == ["own"]
    refused = bob.run("peers", "add", "http://127.0.0.1:9", "--id", alice.id, "--name", "x", "--tenant", "nobody")
    assert refused.code != 0
    bob.kill()
    bob.start()
    assert bob.peer("alice")["tenant"] == "acme"
