"""Providers whose ledger was restored: what they ask again, and how their reports count."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import pytest

from covenant.ledger.machine.commands import Continue
from covenant.model.content import Text
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import Delegation, ReceivedEnvelope
from covenant.model.peers.delegation_messages import DelegationAccept, DelegationMessage, StatusReport
from covenant.model.task_event import MessageUpdate
from covenant.model.task_view import TaskState
from covenant.peers.transport.inbox import IncomingMessage
from covenant.wire.peers import type_of
from tests.ledger_contract.samples import ALICE
from tests.peers.peers_under_test import PeerUnderTest, peer_under_test, said, worker
from tests.peers.transport_under_test import listening

RESTORED: Final = "restored-1"


async def ask_twice(turn: Any) -> Any:
    if turn.turn < 3:
        yield turn.need_input(f"question {turn.turn}?")
        return
    yield f"heard {turn.text}"


@asynccontextmanager
async def asked_once(home: Path) -> AsyncIterator[tuple[PeerUnderTest, PeerUnderTest, TaskId]]:
    """Rita was asked something by paul. Nothing more is delivered to paul, until he listens again."""
    async with (
        peer_under_test(home / "rita") as rita,
        peer_under_test(home / "paul", worker(ask_twice), listens=False) as paul,
    ):
        async with listening(cast("Any", paul)):
            await rita.knows(paul)
            await paul.knows(rita)
            task_id = await rita.delegate(paul)
            await rita.seen(task_id, lambda view: view.state is TaskState.INPUT_REQUIRED)
            await rita.until_addressees(lambda waiting: not waiting)
        yield rita, paul, task_id


async def answer(rita: PeerUnderTest, task_id: TaskId, text: str) -> None:
    message = MessageUpdate(role="user", parts=(Text(text),), message_id=text)
    await rita.ledger.commit(Continue(task_id=task_id, message=message, message_id=text, by=ALICE))


async def hears_more(rita: PeerUnderTest, task_id: TaskId, reports: int = 2) -> Delegation:
    """Once paul has reported so often after now: the last report was made after the first one was heard."""
    heard = (await rita.delegation(task_id)).received_seq
    await rita.until_delegation(task_id, lambda found: found.received_seq >= heard + reports)
    return await rita.delegation(task_id)


async def test_an_answer_that_is_on_its_way_to_a_restored_provider_is_not_asked_for_again(tmp_path: Path) -> None:
    async with asked_once(tmp_path) as (rita, paul, task_id):
        await answer(rita, task_id, "first answer")
        await rita.until_delegation(task_id, lambda found: found.answered)
        paul.context.epoch = RESTORED
        await rita.until_delegation(task_id, lambda found: found.offered_in == (None, RESTORED))
        assert (await hears_more(rita, task_id)).question is None, "paul asks the same, and has no answer yet"
        async with listening(cast("Any", paul)):
            view = await rita.seen(task_id, lambda view: view.state is TaskState.INPUT_REQUIRED)
            assert said(view) == "question 2?"
            await answer(rita, task_id, "second answer")
            assert said(await rita.ended(task_id)) == "heard second answer"


@pytest.mark.parametrize("accepts_first", [False, True])
async def test_the_reports_of_a_restored_provider_count_although_it_has_forgotten_its_last_ones(
    tmp_path: Path, *, accepts_first: bool
) -> None:
    async with asked_once(tmp_path) as (rita, paul, task_id):
        await paul.provider.stop()
        await paul.until_addressees(lambda waiting: not waiting)
        known = rita.ledger.peer(paul.id)
        before = await rita.delegation(task_id)
        assert known is not None
        assert before.delegation_id is not None
        assert before.status_seq > 0
        forgotten = StatusReport(
            offer_id=before.offer_id, delegation_id=before.delegation_id, seq=1, status="running", message="at it again"
        )
        accept = DelegationAccept(
            offer_id=before.offer_id,
            delegation_id=before.delegation_id,
            max_token_budget=before.budget,
            timeout=before.timeout_ms,
        )
        messages: tuple[DelegationMessage, ...] = (accept, forgotten) if accepts_first else (forgotten,)
        key = (await rita.delegation(task_id)).key
        for seq, message in enumerate(messages, 1):
            envelope = ReceivedEnvelope(
                sender=paul.id,
                jti=f"restored {seq}",
                typ=type_of(message),
                until_ms=rita.clock() + 60_000,
                seq=seq,
                epoch=RESTORED,
            )
            await rita.requester.receive(IncomingMessage(known, envelope, message, key))
        after = await rita.delegation(task_id)
        assert (after.message, after.question, after.status_seq) == ("at it again", None, 1)
