"""Requests and answers of each task as they were on the wire, without secrets: in memory, within bounds.

A call is kept when it is over, under the tasks that its answer or its path names; a refused call is not kept. The bytes
of a frame, the frames and bytes of one task, the number of tasks and the bytes of all are bounded. In a task the oldest
frames are dropped first; of all tasks, the one whose newest frame is oldest. Calls that come faster than they can be
kept are left out and counted.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from covenant.exchange.task_logs import TURN
from covenant.model.ids import TaskId
from covenant.wire.frame_redaction import redact_answer_headers, redact_body, redact_request_headers

CAPTURED_BYTES_MAX: Final = 64 * 1024
"""The most bytes of a request, and of its answer."""
TASK_FRAMES_MAX: Final = 200
TASK_BYTES_MAX: Final = 1024 * 1024
TASKS_MAX: Final = 10_000
WAITING_MAX: Final = 256
"""The most finished calls that wait to be kept."""
TASKS_OF_CALL_MAX: Final = 8
OVERHEAD: Final = 200
"""The approximate bytes of a frame besides its texts."""

Direction = Literal["in", "out"]
FindTask = Callable[[TaskId], Awaitable[object | None]]
"""Returns None if the task does not exist."""
_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_NESTED_FIELDS: Final = ("result", "task", "message", "statusUpdate", "artifactUpdate", "lease")
_ID_FIELDS: Final = ("taskId", "task_id", "request_id")


class LoggedFrame(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """`door`: `a2a`, `native`, `mailbox` or `socket` for a call that came in, `remote` for one that an agent made."""

    at_ms: int
    direction: Direction
    door: str
    what: str
    text: str
    headers: dict[str, str] = {}
    truncated: bool = False

    @property
    def size(self) -> int:
        return OVERHEAD + len(self.text) + sum(len(name) + len(value) for name, value in self.headers.items())


@dataclass(slots=True)
class CapturedCall:
    """One request and its answer, while the call runs. `direction` is that of the request."""

    log: FrameLog
    direction: Direction
    door: str
    what: str
    headers: Mapping[str, str]
    at_ms: int = field(init=False)
    answered_ms: int = field(init=False)
    request: bytearray = field(default_factory=bytearray)
    request_bytes: int = 0
    answer: bytearray = field(default_factory=bytearray)
    answer_bytes: int = 0
    status: int = 0
    """The HTTP status; 0 without an answer."""
    outcome: str = ""
    """The name of the answer, where there is no HTTP status."""
    answer_headers: Mapping[str, str] | None = None
    task_id: TaskId | None = None
    """The task that the call belongs to, if it is known."""

    def __post_init__(self) -> None:
        self.at_ms = self.answered_ms = self.log.now_ms()

    def sent(self, piece: bytes) -> None:
        self.request += piece[: max(0, CAPTURED_BYTES_MAX - len(self.request))]
        self.request_bytes += len(piece)

    def answered(self, status: int, headers: Mapping[str, str], outcome: str = "") -> None:
        self.status, self.answer_headers, self.outcome = status, headers, outcome
        self.answered_ms = self.log.now_ms()

    def received(self, piece: bytes) -> None:
        self.answer += piece[: max(0, CAPTURED_BYTES_MAX - len(self.answer))]
        self.answer_bytes += len(piece)

    def ended(self) -> None:
        """Offers the call to the log."""
        self.log.offer(self)


class FramePage(msgspec.Struct, frozen=True, gc=False):
    """`left_out`: older frames of the task that were dropped. `lost`: calls of any task that were not kept."""

    frames: tuple[LoggedFrame, ...]
    left_out: int = 0
    lost: int = 0


class _TaskFrames:
    __slots__ = ("bytes", "frames", "left_out")

    def __init__(self) -> None:
        self.frames: deque[LoggedFrame] = deque()
        self.bytes = 0
        self.left_out = 0


class FrameLog:
    """Must be used on one event loop. `run` stores captured calls, and so does each read."""

    def __init__(self, now_ms: Callable[[], int], *, bytes_max: int, find_task: FindTask) -> None:
        self.now_ms: Final = now_ms
        self._find_task = find_task
        self._bytes_max = bytes_max
        self._tasks: OrderedDict[TaskId, _TaskFrames] = OrderedDict()
        self.bytes = 0
        self._waiting: deque[CapturedCall] = deque()
        self._wakeup = asyncio.Event()
        self._storing = asyncio.Lock()
        self._lost = 0
        self._erased = False

    def offer(self, call: CapturedCall) -> None:
        """Takes a finished call."""
        if len(self._waiting) >= WAITING_MAX:
            self._lost += 1
            return
        self._waiting.append(call)
        self._wakeup.set()

    def sent(self, method: str, url: str, headers: Mapping[str, str], content: bytes) -> CapturedCall | None:
        """Captures a call of the daemon's fetcher, if an agent makes it within its turn."""
        turn = TURN.get()
        if turn is None:
            return None
        call = CapturedCall(self, "out", "remote", f"{method} {url.partition('?')[0]}", headers)
        call.task_id = turn.task.id
        call.sent(content)
        return call

    async def run(self) -> None:
        while True:
            await self._wakeup.wait()
            if self._erased:
                self._erased = False
                await self.forget_unknown()
            await self._store_waiting()

    def on_erased(self) -> None:
        """Called when tasks were erased: their frames go soon, and nobody can read them meanwhile."""
        self._erased = True
        self._wakeup.set()

    async def read(self, task_id: TaskId) -> FramePage:
        """The task's frames in the order of time, including all calls that are over by now."""
        await self._store_waiting()
        known = self._tasks.get(task_id)
        if known is None or (self._erased and await self._find_task(task_id) is None):
            return FramePage((), lost=self._lost)
        ordered = sorted(known.frames, key=lambda frame: frame.at_ms)
        return FramePage(tuple(ordered), known.left_out, self._lost)

    async def forget_unknown(self) -> None:
        """Deletes the frames of tasks that no longer exist, also those that wait to be kept."""
        await self._store_waiting()
        for task_id in list(self._tasks):
            if await self._find_task(task_id) is None:
                removed = self._tasks.pop(task_id, None)
                self.bytes -= removed.bytes if removed is not None else 0

    async def _store_waiting(self) -> None:
        async with self._storing:
            for _ in range(len(self._waiting)):
                call = self._waiting.popleft()
                # Parsing and redacting take a while, so a thread does them.
                task_ids, frames = await asyncio.to_thread(_frames_of, call)
                for task_id in task_ids:
                    if await self._find_task(task_id) is not None:
                        self._add(task_id, frames)
            if not self._waiting:
                self._wakeup.clear()

    def _add(self, task_id: TaskId, frames: tuple[LoggedFrame, ...]) -> None:
        known = self._tasks.pop(task_id, None) or _TaskFrames()
        self._tasks[task_id] = known
        for frame in frames:
            known.frames.append(frame)
            known.bytes += frame.size
            self.bytes += frame.size
        while len(known.frames) > TASK_FRAMES_MAX or known.bytes > TASK_BYTES_MAX:
            forgotten = known.frames.popleft().size
            known.bytes -= forgotten
            self.bytes -= forgotten
            known.left_out += 1
        while len(self._tasks) > TASKS_MAX or self.bytes > self._bytes_max:
            _, dropped = self._tasks.popitem(last=False)
            self.bytes -= dropped.bytes


