"""Several daemons on one PostgreSQL are one instance to its peers, as provider and requester, whichever is killed."""

import asyncio
import json
import shutil
import signal
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any, Final, NamedTuple

import asyncpg
import msgspec
import pytest

from covenant.daemon.home import KEY_NAME, TOKEN_NAME
from covenant.daemon.wiring.peers import SHARDS
from covenant.model.peers.delegation_messages import DelegationOffer, DelegationReject
from covenant.model.peers.instance import KeyCertificate
from covenant.wire.peers import decode_received
from tests.cli.daemons import covenant
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.faults import PLENTY, STEADY
from tests.e2e.peers.peer_daemons import Node, PeerDaemons, introduce, open_peer_daemons, until
from tests.e2e.peers.proxy import Proxy, Way
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.engine_under_test import database_of, dump, restore_dump
from tests.matrices import first_of
from tests.places import short_folder

SOURCE: Final = AGENTS + STEADY


class Nodes(NamedTuple):
    """`one` and `two` share a ledger; `other` has its own. `door` is where the shared instance is called."""

    daemons: PeerDaemons
    one: Node
    two: Node
    other: Node
    door: Proxy
    to_other: Proxy

    @property
    def url(self) -> str:
        return database_of(self.one.home)

    def execute(self, query: str) -> list[Any]:
        async def ask() -> list[Any]:
            connection = await asyncpg.connect(self.url)
            try:
                return list(await connection.fetch(query))
            finally:
                await connection.close()

        return asyncio.run(ask())

    def serving(self) -> tuple[Node, Node]:
        """The daemon that serves the other instance, and the one that does not."""
        name = f"peers/{zlib.crc32(self.other.id.encode()) % SHARDS}"

        def look() -> list[str]:
            rows = self.execute(
                "SELECT s.name, s.node FROM singletons s JOIN nodes n "
                "ON n.node = s.node AND n.boot = s.boot AND n.lost_at_ms IS NULL"
            )
            return [row["node"] for row in rows if row["name"] == name]

        (node,) = until(look, bool)
        return (self.one, self.two) if node == "one" else (self.two, self.one)

    def shared(self) -> None:
        """Wait until both have said that they do a part of the work."""
        members = "SELECT count(*) AS n FROM singletons WHERE name LIKE 'peers@%'"
        until(lambda: self.execute(members)[0]["n"], lambda count: count == 2)

    def again(self, node: Node) -> None:
        node.start()
        self.shared()


