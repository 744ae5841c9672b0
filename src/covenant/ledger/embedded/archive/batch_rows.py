"""What records come to as rows of the archive. Pure: lines in, rows out; what it must know of before, it is told.

Events are applied one by one, in order, to the rows of their tasks; a task that passes through in one batch is written
once, as it is in the end. What each event does is in `moves`.

A task's number here is its place. What tasks refer to, contexts and parents, are texts in no order: an index over them
would be written to a page of its own for each task. So a reference is a number, too, that grows with time: that of the
task whose id it is, or else that of the first task that named it. Their last bit tells the two apart, because a task
may be the first to name a context and be one itself. Most tasks are their own context: that needs no look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from covenant.ledger.embedded.archive.row_updates import (
    AuditedRow,
    AuditPurgedRow,
    Begins,
    OfTask,
    RememberedRequest,
    ResultReturnedRow,
    Rows,
    TaskRowUpdate,
    decode_audit_row,
    decode_lines,
    decode_request,
    text_of,
)
from covenant.model.errors import CovenantError

PLACES_IN_RECORD: Final = 1 << 20


class Contradiction(CovenantError):
    """A record that cannot follow what the archive holds."""


def context_name(text: str) -> bytes:
    """Under which the ids have a context that is no task's id."""
    return b"@" + text.encode()


def parent_name(text: str) -> bytes:
    return b">" + text.encode()


class Known(NamedTuple):
    """What the archive had before, of what was asked for."""

    tasks: Mapping[str, TaskRowUpdate]
    contexts: Mapping[str, int]
    parents: Mapping[str, int]


class Batch:
    """Records that are to be applied: first what they need to know, then what they come to."""

    def __init__(self, data: bytes, after_seq: int, offset: int = 0) -> None:
        self._offset = offset
        self._lines = [line for line in decode_lines(data) if line.seq > after_seq]
        self._begun: dict[str, RememberedRequest] = {}
        self.moved: dict[str, None] = {}
        """Ids of tasks that were sent before."""
        self.contexts: dict[str, None] = {}
        self.parents: dict[str, None] = {}
        """What tasks refer to, and may have a number already."""
        self._returned: dict[str, RememberedRequest] = {}
        begun, moved = self._begun, self.moved
        for line in self._lines:
            for event in line.events:
                if isinstance(event, ResultReturnedRow):
                    self._returned[event.task_id] = self._begin(event)
                    if event.task_id not in begun:
                        moved[event.task_id] = None
                elif isinstance(event, Begins):
                    begun[event.task_id] = self._begin(event)
                elif isinstance(event, OfTask) and event.task_id not in begun:
                    moved[event.task_id] = None

    def _begin(self, event: Begins) -> RememberedRequest:
        task = decode_request(event.task)
        if task.tenant and task.context_id != event.task_id:
            self.contexts[task.context_id or ""] = None
        if task.parent is not None:
            self.parents[task.parent] = None
        return task

    def rows(self, known: Known) -> Rows:
        rows = Rows()
        before = {task_id: row.state for task_id, row in known.tasks.items()}
        for line in self._lines:
            rows.place = line.seq * PLACES_IN_RECORD + self._offset
            rows.ts_ms = line.ts_ms
            for event in line.events:
                if isinstance(event, Begins) and not isinstance(event, ResultReturnedRow):
                    self._add(event, self._begun[event.task_id], rows, known)
                elif isinstance(event, OfTask):
                    row = rows.tasks.get(event.task_id) or self._moving(event, rows, known)
                    event.move(row, rows)
                    row.updated_at = line.ts_ms
                elif isinstance(event, AuditedRow):
                    at_ms = decode_audit_row(event.row).timestamp_ms
                    rows.audit.append((event.index, at_ms, event.issuer, event.chain_hash, event.row))
                elif isinstance(event, AuditPurgedRow):
                    rows.purged.append((event.through, event.anchor_hash))
                rows.place += 1
        for row in rows.tasks.values():
            row.state = row.in_words_of_a2a()
            if row.tenant_id:
                _count(rows.counts, row, before.get(row.task_id))
        return rows

    def _moving(self, event: OfTask, rows: Rows, known: Known) -> TaskRowUpdate:
        task_id = event.task_id
        row = known.tasks.get(task_id)
        if row is not None:
            rows.tasks[task_id] = row
        elif isinstance(event, ResultReturnedRow):
            self._add(event, self._returned[task_id], rows, known)
        else:
            raise Contradiction(f"the task {task_id} moved, and was never sent")
        return rows.tasks[task_id]

    def _add(self, event: Begins, task: RememberedRequest, rows: Rows, known: Known) -> None:
        task_id = event.task_id
        place, ts_ms = rows.place, rows.ts_ms
        if task_id in rows.ids:
            raise Contradiction(f"the task {task_id} was sent twice")
        rows.ids[task_id] = place
        context_id, display = task.context_id or "", task.recipient.display
        rows.tasks[task_id] = row = TaskRowUpdate(
            task_no=place,
            task_id=task_id,
            tenant_id=task.tenant or "",
            agent_id=display[: max(0, display.find("@"))],
            context_id=context_id,
            context_no=_reference(rows, known.contexts, context_name, context_id) if task.tenant else None,
            parent=task.parent,
            parent_no=None if task.parent is None else _reference(rows, known.parents, parent_name, task.parent),
            created_at=ts_ms,
            updated_at=ts_ms,
            ledger_state=event.state,
            state="",
            digest=event.digest,
            sender_display=task.sender.display,
            sender_pubkey=task.sender.pubkey,
            recipient_display=display,
            recipient_pubkey=task.recipient.pubkey,
            task_kind=task.task_kind,
            deadline_ms=task.deadline_ms,
            origin=task.origin,
            place=place,
        )
        rows.requests.append((place, text_of(event.task)))
        rows.updated(row, 1, "submitted", None)


def _reference(rows: Rows, known: Mapping[str, int], named: Callable[[str], bytes], text: str) -> int:
    """The number of what the task that is just being added refers to."""
    number = rows.ids.get(text)
    if number is not None:
        return 2 * number
    return known.get(text) or 2 * rows.names.setdefault(named(text), rows.place) + 1


def _count(counts: dict[tuple[str, str], int], row: TaskRowUpdate, before: str | None) -> None:
    if row.state != before:
        key = (row.recipient_pubkey, row.state)
        counts[key] = counts.get(key, 0) + 1
        if before is not None:
            key = (row.recipient_pubkey, before)
            counts[key] = counts.get(key, 0) - 1
