"""What a tenant's worker sends while it works on a task is part of that task's chain, also by mail."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covenant.daemon.environment import now_ms
from covenant.exchange.access.identities import operator_agent
from covenant.exchange.access.principals import Principal
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.mailbox import MailboxExchange
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.commands import Accept
from covenant.ledger.machine.identity_commands import MakeGrant
from covenant.model.errors import Refusal
from covenant.model.grant import send_actions
from covenant.model.task import Task, check_chain, fingerprint
from covenant.seal.keys import new_private_key
from tests.ledger_contract.samples import ALICE, BOB, CAROL, OPERATOR, make_grant, make_task, task_id

KEY = new_private_key()


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[EmbeddedLedger]:
    opened = await open_ledger(tmp_path, clock=now_ms)
    yield opened
    await opened.close()


async def sent(ledger: EmbeddedLedger, task: Task, **limits: Any) -> Task:
    """By its sender, by mail; as it was kept."""
    exchange = MailboxExchange(ledger, OPERATOR, **limits)
    await ledger.commit(MakeGrant(by=OPERATOR, grant=make_grant(task.sender, send_actions(task.recipient)[0])))
    await exchange.accept(Principal(task.sender, operator=False, token_sha256="t"), task)
    entry = await ledger.entry(task.id)
    assert entry is not None
    return entry.task


async def begun(ledger: EmbeddedLedger, task: Task) -> None:
    await ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))


async def test_a_workers_mail_goes_on_with_the_chain_and_within_the_time_of_what_it_works_on(
    ledger: EmbeddedLedger,
) -> None:
    soon_ms = now_ms() + 60_000
    await begun(ledger, make_task(1, tenant="acme", origin="a2a", depth=1, chain=("x",), deadline_ms=soon_ms))
    child = make_task(2, sender=BOB, recipient=CAROL, parent=task_id(1), deadline_ms=soon_ms + 60_000)
    kept = await sent(ledger, child)
    assert (kept.depth, kept.chain, kept.tenant, kept.deadline_ms) == (2, ("x", BOB.pubkey), "acme", soon_ms)
    # Said again, it is the same request, whatever became of what it is part of.
    exchange = MailboxExchange(ledger, OPERATOR)
    again = await exchange.accept(Principal(BOB, operator=False, token_sha256="t"), child)
    assert again.duplicate


async def test_a_workers_mail_that_is_too_deep_or_comes_back_is_refused(ledger: EmbeddedLedger) -> None:
    await begun(ledger, make_task(1, tenant="acme", origin="a2a", depth=3, chain=(CAROL.pubkey,)))
    with pytest.raises(Refusal, match="4 deep"):
        await sent(ledger, make_task(2, sender=BOB, recipient=ALICE, parent=task_id(1)))
    with pytest.raises(Refusal, match="is in this chain of calls already"):
        await sent(ledger, make_task(3, sender=BOB, recipient=CAROL, parent=task_id(1)), depth_max=9)


async def test_mail_between_those_that_are_no_tenants_agents_is_nobodys_chain(ledger: EmbeddedLedger) -> None:
    await begun(ledger, make_task(1))
    plain = make_task(2, sender=BOB, recipient=ALICE, parent=task_id(1))
    assert await sent(ledger, plain) == plain
    await begun(ledger, make_task(3, tenant="acme", origin="a2a"))
    foreign = make_task(4, sender=CAROL, recipient=ALICE, parent=task_id(3))
    assert await sent(ledger, foreign) == foreign
    unknown = make_task(5, sender=BOB, recipient=ALICE, parent=task_id(99))
    assert await sent(ledger, unknown) == unknown


async def test_identities_in_a_chain_are_keys_and_tell_no_names(ledger: EmbeddedLedger) -> None:
    catalogue = Catalogue(ledger, KEY)
    me = catalogue.identity("acme", "writer")
    with pytest.raises(Refusal) as caught:
        check_chain(1, (me.pubkey,), me, 3)
    assert caught.value.code == "loop_detected"
    assert "acme" not in me.pubkey
    assert catalogue.identity("acme", "writer") == me
    other = Catalogue(ledger, new_private_key()).identity("acme", "writer")
    check_chain(3, (other.pubkey, operator_agent("o@x", KEY).pubkey), me, 3)
