"""The operator's operations on tasks: show, find, count, logs, frames, pushes and repair."""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final
from urllib.parse import urlsplit

import msgspec

from covenant.doors.operator_api.mailbox import LIMIT
from covenant.doors.operator_api.operation import (
    PAGE_BYTES_MAX,
    AnyApiOperation,
    ApiAnswer,
    ApiOperation,
    Services,
    expand_ids,
    fill,
    fit,
    page_limit,
    size_of,
)
from covenant.doors.waits import Pause
from covenant.exchange import push as pushes
from covenant.exchange import task_search
from covenant.exchange.access.principals import Principal, require_operator
from covenant.exchange.frame_log import LoggedFrame
from covenant.exchange.id_prefixes import find_lease_id
from covenant.exchange.repair_service import BulkReport, repair_task, repair_tasks, retry_stale
from covenant.exchange.task_logs import TASK_LINES_MAX, LogLine
from covenant.exchange.tasks.reader import fold_ended
from covenant.ledger.contract.task_query import FoundTask, TaskCounts
from covenant.ledger.contract.tasks import TaskDetail, TreeNode
from covenant.ledger.machine.decisions.context import unknown_task
from covenant.model.ids import TaskId, parse_task_id
from covenant.model.peers.instance import InstanceId
from covenant.model.push import Push
from covenant.model.question import PersonDecision
from covenant.model.retry_policy import RepairOutcome, RetryReport
from covenant.model.task import Result, Task
from covenant.model.tenants import host_of
from covenant.wire.mailbox import (
    AnswerRequest,
    EmptyRequest,
    FindRequest,
    RecentRequest,
    RepairTask,
    RepairTasks,
    Request,
    RetryStaleRequest,
    SignalRequest,
    TaskRequest,
    Whole,
    WrappedPolicy,
    WrappedRepair,
)

LOG_LINES: Final = 200
PUSH_LIMIT: Final = 20
PUSH_LIMIT_MAX: Final = 1_000


class Tasks(ApiAnswer, frozen=True, kw_only=True, tag="a2a_tasks"):
    """`truncated`: there were more tasks than one answer may hold."""

    tasks: tuple[Task, ...]
    truncated: bool = False


class Results(ApiAnswer, frozen=True, kw_only=True, tag="a2a_results"):
    results: tuple[Result, ...]
    truncated: bool = False


class ShowTaskRequest(TaskRequest, frozen=True, kw_only=True):
    """`after`: the generation that the caller has seen. The answer has the first updates after it; with `wait_ms`, it
    comes when there is one."""

    after: Whole | None = None
    wait_ms: Whole | None = None


class TaskShown(ApiAnswer, TaskDetail, frozen=True, kw_only=True, tag="a2a_task", omit_defaults=True):
    """`truncated`: there are later updates than these. Ask again, `after` the last of these."""

    truncated: bool = False


class TreeRequest(TaskRequest, frozen=True, kw_only=True):
    """`fold`: branches that have ended are shown without the tasks below them."""

    fold: bool | None = None


class TreeShown(ApiAnswer, frozen=True, kw_only=True, tag="a2a_tree", omit_defaults=True):
    """`peers`: for the operator and viewers, the names of the known peers in the tree, by their ids."""

    tree: TreeNode
    peers: dict[str, str] = msgspec.field(default_factory=dict)


class Repaired(ApiAnswer, frozen=True, kw_only=True, tag="a2a_repaired"):
    outcome: RepairOutcome


class AnsweredTask(ApiAnswer, frozen=True, kw_only=True, tag="a2a_answered", omit_defaults=True):
    task_id: TaskId
    duplicate: bool = False


class SignaledTask(ApiAnswer, frozen=True, kw_only=True, tag="a2a_signaled", omit_defaults=True):
    task_id: TaskId
    duplicate: bool = False


class AutoRetried(ApiAnswer, frozen=True, kw_only=True, tag="a2a_auto_retried"):
    report: RetryReport


class CompactedAnswer(ApiAnswer, frozen=True, kw_only=True, tag="a2a_compacted"):
    dropped: int


async def recent_a2a_tasks(services: Services, caller: Principal, request: RecentRequest) -> Tasks:
    found = await services.exchange.recent_tasks(caller, page_limit(request.limit, LIMIT))
    tasks = fit(found)
    return Tasks(tasks=tasks, truncated=len(tasks) < len(found))


async def recent_a2a_results(services: Services, caller: Principal, request: RecentRequest) -> Results:
    found = await services.exchange.recent_results(caller, page_limit(request.limit, LIMIT))
    results = fit(found)
    return Results(results=results, truncated=len(results) < len(found))


