"""A task's history in time, ready to draw: a bar for each wait, attempt, call, push, and use of a model or a tool.

The bars are derived from the answers of operations: the task's leases and updates, its calls, and its pushes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from starlette.types import Scope

from covenant.agents.runtime.turn_output import NEXT_ATTEMPT
from covenant.dashboard.page_endpoint import query_of
from covenant.dashboard.session_operations import run_for
from covenant.dashboard.sessions import Role, UiSession
from covenant.dashboard.time_scale import Fold, PlacedSpan, Stretch, Tick, TimeScale
from covenant.doors.operator_api.operation import Services
from covenant.doors.operator_api.tasks import PushShown, TaskShown, TreeShown
from covenant.ledger.contract.task_query import FoundTask
from covenant.ledger.contract.tasks import LeaseRecord, TreeNode, UpdateRecord
from covenant.model.question import QUESTION
from covenant.model.task import Cause
from covenant.model.task_event import Wait
from covenant.model.usage import read_usage

BARS_MAX: Final = 400
BANDS_MAX: Final = 100
CALLS_MAX: Final = 100
LABEL_MAX: Final = 200
PAUSE_MS: Final = 2_000
"""Output pieces that are further apart become two bars."""
TOOL: Final = "x-arbiter.tool_call"
TOOK: Final = "x-arbiter.took_ms"
ENDED: Final = ("done", "result_pending")
REPAIRED: Final = "a2a_repair_applied"
REPAIRS_MAX: Final = 200
RISKS: Final = {"idempotent": "said to be idempotent", "operator_accepted": "accepting that it may run twice"}
WAITS: Final = {"queued": "In the queue", "parked": "Waits for its sender", "following": "Follows another task"}
"""The kinds of bars that are mere waiting."""


class Bar(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """`ends_ms` is None while the bar goes on. `detail` is text for people."""

    kind: str
    label: str
    begins_ms: int
    ends_ms: int | None
    detail: str = ""
    bad: bool = False
    task_id: str = ""
    remote: bool = False
    until_ms: int | None = None
    """When the wait ends by itself."""


class BarDrawn(Bar, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    x: float
    w: float


class EndedAttempt(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An attempt that was repaired, released or lost: its outcome, the reason, and the issuer."""

    lease_id: str
    what: str
    why: str | None
    who: str
    at_ms: int | None


class Timeline(msgspec.Struct, frozen=True, kw_only=True, tag="ui_timeline", tag_field="kind"):
    """`bands` are the turns. Places are from 0 to 1. `truncated`: the task has more bars than are drawn."""

    begins_ms: int
    now_ms: int
    bars: tuple[BarDrawn, ...]
    bands: tuple[PlacedSpan, ...]
    folds: tuple[Fold, ...]
    ticks: tuple[Tick, ...]
    truncated: bool
    repairs: tuple[EndedAttempt, ...] = ()


async def timeline_page(services: Services, session: UiSession, scope: Scope) -> Timeline:
    """The timeline of a task that the session may see."""

    async def run(kind: str, **fields: Any) -> Any:
        return await run_for(session, kind, services, fields)

    shown: TaskShown = await run("show_a2a_task", task_id=query_of(scope).get("task_id", ""))
    task_id = shown.task.id
    found = await run("find_a2a_tasks", parent=task_id, limit=CALLS_MAX, ascending=True)
    calls = found.tasks
    # Only the tree has a remote call's name and provider.
    elsewhere = any(call.remote for call in calls)
    tree_shown: TreeShown | None = await run("a2a_tree", task_id=task_id) if elsewhere else None
    pushes = () if session.role is Role.TENANT else (await run("a2a_pushes", task_id=task_id)).pushes
    bars = sorted(
        [*task_bars(shown), *_call_bars(calls, tree_shown), *map(_push_bar, pushes)], key=lambda bar: bar.begins_ms
    )
    drawn = draw(shown, bars, services.ledger.now_ms(), more=found.next is not None)
    ended = [lease for lease in shown.leases if lease.reason or lease.outcome not in (None, "settled")]
    rows = dict[str, Any]()
    if session.role is not Role.TENANT and any(lease.reason for lease in ended):
        audit = await run("recent_audit", type=REPAIRED, since_ms=shown.created_at_ms, limit=REPAIRS_MAX)
        rows = {row["kind"]["lease_id"]: row for row in map(msgspec.json.decode, audit.events)}
    repairs = tuple([_ended_attempt(lease, rows.get(lease.lease_id)) for lease in ended])
    return msgspec.structs.replace(drawn, repairs=repairs)


