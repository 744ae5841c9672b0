"""The log lines of a task while an agent of this daemon worked on it: the newest lines, in memory.

A line is the agent's output to standard output, standard error or `logging`, or an event of the daemon that names the
task. The length of a line, the lines and bytes of one task, the number of tasks and the bytes of all are bounded. In a
task the oldest lines are dropped first; of all tasks, the one whose newest line is oldest. A store has other lines,
such as those of an earlier run.

Lines may come from any thread. They are read and waited for on the event loop. A line's number is larger than those of
all lines before it, also across restarts: it is a cursor.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Final, Literal, Protocol

import msgspec

from covenant.ledger.machine.commands import LeasedTask
from covenant.ledger.watchers import KeyedWakeups
from covenant.model.ids import TaskId

LogStream = Literal["stdout", "stderr", "log"]
LogWriter = Literal["agent", "daemon"]

LINE_LENGTH_MAX: Final = 4_096
TASK_LINES_MAX: Final = 1_000
TASK_BYTES_MAX: Final = 256 * 1024
TASKS_MAX: Final = 10_000
BYTES_MAX: Final = 16 * 1024 * 1024
OVERHEAD: Final = 100
"""The approximate bytes of a line besides its text."""
UNFINISHED_S: Final = 0.5
"""A line without an end is shown when nothing was added to it for this long."""
CUT: Final = "…"
NO_MAX: Final = 2**63 - 1

TURN: Final[ContextVar[LeasedTask | None]] = ContextVar("covenant_turn", default=None)
"""The turn that the running code belongs to. Tasks and threads that an agent starts inherit it."""


class LogLine(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """`logger`: the name of the logger, for a line of `logging`. `fields`: of an event of the daemon."""

    no: int
    ts_ms: int
    writer: LogWriter
    stream: LogStream
    level: str
    text: str
    attempt: int = 0
    logger: str = ""
    fields: dict[str, str] = {}
    traceback: str = ""

    @property
    def size(self) -> int:
        words = sum(len(name) + len(value) for name, value in self.fields.items())
        return OVERHEAD + len(self.text) + len(self.logger) + len(self.traceback) + words


class _TaskLines:
    __slots__ = ("bytes", "left_out", "lines", "unfinished")

    def __init__(self) -> None:
        self.lines: deque[LogLine] = deque()
        self.bytes = 0
        self.left_out = 0
        self.unfinished: dict[LogStream, tuple[str, int, float]] = {}
        """For each stream: the text since its last line end, the attempt, and the time."""


class ReadLines(msgspec.Struct, frozen=True, gc=False):
    """`left_out`: the number of older lines of the task that were dropped."""

    lines: tuple[LogLine, ...]
    left_out: int = 0


IsKnown = Callable[[TaskId], Awaitable[bool]]


class LineStore(Protocol):
    """Keeps lines beyond this process."""

    def keep(self, task_id: TaskId, line: LogLine) -> None:
        """Called with each line in the writer's thread; must not wait."""

    async def older(self, task_id: TaskId, before: int) -> Sequence[LogLine]:
        """The task's lines with smaller numbers than this one, oldest first."""

    async def forget(self, is_known: IsKnown) -> None:
        """Deletes stored lines of tasks that no longer exist."""