async def show_a2a_task(services: Services, caller: Principal, request: ShowTaskRequest) -> TaskShown:
    shown = await services.exchange.show(caller, request.parsed_task_id(), request.after)
    updates = fit(shown.updates, PAGE_BYTES_MAX - size_of((shown.task, shown.leases, shown.result)))
    truncated = len(updates) < len(shown.updates)
    if request.after is not None and updates:
        truncated = updates[-1].generation < shown.generation
    return fill(TaskShown, shown, updates=updates, truncated=truncated)


async def show_waiting(services: Services, caller: Principal, request: ShowTaskRequest, pause: Pause) -> TaskShown:
    """Waits for an update after the generation that the caller has seen, or for the end of the task."""
    clock, give_up_ms = services.ledger.clock, services.give_up_ms(request.wait_ms)
    with services.ledger.watch(request.parsed_task_id()) as watch:
        while True:
            shown = await show_a2a_task(services, caller, request)
            remaining_ms = give_up_ms - clock.monotonic_ms()
            if shown.generation > (request.after or 0) or shown.result is not None or remaining_ms <= 0 or watch.cut:
                return shown
            await pause.until(watch.next(remaining_ms / 1000))


async def a2a_tree(services: Services, caller: Principal, request: TreeRequest) -> TreeShown:
    tree = await services.exchange.tree(caller, request.parsed_task_id())
    sees_all = caller.operator and caller.tenant is None  # A tenant's session reads its own trees as the operator.
    peers = _peer_names(services, tree) if sees_all else {}
    return TreeShown(tree=fold_ended(tree) if request.fold else tree, peers=peers)


def _peer_names(services: Services, root: TreeNode) -> dict[str, str]:
    found, unvisited = dict[str, str](), [root]
    while unvisited:
        node = unvisited.pop()
        unvisited += node.children
        peer = services.ledger.peer(InstanceId(node.provider)) if isinstance(node.provider, str) else None
        if peer is not None:
            found[peer.id] = peer.name
    return found


async def answer_a2a_task(services: Services, caller: Principal, request: AnswerRequest) -> AnsweredTask:
    task_id = request.parsed_task_id()
    answer: str | PersonDecision = request.text
    if request.approved is not None:
        answer = PersonDecision(approved=request.approved, reason=request.text, id=request.question_id)
    answered = await services.exchange.answer(caller, task_id, answer, request.answer_id)
    return AnsweredTask(task_id=task_id, duplicate=answered.duplicate)


async def signal_a2a_task(services: Services, caller: Principal, request: SignalRequest) -> SignaledTask:
    task_id = request.parsed_task_id()
    signaled = await services.exchange.signal(caller, task_id, request.name, request.value, request.signal_id)
    return SignaledTask(task_id=task_id, duplicate=signaled.duplicate)


async def repair_a2a_task(services: Services, caller: Principal, request: RepairTask) -> Repaired:
    task_id, lease_id = request.parsed_task_id(), request.command.lease_id
    if lease_id:
        lease_id = await find_lease_id(services.ledger, caller, task_id, lease_id)
    command = request.parsed_command(lease_id)
    return Repaired(outcome=await repair_task(services.ledger, caller, task_id, command, request.reason))


async def retry_a2a_stale(services: Services, caller: Principal, request: RetryStaleRequest) -> AutoRetried:
    return AutoRetried(report=await retry_stale(services.ledger, caller, request.policy()))


async def compact_a2a(services: Services, caller: Principal, _: EmptyRequest) -> CompactedAnswer:
    return CompactedAnswer(dropped=await services.exchange.compact(caller))


class TaskLogRequest(TaskRequest, frozen=True, kw_only=True):
    """`after`: the number of the last line that the caller has; without it, the answer has the newest lines."""

    after: Whole | None = None
    limit: Whole | None = None
    wait_ms: Whole | None = None


class TaskLogShown(ApiAnswer, frozen=True, kw_only=True, tag="a2a_task_log"):
    """The lines, the oldest first. `next` is the `after` of the next request.

    `ended`: the task has ended, so that nothing more is written for it. `left_out`: older lines that are not kept.
    """

    task_id: TaskId
    lines: tuple[LogLine, ...]
    next: int
    ended: bool
    left_out: int = 0


async def a2a_task_log(services: Services, caller: Principal, request: TaskLogRequest) -> TaskLogShown:
    task_id = request.parsed_task_id()
    await _check_log_reader(services, caller, task_id)
    limit = page_limit(request.limit, LOG_LINES, most=TASK_LINES_MAX)
    entry = await services.ledger.entry(task_id)
    ended = entry is None or entry.finished
    found = await services.task_logs.read(task_id, request.after, limit, ended=ended)
    lines = fit([line if caller.operator else _without_fields(line) for line in found.lines], PAGE_BYTES_MAX)
    last = lines[-1].no if lines else request.after or 0
    return TaskLogShown(
        task_id=task_id,
        lines=lines,
        next=last,
        # Lines that do not fit, or are over the limit, come with the next request.
        ended=ended and (request.after is None or len(found.lines) < limit) and len(lines) == len(found.lines),
        left_out=found.left_out,
    )


