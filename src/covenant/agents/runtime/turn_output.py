"""The output of a turn: `TurnOutput` makes updates of an agent's output, `JobBuffer` has them until they are written.

All text of a turn is one artifact, `<task>-text-<n>` (0 in the first turn), called "response": its first chunk begins
it, the others add to it, and an empty last chunk closes it. Files are `<task>-file-<n>`, data `<task>-data-<n>`,
counted from 0 in each turn; a later turn puts its own number before theirs, and so replaces nothing of an earlier one.
The same holds for uses of tools, `<task>-tool-<n>`, and answers of other agents, `<task>-sub-<n>`. Output of a model
after it asked a person also has the number of its round (`<task>-file-0.1.0`, `<task>-text-0.1`): it replaces nothing
of the output before the question.

Updates are written several a record. The agent does not wait for the disk, and nobody sees an update before it is
durable. The buffer is bounded: an agent that is faster than the disk waits for `room`. So is the output of a turn
(`A2aSettings`). A durable step is written at once, with the output before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from covenant.agents.runtime.function_threads import TurnStopped
from covenant.agents.runtime.model_calls import ModelCalls
from covenant.exchange.delegation import Delegations
from covenant.exchange.native import earlier_messages, kept_files
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.tasks.reader import PAGE, TaskReader
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.machine.commands import Advance, Advanced, LeasedTask
from covenant.model.content import Content, File, Json, Resource, ResourceLink, Text
from covenant.model.errors import OUTCOME_UNKNOWN, Invalid, Refusal, Unavailable
from covenant.model.ids import AgentId
from covenant.model.sanitizer import named_safely
from covenant.model.settings import A2aSettings
from covenant.model.task import NATIVE, Ending, Result, Task, account_of
from covenant.model.task_event import (
    TEXT_ARTIFACT,
    ArtifactUpdate,
    MessageUpdate,
    StatusUpdate,
    Step,
    StepUpdate,
    TurnUpdate,
    Update,
    Wait,
)
from covenant.model.task_view import TaskView, first_message
from covenant.model.tracing import Tracer

if TYPE_CHECKING:
    from covenant.agents.runtime.job import Job

FAILED: Final = "the agent failed"
NEXT_ATTEMPT: Final = "covenant.next_attempt"
"""Key in the metadata of the status between two attempts: the number of the `attempt`, and `at_ms`, when it begins."""
BUFFERED_MAX: Final = 256
BUFFERED_BYTES_MAX: Final = 256 * 1024
# A job writes at most once in this time, except for its end: faster updates share a record.
PAUSE_S: Final = 0.001
WRITE_AGAIN_MS_MAX: Final = 5_000

RESPONSE: Final = "response"
TOOL_CALL: Final = "tool_call"
SUB_AGENT: Final = "sub_agent_response"
SUB_CHARACTERS_MAX: Final = 64 * 1024
OVERHEAD: Final = 64
"""The approximate bytes of an update besides its text."""
_NO_TEXT: Final = (Text(""),)
_UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60))

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode


class JobServices(NamedTuple):
    """Services that the jobs of a worker pool share. `done` is called once for each job, when it has ended."""

    ledger: Ledger
    loop: asyncio.AbstractEventLoop
    limits: A2aSettings
    done: Callable[[Job], None]
    delegations: Delegations | None
    tracer: Tracer
    files: StoredFiles | None = None
    """None: bytes stay in the ledger."""
    model_calls: ModelCalls = ModelCalls()


class JobBuffer:
    __slots__ = (
        "_bytes",
        "_flusher",
        "_large",
        "_ledger",
        "_loop",
        "_mute",
        "_next_flush",
        "_pending",
        "_pending_bytes",
        "_room",
        "_services",
        "_timer",
        "_updates",
        "finishing",
        "full",
        "holder",
        "leased",
        "notes",
        "over",
        "task",
        "unfinished",
    )

    full: bool
    over: bool
    finishing: bool
    holder: AgentId
    leased: LeasedTask
    task: Task
    notes: dict[str, Any]
    unfinished: Callable[[], object] | None
    _ledger: Ledger
    _bytes: int
    _updates: int
    _pending: list[TurnUpdate]
    _pending_bytes: int
    _mute: bool
    _next_flush: float
    _loop: asyncio.AbstractEventLoop
    _services: JobServices
    _timer: asyncio.Handle | None
    _flusher: asyncio.Task[None] | None
    _large: bool
    _room: asyncio.Future[None] | None
    # Implemented by the job.
    fail: Callable[[str], None]
    cut: Callable[[str], None]
    _refused: Callable[[Refusal], None]

    def allow(self, size: int) -> None:
        """Exempts this many bytes from the limit: they are no output of the agent."""
        self._bytes -= size

    def say(self, update: Update, size: int | None = None, *, last: bool = False) -> None:
        """Adds an update; never waits. `size`: its approximate bytes, if known. `last`: the job ends with it."""
        if self._mute:
            if self.over:
                raise TurnStopped
            return
        if size is None:
            if update.parts or isinstance(update, ArtifactUpdate):  # most updates of a state have nothing to name
                update = named_safely(update)
                if self._services.files is not None and self._services.files.concerns(update.parts):
                    self._large = True
            size = len(_encode(update))
        self._updates += 1
        self._bytes += size
        limits = self._services.limits
        if self._updates > limits.turn_updates_max or self._bytes > limits.turn_bytes_max:
            self._flooded()
        pending = self._pending
        pending.append(update)
        self._pending_bytes += size
        if len(pending) >= BUFFERED_MAX or self._pending_bytes >= BUFFERED_BYTES_MAX:
            self.full = True
        if self._timer is None and self._flusher is None and not last:
            self._schedule()

    async def room(self) -> None:
        """Waits until there is room for more: until the earlier output is being written."""
        while self.full and not self.over:
            if self._flusher is None:
                self._flush()
            if self._room is None:
                self._room = self._loop.create_future()
            await self._room

    @property
    def limits(self) -> A2aSettings:
        return self._services.limits

    @property
    def now_ms(self) -> int:
        return self._ledger.now_ms()

    async def write(self, *steps: StepUpdate, wait: Wait | None = None, status: StatusUpdate | None = None) -> Advanced:
        """Writes the earlier output and these steps in one record. Returns when it is durable."""
        if self._mute:
            raise TurnStopped
        self._updates += len(steps)
        self._bytes += sum(len(_encode(step)) for step in steps)
        limits = self._services.limits
        if self._updates > limits.turn_updates_max or self._bytes > limits.turn_bytes_max:
            self._flooded()
        updates, self._pending, self._pending_bytes = (*self._pending, *steps), [], 0
        self._make_room()
        try:
            try:
                return await self._advance(updates, wait=wait, status=status)
            except Unavailable as refusal:
                return await self._advance_again(refusal, updates, wait=wait, status=status)
        except Refusal as refusal:
            self._refused(refusal)
            raise TurnStopped from None

    def _advance(
        self,
        updates: tuple[TurnUpdate, ...],
        result: Result | None = None,
        ending: Ending | None = None,
        *,
        wait: Wait | None = None,
        status: StatusUpdate | None = None,
    ) -> Awaitable[Advanced]:
        if result is not None and self.notes:
            result = msgspec.structs.replace(result, metadata=self.notes)
        advance = Advance(
            task_id=self.task.id,
            holder=self.holder,
            lease_id=self.leased.lease.lease_id,
            updates=updates,
            result=result,
            ending=ending,
            wait=wait,
            status=status,
        )
        if self._large and self._services.files is not None:
            return self._advance_files(self._services.files, advance)
        return self._ledger.commit(advance)

    async def _advance_again(
        self,
        refusal: Unavailable,
        updates: tuple[TurnUpdate, ...],
        result: Result | None = None,
        ending: Ending | None = None,
        *,
        wait: Wait | None = None,
        status: StatusUpdate | None = None,
    ) -> Advanced:
        """Writes again later: the ledger accepts nothing just now, but the work is done and the lease is held.

        Raises the ledger's refusal if it names no time to retry, if the lease is lost meanwhile, or if it is not known
        whether updates were written: only a result can be written twice and is kept once.
        """
        while refusal.retry_after_ms is not None and not (refusal.code == OUTCOME_UNKNOWN and result is None):
            log.warning("agent.write_delayed", extra=self.fields(code=refusal.code, reason=refusal.message))
            await asyncio.sleep(min(refusal.retry_after_ms, WRITE_AGAIN_MS_MAX) / 1_000)
            if self.over:
                break
            try:
                return await self._advance(updates, result, ending, wait=wait, status=status)
            except Unavailable as again:
                refusal = again
        raise refusal

    async def _advance_files(self, files: StoredFiles, advance: Advance) -> Advanced:
        """Stores large bytes in the blob store first. A failure to store fails the turn, and does not lose it."""
        account, task_id, kept = account_of(self.task), self.task.id, list(advance.updates)
        try:
            for at, update in enumerate(kept):
                if not isinstance(update, StepUpdate) and files.concerns(update.parts):
                    parts = await files.store(update.parts, account, task_id)
                    kept[at] = msgspec.structs.replace(update, parts=parts)
            result = advance.result
            if result is not None:
                result = await files.store_result(result, account)
        except Refusal as refusal:
            raise Invalid(refusal.code, refusal.message) from refusal
        return await self._ledger.commit(msgspec.structs.replace(advance, updates=tuple(kept), result=result))

    def _schedule(self) -> None:
        if self._loop.time() >= self._next_flush:
            self._timer = self._loop.call_soon(self._flush)
        else:
            self._timer = self._loop.call_at(self._next_flush, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending and self._flusher is None and not self.finishing and not self.over:
            self._flusher = self._loop.create_task(self._write())

    async def _write(self) -> None:
        updates, self._pending, self._pending_bytes = tuple(self._pending), [], 0
        self._next_flush = self._loop.time() + PAUSE_S
        self._make_room()
        try:
            try:
                await self._advance(updates)
            except Unavailable as refusal:
                await self._advance_again(refusal, updates)
        except Refusal as refusal:
            self._refused(refusal)
        except Exception:
            log.exception("agent.unwritten", extra=self.fields())
            self.cut(FAILED)
        finally:
            self._flusher = None
            if self.full:
                self._flush()
            elif self._pending and not self.finishing and not self.over:
                self._schedule()

    def _make_room(self) -> None:
        self.full = False
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _flooded(self) -> None:
        limits = self._services.limits
        many = self._updates > limits.turn_updates_max
        much = f"{limits.turn_updates_max} updates" if many else f"{limits.turn_bytes_max} bytes"
        message = f"the agent's output in one turn exceeds {much}"
        log.warning("agent.flooded", extra=self.fields(limit=much))
        self.unfinished = None
        self.fail(message)
        # Canceled a moment later, and only if it still runs: this very asyncio task may have to write the end.
        self._loop.call_soon(self.cut, message)
        raise TurnStopped

    def fields(self, **more: Any) -> dict[str, Any]:
        return {"task_id": self.task.id, "agent": self.holder.display, "attempt": self.leased.lease.attempt, **more}

    # Reads of the task, and of its conversation.

    @property
    def messages(self) -> tuple[MessageUpdate, ...]:
        return self.leased.messages or (first_message(self.task),)

    async def _past(self) -> AsyncIterator[Step]:
        after = 0
        while steps := await self._ledger.steps(self.task.id, after, PAGE):
            for step in steps:
                yield step
            after = steps[-1].generation

    async def noted(self, name: str) -> Any:
        """The last value under this name in the metadata of a status, in this turn or before it."""
        found = None
        async for step in self._past():
            if isinstance(step.what, StatusUpdate) and name in (step.what.metadata or {}):
                assert step.what.metadata is not None
                found = step.what.metadata[name]
        return found

    async def durable_steps(self) -> list[StepUpdate]:
        """The durable steps of this turn, as they were written."""
        turn = self.leased.turn
        return [
            step.what async for step in self._past() if isinstance(step.what, StepUpdate) and step.what.turn == turn
        ]

    async def thread(self, *, context: bool = False) -> tuple[MessageUpdate, ...]:
        """The messages of its conversation before this task, if it is in one; `context`: or of its A2A context."""
        wanted = self.task.origin == NATIVE or (context and self.limits.context_history)
        return await earlier_messages(self._ledger, self.task) if wanted else ()

    async def kept_files(self) -> dict[str, str]:
        return await kept_files(self._ledger, self.task)

    async def view(self) -> TaskView | None:
        """The task in its current state, with the messages of earlier turns."""
        return (await TaskReader(self._ledger).past(self.task.id)).view()


class TurnOutput:
    """An agent's output in one turn. `text` is all of its text."""

    _files = _data = _tools = _subs = 0
    """How many of each were written."""

    def __init__(self, job: JobBuffer) -> None:
        earlier = job.leased.turn - 1
        self._job = job
        self._task_id = job.task.id
        self._text_id = TEXT_ARTIFACT % (job.task.id, earlier)
        self._earlier = earlier
        self._prefix = f"{earlier}." if earlier else ""
        self._chunks: list[str] = []

    def begin_round(self, no: int) -> None:
        """Begins a round after a question: a model does not repeat its output from before it."""
        if no > 1 and self._prefix != f"{self._earlier}.{no - 1}.":
            self._prefix = f"{self._earlier}.{no - 1}."
            self._text_id = f"{self._task_id}-text-{self._earlier}.{no - 1}"
            self._chunks = []
            self._files = self._data = self._tools = self._subs = 0

    def say(self, chunk: str) -> None:
        if not chunk:
            return
        size = (len(chunk) if chunk.isascii() else len(chunk.encode())) + OVERHEAD
        if self._chunks:
            update = ArtifactUpdate(self._text_id, (Text(chunk),), None, None, True)
        else:
            update = ArtifactUpdate(self._text_id, (Text(chunk),), RESPONSE)
            self._job.unfinished = self.close
        self._chunks.append(chunk)
        self._job.say(update, size)

    def say_at_once(self, text: str) -> None:
        """Writes the whole text: nothing was streamed, so one chunk is the first and the last."""
        if self._chunks:
            self.say(text)
        elif text:
            size = (len(text) if text.isascii() else len(text.encode())) + OVERHEAD
            self._chunks.append(text)
            self._job.say(ArtifactUpdate(self._text_id, (Text(text),), RESPONSE, last_chunk=True), size, last=True)
            self._text_id = ""

    def give(self, content: Content) -> None:
        """Writes a content; anything but plain text is an artifact of its own."""
        if isinstance(content, Text) and content.mimeType is None and content.filename is None:
            self.say(content.text)
            return
        name: str | None
        if isinstance(content, Json):
            artifact_id, name = f"{self._task_id}-data-{self._prefix}{self._data}", content.filename or "data"
            self._data += 1
        else:
            artifact_id, name = f"{self._task_id}-file-{self._prefix}{self._files}", _name(content)
            self._files += 1
        self._job.say(ArtifactUpdate(artifact_id, (content,), name))

    def tool(self, name: str, *, ok: bool, took_ms: int = 0) -> None:
        """Records that a tool was used, and whether it succeeded."""
        metadata = {f"x-arbiter.{TOOL_CALL}": True, "x-arbiter.took_ms": took_ms}
        part = Json({"tool": name, "ok": ok}, metadata=metadata)
        self._job.say(ArtifactUpdate(f"{self._task_id}-tool-{self._prefix}{self._tools}", (part,), TOOL_CALL))
        self._tools += 1

    def sub(self, agent: str, depth: int, content: str) -> None:
        """Records the whole answer of another agent, beside the output here."""
        value = {"agent": agent, "depth": depth, "content": content[:SUB_CHARACTERS_MAX]}
        part = Json(value, metadata={f"x-arbiter.{SUB_AGENT}": True})
        self._job.say(ArtifactUpdate(f"{self._task_id}-sub-{self._prefix}{self._subs}", (part,), SUB_AGENT))
        self._subs += 1

    def status(self, update: StatusUpdate) -> None:
        self._job.say(update)

    @property
    def text(self) -> str:
        return "".join(self._chunks)

    @property
    def chunks(self) -> tuple[Text, ...]:
        """The text in its original chunks."""
        return tuple(Text(chunk) for chunk in self._chunks)

    def close(self) -> tuple[Content, ...]:
        """Closes the text artifact; returns the content of the final message."""
        if not self._chunks:
            return ()
        if self._text_id:
            self._job.say(ArtifactUpdate(self._text_id, _NO_TEXT, None, None, True, True), OVERHEAD)
            self._text_id = ""
            self._job.unfinished = None
        return (Text("".join(self._chunks)),)


def _name(content: Content) -> str | None:
    if isinstance(content, ResourceLink):
        return content.name or None
    return content.filename if isinstance(content, Resource | Text | File) else None


def announce_attempt(text: str, attempt: int, after_s: float, now_ms: int) -> StatusUpdate:
    """The status between two attempts. `text` says how the first one ended."""
    unit, size = next(((unit, size) for unit, size in _UNITS if after_s >= 2 * size), ("s", 1))
    pause = f"{after_s:.3g} s" if size == 1 else f"{round(after_s / size, 1):g} {unit}"
    about = {"attempt": attempt, "at_ms": now_ms + round(after_s * 1000)}
    return StatusUpdate(f"{text}; attempt {attempt} begins in {pause}", metadata={NEXT_ATTEMPT: about})