class TaskLogs:
    """Must be made on the loop that reads it."""

    def __init__(
        self, now_ms: Callable[[], int], *, bytes_max: int = BYTES_MAX, store: LineStore | None = None
    ) -> None:
        self._bytes_max = bytes_max
        self._store = store
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._tasks: OrderedDict[TaskId, _TaskLines] = OrderedDict()
        self._bytes = 0
        self._last_no = 0
        self._followers = 0
        self._wakeups = KeyedWakeups()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    def write(self, turn: LeasedTask, stream: LogStream, text: str) -> None:
        """Adds a piece of an agent's output to a stream: each whole line is kept."""
        task_id, attempt = turn.task.id, turn.lease.attempt
        text = text[-TASK_BYTES_MAX:]  # no more would be kept
        with self._lock:
            known = self._lines_of(task_id)
            before = known.unfinished.pop(stream, ("", 0, 0.0))[0]
            *lines, rest = (before + text).split("\n")
            while len(rest) > LINE_LENGTH_MAX:
                lines.append(rest[:LINE_LENGTH_MAX])
                rest = rest[LINE_LENGTH_MAX:]
            if rest:
                known.unfinished[stream] = (rest, attempt, time.monotonic())
            for line in lines:
                self._add_written(known, task_id, stream, line, attempt)
        if lines:
            self._wake(task_id)

    def add(
        self,
        task_id: TaskId,
        text: str,
        *,
        writer: LogWriter,
        stream: LogStream = "log",
        level: str = "info",
        attempt: int = 0,
        logger: str = "",
        fields: dict[str, str] | None = None,
        traceback: str = "",
    ) -> None:
        with self._lock:
            line = LogLine(
                no=self._next_no(),
                ts_ms=self._now_ms(),
                writer=writer,
                stream=stream,
                level=level,
                text=_cut(text),
                attempt=attempt,
                logger=_cut(logger),
                fields=fields or {},
                traceback=_cut(traceback, 4 * LINE_LENGTH_MAX),
            )
            self._put(self._lines_of(task_id), task_id, line)
        self._wake(task_id)

    async def read(self, task_id: TaskId, after: int | None, limit: int, *, ended: bool) -> ReadLines:
        """The lines after a number, oldest first; without one, the newest. `ended`: no more lines follow."""
        with self._lock:
            known = self._tasks.get(task_id)
            if known is not None:
                self._finish(known, task_id, ended=ended)
            lines = list(known.lines) if known is not None else []
            left_out = known.left_out if known is not None else 0
        first_no = lines[0].no if lines else NO_MAX
        if self._store is not None and not left_out and (after is None or after < first_no - 1):
            lines = [*await self._store.older(task_id, first_no), *lines]
        if after is None:
            return ReadLines(tuple(lines[-limit:]), left_out)
        return ReadLines(tuple([line for line in lines if line.no > after][:limit]), left_out)

    async def wait(self, task_id: TaskId, after: int, timeout_ms: int) -> bool:
        """True if there may be a line after this number; False after the timeout."""
        self._loop = self._loop or asyncio.get_running_loop()
        self._followers += 1
        try:
            with self._lock:
                known = self._tasks.get(task_id)
                if known is not None and known.lines and known.lines[-1].no > after:
                    return True
            return await self._wakeups.wait((task_id,), timeout_ms)
        finally:
            self._followers -= 1

    async def forget_unknown(self, is_known: IsKnown) -> None:
        """Deletes the lines of tasks that no longer exist, here and where lines are kept."""
        with self._lock:
            task_ids = list(self._tasks)
        for task_id in task_ids:
            if not await is_known(task_id):
                with self._lock:
                    removed = self._tasks.pop(task_id, None)
                    self._bytes -= removed.bytes if removed is not None else 0
        if self._store is not None:
            await self._store.forget(is_known)

    def finish(self) -> None:
        """Keeps every line that has no end yet: nothing more will be written."""
        with self._lock:
            for task_id, known in self._tasks.items():
                self._finish(known, task_id, ended=True)

    def _lines_of(self, task_id: TaskId) -> _TaskLines:
        known = self._tasks.get(task_id)
        if known is None:
            known = self._tasks[task_id] = _TaskLines()
            if len(self._tasks) > TASKS_MAX:
                self._drop_oldest()
        else:
            self._tasks.move_to_end(task_id)
        return known

    def _add_written(self, known: _TaskLines, task_id: TaskId, stream: LogStream, text: str, attempt: int) -> None:
        for start in range(0, len(text) or 1, LINE_LENGTH_MAX):
            self._put(
                known,
                task_id,
                LogLine(
                    no=self._next_no(),
                    ts_ms=self._now_ms(),
                    writer="agent",
                    stream=stream,
                    level="info",
                    text=text[start : start + LINE_LENGTH_MAX],
                    attempt=attempt,
                ),
            )

    def _put(self, known: _TaskLines, task_id: TaskId, line: LogLine) -> None:
        known.lines.append(line)
        known.bytes += line.size
        self._bytes += line.size
        while len(known.lines) > TASK_LINES_MAX or known.bytes > TASK_BYTES_MAX:
            size = known.lines.popleft().size
            known.bytes -= size
            self._bytes -= size
            known.left_out += 1
        while self._bytes > self._bytes_max and len(self._tasks) > 1:
            self._drop_oldest()
        if self._store is not None:
            self._store.keep(task_id, line)

    def _drop_oldest(self) -> None:
        _, dropped = self._tasks.popitem(last=False)
        self._bytes -= dropped.bytes

    def _finish(self, known: _TaskLines, task_id: TaskId, *, ended: bool) -> None:
        for stream, (text, attempt, at_s) in tuple(known.unfinished.items()):
            if ended or time.monotonic() - at_s >= UNFINISHED_S:
                del known.unfinished[stream]
                self._add_written(known, task_id, stream, text, attempt)

    def _next_no(self) -> int:
        # Larger than the numbers of an earlier run, and exact as a double.
        self._last_no = max(self._last_no + 1, 1_000 * self._now_ms())
        return self._last_no

    def _wake(self, task_id: TaskId) -> None:
        if self._followers and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wakeups.wake, (task_id,))


def _cut(text: str, length_max: int = LINE_LENGTH_MAX) -> str:
    return text if len(text) <= length_max else text[: length_max - 1] + CUT
