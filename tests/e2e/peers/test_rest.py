"""The operator's routes for peers, on real daemons: what they do, and what they refuse. No success is a false one."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Final
from uuid import uuid4

import pytest

from covenant.doors.operator_api.peers import OPERATIONS
from covenant.model.peers.delegation_messages import DelegationOffer
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.peer_daemons import API, Node, call, open_peer_daemons
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.places import short_folder

NOBODY: Final = "frd1_" + "a" * 40
NOTHING: Final = "0b0e3c52-0000-4b8e-8d0a-6a1f1d2c3b4a"
BODIES: Final[dict[str, Any]] = {
    "add_peer": {"url": "http://127.0.0.1:9"},
    "trust_peer": {"trustLevel": "peer"},
    "succeed_peer": {"newId": NOBODY},
    "discover_peers": {"timeoutMs": 0},
    "rotate_purpose_keys": {},
    "delegate": {"task": "x", "profile": "echo"},
    "force_delegation": {"reason": "x"},
}
ROUTES: Final = [
    pytest.param(
        each.method,
        each.path.format(peer_id=NOBODY, delegation_id=NOTHING),
        None if each.method in ("GET", "DELETE") else BODIES.get(each.kind, {}),
        id=each.kind,
    )
    for each in OPERATIONS
]
NAMED: Final = [param for param in ROUTES if NOBODY in str(param.values[1]) or NOTHING in str(param.values[1])]


@pytest.fixture(scope="module")
def alone() -> Iterator[Node]:
    """A daemon without peers."""
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made.node("alone", AGENTS, enabled="0")


@pytest.fixture
def kim(pair: Pair) -> Iterator[ScriptedPeer]:
    with ScriptedPeer(f"kim-{uuid4().hex[:8]}") as actor:
        actor.known_to(pair.alice)
        yield actor


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_a_daemon_without_peers_says_so(alone: Node, method: str, path: str, body: Any) -> None:
    answer = alone.call(method, path, body)
    assert (answer.status, answer.code) == (409, "peers_off")
    assert "enabled = true" in answer.body["error"]


def test_a_daemon_without_peers_has_no_letterbox_and_shows_no_keys(alone: Node) -> None:
    for method, path in (("GET", "identity"), ("POST", "receive"), ("POST", "poll")):
        assert call(alone.port, method, f"{API}/{path}", b"{}" if method == "POST" else None).status == 404


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_nobody_but_the_operator_may_ask(pair: Pair, method: str, path: str, body: Any) -> None:
    assert call(pair.alice.port, method, path, body).status == 401
    assert call(pair.alice.port, method, path, body, token="nobody's").status == 401


def test_somebody_else_with_a_token_is_not_the_operator(pair: Pair) -> None:
    token = pair.alice.cli("identities", "enroll", f"eve{uuid4().hex[:6]}@host")["token_b58"]
    for param in ROUTES:
        method, path, body = param.values
        answer = call(pair.alice.port, str(method), str(path), body, token=token)
        assert answer.status == 403, (method, path, answer)


@pytest.mark.parametrize(("method", "path", "body"), NAMED)
def test_what_is_not_there_is_not_found(pair: Pair, method: str, path: str, body: Any) -> None:
    answer = pair.alice.call(method, path, body)
    assert answer.status == 404, answer
    assert answer.code in ("unknown_peer", "unknown_delegation", "unknown_task", "no_proof")
    assert answer.body["error"]


WRONG: Final[list[tuple[str, str, Any]]] = [
    ("POST", "/peers", {}),
    ("POST", "/peers", {"url": 5}),
    ("POST", "/peers", {"url": "not a url"}),
    ("POST", "/peers", {"id": "frd1_short", "name": "short"}),
    ("POST", "/peers", {"id": NOBODY, "name": "spaces are not names"}),
    ("POST", "/peers", []),
    ("GET", "/peers?limit=0", None),
    ("GET", "/peers?status=asleep", None),
    ("GET", "/peers?trustLevel=best", None),
    ("PATCH", "/peers/bob", {"limits": {"concurrent": -1}}),
    ("PATCH", "/peers/bob", {"name": ""}),
    ("PATCH", "/peers/bob", {"url": "gopher://x"}),
    ("PUT", "/peers/bob/trust", {}),
    ("PUT", "/peers/bob/trust", {"trustLevel": "best"}),
    ("POST", "/peers/bob/identity", {}),
    ("POST", "/peers/bob/identity", {"newId": "bob"}),
    ("POST", "/discover", {"timeoutMs": -1}),
    ("GET", "/capabilities?peerId=bob&fresh=perhaps", None),
    ("POST", "/delegate", {}),
    ("POST", "/delegate", {"task": "x"}),
    ("POST", "/delegate", {"task": "", "profile": "echo", "peerId": "bob"}),
    ("POST", "/delegate", {"task": "x" * 50_001, "profile": "echo", "peerId": "bob"}),
    ("POST", "/delegate", {"task": "x", "profile": "echo", "peerId": "bob", "maxTokenBudget": 0}),
    ("POST", "/delegate", {"task": "x", "profile": "echo", "peerId": "bob", "timeout": 600_001}),
    ("POST", "/delegate", {"task": "x", "profile": "echo", "peerId": "bob", "id": "one"}),
    ("GET", "/delegations?limit=101", None),
    ("GET", "/delegations?role=boss", None),
    ("GET", "/delegations?status=odd", None),
    ("POST", f"/delegations/{NOTHING}/force-error", {}),
    ("GET", "/messages?limit=1000", None),
    ("POST", "/peers", b"{"),
]


@pytest.mark.parametrize(("method", "path", "body"), WRONG, ids=[f"{each[1]} {str(each[2])[-40:]}" for each in WRONG])
def test_what_cannot_be_meant_is_refused_with_a_reason(pair: Pair, method: str, path: str, body: Any) -> None:
    before = pair.alice.get("/peers")["total"], len(pair.alice.delegations())
    answer = pair.alice.call(method, path, body)
    assert answer.status == 400, answer
    assert answer.code
    assert answer.body["error"]
    assert (pair.alice.get("/peers")["total"], len(pair.alice.delegations())) == before


def test_a_peer_is_added_found_changed_denied_and_removed(pair: Pair) -> None:
    alice, name = pair.alice, f"lou-{uuid4().hex[:8]}"
    with ScriptedPeer(name) as lou:
        answer = alice.call("POST", "/peers", {"url": lou.url})
        assert (answer.status, answer.body["peer"]["name"]) == (201, name), "as it calls itself"
        added = answer.body["peer"]
        assert (added["trustLevel"], added["status"], added["source"]) == ("verified", "online", "operator")
        assert added["publicKey"] == lou.identity.key
        assert added["capabilities"] == [{"name": "researcher", "description": "", "maxTokenBudget": 100_000}]
        for named in (lou.id, name, lou.id[:20]):
            assert alice.peer(named)["id"] == lou.id
        listed = alice.get("/peers?trustLevel=verified&limit=100")
        assert (listed["id"], listed["name"]) == (alice.id, "alice")
        assert lou.id in [each["id"] for each in listed["peers"]]
        assert lou.id not in [each["id"] for each in alice.get("/peers?status=offline")["peers"]]
        again = alice.call("POST", "/peers", {"url": lou.url, "name": "another"})
        assert (again.status, again.code) == (409, "peer_exists")
        taken = alice.call("PATCH", f"/peers/{name}", {"name": "bob"})
        assert taken.status == 409
        changed = alice.ask("PATCH", f"/peers/{name}", {"name": f"{name}2", "limits": {"concurrent": 2}})["peer"]
        assert (changed["name"], changed["limits"]) == (f"{name}2", {"concurrent": 2})
        assert alice.ask("PUT", f"/peers/{name}2/trust", {"trustLevel": "trusted"})["peer"]["trustLevel"] == "trusted"
        assert alice.ask("PATCH", f"/peers/{name}2", {"denied": True})["peer"]["denied"] is True
        refused = alice.ended(alice.delegate("x", "researcher", f"{name}2"))
        assert refused["error"].startswith("denied")
        assert alice.ask("PATCH", f"/peers/{name}2", {"url": ""})["peer"]["url"] is None
        assert alice.ask("DELETE", f"/peers/{name}2")["id"] == lou.id
        assert alice.call("GET", f"/peers/{lou.id}").status == 404
    kinds = {row["type"] for row in alice.audit()}
    assert {"peer_added", "peer_changed", "peer_removed"} <= kinds


def test_a_peer_with_work_under_way_is_not_removed(pair: Pair, kim: ScriptedPeer) -> None:
    offered = pair.alice.delegate("x", "researcher", kim.name)
    kim.until(DelegationOffer)
    refused = pair.alice.call("DELETE", f"/peers/{kim.name}")
    assert refused.status == 409
    pair.alice.post(f"/delegations/{offered}/cancel")


def test_a_peer_that_fetches_is_added_by_its_id(pair: Pair) -> None:
    with ScriptedPeer("far") as far:
        name = f"far-{uuid4().hex[:8]}"
        added = pair.alice.post("/peers", {"id": far.id, "name": name})
        assert (added["peer"]["url"], added["peer"]["trustLevel"]) == (None, "peer")
        assert "fetches" in added["note"]
        pair.alice.ask("DELETE", f"/peers/{name}")


def test_capabilities_are_shown_without_the_token_that_comes_with_them(pair: Pair) -> None:
    theirs = pair.alice.get("/capabilities?peerId=bob&fresh=true")
    assert theirs["peer"] == "bob"
    assert "finder" in [each["name"] for each in theirs["capabilities"]["profiles"]]
    assert theirs["capabilities"]["trustLevel"] == "verified"
    own = pair.alice.get("/capabilities")
    assert own["peer"] is None
    assert "finder" not in [each["name"] for each in own["capabilities"]["profiles"]]
    assert "token" not in str(theirs).lower().replace("maxtokenbudget", "")


def test_messages_are_listed_without_what_they_said(pair: Pair) -> None:
    offered = pair.alice.delegate("unspoken", "echo", "bob")
    pair.alice.ended(offered)
    found = pair.alice.get("/messages?peerId=bob&type=delegation_offer&limit=1")
    (first,) = found["messages"]
    assert (first["type"], first["direction"], first["offerId"]) == ("delegation_offer", "sent", offered)
    assert set(first) == {"atMs", "direction", "peer", "type", "id", "offerId"}
    assert found["total"] >= 1


def test_the_settings_in_force_are_shown(pair: Pair) -> None:
    shown = pair.alice.get("/config")
    assert (shown["id"], shown["name"]) == (pair.alice.id, "alice")
    assert (shown["config"]["enabled"], shown["config"]["redaction"]) == (True, "redact")


def test_discovery_finds_candidates_and_makes_nobody_a_peer(pair: Pair) -> None:
    before = pair.alice.get("/peers")["total"]
    found = pair.alice.post("/discover", {"timeoutMs": 0})
    assert not any(way["on"] for way in found["ways"]), "none was switched on"
    assert found["discovered"] == []
    assert pair.alice.get("/peers")["total"] == before


# No false success


def test_delegating_to_nobody_or_for_nothing_is_an_error(pair: Pair) -> None:
    unknown = pair.alice.call("POST", "/delegate", {"task": "x", "profile": "echo", "peerId": "zoe"})
    assert (unknown.status, unknown.code) == (404, "unknown_peer")
    unheard = pair.alice.call("POST", "/delegate", {"task": "x", "profile": "astrologer"})
    assert (unheard.status, unheard.code) == (404, "no_profile")
    which = pair.alice.call("POST", "/delegate", {"task": "x", "peerId": "bob"})
    assert (which.status, which.code) == (400, "profile_needed")
    offered = pair.alice.delegate("x", "astrologer", "bob")
    ended = pair.alice.ended(offered)
    assert (ended["delegation"]["state"], ended["delegation"]["delegationId"]) == ("failed", None)
    assert ended["error"].startswith("no_profile")
    assert ended["delegation"]["code"] == "no_profile"


def test_what_could_not_be_offered_yet_is_shown_and_can_be_cancelled(pair: Pair) -> None:
    with ScriptedPeer(f"shy-{uuid4().hex[:8]}") as shy:
        shy.deaf = True
        assert pair.alice.add(shy.url, shy.name)["trustLevel"] == "peer"
        offered = pair.alice.delegate("are you who you are?", "researcher", shy.name)
        waiting = pair.alice.delegation(offered)["delegation"]
        assert (waiting["state"], waiting["peer"], waiting["delegationId"]) == ("offered", shy.name, None)
        cancelled = pair.alice.post(f"/delegations/{offered}/cancel")["delegation"]
        assert cancelled["state"] == "cancelled"
        assert pair.alice.task(offered)["a2a_state"] == "canceled"
        assert not [each for each in shy.heard if isinstance(each.message, DelegationOffer)]


def test_a_peer_that_is_not_there_is_not_added(pair: Pair) -> None:
    before = pair.alice.get("/peers")["total"]
    answer = pair.alice.call("POST", "/peers", {"url": "http://127.0.0.1:9", "name": "ghost"})
    assert (answer.status, answer.code) == (503, "connect_failed")
    own = pair.alice.call("POST", "/peers", {"url": pair.alice.url})
    assert (own.status, own.code) == (400, "self_peer")
    other = pair.alice.call("POST", "/peers", {"url": pair.bob.url, "id": NOBODY, "name": "ghost"})
    assert (other.status, other.code) == (409, "identity_changed")
    assert pair.alice.get("/peers")["total"] == before


METADATA: Final = [
    "http://169.254.169.254/",
    "http://169.254.169.254./",
    "http://[::ffff:169.254.169.254]/",
    "http://[::ffff:a9fe:a9fe]/",
    "http://[::169.254.169.254]/",
    "http://[64:ff9b::169.254.169.254]/",
    "http://[2002:a9fe:a9fe::1]/",
    "http://2852039166/",
    "http://0xa9fea9fe/",
    "http://0xa9.0xfe.0xa9.0xfe/",
    "http://0251.0376.0251.0376/",
    "http://169.254.43518/",
    "http://[fe80::1]/",
    "http://[fd00:ec2::254]/",
    "http://100.100.100.200/",
    "http://0.0.0.0/",
    "http://[::]/",
    "http://224.0.0.1/",
    "http://255.255.255.255/",
    "http://user:secret@127.0.0.1/",
    "http://127.0.0.1:9#@169.254.169.254/",
    "file:///etc/passwd",
    "ftp://127.0.0.1/",
    "//127.0.0.1/",
    "http://",
    "http://127.0.0.1:99999/",
]


@pytest.mark.parametrize("url", METADATA)
def test_an_address_that_no_peer_has_is_not_called(pair: Pair, url: str) -> None:
    answer = pair.alice.call("POST", "/peers", {"url": url, "name": "trap"}, within_s=10.0)
    assert answer.status in (400, 403, 409), answer
    assert answer.code not in (None, "connect_failed", "timed_out", "internal")
    assert pair.alice.call("GET", "/peers/trap").status == 404


def test_a_redirect_to_where_no_peer_is_is_not_followed(pair: Pair) -> None:
    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest/meta-data/")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        answer = pair.alice.call("POST", "/peers", {"url": f"http://127.0.0.1:{server.server_port}", "name": "trap"})
        server.shutdown()
    assert (answer.status, answer.code) == (409, "not_a_peer")
    assert "302" in answer.body["error"]


def test_every_route_of_the_page_is_one_of_these() -> None:
    page = (Path(__file__).parents[3] / "docs/formats/peers-http.md").read_text()
    for each in OPERATIONS:
        assert f"`{each.method} {each.path}`" in page, each.kind
