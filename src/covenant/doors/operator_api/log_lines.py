"""The log of a task: what the agent wrote while it worked on it, and what the daemon noted of it."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from covenant.doors.operator_api.operation import (
    PAGE_BYTES_MAX,
    AnyApiOperation,
    ApiAnswer,
    ApiOperation,
    Services,
    fit,
    page_limit,
)
from covenant.doors.waits import Pause
from covenant.exchange.access.principals import Principal
from covenant.exchange.delegation import tenant_of
from covenant.exchange.task_logs import TASK_LINES_MAX, LogLine
from covenant.exchange.tasks.reader import unknown_task
from covenant.model.ids import TaskId
from covenant.wire.mailbox import TaskRequest, Whole

LINES: Final = 200


class TaskLogRequest(TaskRequest, frozen=True, kw_only=True):
    """`after`: the number of the last line that the caller has; without it, the newest lines are told."""

    after: Whole | None = None
    limit: Whole | None = None
    wait_ms: Whole | None = None


class TaskLogShown(ApiAnswer, frozen=True, kw_only=True, tag="a2a_task_log"):
    """The lines, the oldest first. `next` is what to ask for the ones after them with.

    `ended`: the task has ended, so that nothing more is written for it. `left_out`: older lines that are not kept.
    """

    task_id: TaskId
    lines: tuple[LogLine, ...]
    next: int
    ended: bool
    left_out: int = 0


async def a2a_task_log(services: Services, caller: Principal, request: TaskLogRequest) -> TaskLogShown:
    task_id = request.parsed_task_id()
    await _check_reader(services, caller, task_id)
    limit = page_limit(request.limit, LINES, most=TASK_LINES_MAX)
    entry = await services.ledger.entry(task_id)
    ended = entry is None or entry.finished
    found = await services.task_logs.read(task_id, request.after, limit, ended=ended)
    lines = fit([line if caller.operator else _without_inner(line) for line in found.lines], PAGE_BYTES_MAX)
    last = lines[-1].no if lines else request.after or 0
    return TaskLogShown(
        task_id=task_id,
        lines=lines,
        next=last,
        # What does not fit, or is over the limit, is told first.
        ended=ended and (request.after is None or len(found.lines) < limit) and len(lines) == len(found.lines),
        left_out=found.left_out,
    )


async def log_waiting(services: Services, caller: Principal, request: TaskLogRequest, pause: Pause) -> TaskLogShown:
    clock, give_up_ms = services.ledger.clock, services.give_up_ms(request.wait_ms)
    while True:
        answer = await a2a_task_log(services, caller, request)
        left_ms = give_up_ms - clock.monotonic_ms()
        if answer.lines or answer.ended or left_ms <= 0:
            return answer
        await pause.until(_line_or_end(services, answer, left_ms))


async def _line_or_end(services: Services, answer: TaskLogShown, left_ms: int) -> None:
    waits = [
        asyncio.ensure_future(services.task_logs.wait(answer.task_id, answer.next, left_ms)),
        asyncio.ensure_future(services.ledger.finished(answer.task_id, left_ms)),
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _check_reader(services: Services, caller: Principal, task_id: TaskId) -> None:
    """The operator, and whoever acts for the task's tenant. To others there is no such task."""
    parties = await services.ledger.parties(task_id)
    if parties is None or not (caller.operator or parties.tenant == tenant_of(caller.agent)):
        raise unknown_task(task_id)


def _without_inner(line: LogLine) -> LogLine:
    """For a tenant: what its agent wrote, and of the daemon's events only what happened."""
    return msgspec.structs.replace(line, fields={}, traceback="") if line.writer == "daemon" else line


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation(
        "GET",
        "/a2a/tasks/{task_id}/log",
        a2a_task_log,
        "What was logged for a task: by its agent, and by the daemon",
        wait=log_waiting,
    ),
)
