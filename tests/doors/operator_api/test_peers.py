"""What each operation on peers answers, over both doors of a real daemon that has a real peer."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from covenant.doors.operator_api.operation_table import BY_KIND
from covenant.doors.operator_api.peers import OPERATIONS
from covenant.model.peers.delegation_messages import DelegationOffer
from covenant.wire.ipc_frames import canonical_kind
from tests.doors.clients import Http, Ipc
from tests.doors.doors_under_test import EnrolledCaller as Caller
from tests.doors.speakers import HttpSpeaker, Told
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.peer_daemons import Node, open_peer_daemons, until
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.places import short_folder

NOBODY = "frd1_" + "a" * 40
WAIT_MS = 20_000
OF_PATH = {"peerId": "peer_id", "delegationId": "delegation_id"}


class Door:
    """Asks a daemon as its operator does, over one of its doors."""

    def __init__(self, node: Node, way: str) -> None:
        self.node = node
        self._way = way

    async def tell(self, kind: str, **fields: Any) -> Told:
        token = self.node.token
        if self._way == "ipc":
            async with Ipc(self.node.home / "sock") as connection:
                await connection.authenticate(token)
                return Told(await connection.ask(kind, **fields), None)
        path = BY_KIND[canonical_kind(kind)].path
        named = {OF_PATH[key] if f"{{{OF_PATH.get(key)}}}" in path else key: value for key, value in fields.items()}
        caller: Any = Caller(None, token, Http(self.node.port, token))  # type: ignore[arg-type]  # the token says who
        return await HttpSpeaker().tell(caller, kind, **named)

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        told = await self.tell(kind, **fields)
        assert told.answer["kind"] != "error", told
        assert told.status in (None, BY_KIND[canonical_kind(kind)].status)
        return told.answer

    async def refused(self, kind: str, **fields: Any) -> str:
        told = await self.tell(kind, **fields)
        assert told.answer["kind"] == "error", told
        assert told.answer["message"]
        code: str = told.answer["code"]
        return code


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made.node("node", AGENTS, silence_ms=200, status_interval_ms=100)


@pytest.fixture(params=["http", "ipc"])
def door(request: pytest.FixtureRequest, node: Node) -> Door:
    return Door(node, request.param)


@pytest.fixture
def peer(node: Node) -> Iterator[ScriptedPeer]:
    with ScriptedPeer(f"p{uuid4().hex[:8]}") as actor:
        actor.known_to(node)
        yield actor


async def test_peers_are_added_listed_shown_changed_and_removed(door: Door) -> None:
    with ScriptedPeer(f"p{uuid4().hex[:8]}") as other:
        added = await door.ask("add_peer", url=other.url, name=other.name)
        assert (added["kind"], added["peer"]["id"], added["peer"]["trustLevel"]) == ("peer", other.id, "verified")
        listed = await door.ask("list_peers", trustLevel="verified", limit=100)
        assert (listed["kind"], listed["id"], listed["name"]) == ("peers", door.node.id, "node")
        assert other.id in [each["id"] for each in listed["peers"]]
        shown = await door.ask("show_peer", peerId=other.name)
        assert shown["peer"]["publicKey"] == other.identity.key
        changed = await door.ask("change_peer", peerId=other.id, denied=True, limits={"offersPerMin": 3})
        assert (changed["peer"]["denied"], changed["peer"]["limits"]) == (True, {"offersPerMin": 3})
        trusted = await door.ask("trust_peer", peerId=other.name, trustLevel="trusted")
        assert trusted["peer"]["trustLevel"] == "trusted"
        await door.ask("change_peer", peerId=other.id, denied=False)
        verified = await door.ask("verify_peer", peerId=other.name)
        assert (verified["kind"], verified["peer"]["trustLevel"]) == ("peer", "trusted")
        revoked = await door.ask("revoke_peer_tokens", peerId=other.name)
        assert revoked == {"kind": "peer_tokens_revoked", "id": other.id, "revoked": 0}
        assert await door.refused("succeed_peer", peerId=other.name, newId=NOBODY) == "identity_changed"
        removed = await door.ask("remove_peer", peerId=other.name)
        assert removed == {"kind": "peer_removed", "id": other.id, "name": other.name}


async def test_what_there_is_can_be_asked_for(door: Door, peer: ScriptedPeer) -> None:
    theirs = await door.ask("peer_capabilities", peerId=peer.name)
    assert (theirs["kind"], theirs["peer"]) == ("peer_capabilities", peer.name)
    assert [each["name"] for each in theirs["capabilities"]["profiles"]] == ["researcher"]
    assert (await door.ask("peer_capabilities"))["peer"] is None
    config = await door.ask("peer_config")
    assert (config["kind"], config["id"], config["config"]["silence_ms"]) == ("peer_config", door.node.id, 200)
    rotated = await door.ask("rotate_purpose_keys")
    assert (rotated["kind"], [each["purpose"] for each in rotated["keys"]]) == (
        "purpose_keys_rotated",
        ["envelopes", "proofs", "tokens"],
    )
    found = await door.ask("discover_peers", timeoutMs=0)
    assert (found["kind"], found["discovered"]) == ("peers_discovered", [])


async def test_a_delegation_can_be_made_followed_and_proven(door: Door, peer: ScriptedPeer) -> None:
    begun = await door.ask("delegate", task="find it", profile="researcher", peerId=peer.name)
    assert (begun["kind"], begun["peerId"], begun["remote"]) == ("delegated", peer.id, True)
    made = begun["delegationId"]
    offer = peer.until(DelegationOffer, lambda it: it.offer_id == made)
    peer.accept(door.node, offer)
    peer.say(door.node, peer.result(offer, door.node.id))
    door.node.ended(made)
    shown = await door.ask("show_delegation", delegationId=made)
    assert (shown["kind"], shown["result"], shown["delegation"]["proven"]) == ("delegation", "done", True)
    assert await door.ask("show_delegation", delegationId=made[:8]) == shown
    assert (await door.ask("delegation_tree", delegationId=made[:8]))["tree"]["task_id"] == made
    assert await door.refused("show_delegation", delegationId="zz") == "unknown_delegation"
    listed = await door.ask("list_delegations", peerId=peer.name[:-1], role="requester")
    assert ([each["id"] for each in listed["delegations"]], listed["total"]) == ([made], 1)
    tree = await door.ask("delegation_tree", delegationId=made)
    assert (tree["kind"], tree["tree"]["provider"], tree["tree"]["status"]) == ("delegation_tree", peer.id, "completed")
    proof = await door.ask("delegation_proof", delegationId=made)
    assert (proof["kind"], proof["proof"]["provider"]) == ("delegation_proof", peer.id)
    messages = await door.ask("list_peer_messages", peerId=peer.name, type="delegation_result")
    assert (messages["kind"], [each["offerId"] for each in messages["messages"]]) == ("peer_messages", [made])
    used = await door.ask("peer_usage", peerId=peer.name, role="requester", profile="researcher", days=1)
    assert (used["kind"], used["total"], used["quotas"]) == ("peer_usage", 1, [])
    assert [(each["peer"], each["offers"], each["completed"]) for each in used["usage"]] == [(peer.name, 1, 1)]


async def test_a_look_at_a_delegation_waits_for_the_next_move_or_for_the_outcome(
    door: Door, peer: ScriptedPeer
) -> None:
    made = (await door.ask("delegate", task="find it", profile="researcher", peerId=peer.name))["delegationId"]
    offer = await asyncio.to_thread(peer.until, DelegationOffer, lambda it: it.offer_id == made)
    before = await door.ask("show_delegation", delegationId=made, waitMs=1)
    shown = before["delegation"]
    assert (shown["state"], before.get("result")) == ("offered", None)
    since_ms = max(shown["movedAtMs"], shown["heardAtMs"])
    moves = door.ask("show_delegation", delegationId=made, waitMs=WAIT_MS, sinceMs=since_ms)
    ends = door.ask("show_delegation", delegationId=made, waitMs=WAIT_MS)
    async with asyncio.timeout(WAIT_MS / 2_000):
        moved, ended = asyncio.create_task(moves), asyncio.create_task(ends)
        await asyncio.to_thread(peer.accept, door.node, offer)
        assert (await moved)["delegation"]["movedAtMs"] > since_ms
        assert not ended.done()
        await asyncio.to_thread(peer.say, door.node, peer.result(offer, door.node.id))
        assert (await ended)["result"] == "done"
    assert (await door.ask("show_delegation", delegationId=made, waitMs=WAIT_MS))["result"] == "done"
    assert await door.refused("show_delegation", delegationId=made, waitMs=10**9) == "invalid_wait"


async def test_a_lost_delegation_can_be_offered_again_given_up_or_cancelled(door: Door, peer: ScriptedPeer) -> None:
    made = (await door.ask("delegate", task="?", profile="researcher", peerId=peer.name))["delegationId"]
    door.node.stands(made, "lost")
    again = await door.ask("offer_again", delegationId=made)
    assert (again["kind"], again["delegation"]["state"]) == ("delegation", "offered")
    door.node.stands(made, "lost")
    assert await door.refused("force_delegation", delegationId=made, reason=" ") == "invalid_request"
    given_up = await door.ask("force_delegation", delegationId=made, reason="gone")
    assert (given_up["delegation"]["state"], given_up["delegation"]["code"]) == ("failed", "provider_lost")
    door.node.stands(made, "failed")  # and so has its task ended
    assert await door.refused("cancel_delegation", delegationId=made) == "already_ended"
    other = (await door.ask("delegate", task="?", profile="researcher", peerId=peer.name))["delegationId"]
    until(lambda: door.node.delegations(peerId=peer.name), lambda found: other in [each["id"] for each in found])
    cancelled = await door.ask("cancel_delegation", delegationId=other, reason="no longer")
    assert cancelled["delegation"]["state"] in ("cancelling", "cancelled")


@pytest.mark.parametrize("kind", [each.kind for each in OPERATIONS if "{" in each.path])
async def test_what_is_unknown_is_refused(door: Door, kind: str) -> None:
    fields: dict[str, Any] = {"trust_peer": {"trustLevel": "peer"}, "succeed_peer": {"newId": NOBODY}}.get(kind, {})
    if kind == "force_delegation":
        fields = {"reason": "x"}
    of_peer = "{peer_id}" in BY_KIND[canonical_kind(kind)].path
    named = {"peerId": NOBODY} if of_peer else {"delegationId": str(uuid4())}
    assert await door.refused(kind, **named, **fields) in (
        ("unknown_peer",) if of_peer else ("unknown_delegation", "no_proof")
    )


def test_every_operation_is_asked_for_on_this_page_by_its_kind() -> None:
    page = Path(__file__).read_text(encoding="utf-8")
    assert [each.kind for each in OPERATIONS if f'"{each.kind}"' not in page] == []
