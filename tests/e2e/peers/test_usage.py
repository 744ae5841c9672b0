"""What peers used, by peer, profile and day: counted, bounded, written down, and the same after a kill."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from covenant.model.peers.delegation_messages import DelegationReject
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.peer_daemons import Node, PeerDaemons, call, introduce, open_peer_daemons, until
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.places import short_folder

METRICS_TOKEN = "shown"


@pytest.fixture
def daemons() -> Iterator[PeerDaemons]:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made


def rows(node: Node, **query: str) -> dict[tuple[str, str], dict[str, Any]]:
    words = "&".join(f"{name}={value}" for name, value in query.items())
    found = node.get(f"/usage?{words}")
    assert found["kind"] == "peer_usage"
    return {(each["role"], each["profile"]): each for each in found["usage"]}


def counted(row: dict[str, Any], *names: str) -> list[int]:
    return [row[name] for name in names]


def test_usage_is_counted_on_both_sides_audited_and_measured_and_survives_a_kill(daemons: PeerDaemons) -> None:
    alice = daemons.node("alice", AGENTS)
    secret = daemons.folder / "metrics.token"
    secret.write_text(METRICS_TOKEN)
    secret.chmod(0o600)
    bob = daemons.node("bob", AGENTS, env={"COVENANT_HTTP_METRICS_TOKEN_FILE": str(secret)}, profiles="echo")
    introduce(alice, bob)
    for n in range(3):
        assert alice.ended(alice.delegate(f"task {n}", "echo", "bob"))["result"] == f"echo task {n}"
    until(lambda: rows(bob)["provider", "echo"], lambda row: row["completed"] == 3)
    with ScriptedPeer("pat") as pat:
        pat.known_to(bob)
        pat.say(bob, pat.offer(bob, "made-up"))
        pat.until(DelegationReject)
    before = bob.get("/usage")
    bob.kill()
    bob.start()
    assert bob.get("/usage") == before
    (refused,) = [each for each in before["usage"] if each["peer"] == "pat"]
    assert (refused["profile"], *counted(refused, "offers", "accepted", "rejected")) == ("", 1, 0, 1)
    had = rows(bob, peerId="alice", days="1")
    assert counted(had["provider", "echo"], "offers", "accepted", "completed", "tokens") == [3, 3, 3, 21]
    assert (had["provider", "echo"]["peer"], had["provider", "echo"]["peerId"]) == ("alice", alice.id)
    asked = rows(alice, role="requester")
    assert counted(asked["requester", "echo"], "offers", "accepted", "completed", "tokens") == [3, 3, 3, 21]
    assert rows(alice, role="provider") == {}
    written = [(row["state"], row["profile"], row["code"]) for row in bob.audit("delegation")]
    assert sorted(written, key=str) == sorted(
        [("accepted", "echo", None)] * 3 + [("rejected", "made-up", "no_profile")], key=str
    )
    said = bob.run("peers", "usage", "alice")
    assert (said.code, "echo" in said.out, "alice" in said.out) == (0, True, True), said
    text = call(bob.port, "GET", "/metrics", token=METRICS_TOKEN).raw.decode()
    found = {
        (sample.labels["peer"], sample.labels["outcome"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "covenant_peer_delegations_today" and sample.labels["role"] == "provider"
    }
    assert (found["alice", "completed"], found["pat", "rejected"]) == (3, 1)


def test_a_peer_has_no_more_than_its_quota_of_a_day_also_after_a_kill(daemons: PeerDaemons) -> None:
    # Whoever is refused for the day asks again so often.
    alice = daemons.node("alice", AGENTS, constants={"covenant.peers.requester.placement.PAUSE_MS_MAX": 500})
    bob = daemons.node("bob", AGENTS, offers_per_day=2)
    introduce(alice, bob)
    for n in range(2):
        assert "result" in alice.ended(alice.delegate(f"task {n}", "echo", "bob"))
    bob.kill()
    bob.start()
    third = alice.delegate("task 2", "echo", "bob", timeout=20_000)
    until(lambda: rows(bob)["provider", "echo"], lambda row: row["rejected"] >= 1)
    assert {row["code"] for row in bob.audit("delegation") if row["state"] == "rejected"} == {"rate_limited"}
    assert bob.get("/usage")["quotas"] == [
        {"peerId": alice.id, "peer": "alice", "acceptedToday": 2, "tokensToday": 14, "offersPerDay": 2}
    ]
    assert "2 of 2 offers today" in bob.run("peers", "usage").out
    alice.post(f"/delegations/{third}/cancel")
    bob.cli("peers", "change", "alice", "--offers-per-day", "100", "--tokens-per-day", "100")
    spent = alice.ended(alice.delegate("80", "spender", "bob", maxTokenBudget=500))
    assert (spent["delegation"]["maxTokenBudget"], spent["delegation"]["state"]) == (86, "completed"), spent
    last = alice.ended(alice.delegate("80", "spender", "bob", maxTokenBudget=500))
    assert (last["delegation"]["maxTokenBudget"], last["delegation"]["code"]) == (6, "budget_exceeded"), last


def test_offers_that_come_at_once_share_the_quota_of_a_day(daemons: PeerDaemons) -> None:
    bob = daemons.node("bob", AGENTS)
    with ScriptedPeer("mallory") as mallory:
        mallory.known_to(bob)
        bob.cli("peers", "change", "mallory", "--tokens-per-day", "1000", "--offers-per-day", "4")
        offers = [mallory.offer(bob, "held", task="never", max_token_budget=400) for _ in range(12)]
        envelopes = [mallory.envelope(bob, each, seq=1) for each in offers]
        with ThreadPoolExecutor(len(envelopes)) as pool:
            assert {answer.status for answer in pool.map(bob.receive, envelopes)} == {200}
        begun = [each for each in bob.delegations(role="provider") if each["state"] != "rejected"]
        assert sorted(each["maxTokenBudget"] for each in begun) == [200, 400, 400]