def draw(shown: TaskShown, bars: Sequence[Bar], now_ms: int, *, more: bool = False) -> Timeline:
    """`bars` are in the order of their beginnings; `more`: there are further bars."""
    cut = bool(shown.updates) and shown.updates[0].generation > 1  # The oldest are left out of an answer.
    truncated = more or shown.truncated or cut or len(bars) > BARS_MAX
    bars = bars[:BARS_MAX]
    begins_ms, settled_ms = shown.created_at_ms, _settled_ms(shown)
    over_ms = now_ms if settled_ms is None else settled_ms
    last_ms = max([over_ms, begins_ms + 1, *(now_ms if bar.ends_ms is None else bar.ends_ms for bar in bars)])

    def stretch(bar: Bar) -> Stretch:
        return Stretch(bar.begins_ms, last_ms if bar.ends_ms is None else bar.ends_ms)

    busy = [stretch(bar) for bar in bars if bar.kind not in WAITS]
    scale = TimeScale(Stretch(begins_ms, last_ms), map(stretch, bars), busy)
    turns = [begins_ms, *_moments(shown, "continued")[: BANDS_MAX - 1], last_ms if settled_ms is None else settled_ms]
    return Timeline(
        begins_ms=begins_ms,
        now_ms=now_ms,
        bars=tuple([_placed(bar, scale.span(stretch(bar))) for bar in bars]),
        bands=tuple([scale.span(Stretch(*turn)) for turn in pairwise(turns)]),
        folds=scale.folds(),
        ticks=scale.ticks(),
        truncated=truncated,
    )


def _placed(bar: Bar, span: PlacedSpan) -> BarDrawn:
    return BarDrawn(**msgspec.structs.asdict(bar), x=span.x, w=span.w)


def task_bars(shown: TaskShown) -> Iterator[Bar]:
    """The bars of the task itself: its waits, its attempts, and the work done in them."""
    ends_ms, tools = _settled_ms(shown), [use for use in map(_tool_bar, shown.updates) if use is not None]
    yield from _wait_bars(shown, ends_ms)
    for lease in shown.leases:
        yield from _attempt_bars(lease, shown)
    yield from _model_bars(shown, tools, ends_ms)
    yield from tools
    yield from _output_bars(shown.updates)


def _moments(shown: TaskShown, kind: str) -> list[int]:
    return sorted(step.ts_ms for step in shown.updates if step.kind == kind)


def _settled_ms(shown: TaskShown) -> int | None:
    return next(iter(_moments(shown, "settled")), None)


def _wait_bars(shown: TaskShown, ends_ms: int | None) -> Iterator[Bar]:
    """The waits before, between and after leases. In each gap the wait that parked the task comes before the queue."""
    waits_now = shown.state in ("queued", "following")
    wait = "following" if shown.state == "following" or shown.cause == Cause.LEADER else "queued"
    parks = deque(_parked_bars(shown))
    since_ms, before = shown.created_at_ms, None
    for lease in (*shown.leases, None):
        until_ms = ends_ms if lease is None else lease.leased_at_ms
        queued_ms: int | None = since_ms
        # One record ends the lease and parks the task, so the wait begins at the lease's end.
        recorded = before is not None and parks and parks[0].begins_ms <= since_ms
        park = parks.popleft() if recorded else _unrecorded_wait(shown, before, since_ms)
        if park is not None:
            queued_ms = park.ends_ms
            if queued_ms is None or (until_ms is not None and queued_ms > until_ms):
                queued_ms = until_ms
            yield msgspec.structs.replace(park, ends_ms=queued_ms)
        if queued_ms is not None and (waits_now if until_ms is None else until_ms > queued_ms):
            yield _wait_bar(wait, queued_ms, until_ms)
        after_ms = until_ms if lease is None or lease.ended_at_ms is None else lease.ended_at_ms
        if after_ms is None:
            return
        since_ms, before = after_ms, lease


