"""A task's story in time, ready to draw: a bar for each wait, attempt, call, push, and use of a model or a tool.

It is read from what the operations tell of the task: its leases and steps, its calls, and its pushes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from starlette.types import Receive, Scope, Send

from covenant.dashboard.page_endpoint import query_of
from covenant.dashboard.session_operations import SESSION, run_for
from covenant.dashboard.sessions import Role, UiSession
from covenant.dashboard.time_scale import Fold, PlacedSpan, Stretch, Tick, TimeScale
from covenant.doors.http.endpoint import Endpoint
from covenant.doors.http.responses import MAILBOX, reply
from covenant.doors.operator_api.operation import ApiContext, encode
from covenant.doors.operator_api.tasks import PushShown, TaskShown
from covenant.ledger.contract.task_query import FoundTask
from covenant.ledger.contract.tasks import LeaseRecord, TreeNode, UpdateRecord
from covenant.model.usage import read_usage

BARS_MAX: Final = 400
BANDS_MAX: Final = 100
CALLS_MAX: Final = 100
LABEL_MAX: Final = 200
PAUSE_MS: Final = 2_000
"""Pieces of output that are further apart are two bars."""
TOOL: Final = "x-arbiter.tool_call"
TOOK: Final = "x-arbiter.took_ms"
ENDED: Final = ("done", "result_pending")
WAITS: Final = {"queued": "In the queue", "parked": "Waits for its sender", "following": "Follows another task"}
"""The kinds of bars that are only waiting."""


class Bar(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """`ends_ms` is None while it goes on. `detail` is in words."""

    kind: str
    label: str
    begins_ms: int
    ends_ms: int | None
    detail: str = ""
    bad: bool = False
    task_id: str = ""
    remote: bool = False


class BarDrawn(Bar, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    x: float
    w: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True, tag="ui_timeline", tag_field="kind"):
    """`bands` are the turns. Places go from 0 to 1. `truncated`: there is more than is drawn."""

    begins_ms: int
    now_ms: int
    bars: tuple[BarDrawn, ...]
    bands: tuple[PlacedSpan, ...]
    folds: tuple[Fold, ...]
    ticks: tuple[Tick, ...]
    truncated: bool


class TimelineEndpoint(Endpoint):
    """Of a task that the session may look at."""

    def __init__(self, api: ApiContext) -> None:
        super().__init__("ui_timeline", MAILBOX, api.meter)
        self._services = api.services

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  (of every endpoint)
        session: UiSession = scope[SESSION]

        async def ask(kind: str, **fields: Any) -> Any:
            return await run_for(session, kind, self._services, fields)

        shown: TaskShown = await ask("show_a2a_task", task_id=query_of(scope).get("task_id", ""))
        task_id = shown.task.id
        calls = (await ask("find_a2a_tasks", parent=task_id, limit=CALLS_MAX, ascending=True)).tasks
        # What a call elsewhere is named by, and who does it, the tree knows.
        elsewhere = any(call.remote for call in calls)
        nodes = (await ask("a2a_tree", task_id=task_id)).tree.children if elsewhere else ()
        pushes = () if session.role is Role.TENANT else (await ask("a2a_pushes", task_id=task_id)).pushes
        bars = sorted([*task_bars(shown), *_calls(calls, nodes), *map(_push, pushes)], key=lambda bar: bar.begins_ms)
        await reply(send, 200, encode(draw(shown, bars, self._services.ledger.now_ms())))


def draw(shown: TaskShown, bars: Sequence[Bar], now_ms: int) -> Timeline:
    """`bars` in the order in which they begin."""
    truncated = shown.truncated or len(bars) > BARS_MAX
    bars = bars[:BARS_MAX]
    begins_ms, settled_ms = shown.created_at_ms, _settled(shown)
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
        bars=tuple([_drawn(bar, scale.span(stretch(bar))) for bar in bars]),
        bands=tuple([scale.span(Stretch(*turn)) for turn in pairwise(turns)]),
        folds=scale.folds(),
        ticks=scale.ticks(),
        truncated=truncated,
    )


def _drawn(bar: Bar, span: PlacedSpan) -> BarDrawn:
    return BarDrawn(**msgspec.structs.asdict(bar), x=span.x, w=span.w)


def task_bars(shown: TaskShown) -> Iterator[Bar]:
    """The bars of the task itself: its waits, its attempts, and what was done in them."""
    ends_ms, tools = _settled(shown), [use for use in map(_tool, shown.updates) if use is not None]
    yield from _waits(shown, ends_ms)
    for lease in shown.leases:
        yield from _attempt(lease, shown)
    yield from _models(shown, tools, ends_ms)
    yield from tools
    yield from _output(shown.updates)


def _moments(shown: TaskShown, kind: str) -> list[int]:
    return sorted(step.ts_ms for step in shown.updates if step.kind == kind)


def _first(moments: Sequence[int], since_ms: int) -> int | None:
    at = bisect_left(moments, since_ms)
    return moments[at] if at < len(moments) else None


def _settled(shown: TaskShown) -> int | None:
    return _first(_moments(shown, "settled"), 0)


def _waits(shown: TaskShown, ends_ms: int | None) -> Iterator[Bar]:
    """Between its beginning, its leases and its end, a task waits: for its sender if it was parked, else for a
    holder."""
    parks, answers = _moments(shown, "parked"), _moments(shown, "continued")
    waits_now = shown.state in ("queued", "following")
    wait = shown.state if waits_now else "queued"
    since_ms = shown.created_at_ms
    for lease in (*shown.leases, None):
        until_ms = ends_ms if lease is None else lease.leased_at_ms
        queued_ms: int | None = since_ms
        parked_ms = _first(parks, since_ms)
        if parked_ms is not None and (until_ms is None or parked_ms <= until_ms):
            queued_ms = _first(answers, parked_ms)
            yield _wait("parked", parked_ms, until_ms if queued_ms is None else queued_ms)
        if queued_ms is not None and (waits_now if lease is None else lease.leased_at_ms > queued_ms):
            yield _wait(wait, queued_ms, until_ms)
        after_ms = until_ms if lease is None or lease.ended_at_ms is None else lease.ended_at_ms
        if after_ms is None:
            return
        since_ms = after_ms


def _wait(kind: str, begins_ms: int, ends_ms: int | None) -> Bar:
    return Bar(kind=kind, label=WAITS[kind], begins_ms=begins_ms, ends_ms=ends_ms)


def _attempt(lease: LeaseRecord, shown: TaskShown) -> Iterator[Bar]:
    lost = lease.outcome is None and shown.holder_lost
    yield Bar(
        kind="attempt",
        label=f"Attempt {lease.attempt}",
        begins_ms=lease.leased_at_ms,
        ends_ms=lease.ended_at_ms,
        detail=_words("lost" if lost else lease.outcome, lease.reason),
        bad=lost,
    )
    ended_ms = lease.ended_at_ms
    if lease.outcome == "requeued" and lease.reason and ended_ms is not None:
        yield Bar(kind="repair", label="requeued", begins_ms=ended_ms, ends_ms=ended_ms, detail=lease.reason)


def _tool(step: UpdateRecord) -> Bar | None:
    """The use of a tool that a step tells of, if it does. It is told when it has ended."""
    if step.kind != "artifact":
        return None
    for part in (step.body or {}).get("parts") or ():
        notes = part.get("metadata") or {}
        if notes.get(TOOL):
            took, value = notes.get(TOOK), part.get("value")
            said = value if isinstance(value, dict) else {}
            return Bar(
                kind="tool",
                label=str(said.get("tool", "tool"))[:LABEL_MAX],
                begins_ms=step.ts_ms - (min(max(took, 0), step.ts_ms) if isinstance(took, int) else 0),
                ends_ms=step.ts_ms,
                detail="failed" if said.get("ok") is False else "",
                bad=said.get("ok") is False,
            )
    return None


def _models(shown: TaskShown, tools: Sequence[Bar], ends_ms: int | None) -> Iterator[Bar]:
    """A model was asked from an attempt's beginning on, or from the end of a tool's use, until it used a tool or had
    answered."""
    notes = (shown.result.metadata if shown.result is not None else None) or {}
    requests = read_usage(notes.get("usage")).get("requests")
    if not requests:
        return
    told = [use.ends_ms or 0 for use in tools]
    for lease in shown.leases:
        since_ms, until_ms = lease.leased_at_ms, lease.ended_at_ms or ends_ms
        for use in tools[bisect_left(told, since_ms) :]:
            ended_ms = use.ends_ms or 0
            if until_ms is not None and ended_ms > until_ms:
                break
            if use.begins_ms > since_ms:
                yield Bar(kind="model", label="Model", begins_ms=since_ms, ends_ms=use.begins_ms)
            since_ms = max(since_ms, ended_ms)
        if until_ms is None or until_ms > since_ms:
            detail = f"{_plural(requests, 'request')} in all"
            yield Bar(kind="model", label="Model", begins_ms=since_ms, ends_ms=until_ms, detail=detail)


def _output(updates: Iterable[UpdateRecord]) -> Iterator[Bar]:
    """Pieces that came one after another are one bar."""
    run = list[int]()
    for step in updates:
        if step.kind == "artifact" and _tool(step) is not None:
            continue
        if run and (step.kind != "artifact" or step.ts_ms - run[-1] > PAUSE_MS):
            yield _pieces(run)
            run = []
        if step.kind == "artifact":
            run.append(step.ts_ms)
    if run:
        yield _pieces(run)


def _pieces(run: Sequence[int]) -> Bar:
    detail = _plural(len(run), "piece")
    return Bar(kind="chunks", label="Output", begins_ms=run[0], ends_ms=run[-1], detail=detail)


def _calls(calls: Iterable[FoundTask], nodes: Iterable[TreeNode]) -> Iterator[Bar]:
    elsewhere = {node.task_id: node for node in nodes if node.remote is True}
    for call in calls:
        node = elsewhere.get(call.task_id)
        yield Bar(
            kind="child",
            label=_short(call.agent) if node is None else _callee(node),
            begins_ms=call.created_at_ms,
            ends_ms=call.updated_at_ms if call.state in ENDED else None,
            detail=_words(call.outcome, call.intent),
            bad=call.outcome == "failed",
            task_id=call.task_id,
            remote=call.remote,
        )


def _callee(node: TreeNode) -> str:
    """Work that is done elsewhere is all for one recipient here: what it was called by, and who does it, tells more."""
    target, task = node.task.target if node.task is not None else None, node.task
    named = (target.name or target.profile or _host(target.url)) if target is not None else None
    by = node.provider[:8] if node.provider else _host(node.url or None)
    return _words(named or (_short(task.recipient.display) if task is not None else node.task_id[:8]), by)


def _host(url: str | None) -> str | None:
    return urlsplit(url).netloc if url else None


def _push(push: PushShown) -> Bar:
    told = f"{_plural(push.delivered, 'step')} told, {_plural(push.attempts, 'failed attempt')}"
    return Bar(
        kind="push",
        label=f"Push to {push.host}",
        begins_ms=push.made_at_ms,
        ends_ms=push.dead_at_ms,
        detail=_words({"dead": "given up", "failing": "failing"}.get(push.state), told, push.failure),
        bad=push.state == "dead",
    )


def _short(display: str) -> str:
    return display.removesuffix("@default")


def _plural(count: float, word: str) -> str:
    return f"{count:,.0f} {word}{'' if count == 1 else 's'}"


def _words(*words: str | None) -> str:
    return " · ".join(filter(None, words))
