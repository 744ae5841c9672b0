"""The mailbox's verbs."""

import gc
from collections import OrderedDict

import pytest

from covenant.daemon.environment import now_ms
from covenant.exchange.access.identities import operator_agent
from covenant.exchange.access.principals import Principal
from covenant.exchange.mailbox import MailboxExchange
from covenant.ledger.embedded.open import memory_ledger
from covenant.model.errors import NotFound
from covenant.seal.keys import new_private_key
from tests.ledger_contract.samples import task_id

ANSWERS = 100


def caches() -> int:
    gc.collect()
    return sum(type(each) is OrderedDict for each in gc.get_objects())


async def test_an_answer_that_comes_too_late_leaves_no_cache_in_memory() -> None:
    ledger, operator = await memory_ledger(clock=now_ms), operator_agent("operator@test", new_private_key())
    mailbox = MailboxExchange(ledger, operator)
    principal = Principal(operator, operator=True, token_sha256="operator's hash")
    before = caches()
    for _ in range(ANSWERS):
        with pytest.raises(NotFound):
            await mailbox.answer(principal, task_id(1), "yes")
    assert caches() < before + ANSWERS
    await ledger.close()