def _parked_bars(shown: TaskShown) -> Iterator[Bar]:
    """The waits that updates record. A question ends with the next message or with the step that has its answer; a
    waiting step ends with the next step."""
    park: Bar | None = None
    ends: tuple[str, ...] = ()
    for step in shown.updates:
        if park is not None and step.kind in ends:
            yield msgspec.structs.replace(park, ends_ms=step.ts_ms)
            park = None
        if step.kind == "parked":
            question = _metadata(step, QUESTION)
            park = msgspec.structs.replace(_wait_bar("parked", step.ts_ms, None), until_ms=question.get("until_ms"))
            ends = ("continued", "step")
        elif step.kind == "step" and (wait := (step.body or {}).get("wait")) is not None:
            park, ends = _suspended_bar(msgspec.convert(wait, Wait), step.ts_ms), ("step",)
    if park is not None:
        yield park


def _suspended_bar(wait: Wait, begins_ms: int) -> Bar:
    label = "Sleeps" if wait.signal is None else f"Waits for the signal {wait.signal}"
    return Bar(kind="parked", label=label, begins_ms=begins_ms, ends_ms=None, until_ms=wait.ends_at_ms(begins_ms))


def _unrecorded_wait(shown: TaskShown, before: LeaseRecord | None, since_ms: int) -> Bar | None:
    """The waits that no update records: for the task's `not_before_ms`, and the pause before another attempt."""
    begin_ms = shown.task.not_before_ms
    if before is None and begin_ms is not None and begin_ms > since_ms:
        label, ends_ms = "Waits for its time", None if shown.state == "parked" else begin_ms
        return Bar(kind="parked", label=label, begins_ms=since_ms, ends_ms=ends_ms, until_ms=begin_ms)
    if before is not None and before.outcome == "suspended":
        ends_ms = shown.updated_at_ms if shown.state == "queued" else None
        announcements = (_metadata(step, NEXT_ATTEMPT) for step in shown.updates if step.ts_ms == since_ms)
        until_ms = next((about["at_ms"] for about in announcements if about.get("attempt") == before.attempt + 1), None)
        label = f"Waits for attempt {before.attempt + 1}"
        return Bar(kind="parked", label=label, begins_ms=since_ms, ends_ms=ends_ms, until_ms=until_ms)
    return None


def _metadata(step: UpdateRecord, key: str) -> dict[str, Any]:
    """The object under this key of a status's metadata; empty without one."""
    about = ((step.body or {}).get("metadata") or {}).get(key)
    return about if isinstance(about, dict) else {}


def _wait_bar(kind: str, begins_ms: int, ends_ms: int | None) -> Bar:
    return Bar(kind=kind, label=WAITS[kind], begins_ms=begins_ms, ends_ms=ends_ms)


def _attempt_bars(lease: LeaseRecord, shown: TaskShown) -> Iterator[Bar]:
    lost = lease.outcome is None and shown.holder_lost
    yield Bar(
        kind="attempt",
        label=f"Attempt {lease.attempt}",
        begins_ms=lease.leased_at_ms,
        ends_ms=lease.ended_at_ms,
        detail=_join("lost" if lost else lease.outcome, lease.reason),
        bad=lost,
    )
    ended_ms = lease.ended_at_ms
    if lease.outcome == "requeued" and lease.reason and ended_ms is not None:
        yield Bar(kind="repair", label="requeued", begins_ms=ended_ms, ends_ms=ended_ms, detail=lease.reason)


def _tool_bar(step: UpdateRecord) -> Bar | None:
    """The bar of a tool's use that this update reports, if it does. A use is reported when it has ended."""
    if step.kind != "artifact":
        return None
    for part in (step.body or {}).get("parts") or ():
        notes = part.get("metadata") or {}
        if notes.get(TOOL):
            took, value = notes.get(TOOK), part.get("value")
            use = value if isinstance(value, dict) else {}
            return Bar(
                kind="tool",
                label=str(use.get("tool", "tool"))[:LABEL_MAX],
                begins_ms=step.ts_ms - (min(max(took, 0), step.ts_ms) if isinstance(took, int) else 0),
                ends_ms=step.ts_ms,
                detail="failed" if use.get("ok") is False else "",
                bad=use.get("ok") is False,
            )
    return None