async def log_waiting(services: Services, caller: Principal, request: TaskLogRequest, pause: Pause) -> TaskLogShown:
    clock, give_up_ms = services.ledger.clock, services.give_up_ms(request.wait_ms)
    while True:
        answer = await a2a_task_log(services, caller, request)
        remaining_ms = give_up_ms - clock.monotonic_ms()
        if answer.lines or answer.ended or remaining_ms <= 0:
            return answer
        await pause.until(_line_or_end(services, answer, remaining_ms))


async def _line_or_end(services: Services, answer: TaskLogShown, remaining_ms: int) -> None:
    waits = [
        asyncio.ensure_future(services.task_logs.wait(answer.task_id, answer.next, remaining_ms)),
        asyncio.ensure_future(services.ledger.finished(answer.task_id, remaining_ms)),
    ]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _check_log_reader(services: Services, caller: Principal, task_id: TaskId) -> None:
    """Allows the operator and callers of the task's tenant. Others get the refusal of an unknown task."""
    parties = await services.ledger.parties(task_id)
    acts_for = caller.tenant or host_of(caller.agent.display)
    if parties is None or not (caller.operator or parties.tenant == acts_for):
        raise unknown_task(task_id)


def _without_fields(line: LogLine) -> LogLine:
    """A line as a tenant sees it: the daemon's events are shown by their names alone."""
    return msgspec.structs.replace(line, fields={}, traceback="") if line.writer == "daemon" else line


class FramesShown(ApiAnswer, frozen=True, kw_only=True, tag="a2a_frames"):
    """The oldest first. `on`: whether the daemon keeps frames. `left_out`: frames of the task that were dropped.

    `lost`: calls of any task that came faster than they could be kept.
    """

    task_id: TaskId
    on: bool
    frames: tuple[LoggedFrame, ...]
    left_out: int = 0
    lost: int = 0


async def a2a_task_frames(services: Services, caller: Principal, request: TaskRequest) -> FramesShown:
    await require_operator(services.ledger, caller, "the frames of a task")
    task_id = request.parsed_task_id()
    if await services.ledger.parties(task_id) is None:
        raise unknown_task(task_id)
    if services.frames is None:
        return FramesShown(task_id=task_id, on=False, frames=())
    kept = await services.frames.read(task_id)
    # The newest frames are kept: an operator asks about the last moments.
    frames = tuple(reversed(fit(kept.frames[::-1])))
    left_out = kept.left_out + len(kept.frames) - len(frames)
    return FramesShown(task_id=task_id, on=True, frames=frames, left_out=left_out, lost=kept.lost)


class ListPushesRequest(Request, frozen=True, kw_only=True):
    """`dead`: only those that were given up; `task_id`: only those of this task."""

    ids: ClassVar[tuple[str, ...]] = ("task_id",)
    limit: Whole | None = None
    dead: bool | None = None
    task_id: str | None = None


class RetryPushRequest(Request, frozen=True, kw_only=True):
    ids: ClassVar[tuple[str, ...]] = ("task_id", "push_id")
    task_id: str
    push_id: str


