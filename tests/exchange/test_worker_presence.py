"""Who serves a worker agent, as far as a daemon can know."""

import pytest

from covenant.exchange.worker_presence import QUIET_MS, REMEMBERED_MAX, WorkerPresence
from covenant.ledger.embedded.open import memory_ledger
from covenant.ledger.machine.identity_commands import Enroll
from covenant.model.ids import AgentId, PublicKey
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.samples import OPERATOR, agent, make_identity

WORKER = agent("helper@default")


@pytest.mark.parametrize("shared", [False, True])
async def test_a_worker_that_has_not_asked_for_a_while_is_said_to_be_away_where_one_can_know(shared: bool) -> None:
    clock = FakeClock()
    ledger = await memory_ledger(clock=clock)
    presence = WorkerPresence(ledger, clock, shared=shared)
    assert "no worker is enrolled" in presence.absence(WORKER)
    await ledger.commit(Enroll(by=OPERATOR, identity=make_identity(WORKER)))
    assert presence.absence(WORKER) == ""
    clock.advance(QUIET_MS)
    assert ("none has asked for tasks in the last 60 seconds" in presence.absence(WORKER)) is not shared
    presence.note(WORKER)
    clock.advance(QUIET_MS - 1)
    assert presence.absence(WORKER) == ""
    await ledger.close()


async def test_what_is_remembered_of_those_who_ask_is_bounded() -> None:
    clock = FakeClock()
    ledger = await memory_ledger(clock=clock)
    await ledger.commit(Enroll(by=OPERATOR, identity=make_identity(WORKER)))
    presence = WorkerPresence(ledger, clock)
    clock.advance(QUIET_MS)
    presence.note(WORKER)
    for number in range(REMEMBERED_MAX):
        presence.note(AgentId("other", PublicKey(str(number))))
    assert presence.absence(WORKER) != ""
    await ledger.close()
