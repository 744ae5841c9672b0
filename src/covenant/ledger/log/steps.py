"""From a row of the archive to the step that a watcher would have seen live: the two are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from covenant.model.result import Ending, Result
from covenant.model.task_event import Began, Continued, Ended, StepContent, Started, Step
from covenant.model.task import Task
from covenant.model.task_event import ArtifactUpdate, MessageUpdate, StatusUpdate


class StoredStep(msgspec.Struct, frozen=True, gc=False):
    generation: int
    kind: str
    ts_ms: int
    body: msgspec.Raw


class _End(msgspec.Struct, frozen=True, gc=False):
    ending: Ending
    result: Result


def _decoded(kind: type[Any], made: Callable[[Any], StepContent]) -> Callable[[msgspec.Raw], StepContent]:
    decode = msgspec.json.Decoder(kind).decode
    return lambda body: made(decode(body))


def _as_it_is(update: StepContent) -> StepContent:
    return update


_KINDS: Final[dict[str, Callable[[msgspec.Raw], StepContent]]] = {
    "submitted": _decoded(Task, Began),
    "working": lambda _: Started(),
    "status": _decoded(StatusUpdate, _as_it_is),
    "artifact": _decoded(ArtifactUpdate, _as_it_is),
    "message": _decoded(MessageUpdate, _as_it_is),
    "parked": _decoded(StatusUpdate, _as_it_is),
    "continued": _decoded(MessageUpdate, Continued),
    "settled": _decoded(_End, lambda end: Ended(end.ending, end.result)),
}


class Listed(msgspec.Struct, frozen=True, gc=False):
    """A task of a listing, its place in it, and whether there is a next one."""

    updated_at: int
    task_no: int
    next_no: int | None
    steps: tuple[StoredStep, ...]


_rows = msgspec.json.Decoder(tuple[StoredStep, ...]).decode


def decode_steps(stored: bytes) -> tuple[Step, ...]:
    return steps_of(_rows(stored))


def steps_of(rows: Iterable[StoredStep]) -> tuple[Step, ...]:
    return tuple([Step(row.generation, row.ts_ms, _KINDS[row.kind](row.body)) for row in rows])
