"""A daemon that drains takes no offer of a peer; the peer offers again, and the next start takes it."""

from typing import Final

from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.peer_daemons import introduce, open_peer_daemons, until
from tests.places import short_folder

SOON: Final = {"covenant.peers.provider.offer_admission.BUSY_RETRY_MS": 300}


def test_an_offer_to_a_draining_daemon_is_refused_as_busy_and_taken_after_its_next_start() -> None:
    with short_folder() as folder, open_peer_daemons(folder) as daemons:
        alice, bob = daemons.node("alice", AGENTS), daemons.node("bob", AGENTS, constants=SOON)
        introduce(alice, bob)
        held = alice.delegate("go-drain", "held", "bob")
        alice.stands(held, "running")
        drained = bob.call("POST", "/v1/admin/drain", {"timeout_ms": 600_000}).body
        assert (drained["draining"], drained["running"]) == (True, 1)
        offered = alice.delegate("meanwhile", "echo", "bob")

        def refused() -> list[str]:
            messages = alice.get("/messages?limit=100")["messages"]
            return [each["type"] for each in messages if each.get("offerId", "").startswith(offered[:8])]

        until(refused, lambda types: "delegation_reject" in types)
        assert "bob echo meanwhile" not in daemons.lines("runs")
        daemons.touch("go-drain")
        until(lambda: bob.runs, lambda runs: not runs)
        bob.stop()
        bob.again()
        # Its result may have waited in the outbox for the next start.
        assert alice.ended(held)["result"] == "ended"
        assert alice.ended(offered)["result"] == "echo meanwhile"
        assert daemons.lines("runs").count("bob echo meanwhile") == 1
        assert daemons.lines("runs").count("bob held go-drain") == 1