def _frames_of(call: CapturedCall) -> tuple[tuple[TaskId, ...], tuple[LoggedFrame, ...]]:
    """The tasks that a call may be about, and its frames."""
    task_ids = (call.task_id,) if call.task_id is not None else tuple(_task_ids(call))
    if not task_ids:
        return (), ()
    back: Direction = "out" if call.direction == "in" else "in"
    request = LoggedFrame(
        at_ms=call.at_ms,
        direction=call.direction,
        door=call.door,
        what=call.what,
        text=redact_body(bytes(call.request)),
        headers=redact_request_headers(call.headers),
        truncated=call.request_bytes > len(call.request),
    )
    reply = LoggedFrame(
        at_ms=call.answered_ms,
        direction=back,
        door=call.door,
        what=call.outcome or str(call.status or "no answer"),
        text=redact_body(bytes(call.answer)),
        headers=redact_answer_headers(call.answer_headers or {}),
        truncated=call.answer_bytes > len(call.answer),
    )
    return task_ids, (request, reply)


def _task_ids(call: CapturedCall) -> list[TaskId]:
    """The task ids in the path and the answer. Parts of messages may hold any text, and are not searched."""
    if not 200 <= call.status < 300:
        return []
    answer = _answer_of(bytes(call.answer))
    if isinstance(answer, dict) and answer.get("error") is not None:
        return []
    found = dict.fromkeys([*_UUID.findall(call.what), *_ids_in(answer, 0)])
    return [TaskId(name) for name in list(found)[:TASKS_OF_CALL_MAX]]


def _answer_of(data: bytes) -> Any:
    """The decoded answer; of a stream, its first event; None if it cannot be decoded."""
    if data.startswith(b"{"):
        data = data.partition(b"\n")[0]  # a gRPC message is one line
    else:
        data = next((line[5:] for line in data.split(b"\n") if line.startswith(b"data:")), b"")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _ids_in(answer: Any, depth: int) -> Iterator[str]:
    if not isinstance(answer, dict) or depth > 2:
        return
    given = [answer.get(name) for name in _ID_FIELDS]
    # A JSON-RPC call has an id, too: a task also has a status or a recipient.
    if "status" in answer or "recipient" in answer:
        given.append(answer.get("id"))
    yield from (name for name in given if isinstance(name, str) and _UUID.fullmatch(name))
    for name in _NESTED_FIELDS:
        yield from _ids_in(answer.get(name), depth + 1)