class PushShown(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Without its secrets. `delivered` is the last generation that its receiver has; `attempts` have failed since."""

    task_id: TaskId
    push_id: str
    agent: str
    host: str
    made_at_ms: int
    moved_at_ms: int
    delivered: int
    attempts: int
    state: str
    next_ms: int | None = None
    failure: str | None = None
    dead_at_ms: int | None = None


class PushList(ApiAnswer, frozen=True, kw_only=True, tag="a2a_pushes"):
    """Configurations that were given up come first. `count` and `dead` count all; `pushes` has as many as fit."""

    count: int
    dead: int
    pushes: tuple[PushShown, ...]


class PushRetried(ApiAnswer, frozen=True, kw_only=True, tag="a2a_push_retried"):
    push: PushShown


async def a2a_pushes(services: Services, caller: Principal, request: ListPushesRequest) -> PushList:
    limit = page_limit(request.limit, PUSH_LIMIT, most=PUSH_LIMIT_MAX)
    task_id = parse_task_id(request.task_id) if request.task_id is not None else None
    found = await pushes.outbox(services.ledger, caller, dead=bool(request.dead), task_id=task_id)
    dead = sum(push.dead_at_ms is not None for push in found)
    return PushList(count=len(found), dead=dead, pushes=fit([_shown(push) for push in found[:limit]]))


async def retry_a2a_push(services: Services, caller: Principal, request: RetryPushRequest) -> PushRetried:
    retried = await pushes.retry(services.ledger, caller, parse_task_id(request.task_id), request.push_id)
    return PushRetried(push=_shown(retried))


def _shown(push: Push) -> PushShown:
    return fill(
        PushShown,
        push,
        push_id=push.id,
        agent=push.recipient.display,
        host=urlsplit(push.config.url).netloc,
        state="dead" if push.dead_at_ms is not None else "failing" if push.attempts else "live",
        next_ms=push.next_ms or None,
    )


class Found(ApiAnswer, frozen=True, kw_only=True, tag="a2a_found"):
    """`next` is null on the last page. `total` is null if it was not asked for; `at_least`: there may be more."""

    tasks: tuple[FoundTask, ...]
    next: str | None
    total: int | None
    at_least: bool = False


class Counted(ApiAnswer, TaskCounts, frozen=True, kw_only=True, tag="a2a_counts", omit_defaults=False):
    """Every field is there, also where it is 0."""


class RepairedTasks(ApiAnswer, BulkReport, frozen=True, kw_only=True, tag="a2a_bulk"):
    """`more`: the filter matches more tasks than the limit."""


async def find_a2a_tasks(services: Services, caller: Principal, request: FindRequest) -> Found:
    if caller.operator:
        return fill(Found, await task_search.find(services.ledger, caller, request))
    owner, catalogue = caller.tenant or caller.agent.pubkey, services.catalogue
    opened = msgspec.structs.replace(request, after=catalogue.cursors.open(owner, request.after or ""))
    page = await task_search.find(services.ledger, caller, opened)
    return fill(Found, page, next=catalogue.cursors.seal(owner, page.next) if page.next else None)


async def count_a2a_tasks(services: Services, caller: Principal, _: EmptyRequest) -> Counted:
    return fill(Counted, await task_search.count(services.ledger, caller))


async def repair_a2a_tasks(services: Services, caller: Principal, request: RepairTasks) -> RepairedTasks:
    filters = await expand_ids(services, caller, request.filter)
    request = msgspec.structs.replace(request, filter=filters)
    return fill(RepairedTasks, await repair_tasks(services.ledger, services.exchange, caller, request))


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("GET", "/a2a/tasks/recent", recent_a2a_tasks, "Look at queued tasks without taking them"),
    ApiOperation("GET", "/a2a/results/recent", recent_a2a_results, "Look at undrained results without taking them"),
    ApiOperation("GET", "/a2a/tasks/{task_id}/show", show_a2a_task, "Everything known of one task", wait=show_waiting),
    ApiOperation("GET", "/a2a/tasks/{task_id}/tree", a2a_tree, "The tasks under a root, by parent"),
    ApiOperation(
        "POST",
        "/a2a/tasks/{task_id}/answer",
        answer_a2a_task,
        "Answer a task that waits for its sender",
        for_tenants=True,
    ),
    ApiOperation(
        "POST",
        "/a2a/tasks/{task_id}/signal",
        signal_a2a_task,
        "Signal a task, for a step that waits",
        for_tenants=True,
    ),
    ApiOperation(
        "POST", "/a2a/repair", repair_a2a_task, "Requeue a leased task, or settle it with an error", frame=WrappedRepair
    ),
    ApiOperation(
        "POST", "/a2a/retry-stale", retry_a2a_stale, "One pass of the retry gate over stale leases", frame=WrappedPolicy
    ),
    ApiOperation(
        "GET",
        "/a2a/tasks/{task_id}/log",
        a2a_task_log,
        "The log of a task: lines of its agent and of the daemon",
        wait=log_waiting,
        for_tenants=True,
    ),
    ApiOperation("GET", "/a2a/tasks/{task_id}/frames", a2a_task_frames, "The requests and answers of a task"),
    ApiOperation("POST", "/a2a/compact", compact_a2a, "Merge resolved history into a snapshot"),
    ApiOperation(
        "GET", "/a2a/pushes", a2a_pushes, "Push configurations with the state of their deliveries; those given up first"
    ),
    ApiOperation(
        "POST", "/a2a/pushes/retry", retry_a2a_push, "Try the deliveries of a push configuration again, at once"
    ),
    ApiOperation(
        "GET",
        "/a2a/tasks",
        find_a2a_tasks,
        "Find tasks, live and finished, by filters",
        for_tenants=True,
    ),
    ApiOperation(
        "GET",
        "/a2a/tasks/counts",
        count_a2a_tasks,
        "How many tasks there are, by lane and by agent",
        for_tenants=True,
    ),
    ApiOperation(
        "POST",
        "/a2a/repair/bulk",
        repair_a2a_tasks,
        "Requeue, end or cancel all tasks that match a filter; a dry run unless `dry_run` is false",
    ),
)