def beside(made: PeerDaemons, node: Node, name: str, agents: str = SOURCE, **settings: int) -> Node:
    """Another daemon on the ledger of this one."""
    home = made.folder / name
    for file in (KEY_NAME, TOKEN_NAME):
        (home / file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy2(node.home / file, home / file)
    return made.node(name, agents, env={**node.env, "COVENANT_DAEMON_NODE": name}, **PLENTY | settings)


@contextmanager
def nodes(agents_of_two: str = SOURCE, **settings: int) -> Iterator[Nodes]:
    """`settings` of `[peers]`, of all of them."""
    with short_folder() as folder, open_peer_daemons(folder) as made:
        env = {
            "COVENANT_LEDGER_URL": database_of(folder / "one"),
            "COVENANT_LEDGER_DURABILITY": "os",
            "COVENANT_LEDGER_NODE_LEASE_MS": "1500",
            "COVENANT_DAEMON_NODE": "one",
        }
        one = made.node("one", SOURCE, env=env, **PLENTY | settings)
        two = beside(made, one, "two", agents_of_two, **settings)
        other = made.node("other", SOURCE, **PLENTY | settings)
        door, to_other = made.proxy(one), made.proxy(other)
        introduce(one, other, a_calls=to_other.url, b_calls=door.url)
        found = Nodes(made, one, two, other, door, to_other)
        found.shared()
        yield found


def test_a_peer_finds_one_instance_at_each_daemon_and_both_work_for_it() -> None:
    with nodes() as pair:
        assert pair.one.id == pair.two.id
        assert pair.two.peer("other")["trustLevel"] == "verified"
        for node in (pair.one, pair.two, pair.one):
            pair.door.lead_to(node.port)
            # Sealed to the keys that it has of either of them.
            offered = pair.other.delegate(f"by {node.name}", "echo", "one")
            assert pair.other.ended(offered)["result"] == f"echo by {node.name}"
            assert pair.other.delegation(offered)["delegation"]["proven"] is True
        assert sorted(line.split()[-1] for line in pair.daemons.lines("runs")) == ["one", "one", "two"]
        until(lambda: pair.other.peer("one")["waiting"], lambda waiting: waiting == {})
        for node in (pair.one, pair.two):
            until(lambda node=node: node.peer("other")["waiting"], lambda waiting: waiting == {})  # type: ignore[misc]


def test_a_requester_waits_at_one_daemon_for_the_result_that_comes_to_the_other() -> None:
    with nodes() as pair:
        for waiting, called in ((pair.one, pair.two), (pair.two, pair.one)):
            pair.door.lead_to(called.port)
            offered = waiting.delegate("find it", "researcher", "other")
            ended = waiting.ended(offered)
            assert ended["result"] == "found by other: find it"
            assert (ended["delegation"]["state"], ended["delegation"]["proven"]) == ("completed", True)
            assert called.ended(offered)["result"] == ended["result"], "read at the other one too"


def test_a_cancel_at_either_daemon_reaches_the_work_wherever_it_is_done() -> None:
    with nodes() as pair:
        for node in (pair.one, pair.two):
            offered = node.delegate(f"never-{node.name}", "held", "other")
            node.stands(offered, "running")
            other = pair.two if node is pair.one else pair.one
            other.post(f"/delegations/{offered}/cancel")
            assert node.ended(offered)["delegation"]["state"] == "cancelled"
        offered = pair.other.delegate("never", "held", "one")
        pair.other.stands(offered, "running")
        pair.door.lead_to(pair.two.port)
        pair.other.post(f"/delegations/{offered}/cancel")
        assert pair.other.ended(offered)["delegation"]["state"] == "cancelled"
        until(
            lambda: [each["state"] for each in pair.one.delegations(role="provider")],
            lambda found: found == ["cancelled"],
        )


@pytest.mark.parametrize("dies", [True, False])
def test_an_offer_for_an_agent_of_a_daemon_that_is_away_is_taken_when_it_is_back(dies: bool) -> None:
    with nodes(
        "from covenant import Agent\n\nunused = Agent('unused')\n\n\n@unused\nasync def do(turn): ...\n"
    ) as pair:
        pair.door.lead_to(pair.two.port)
        (pair.one.kill if dies else pair.one.stop)()
        until(
            lambda: [each["id"] for each in pair.two.cli("agents", "list")["agents"]],
            lambda found: "echo" not in found,
        )
        offered = pair.other.delegate("later", "echo", "one")
        # It was refused for now, and not for good.
        pair.other.stands(offered, "offering", "offered")
        until(
            lambda: [each["type"] for each in pair.other.get("/messages?limit=100")["messages"]],
            lambda types: "delegation_reject" in types,
        )
        shown = pair.other.cli("peers", "capabilities", "one", "--fresh")["capabilities"]["profiles"]
        assert "echo" in [each["name"] for each in shown], "its token names what it may use"
        pair.again(pair.one)
        assert pair.other.ended(offered)["result"] == "echo later"
        assert pair.daemons.lines("runs").count("one echo later") == 1


@pytest.mark.parametrize("lost", first_of(["request", "receipt"]))
def test_a_parcel_of_a_daemon_that_is_killed_is_delivered_by_the_other_and_done_once(lost: str) -> None:
    with nodes() as pair:
        serving, rest = pair.serving()
        pair.door.lead_to(rest.port)
        way: Way = "there" if lost == "request" else "back"
        pair.to_other.drop(way)
        offered = rest.delegate("once", "steady", "other")
        pair.to_other.until_kept(way)
        # It is begun, by the ledger. What was kept on the way may be something else, from before it.
        until(
            lambda: [json.loads(row["body"]).get("attempts", 0) for row in pair.execute("SELECT body FROM parcels")],
            lambda attempts: len(attempts) == 1 and attempts[0] >= 1,
        )
        serving.kill()
        pair.to_other.release()
        pair.to_other.cut()
        pair.daemons.wrote("runs", "other steady once")
        pair.daemons.touch("once")
        assert rest.ended(offered)["result"] == "done once"
        assert pair.daemons.lines("runs").count("other steady once") == 1
        until(lambda: pair.serving()[0].name, lambda name: name == rest.name)
        pair.again(serving)
        offered = serving.delegate("after", "echo", "other")
        assert serving.ended(offered)["result"] == "echo after"


def test_what_another_daemon_has_begun_to_send_is_cancelled_and_what_nobody_began_is_withdrawn() -> None:
    with nodes(retry_first_ms=8_000, retry_max_ms=8_000) as pair:
        _, rest = pair.serving()
        pair.to_other.refuse()

        def tried() -> dict[str, str | None]:
            """Why the last try of each offer has failed, if there was one."""
            rows = pair.execute("SELECT offer_id::text AS offer_id, body FROM parcels")
            return {row["offer_id"]: json.loads(row["body"]).get("failure") for row in rows}

        first = rest.delegate("first", "steady", "other")
        until(tried, lambda found: found.get(first))
        second = rest.delegate("second", "steady", "other")
        until(tried, lambda found: second in found)
        # After a failed try nothing is sent for a while: the second offer waits.
        for offered, state in ((second, "cancelled"), (first, "cancelling")):
            rest.post(f"/delegations/{offered}/cancel")
            rest.stands(offered, state)  # the peer may have the first one, and nothing reaches it
        assert second not in tried()
        pair.to_other.release()
        assert rest.ended(first)["delegation"]["state"] == "cancelled"
        assert not [line for line in pair.daemons.lines("runs") if "second" in line]


def test_work_for_a_peer_is_reported_by_another_daemon_when_the_one_that_did_is_killed() -> None:
    with nodes() as pair:
        serving, rest = pair.serving()
        pair.door.lead_to(rest.port)
        name, offered = _done_by(pair, rest)
        pair.other.stands(offered, "running")
        serving.kill()
        pair.daemons.touch(name)
        assert pair.other.ended(offered)["result"] == f"done {name}"
        assert pair.daemons.lines("runs").count(f"{rest.name} steady {name}") == 1


def _done_by(pair: Nodes, node: Node) -> tuple[str, str]:
    """Work for the peer that this daemon has begun, and its offer. A busy machine may have the other one begin it."""
    for name in (f"told-{number}" for number in count(1)):
        offered = pair.other.delegate(name, "steady", "one")
        (line,) = until(partial(_begun, pair, name), bool)
        if line.startswith(node.name):
            return name, offered
        pair.daemons.touch(name)
        pair.other.ended(offered)
    raise AssertionError


def _begun(pair: Nodes, name: str) -> list[str]:
    return [line for line in pair.daemons.lines("runs") if line.endswith(f"steady {name}")]


def test_what_a_daemon_that_stood_still_had_in_hand_is_done_once() -> None:
    with nodes() as pair:
        serving, rest = pair.serving()
        pair.door.lead_to(rest.port)
        asked = [rest.delegate(f"before {number}", "echo", "other") for number in range(5)]
        worked = [pair.other.delegate(f"for them {number}", "echo", "one") for number in range(5)]
        serving.daemon.process.send_signal(signal.SIGSTOP)
        asked += [rest.delegate(f"meanwhile {number}", "echo", "other") for number in range(5)]
        until(lambda: pair.serving()[0].name, lambda name: name == rest.name)
        serving.daemon.process.send_signal(signal.SIGCONT)
        assert {rest.ended(each)["delegation"]["state"] for each in asked} == {"completed"}
        assert {pair.other.ended(each)["delegation"]["state"] for each in worked} == {"completed"}
        runs = [line for line in pair.daemons.lines("runs") if line.startswith("other echo")]
        assert len(runs) == len(set(runs)) == len(asked)


def test_a_database_that_cuts_every_connection_ends_no_delegation() -> None:
    with nodes() as pair:
        cut = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )
        asked = pair.one.delegate("asked", "steady", "other")
        worked = pair.other.delegate("worked", "steady", "one")
        pair.one.stands(asked, "running")
        pair.other.stands(worked, "running")
        for _ in range(3):
            pair.execute(cut)
            # What it cut off is noticed with the next word of the peer, and with ours.
            offered = pair.other.delegate("between", "echo", "one")
            assert pair.other.ended(offered)["result"] == "echo between"
        for name in ("asked", "worked"):
            pair.daemons.touch(name)
        assert pair.one.ended(asked)["result"] == "done asked"
        assert pair.other.ended(worked)["result"] == "done worked"
        assert pair.one.ended(pair.one.delegate("after", "echo", "other"))["result"] == "echo after"
        assert sum("steady asked" in line for line in pair.daemons.lines("runs")) == 1