def _model_bars(shown: TaskShown, tools: Sequence[Bar], ends_ms: int | None) -> Iterator[Bar]:
    """The model's bars: from an attempt's beginning or a tool's end to the next use of a tool or the attempt's end."""
    notes = (shown.result.metadata if shown.result is not None else None) or {}
    requests = read_usage(notes.get("usage")).get("requests")
    if not requests:
        return
    tool_ends = [use.ends_ms or 0 for use in tools]
    for lease in shown.leases:
        since_ms, until_ms = lease.leased_at_ms, lease.ended_at_ms or ends_ms
        for use in tools[bisect_left(tool_ends, since_ms) :]:
            ended_ms = use.ends_ms or 0
            if until_ms is not None and ended_ms > until_ms:
                break
            if use.begins_ms > since_ms:
                yield Bar(kind="model", label="Model", begins_ms=since_ms, ends_ms=use.begins_ms)
            since_ms = max(since_ms, ended_ms)
        if until_ms is None or until_ms > since_ms:
            detail = f"{_plural(requests, 'request')} in all"
            yield Bar(kind="model", label="Model", begins_ms=since_ms, ends_ms=until_ms, detail=detail)


def _output_bars(updates: Iterable[UpdateRecord]) -> Iterator[Bar]:
    """Pieces of output that came one after another are one bar."""
    run = list[int]()
    for step in updates:
        if step.kind == "artifact" and _tool_bar(step) is not None:
            continue
        if run and (step.kind != "artifact" or step.ts_ms - run[-1] > PAUSE_MS):
            yield _output_bar(run)
            run = []
        if step.kind == "artifact":
            run.append(step.ts_ms)
    if run:
        yield _output_bar(run)


def _output_bar(run: Sequence[int]) -> Bar:
    detail = _plural(len(run), "piece")
    return Bar(kind="chunks", label="Output", begins_ms=run[0], ends_ms=run[-1], detail=detail)


def _call_bars(calls: Iterable[FoundTask], tree_shown: TreeShown | None) -> Iterator[Bar]:
    """`tree_shown` is the tree of the task, if some of its calls are done elsewhere."""
    nodes, peers = (tree_shown.tree.children, tree_shown.peers) if tree_shown is not None else ((), {})
    elsewhere = {node.task_id: node for node in nodes if node.remote is True}
    for call in calls:
        node = elsewhere.get(call.task_id)
        yield Bar(
            kind="child",
            label=_short_name(call.agent) if node is None else _callee(node, peers),
            begins_ms=call.created_at_ms,
            ends_ms=call.updated_at_ms if call.state in ENDED else None,
            detail=_join(call.outcome, call.intent),
            bad=call.outcome == "failed",
            task_id=call.task_id,
            remote=call.remote,
        )


def _callee(node: TreeNode, peers: Mapping[str, str]) -> str:
    """A remote call's name and provider: all remote work has one recipient here, which says little."""
    target, task = node.task.target if node.task is not None else None, node.task
    named = (target.profile or target.name or _host(target.url)) if target is not None else None
    by = peers.get(node.provider, node.provider[:8]) if node.provider else _host(node.url or None)
    return _join(named or (_short_name(task.recipient.display) if task is not None else node.task_id[:8]), by)


def _host(url: str | None) -> str | None:
    return urlsplit(url).netloc if url else None


def _ended_attempt(lease: LeaseRecord, row: Any) -> EndedAttempt:
    """`row` is the audit's, if the attempt was repaired."""
    by = f"{row['kind']['action']} by {_short_name(row['issuer']['display'])}" if row is not None else None
    risk = RISKS.get(row["kind"].get("duplicate_risk")) if row is not None else None
    words = (by, risk, f"held by {_short_name(lease.leased_to.display)}")
    return EndedAttempt(
        lease_id=lease.lease_id,
        what=f"Attempt {lease.attempt}: {lease.outcome or 'under way'}",
        why=lease.reason,
        who=", ".join(word for word in words if word),
        at_ms=lease.ended_at_ms,
    )


def _push_bar(push: PushShown) -> Bar:
    progress = f"{_plural(push.delivered, 'step')} delivered, {_plural(push.attempts, 'failed attempt')}"
    return Bar(
        kind="push",
        label=f"Push to {push.host}",
        begins_ms=push.made_at_ms,
        ends_ms=push.dead_at_ms,
        detail=_join({"dead": "given up", "failing": "failing"}.get(push.state), progress, push.failure),
        bad=push.state == "dead",
    )


def _short_name(display: str) -> str:
    return display.removesuffix("@default")


def _plural(count: float, word: str) -> str:
    return f"{count:,.0f} {word}{'' if count == 1 else 's'}"


def _join(*words: str | None) -> str:
    return " · ".join(filter(None, words))
