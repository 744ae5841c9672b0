"""Streams: a first view of a task, then every step after it, each once, until the task ends or waits for its sender.

The watch begins before the past is read, so nothing falls between the two; generations sort out what is in both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from covenant.ledger.contract.tasks import TaskLedger, Watch
from covenant.model.task_event import Ended, StatusUpdate, Step
from covenant.model.task_view import TaskView
from covenant.wire.sse import KEEP_ALIVE_S

PAGE: Final = 1_000
"""Steps that are read at once."""


class TaskStream:
    """A context, iterated once. Yields batches of steps; an empty one says that nothing happened for a while.

    Leaving it never ends the task.
    """

    def __init__(
        self,
        ledger: TaskLedger,
        watch: Watch,
        first: TaskView,
        *,
        backlog: Sequence[Step] | None = None,
        reply: TaskView | None = None,
        ends_when_parked: bool,
    ) -> None:
        """`backlog`: the steps after the first view that the watch has told already; None if the past is to be read."""
        self.first = first
        self.reply = reply
        """The finished task whose agent answered with a bare message: then that is all there is to send."""
        self.cut = False
        """The reader was too slow: the stream ended before its task did, and can be resumed."""
        self._ledger = ledger
        self._watch = watch
        self._backlog = backlog
        self._ends_when_parked = ends_when_parked

    async def __aiter__(self) -> AsyncIterator[Sequence[Step]]:
        at = self.first.generation
        if self._is_over(self.first):
            return
        async for batch in self._batches(at):
            newer = [step for step in batch if step.generation > at] if batch else batch
            last = next((place for place, step in enumerate(newer) if self._is_last(step)), None)
            if last is not None:
                yield newer[: last + 1]
                return
            if newer:
                at = newer[-1].generation
            if newer or not batch:
                yield newer

    async def _batches(self, at: int) -> AsyncIterator[Sequence[Step]]:
        if self._backlog is None:
            full = True
            while full:
                past = await self._ledger.steps(self.first.task.id, at, PAGE)
                full = len(past) == PAGE
                if past:
                    at = past[-1].generation
                    yield past
        elif self._backlog:
            yield self._backlog
        while not self._watch.cut:
            yield await self._watch.next(KEEP_ALIVE_S)
        self.cut = True

    def _is_over(self, view: TaskView) -> bool:
        return view.state.terminal or (self._ends_when_parked and view.state.waits)

    def _is_last(self, step: Step) -> bool:
        what = step.what
        if isinstance(what, Ended):
            return True
        return self._ends_when_parked and isinstance(what, StatusUpdate) and what.state != "working"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._watch.__exit__(kind, error, at)


@contextmanager
def handed_over(watch: Watch) -> Iterator[Watch]:
    """Begin to watch for a stream, which leaves the watch in its own time. Left here if the stream is not made."""
    watch.__enter__()
    try:
        yield watch
    except BaseException:
        watch.__exit__(None, None, None)
        raise