def test_a_peer_that_fetches_gets_everything_once_from_either_daemon() -> None:
    with nodes() as pair:
        fetcher = pair.daemons.node("fetcher", SOURCE, poll="*", poll_wait_ms=500, **PLENTY)
        fetcher.add(pair.door.url, "one")
        pair.one.post("/peers", {"id": fetcher.id, "name": "fetcher"})
        until(lambda: pair.one.peer("fetcher")["trustLevel"], lambda trust: trust != "peer")
        until(lambda: fetcher.peer("one")["trustLevel"], lambda trust: trust != "peer")
        for number, (asked, called) in enumerate(((pair.one, pair.two), (pair.two, pair.one))):
            pair.door.lead_to(called.port)
            offered = asked.delegate(f"fetched {number}", "echo", "fetcher")
            assert asked.ended(offered)["result"] == f"echo fetched {number}"
        assert pair.daemons.lines("runs").count("fetcher echo fetched 0") == 1


@pytest.mark.parametrize("side", first_of(["requester", "provider"]))
def test_a_database_that_is_restored_tells_its_peers_and_loses_no_result(side: str) -> None:
    with nodes() as pair:
        asking = pair.one if side == "requester" else pair.other
        working = "other" if side == "requester" else "one"
        offered = asking.delegate("kept", "steady", working)
        until(lambda: [line for line in pair.daemons.lines("runs") if line.endswith("steady kept")], bool)
        asking.stands(offered, "running")
        file = pair.daemons.folder / "saved"
        dump(pair.one.home, file)
        pair.daemons.touch("kept")
        assert asking.ended(offered)["result"] == "done kept"
        for number in range(3):
            assert asking.ended(asking.delegate(f"more {number}", "echo", working))["result"]
        for node in (pair.one, pair.two):
            node.kill()
        restore_dump(pair.one.home, file)
        ran = covenant("ledger", "restored", "--home", str(pair.one.home), "--ledger", pair.url)
        assert ran.code == 0, ran
        for node in (pair.one, pair.two):
            node.start()
        assert asking.ended(offered)["result"] == "done kept"
        for node in (pair.one, pair.two) if side == "requester" else (pair.other,):
            assert node.ended(node.delegate("after", "echo", working))["result"] == "echo after"


