"""Where the lines of task logs come from, and the file that keeps them.

Function agents share the process: `capture_streams` puts `TurnStream` in the place of `sys.stdout` and `sys.stderr`,
which passes everything on and keeps what is written within a turn. `TurnLogHandler` keeps records of `logging`: those
of other loggers by the turn that they are written in, those of the daemon's own by the `task_id` that they name.

The file `logs/tasks.jsonl` in the home has one JSON object a line. It is written by a thread of its own, never synced,
and replaced when it is full; the file before it stays as `tasks.1.jsonl`. So a killed daemon's lines can be read by the
next one, and the two files have a bound. Of one task at most `KEPT_LINES_MAX` lines go into them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO, cast

import msgspec

from covenant.daemon.environment import now_ms
from covenant.daemon.telemetry import ROOT, fields_of
from covenant.exchange.task_logs import TASK_LINES_MAX, TASKS_MAX, TURN, IsKnown, LogLine, LogStream, TaskLogs
from covenant.ledger.embedded.disk import make_owned_folder, open_owned
from covenant.model.ids import TaskId

FOLDER: Final = "logs"
FILE: Final = "tasks.jsonl"
FILE_BEFORE: Final = "tasks.1.jsonl"
KEPT_LINES_MAX: Final = 4 * TASK_LINES_MAX
WAITING_MAX: Final = 10_000
"""Lines that wait for the disk; more are not written to it."""
FIELD_LENGTH_MAX: Final = 1_000
_STORED_APART: Final = frozenset({"task_id", "attempt", "said", "stream"})
"""Fields of a log record that have a place of their own in a line."""

_STREAMS: Final[dict[object, LogStream]] = {"stdout": "stdout", "stderr": "stderr"}

_encode = msgspec.json.Encoder().encode


class _StoredLine(msgspec.Struct, frozen=True):
    task_id: TaskId
    line: LogLine


class TaskLogFile:
    """`bytes_max`: of both files together."""

    def __init__(self, home: Path, bytes_max: int) -> None:
        self._folder = home / FOLDER
        self._half = bytes_max // 2
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._written: OrderedDict[TaskId, int] = OrderedDict()
        self._files = threading.Lock()
        """The holder of this lock may replace the files."""
        self._writer = threading.Thread(target=self._write_all, name="task log", daemon=True)
        self._writer.start()

    def keep(self, task_id: TaskId, line: LogLine) -> None:
        """For any thread. Does not wait for the disk. Calls for one task come one after another."""
        count = self._written.pop(task_id, 0) + 1
        self._written[task_id] = count
        if len(self._written) > TASKS_MAX:
            self._written.popitem(last=False)
        if count <= KEPT_LINES_MAX and len(self._waiting) < WAITING_MAX:
            with self._changed:
                self._waiting.append(_encode(_StoredLine(task_id, line)) + b"\n")
                self._changed.notify()

    async def older(self, task_id: TaskId, before: int) -> Sequence[LogLine]:
        return await asyncio.get_running_loop().run_in_executor(None, self._read, task_id, before)

    def _read(self, task_id: TaskId, before: int) -> Sequence[LogLine]:
        """Reads both files from their beginnings: they are small, and rarely read."""
        found = deque[LogLine](maxlen=TASK_LINES_MAX)
        for name in (FILE_BEFORE, FILE):
            with suppress(OSError):
                for _, kept in self._rows(name, task_id.encode()):
                    if kept is not None and kept.task_id == task_id and kept.line.no < before:
                        found.append(kept.line)
        return tuple(found)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                rows, self._waiting = self._waiting, deque()
            if not rows:
                return
            with suppress(OSError), self._files:  # if the disk is full or gone, memory has the lines
                self._append(b"".join(rows))

    def _append(self, rows: bytes) -> None:
        path = self._folder / FILE
        make_owned_folder(self._folder, exist_ok=True)
        with suppress(FileNotFoundError):
            if path.stat().st_size + len(rows) > self._half:
                path.replace(self._folder / FILE_BEFORE)
        with open(path, "ab", buffering=0, opener=open_owned) as file:
            file.write(rows[-self._half :])

    async def forget(self, is_known: IsKnown) -> None:
        """Drops the lines of tasks that are not known any more."""
        unknown = {task_id for task_id in await asyncio.to_thread(self._task_ids) if not await is_known(task_id)}
        if unknown:
            await asyncio.to_thread(self._drop, unknown)

    def _task_ids(self) -> set[TaskId]:
        return {kept.task_id for name in (FILE_BEFORE, FILE) for _, kept in self._rows(name) if kept is not None}

    def _drop(self, task_ids: set[TaskId]) -> None:
        with self._files:
            for name in (FILE_BEFORE, FILE):
                rows = [row for row, kept in self._rows(name) if kept is not None and kept.task_id not in task_ids]
                aside = self._folder / f"{name}.tmp"
                aside.unlink(missing_ok=True)
                with open(aside, "xb", opener=open_owned) as file:
                    file.writelines(rows)
                aside.replace(self._folder / name)

    def _rows(self, name: str, having: bytes = b"") -> Iterator[tuple[bytes, _StoredLine | None]]:
        """The rows that have these bytes. None for half a line, which a crash left."""
        decode = msgspec.json.Decoder(_StoredLine).decode
        with suppress(FileNotFoundError), (self._folder / name).open("rb") as file:
            for row in file:
                if having not in row:
                    continue
                try:
                    yield row, decode(row)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    yield row, None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._writer.join()


class TurnLogHandler(logging.Handler):
    def __init__(self, logs: TaskLogs) -> None:
        super().__init__(logging.INFO)
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        fields = fields_of(record)
        task_id, turn = fields.get("task_id"), TURN.get()
        own = record.name.partition(".")[0] == ROOT
        if task_id is None and turn is not None and not own:
            task_id = turn.task.id
        if not isinstance(task_id, str):
            return
        attempt = fields.get("attempt", turn.lease.attempt if turn is not None and turn.task.id == task_id else 0)
        text = fields.get("said")
        try:
            self._logs.add(
                TaskId(task_id),
                text if own and isinstance(text, str) else record.getMessage(),
                writer="agent" if not own or text is not None else "daemon",
                stream=_STREAMS.get(fields.get("stream"), "log"),
                level=record.levelname.lower(),
                attempt=attempt if isinstance(attempt, int) else 0,
                logger="" if own else record.name,
                fields={
                    name: str(value)[:FIELD_LENGTH_MAX] for name, value in fields.items() if name not in _STORED_APART
                },
                traceback=_traceback(record),
            )
        except Exception:  # noqa: BLE001  (a message and its arguments may be anything; logging never raises)
            self.handleError(record)


def _traceback(record: logging.LogRecord) -> str:
    return logging.Formatter().formatException(record.exc_info) if record.exc_info else ""


class TurnStream:
    """A standard stream: all that is written goes to `under`; what is written within a turn also to its task's log."""

    def __init__(self, under: TextIO, stream: LogStream, logs: TaskLogs) -> None:
        self._under = under
        self._stream: LogStream = stream
        self._logs = logs

    def write(self, text: str) -> int:
        turn = TURN.get()
        if turn is not None and isinstance(text, str):
            self._logs.write(turn, self._stream, text)
        return self._under.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)


@contextmanager
def capture_streams(logs: TaskLogs) -> Iterator[None]:
    before: tuple[TextIO, TextIO] = sys.stdout, sys.stderr
    sys.stdout = cast("TextIO", TurnStream(before[0], "stdout", logs))
    sys.stderr = cast("TextIO", TurnStream(before[1], "stderr", logs))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@asynccontextmanager
async def open_task_logs(home: Path, *, bytes_max: int) -> AsyncIterator[TaskLogs]:
    """`bytes_max`: in memory, and the same in the home."""
    file = TaskLogFile(home, bytes_max)
    logs = TaskLogs(now_ms, bytes_max=bytes_max, store=file)
    handler = TurnLogHandler(logs)
    logging.getLogger().addHandler(handler)
    try:
        yield logs
    finally:
        logging.getLogger().removeHandler(handler)
        logs.finish()
        file.close()
