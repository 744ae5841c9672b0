"""Every `covenant peers` command against real daemons: for people, and with --json."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest

from covenant.cli.peers import peers as group
from covenant.model.peers.delegation_messages import (
    DelegationInput,
    DelegationOffer,
    DelegationReject,
    Profile,
    StatusReport,
)
from tests.cli.daemons import COVENANT, Daemon, environment
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.peer_daemons import Node, until
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.waits import BOUND_S

KINDS = {
    "accept-identity": "peer",
    "add": "peer",
    "allow": "peer",
    "cancel": "delegation",
    "capabilities": "peer_capabilities",
    "change": "peer",
    "config": "peer_config",
    "delegate": "delegation",
    "delegations": "delegations",
    "deny": "peer",
    "discover": "peers_discovered",
    "force-error": "delegation",
    "list": "peers",
    "messages": "peer_messages",
    "offer-again": "delegation",
    "proof": "delegation_proof",
    "remove": "peer_removed",
    "revocation": "revocation",
    "revoke-tokens": "peer_tokens_revoked",
    "rotate-identity": "identity_rotated",
    "rotate-keys": "purpose_keys_rotated",
    "show": "peer",
    "trust": "peer",
    "usage": "peer_usage",
    "verify": "peer",
    "verify-proof": "proof_verified",
}


@pytest.fixture
def pat(pair: Pair) -> Iterator[ScriptedPeer]:
    with ScriptedPeer(f"pat-{uuid4().hex[:8]}") as actor:
        actor.known_to(pair.alice)
        yield actor


def both(node: Node, *words: str) -> tuple[str, dict[str, object]]:
    """What people are told, and what programs are."""
    told = node.run("peers", *words)
    assert (told.code, "Traceback" in told.err) == (0, False), told
    answer = node.cli("peers", *words)
    assert answer["kind"] == KINDS[words[0]]
    return told.out, answer


def test_every_command_is_tried_on_this_page_or_beside_it() -> None:
    commands = set(group.commands)
    assert commands == set(KINDS)
    pages = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for each in commands:
        assert f'"{each}"' in pages.replace("KINDS", ""), each


def test_peers_are_listed_and_shown(pair: Pair) -> None:
    said, answer = both(pair.alice, "list")
    assert answer["id"] == pair.alice.id
    assert "bob" in said
    assert pair.bob.id in said
    said, answer = both(pair.alice, "list", "--trust", "trusted", "--limit", "1")
    assert "bob" not in said
    said, answer = both(pair.alice, "show", "bob")
    assert said.startswith(f"bob  {pair.bob.id}  verified  {pair.to_bob.url}")
    assert "finder" in said
    assert both(pair.alice, "show", pair.bob.id[:16])[1] == answer


def test_a_peer_is_added_and_removed(pair: Pair) -> None:
    with ScriptedPeer("quinn") as quinn:
        added = pair.alice.run("peers", "add", quinn.url, "--name", "quinn", "--id", quinn.id)
        assert (added.code, f"quinn  {quinn.id}  verified" in added.out) == (0, True), added
        said = pair.alice.run("peers", "remove", "quinn")
        assert (said.code, said.out) == (0, f"removed quinn, {quinn.id}\n")
        assert pair.alice.cli("peers", "add", quinn.url)["peer"]["trustLevel"] == "verified"
        assert pair.alice.cli("peers", "remove", "quinn") == {"kind": "peer_removed", "id": quinn.id, "name": "quinn"}
        quinn.deaf = True
        unverified = pair.alice.run("peers", "add", quinn.url)
        assert unverified.code == 0
        assert f"covenant peers add OUR-URL --id {pair.alice.id}" in unverified.err
        pair.alice.run("peers", "remove", "quinn")


def test_what_cannot_be_done_is_said_and_the_exit_code_says_so_too(pair: Pair) -> None:
    for words, code in (
        (("show", "nobody"), "unknown_peer"),
        (("add", "http://169.254.169.254"), None),
        (("add",), None),
        (("delegate", "echo", "x", "--peer", "nobody"), "unknown_peer"),
        (("delegate", "astrologer", "x"), "no_profile"),
        (("delegations", str(uuid4())), "unknown_delegation"),
        (("cancel", str(uuid4())), "unknown_delegation"),
        (("proof", str(uuid4())), "no_proof"),
    ):
        refused = pair.alice.run("peers", *words)
        assert refused.code != 0, words
        assert refused.out == ""
        assert refused.err
        told = pair.alice.run("peers", *words, "--json")
        assert told.code == refused.code
        assert told.json["kind"] == "error"
        assert code in (None, told.json["code"])


def test_trust_denial_limits_and_tokens_are_an_operators_word(pair: Pair, pat: ScriptedPeer) -> None:
    alice = pair.alice
    assert "trusted" in both(alice, "trust", pat.name)[0]
    assert " peer " in both(alice, "trust", pat.name, "peer")[0]
    assert "verified" in both(alice, "trust", pat.name, "verified")[0]
    both(alice, "deny", pat.name)
    assert alice.receive(pat.envelope(alice)).code == "refused"
    assert "denied" in alice.run("peers", "list").out
    both(alice, "allow", pat.name)
    assert alice.receive(pat.envelope(alice)).status == 200
    assert "verified" in both(alice, "verify", pat.name)[0]
    said = alice.run("peers", "revoke-tokens", pat.name)
    assert (said.code, said.out) == (0, f"revoked 1 tokens of {pat.id}\n")
    assert alice.cli("peers", "revoke-tokens", pat.name)["id"] == pat.id


def test_capabilities_settings_and_discovery_are_shown(pair: Pair) -> None:
    said, answer = both(pair.alice, "capabilities", "bob", "--fresh")
    assert "finder" in said
    assert answer["peer"] == "bob"
    said, answer = both(pair.alice, "capabilities")
    assert "finder" not in said
    said, answer = both(pair.alice, "config")
    assert pair.alice.id in said
    assert "status_interval_ms" in said
    looked = pair.alice.run("peers", "discover", "--wait-ms", "0")
    assert looked.code == 0
    assert "no discovery is switched on" in looked.err
    assert pair.alice.cli("peers", "discover", "--wait-ms", "0")["discovered"] == []


def test_a_delegation_is_made_watched_proven_and_listed(pair: Pair) -> None:
    done = pair.alice.run("peers", "delegate", "echo", "by hand", "--peer", "bob", "--budget", "100")
    assert done.code == 0
    assert "echo by hand" in done.out
    answer = pair.alice.cli("peers", "delegate", "finder", "it", "--context", "here", "--timeout-ms", "20000")
    assert (answer["kind"], answer["result"]) == ("delegation", "found: it")
    made = answer["delegation"]["id"]
    failed = pair.alice.run("peers", "delegate", "spender", "x", "--peer", "bob")
    assert failed.code != 0
    assert "agent_failed" in failed.out + failed.err
    said, _ = both(pair.alice, "delegations")
    assert made in said
    shown = pair.alice.run("peers", "delegations", made)
    assert (shown.code, "found: it" in shown.out, "proven" in shown.out) == (0, True, True)
    assert pair.alice.cli("peers", "delegations", made)["result"] == "found: it"
    said, answer = both(pair.alice, "messages", "--peer", "bob", "--type", "delegation_result", "--limit", "5")
    assert "delegation_result" in said
    assert "found: it" not in said
    assert answer["messages"]
    assert '"providerKey"' in both(pair.alice, "proof", made)[0]


def test_a_delegation_is_begun_without_waiting_and_cancelled(pair: Pair, pat: ScriptedPeer) -> None:
    begun = pair.alice.run("peers", "delegate", "researcher", "take your time", "--peer", pat.name, "--no-wait")
    made = begun.out.strip()
    pat.until(DelegationOffer, lambda offer: offer.offer_id == made)
    said = pair.alice.run("peers", "cancel", made, "--reason", "changed my mind")
    assert said.code == 0
    assert made in said.out
    answer = pair.alice.cli("peers", "delegate", "researcher", "take your time", "--peer", pat.name, "--no-wait")
    assert (answer["kind"], answer["remote"]) == ("delegated", True)
    until(lambda: pair.alice.run("peers", "cancel", answer["delegationId"], "--json").code, lambda code: code == 0)
    assert pair.alice.delegation(answer["delegationId"])["delegation"]["state"] in ("cancelling", "cancelled")


def test_a_delegation_that_asks_says_so_and_how_it_is_answered(pair: Pair, pat: ScriptedPeer) -> None:
    words = ("peers", "delegate", "researcher", "tides", "--peer", pat.name)
    with (
        subprocess.Popen(
            [str(COVENANT), "--home", str(pair.alice.home), *words],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as waits,
        ExitStack() as stack,
    ):
        stack.callback(waits.kill)
        offer = pat.until(DelegationOffer, lambda offer: offer.task == "tides")
        made = offer.offer_id
        pat.accept(pair.alice, offer)
        asks = StatusReport(
            offer_id=made, delegation_id=made, seq=1, status="input_required", message="which?", question=1
        )
        pat.say(pair.alice, asks)
        until(lambda: pair.alice.task(made)["a2a_state"], lambda state: state == "input-required")
        listed, shown = pair.alice.run("peers", "delegations"), pair.alice.run("peers", "delegations", made)
        assert (shown.out.startswith("running (asks)"), "which?" in shown.out) == (True, True), shown
        assert "running (asks)" in listed.out
        assert all(f"a2a answer {name} TEXT" in told.err for name, told in (("ID", listed), (made, shown)))
        assert pair.alice.delegation(made)["delegation"]["question"] == "which?"
        assert waits.stderr is not None
        while (line := waits.stderr.readline()) and f"a2a answer {made} TEXT" not in line:
            pass
        assert line, "whoever waits is told too"
        pair.alice.cli("a2a", "answer", made, "the high ones")
        assert pat.until(DelegationInput, lambda said: said.offer_id == made).text == "the high ones"
        assert "question" not in pair.alice.delegation(made)["delegation"]
        pat.say(pair.alice, pat.result(offer, pair.alice.id))
        assert waits.communicate(timeout=BOUND_S)[0] == "done\n"


def test_what_a_peer_made_up_cannot_paint_on_the_operators_screen(pair: Pair, pat: ScriptedPeer) -> None:
    made_up = "[/oops][red]:bomb:\x1b[2J\ndenied"
    pat.profiles = (Profile(name=made_up, description=made_up, max_token_budget=5),)
    pair.alice.post(f"/peers/{pat.name}/verify")
    pat.say(pair.alice, pat.offer(pair.alice, made_up))
    pat.until(DelegationReject)
    made = pair.alice.delegate("tides", made_up, pat.name)
    pair.alice.stands(made, "offered")
    commands = (
        ("capabilities", pat.name),
        ("delegations",),
        ("delegations", made),
        ("list",),
        ("show", pat.name),
        ("usage",),
    )
    for words in commands:
        told = pair.alice.run("peers", *words)
        assert (told.code, "\x1b" in told.out, "\ndenied" in told.out) == (0, False, False), told
    assert "[/oops][red]:bomb:\N{REPLACEMENT CHARACTER}[2J" in pair.alice.run("peers", "delegations").out


def test_a_daemon_without_peers_tells_people_how_to_have_them(short_path: Path) -> None:
    daemon = Daemon(short_path / "home")
    try:
        refused = daemon.run("peers", "list")
        assert refused.code != 0
        assert "enabled = true" in refused.err
    finally:
        daemon.stop()
