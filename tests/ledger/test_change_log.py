"""The log of recent changes is bounded, whoever made them."""

from __future__ import annotations

from covenant.ledger import change_log
from covenant.ledger.change_log import ChangeLog
from covenant.model.ids import TaskId


def test_changes_by_other_nodes_that_nobody_takes_are_bounded() -> None:
    log = ChangeLog(0)
    log.begin()
    for number in range(2 * change_log.RECORDS_MAX):
        log.note_remote((), (), (TaskId(f"task-{number}"),), 0, audited=False)
    changes = log.take()
    assert not changes.complete
    assert len(changes.pushes) <= change_log.RECORDS_MAX
    assert log.take().complete
