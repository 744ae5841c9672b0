"""Of a task outside the scope nothing is read: neither a step nor a result leaves the archive."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from covenant.daemon.environment import now_ms
from covenant.exchange.tasks.reader import TaskReader
from covenant.ledger.contract.tasks import TaskScope
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.commands import Accept, Advance, Cancel, Take
from covenant.model.content import Text
from covenant.model.errors import NotFound
from covenant.model.ids import PublicKey
from covenant.model.task import Ending, Result, ResultStatus, fingerprint
from tests.ledger_contract.samples import ALICE, BOB, CAROL, make_task


async def test_a_foreign_task_is_refused_before_anything_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = await open_ledger(tmp_path, clock=now_ms)
    task = make_task(1, tenant="acme", origin="a2a")
    await ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))
    (leased,) = (await ledger.commit(Take(holder=BOB, recipient=BOB.pubkey, count=1))).tasks
    result = Result(task_id=task.id, status=ResultStatus.OK, content=(Text("x" * 100_000),))
    await ledger.commit(
        Advance(
            task_id=task.id,
            holder=BOB,
            lease_id=leased.lease.lease_id,
            updates=(),
            result=result,
            ending=Ending.COMPLETED,
        )
    )
    read: list[Any] = []
    history = ledger._history
    for name in ("steps", "lookup"):
        real = getattr(history, name)

        async def counted(*asked: Any, real: Any = real) -> Any:
            found = await real(*asked)
            read.extend(found if isinstance(found, Sequence) else [found] * (found is not None))
            return found

        monkeypatch.setattr(history, name, counted)
    views = TaskReader(ledger)
    nobody: PublicKey = CAROL.pubkey
    for look in (
        views.get(task.id, TaskScope(recipient=nobody)),
        views.get(task.id, TaskScope(recipient=BOB.pubkey, sender=nobody)),
        views.get(task.id, TaskScope(tenant="other")),
        ledger.commit(Cancel(task_id=task.id, recipient=nobody, by=CAROL, reason="mine")),
        ledger.commit(Cancel(task_id=task.id, viewer=nobody, by=CAROL, reason="mine")),
    ):
        with pytest.raises(NotFound):
            await look
    assert read == []
    assert (await views.get(task.id, TaskScope(recipient=BOB.pubkey, sender=ALICE.pubkey))).task == task
    assert read
    await ledger.close()