def test_a_database_that_is_put_back_without_a_word_is_noticed_by_what_a_peer_remembers() -> None:
    with nodes() as pair:
        file = pair.daemons.folder / "saved"
        dump(pair.one.home, file)
        for number in range(3):
            assert pair.one.ended(pair.one.delegate(f"more {number}", "echo", "other"))["result"]
        for node in (pair.one, pair.two):
            node.get("/capabilities?peerId=other&fresh=true")  # with it goes how far the ledger has come
            assert not node.audit("ledger_forgotten"), "the daemons are not taken for an older copy of each other"
            node.kill()
        restore_dump(pair.one.home, file)
        for node in (pair.one, pair.two):
            node.start()
        row = until(lambda: pair.one.audit("ledger_forgotten"), bool)[0]
        assert row["known"] > row["end"]


def test_an_identity_that_was_changed_at_one_daemon_is_that_of_all() -> None:
    with nodes() as pair:
        before = pair.one.id
        for node in (pair.one, pair.two):
            node.stop()
        ran = covenant("--home", str(pair.two.home), "peers", "rotate-identity")
        assert ran.code == 0, ran
        pair.two.start()
        pair.one.start()
        assert pair.one.id == pair.two.id != before
        pair.door.lead_to(pair.one.port)
        until(lambda: pair.other.peer("one")["id"], lambda found: found == pair.one.id)
        assert pair.one.ended(pair.one.delegate("after", "echo", "other"))["result"] == "echo after"


