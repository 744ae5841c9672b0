"""Two daemons and gates on both ways between them, what they have in common at the end, and how it is looked at."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from uuid import uuid4

from covenant.model.peers.delegation import Delegation, DelegationRole
from covenant.model.peers.instance import InstanceId
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.gate import Gate
from tests.e2e.peers.peer_daemons import Node, PeerDaemons, introduce, open_peer_daemons, until
from tests.engine_under_test import open_ledger
from tests.places import short_folder

STEADY: Final = '''
steady = Agent("steady", idempotent=True, on_lost="requeue")


@steady
async def do_it_again_if_need_be(turn):
    """Until there is a file of the name that it is told. Safe to repeat, and each time it begins is on record."""
    note(f"steady {turn.text}")
    turn.spend(3)
    yield turn.status(f"at {turn.text}")
    await gate(turn.text)
    yield f"done {turn.text}"
'''

PLENTY: Final[dict[str, Any]] = {
    "offers_per_min": 1_000_000,
    "messages_per_min": 1_000_000,
    "slots": 50,
    "slots_per_peer": 50,
}
"""Nobody waits for a rate."""


class Two(NamedTuple):
    """Alice asks, bob works."""

    daemons: PeerDaemons
    alice: Node
    bob: Node
    to_bob: Gate
    to_alice: Gate

    def begin(self, profile: str = "steady", **more: Any) -> tuple[str, str]:
        """A delegation: its id, and the name of what its agent waits for."""
        name = f"go-{uuid4().hex[:12]}"
        return self.alice.delegate(name, profile, "bob", **more), name

    def begun(self, name: str, profile: str = "steady") -> int:
        """How often work on it has begun."""
        return self.daemons.lines("runs").count(f"bob {profile} {name}")

    def work(self, offered: str) -> dict[str, Any]:
        """Bob's record of it, of which there is one, once there is."""

        def look() -> list[dict[str, Any]]:
            return [each for each in self.bob.delegations(role="provider") if each["offerId"] == offered]

        (found,) = until(look, bool)
        return found

    def quiet(self) -> None:
        """Nothing waits on either side."""
        for one, other in ((self.alice, "bob"), (self.bob, "alice")):
            until(lambda one=one, other=other: one.peer(other)["waiting"], lambda waiting: waiting == {})  # type: ignore[misc]

    def agreed(self, offered: str, state: str) -> dict[str, Any]:
        """It has ended so on both sides, once, with a proof that holds; nothing of it waits. What bob's task was."""
        ours = self.alice.ended(offered)["delegation"]
        assert (ours["state"], ours["proven"], ours["broken"]) == (state, True, []), ours
        work = self.work(offered)
        theirs = self.bob.stands(work["id"], "ended")["delegation"]
        assert (theirs["state"], theirs["proven"]) == (state, True), theirs
        assert theirs["tokenUsage"] == ours["tokenUsage"]
        self.quiet()
        for node, task_id in ((self.alice, offered), (self.bob, work["id"])):
            settled = [update for update in node.task(task_id)["updates"] if update["kind"] == "settled"]
            assert len(settled) == 1, (node.name, settled)
        assert len([each for each in self.alice.delegations(role="requester") if each["id"] == offered]) == 1
        return self.bob.task(work["id"])

    def compare(self) -> None:
        """Stop both, and hold what is in their ledgers against each other."""
        ids = {node.name: node.id for node in (self.alice, self.bob)}
        for node in (self.alice, self.bob):
            node.stop()
        asyncio.run(_compare(self.alice, self.bob, ids))


@contextmanager
def two(
    alice: dict[str, Any] | None = None,
    bob: dict[str, Any] | None = None,
    *,
    met: bool = True,
    agents: str = "",
    env: dict[str, str] | None = None,
) -> Iterator[Two]:
    """`alice`, `bob`: settings of `[peers]`. `met`: they know each other, through the gates. `env`: of both."""
    with short_folder() as folder, open_peer_daemons(folder) as made:
        source = AGENTS + STEADY + agents
        asking = made.node("alice", source, env=env, **(PLENTY | (alice or {})))
        working = made.node("bob", source, env=env, **(PLENTY | (bob or {})))
        with Gate(working.port) as to_bob, Gate(asking.port) as to_alice:
            if met:
                introduce(asking, working, a_calls=to_bob.url, b_calls=to_alice.url)
            yield Two(made, asking, working, to_bob, to_alice)


async def _compare(alice: Node, bob: Node, ids: dict[str, str]) -> None:
    ours = await _left(alice, DelegationRole.REQUESTER, InstanceId(ids["bob"]))
    theirs = await _left(bob, DelegationRole.PROVIDER, InstanceId(ids["alice"]))
    assert ours.keys() >= theirs.keys(), "work that nobody asked for"
    for offer_id, our in ours.items():
        their = theirs[offer_id]
        assert all((our.ended, their.ended)), (our.state, their.state)
        assert our.delegation_id in (None, their.task_id)
        assert (our.sent_seq, our.received_seq) == (their.received_seq, their.sent_seq), (
            f"{offer_id}: what one said the other has not heard"
        )


async def _left(node: Node, role: DelegationRole, peer: InstanceId) -> dict[str, Delegation]:
    """The delegations in a daemon's ledger; nothing may wait in it."""
    ledger = await open_ledger(node.home, clock=lambda: time.time_ns() // 1_000_000)
    try:
        assert not await ledger.peer_outbox(peer), f"something waits at {node.name}"
        return {each.offer_id: each for each in await ledger.delegations() if each.role is role}
    finally:
        await ledger.close()
