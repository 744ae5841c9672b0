"""A provider that has another identity while a task is offered to it, or while a delegation is moved: neither fails."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from covenant.ledger.machine.peer_commands import DelegationChanges, SucceedPeer
from covenant.model.peers.delegation import RUNNING
from covenant.peers import message_redaction
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.peers.requester import offers
from covenant.seal.identity import sign_change
from covenant.seal.keys import new_private_key
from tests.ledger_contract.samples import OPERATOR
from tests.peers.peers_under_test import peer_under_test, said, two_peers, worker
from tests.peers.transport_under_test import Keys


async def work(turn: Any) -> str:
    return "done"


@pytest.mark.parametrize("learns", ["while the offer is made", "as it is asked"])
async def test_a_task_goes_to_the_new_identity_of_a_peer_that_was_chosen_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learns: str
) -> None:
    redact, before = message_redaction.redact_aside, Keys()
    async with peer_under_test(tmp_path / "rita") as rita, AsyncExitStack() as there:

        async def change() -> None:
            paul = rita.directory.find("paul")
            await there.aclose()
            after = Keys(port=before.port)
            after.change = sign_change(before.private_key, after.private_key, rita.clock())
            anew = await there.enter_async_context(peer_under_test(tmp_path / "anew", worker(work), keys=after))
            await anew.knows(rita)
            if learns == "while the offer is made":
                await rita.directory.refresh(paul)

        async def redact_late(message: Any, *given: Any) -> Any:
            monkeypatch.setattr(offers, "redact_aside", redact)
            await change()
            return await redact(message, *given)

        paul = await there.enter_async_context(peer_under_test(tmp_path / "paul", worker(work), keys=before))
        await paul.knows(rita)
        await rita.knows(paul)
        if learns == "while the offer is made":
            monkeypatch.setattr(offers, "redact_aside", redact_late)
        else:
            await change()
        ended = await rita.ended(await rita.delegate(paul))
        assert said(ended) == "done"
        assert rita.directory.find("paul").ids == (rita.directory.find("paul").id, paul.id)


async def test_a_delegation_that_was_read_before_its_peer_had_another_identity_moves_all_the_same(
    tmp_path: Path,
) -> None:
    async def wait(turn: Any) -> Any:
        yield turn.need_input("which colour?")

    async with two_peers(tmp_path, worker(wait)) as (rita, paul):
        task_id = await rita.delegate(paul)
        await rita.until_delegation(task_id, lambda found: found.question is not None)
        read = await rita.delegation(task_id)
        keys = InstanceKeys(new_private_key(), (), lambda _: None).bundle(rita.clock())
        await rita.ledger.commit(SucceedPeer(by=OPERATOR, old=paul.id, keys_shown=keys, vouched=True, former=()))
        moved = await rita.requester.commit(read, changes=DelegationChanges(asked=7))
        assert (moved.delegation.peer, moved.delegation.asked, moved.delegation.state) == (keys.id, 7, RUNNING)
