"""Push configurations: created, replaced, moved on and dropped. No audit row or refusal contains their secrets."""

from __future__ import annotations

import msgspec

from covenant.ledger.machine.commands import DropPush, MovePushes, PutPush, RetryPush
from covenant.ledger.machine.decisions.context import DecisionContext, find_task, known_task
from covenant.ledger.machine.events import PushDropped, PushMoved, PushPut
from covenant.ledger.machine.view import Archived
from covenant.model.a2a_requests import PushConfig
from covenant.model.errors import NotFound, OverLimit
from covenant.model.ids import AgentId, TaskId
from covenant.model.push import Push
from covenant.model.tenants import host_of

replace = msgspec.structs.replace

BUSY_RETRY_MS = 60_000


def put_push(decide: DecisionContext, command: PutPush) -> Push:
    """Creates or replaces a configuration. It gets the steps from now on; for an ended task there are none."""
    found = known_task(decide, command)
    config, known = command.config, decide.view.pushes(command.task_id)
    old = next((push for push in known if push.id == config.id), None)
    if old is None and config.id is None and command.once:
        old = next((push for push in known if replace(push.config, id=None) == config), None)
    if old is not None:
        return _put_again(decide, old, replace(config, id=old.id))
    recipient = found.recipient if isinstance(found, Archived) else found.task.recipient
    check_room(decide, command.task_id, recipient)
    if isinstance(found, Archived):
        return make_push(decide, command.task_id, found.recipient, config, delivered=0, ended=0)
    return make_push(
        decide,
        command.task_id,
        found.task.recipient,
        config,
        delivered=found.generation,
        ended=found.generation if found.finished else None,
    )


def check_room(decide: DecisionContext, task_id: TaskId, recipient: AgentId) -> None:
    view, all_most = decide.view, decide.view.limits.pushes_max
    most = view.limits.pushes_per_task_max
    if len(view.pushes(task_id)) >= most:
        raise OverLimit("too_many_pushes", f"a task may have at most {most} push configurations; delete one first")
    # One tenant may have half of them, so that others find room.
    of_tenant_most = max(min(all_most, 1), all_most // 2)
    if view.push_count() >= all_most or view.push_count_of(host_of(recipient.display)) >= of_tenant_most:
        raise OverLimit(
            "too_many_pushes",
            "too many push configurations are under way here; try again later, or follow the task by a stream",
            retry_after_ms=BUSY_RETRY_MS,
        )


def make_push(
    decide: DecisionContext,
    task_id: TaskId,
    recipient: AgentId,
    config: PushConfig,
    *,
    delivered: int,
    ended: int | None = None,
) -> Push:
    """Creates a configuration, for which there is room."""
    push = Push(
        task_id=task_id,
        recipient=recipient,
        config=config if config.id is not None else replace(config, id=decide.new_id()),
        key=decide.new_id(),
        made_at_ms=decide.now_ms,
        moved_at_ms=decide.now_ms,
        delivered=delivered,
        ended=ended,
    )
    decide.add(PushPut(push))
    return push


def _put_again(decide: DecisionContext, old: Push, config: PushConfig) -> Push:
    if old.config == config and not old.attempts and old.dead_at_ms is None:
        return old
    push = _fresh(old, decide.now_ms, config)
    decide.add(PushPut(push))
    return push


def _fresh(old: Push, now_ms: int, config: PushConfig) -> Push:
    """The replaced configuration. Steps that were not delivered yet go to the new one."""
    return replace(
        old,
        config=config,
        revision=old.revision + 1,
        moved_at_ms=now_ms,
        attempts=0,
        next_ms=0,
        failure=None,
        dead_at_ms=None,
    )


def drop_push(decide: DecisionContext, command: DropPush) -> bool:
    known_task(decide, command)
    if decide.view.push(command.task_id, command.id) is None:
        return False
    decide.add(PushDropped(command.task_id, command.id))
    return True


def move_pushes(decide: DecisionContext, command: MovePushes) -> None:
    for move in {(move.task_id, move.id): move for move in command.moves}.values():
        push = decide.view.push(move.task_id, move.id)
        if push is None or (push.key, push.revision) != (move.key, move.revision):
            continue
        if push.ended is not None and move.delivered >= push.ended:
            decide.add(PushDropped(move.task_id, move.id))
        else:
            decide.add(PushMoved(move))


def retry_push(decide: DecisionContext, command: RetryPush) -> Push:
    found = find_task(decide, command)
    push = decide.view.push(command.task_id, command.id) if found is not None else None
    if push is None:
        raise unknown_push(command.id)
    fresh = _fresh(push, decide.now_ms, push.config)
    decide.add(PushPut(fresh))
    decide.audit(
        command.by,
        {
            "type": "push_retried",
            "task_id": command.task_id,
            "push_id": push.id,
            "delivered": push.delivered,
            "dead": push.dead_at_ms is not None,
        },
    )
    return fresh


def unknown_push(push_id: str) -> NotFound:
    return NotFound("unknown_push", f"no push configuration {push_id[:80]!r} for this task")
