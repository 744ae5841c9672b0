"""Grants that were made before slips were refused stay what they were: they open, and allow what they allowed."""

from pathlib import Path

import msgspec
import pytest

from covenant.daemon.environment import now_ms
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.identity_commands import MakeGrant
from covenant.model.errors import Invalid
from covenant.model.grant import Scope, check_action, read_scope
from tests.ledger_contract.samples import ALICE, BOB, OPERATOR, make_grant


async def test_an_old_grant_with_a_misspelt_pin_or_action_opens_again(tmp_path: Path) -> None:
    ledger = await open_ledger(tmp_path, clock=now_ms)
    old = msgspec.structs.replace(make_grant(ALICE, "a2a.sned.bob@test"), scope_json='{"max_use":1}')
    await ledger.commit(MakeGrant(by=OPERATOR, grant=old))
    await ledger.close()
    ledger = await open_ledger(tmp_path, clock=now_ms)
    assert [(grant.action, grant.scope_json) for grant in await ledger.grants()] == [(old.action, old.scope_json)]
    await ledger.close()


@pytest.mark.parametrize("action", ["a2a.compact", "a2a.repair.requeue", f"a2a.send.{BOB.pubkey}", "a2a.recv.x@y.z"])
def test_an_action_that_there_is_is_taken(action: str) -> None:
    assert check_action(action) == action


@pytest.mark.parametrize(
    "action", ["", "a2a", "a2a.send.", "a2a.send.bob", "a2a.send.*", "x.y", "a2a.send.b@h c", "a" * 9_999]
)
def test_one_that_there_is_not_is_refused(action: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_action(action)
    assert refused.value.code == "invalid_action"


def test_a_scope_is_read_whole_or_not_at_all() -> None:
    assert read_scope({"version": 1, "task_id": "x", "max_uses": 2}) == (Scope(task_id="x"), 2)
    for field in ("max_use", "MAX_USES", "taskid", "note", "x" * 9_999):
        with pytest.raises(Invalid) as refused:
            read_scope({"task_id": "x", field: 1})
        assert refused.value.code == "invalid_scope"
        assert len(refused.value.message) < 300