def test_keys_that_one_daemon_has_replaced_are_those_of_all() -> None:
    with nodes() as pair:

        def kept() -> str:
            (row,) = pair.execute("SELECT body FROM secrets WHERE name = 'peers.purposes'")
            body: str = row["body"]
            return body

        before = kept()
        pair.two.cli("peers", "rotate-keys", "--compromised")
        replaced = kept()
        assert replaced != before
        for node in (pair.two, pair.one, pair.two):
            # What the keys before signed is void to the peer: whoever still has them takes the new ones.
            assert node.ended(node.delegate(f"by {node.name}", "echo", "other"))["result"] == f"echo by {node.name}"
        assert kept() == replaced, "nobody made others"


def _is_about(offer: DelegationOffer, said: DelegationReject) -> bool:
    return said.offer_id == offer.offer_id


def _certificates(peer: ScriptedPeer) -> list[KeyCertificate | None]:
    return [each.header.cert for each in peer.heard]


def _says_void(certificate: KeyCertificate | None) -> bool:
    return certificate is not None and certificate.void_before_ms > 0


def test_keys_that_are_void_at_one_daemon_are_void_at_all_and_all_peers_hear_of_it() -> None:
    with nodes() as pair, ExitStack() as stack:
        peers = [stack.enter_context(ScriptedPeer(f"peer-{number}")) for number in range(4)]
        for peer in peers:
            pair.two.add(peer.url, peer.name)
            until(lambda peer=peer: pair.two.peer(peer.name)["trustLevel"], lambda trust: trust != "peer")  # type: ignore[misc]
        carol = peers[0]
        good, *offers = [carol.offer(pair.two) for _ in range(3)]
        assert carol.say(pair.one, good).status == 200
        made = pair.two.cli("peers", "rotate-keys", "--compromised")["keys"]
        keys = {each["purpose"]: each["key"] for each in made}
        for node, offer in zip((pair.one, pair.two), offers, strict=True):
            answered = decode_received(node.receive(carol.envelope(node)).raw).envelope
            assert isinstance(answered, msgspec.Raw)
            certificate = carol.open(bytes(answered)).header.cert
            assert certificate is not None
            assert certificate.key == keys["envelopes"], "each speaks under the new key at once"
            carol.say(node, offer)
            rejected = carol.until(DelegationReject, partial(_is_about, offer))
            assert rejected.code == "denied"
            assert "token_untrusted" in rejected.reason, "its key is void"
        said = [each.message for each in carol.heard if getattr(each.message, "offer_id", None) == good.offer_id]
        assert not any(isinstance(each, DelegationReject) for each in said)
        for peer in peers:
            # Whichever daemon serves it.
            until(partial(_certificates, peer), lambda found: any(map(_says_void, found)))


def test_prekeys_are_the_same_at_all_daemons_and_are_locked_in_the_database() -> None:
    with nodes() as pair:
        one, two = (node.call("GET", "/identity").body["keys"] for node in (pair.one, pair.two))
        assert [each["kid"] for each in one["prekeys"]] == [each["kid"] for each in two["prekeys"]]
        secrets = {row["name"]: row["body"] for row in pair.execute("SELECT name, body FROM secrets")}
        assert {"peers.identity", "peers.prekeys"} <= secrets.keys()
        key = (pair.one.home / "identity/instance.key").read_text().strip()
        assert all(key not in body and "privateKey" not in body for body in secrets.values())
