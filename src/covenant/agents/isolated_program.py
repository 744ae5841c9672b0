"""The program of an isolated function: it does one turn of one agent, and exits. See `isolated_agent`.

    python -m covenant.agents.isolated_program FILE AGENT

Standard input is the turn, then answers to calls; standard output is lines to the daemon. The function's prints and
logs are such lines, too; a traceback goes to standard error. The task's log has all of it. The program ends with the
daemon.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn, cast

import msgspec

from covenant.agents.agent_loader import CannotLoad, find_agent
from covenant.agents.api import Agent
from covenant.agents.function_agent import FunctionAgent
from covenant.agents.isolated_agent import (
    CALL_VERBS,
    STEP_VERBS,
    IsolatedTurn,
    ProgramCall,
    ProgramCallAnswer,
    refusal_of,
)
from covenant.agents.process_agent import LOGGED_LENGTH_MAX
from covenant.agents.runtime.agent_calls import Answer, Call, Calling
from covenant.agents.runtime.durable_step import AskedStep, StepError, as_json
from covenant.agents.runtime.function_threads import AgentThreads
from covenant.agents.runtime.job_buffer import FAILED
from covenant.agents.runtime.turn_files import inline_bytes
from covenant.agents.runtime.turn_limits import HeldTokens, RunOnLoop, Spending
from covenant.exchange.file_source import FileSource
from covenant.ledger.machine.commands import LeasedTask
from covenant.model.content import Content, File
from covenant.model.errors import Unavailable
from covenant.model.ids import AgentId
from covenant.model.question import Question
from covenant.model.task import Task
from covenant.model.task_event import PROGRESS, Interruption, MessageUpdate, StatusUpdate, StepFailure
from covenant.model.task_view import first_message
from covenant.outbound.remote.remote_task import Sendable, parts_of
from covenant.wire.validation import checked

DAEMON_GONE: Final = 70
"""The exit status after the daemon has gone."""

_encode = msgspec.json.Encoder().encode


class _Output:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._one_line = threading.Lock()

    def write(self, **event: Any) -> None:
        self.write_line(_encode(event))

    def write_line(self, line: bytes) -> None:
        left = memoryview(line + b"\n")
        with self._one_line:
            while left:
                left = left[os.write(self._descriptor, left) :]


class _LogHandler(logging.Handler):
    """Sends the function's log records to the daemon."""

    def __init__(self, output: _Output) -> None:
        super().__init__(logging.INFO)
        self._output = output
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)[:LOGGED_LENGTH_MAX].encode(errors="replace").decode()
            self._output.write(type="log", level=record.levelname.lower(), text=text)
        except Exception:  # noqa: BLE001  (the author's record; as for any handler, its error ends no work)
            self.handleError(record)


class _PrintedLines(io.TextIOBase):
    """Sends the function's prints to the daemon."""

    def __init__(self, output: _Output) -> None:
        self._output = output
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        if len(self._rest) > LOGGED_LENGTH_MAX:
            lines, self._rest = [*lines, self._rest], ""
        for line in lines:
            self._output.write(type="log", stream="stdout", text=line[:LOGGED_LENGTH_MAX])
        return len(text)

    def close_line(self) -> None:
        if self._rest:
            self.write("\n")


class _Calls:
    def __init__(self, output: _Output) -> None:
        self._output = output
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[ProgramCallAnswer]] = {}

    def receive(self, answered: ProgramCallAnswer) -> None:
        waiting = self._waiting.get(answered.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answered)

    async def one(self, call: Call, *, step: str = "") -> Answer:
        return cast("Answer", await self.ask("one", _as_call(call), step=step))

    async def all(self, calls: Sequence[Calling], *, step: str = "") -> tuple[Answer, ...]:
        return cast("tuple[Answer, ...]", await self.ask("all", [*map(_as_call, calls)], step=step))

    async def quorum(self, wanted: int, calls: Sequence[Calling], *, step: str = "") -> tuple[Answer, ...]:
        return cast("tuple[Answer, ...]", await self.ask("quorum", wanted, [*map(_as_call, calls)], step=step))

    async def answer(self, child: Answer | str, what: Sendable, *, step: str = "") -> Answer:
        child_id = child.task_id if isinstance(child, Answer) else child
        return cast("Answer", await self.ask("answer", child_id, parts_of(what), step=step))

    def send(self, verb: str, *arguments: Any, step: str = "") -> int:
        """Sends a call; returns its id. `give_up` alone needs no answer."""
        request = ProgramCall(id=next(self._ids), verb=verb, arguments=arguments, step=step)
        self._output.write_line(_encode(request))
        return request.id

    async def ask(self, verb: str, *arguments: Any, step: str = "") -> Any:
        request_id = self.send(verb, *arguments, step=step)
        waiting: asyncio.Future[ProgramCallAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = waiting
        try:
            answered = await waiting
        except asyncio.CancelledError:
            self._output.write(type="call_off", id=request_id)
            raise
        finally:
            del self._waiting[request_id]
        if answered.refused is not None:
            raise refusal_of(answered.refused)
        return msgspec.json.decode(answered.value, type=(CALL_VERBS.get(verb) or STEP_VERBS[verb]).answer)


class _Steps:
    """Durable steps by way of the daemon. A wait ends this program."""

    def __init__(self, calls: _Calls, leased: LeasedTask) -> None:
        self._calls = calls
        self.interrupted = leased.cut

    async def begin(self, name: str) -> AskedStep:
        return cast("AskedStep", await self._calls.ask("begin", name))

    async def end(self, step: AskedStep, value: Any) -> Any:
        kept = await self._calls.ask("end", step, as_json(step, value))
        self.interrupted = False
        return kept

    async def fail(self, step: AskedStep, failure: StepFailure) -> None:
        await self._calls.ask("fail", step, failure)
        self.interrupted = False

    def give_up(self, step: AskedStep) -> None:
        self._calls.send("give_up", step)

    async def sleep(self, seconds: float) -> None:
        await self._calls.ask("sleep", checked("seconds", seconds, float | int))

    async def wait_for(self, name: str, timeout_s: float | None) -> Any:
        return await self._calls.ask("wait_for", name, checked("timeout_s", timeout_s, float | int | None))

    async def ask(self, question: Question, timeout_s: float | None) -> dict[str, Any]:
        timeout_s = checked("timeout_s", timeout_s, float | int | None)
        return cast("dict[str, Any]", await self._calls.ask("ask", question, timeout_s))

    async def check_end(self) -> None:
        await self._calls.ask("check_end")


def _as_call(call: Calling) -> Call:
    if isinstance(call, tuple):
        agent, what = call
        call = Call(agent=agent, what=what)
    name = getattr(call.agent, "name", call.agent)
    return msgspec.structs.replace(call, agent=name, what=parts_of(call.what))


class _Turn:
    """Stands in for the function's `Job` and `TurnOutput`: each call becomes a line to the daemon."""

    def __init__(self, leased: LeasedTask, output: _Output, calls: _Calls, before_end: Callable[[], None]) -> None:
        self.leased: Final = leased
        self.task: Final[Task] = leased.task
        self._spending = Spending(leased.task, {})
        self.holder: Final[AgentId] = leased.lease.leased_to
        self.calls: Final = calls
        self.steps: Final = _Steps(calls, leased)
        self.begun_before: Final = leased.continues or leased.lease.attempt > 1
        self.threads: Final = AgentThreads(1)
        self.full = False
        self.ended = False
        self._output = output
        self._before_end = before_end
        self._chunks: list[str] = []
        self._whole = ""

    @property
    def messages(self) -> tuple[MessageUpdate, ...]:
        return self.leased.messages or (first_message(self.task),)

    @property
    def text(self) -> str:
        return "".join(self._chunks)

    def write_text(self, chunk: str) -> None:
        if chunk:
            self._chunks.append(chunk)
            self._output.write(type="assistant", text=chunk)

    def write_whole_text(self, text: str) -> None:
        if self._chunks:
            self.write_text(text)
        else:
            self._whole = text

    def write_content(self, content: Content) -> None:
        self._output.write(type="artifact", part=content)

    def write_status(self, update: StatusUpdate) -> None:
        self._output.write(type="status", text=update.text, progress=(update.metadata or {}).get(PROGRESS))

    def close(self) -> tuple[Content, ...]:
        return ()

    async def room(self) -> None:
        """Never waits: a full pipe already makes the writer wait."""

    def spend(self, amounts: dict[str, float]) -> str | None:
        """Counts in this program, too. The daemon also counts what called agents used."""
        self._output.write(type="usage", usage=amounts)
        return self._spending.add(amounts)

    def reserve(self, tokens: int, ask: RunOnLoop | None = None) -> HeldTokens:
        return HeldTokens(self._spending.budget, tokens, ask)

    @property
    def tokens_left(self) -> int | None:
        """The rest of the budget as far as this program knows: only the daemon knows what its calls have reserved."""
        budget = self._spending.budget
        return budget.left if budget is not None else None

    def complete(self, *content: Content, reply: bool = False) -> None:
        if reply:
            self._end(type="reply", parts=content)
        elif content:
            for part in content:
                self.write_content(part)
            self._end(type="result")
        else:
            self._end(type="result", **({"text": self._whole} if self._whole else {}))

    async def save_file(self, name: str, source: FileSource, media_type: str | None = None) -> File:
        del source, media_type
        raise Unavailable("no_files", f"an agent with isolate=True yields turn.file({name!r}, data) instead")

    async def open_file(self, part: Content) -> AsyncIterator[bytes]:
        """The bytes of an inline part; only the daemon can read the blob store."""
        if isinstance(part, File):
            raise Unavailable("no_files", "an agent with isolate=True reads files that came in the message, no others")
        yield inline_bytes(part)

    def fail(self, message: str) -> None:
        self._end(type="error", message=message)

    def reject(self, message: str) -> None:
        self._end(type="reject", text=message)

    def retry(self, after_s: float, text: str) -> None:
        self._end(type="retry", after_s=after_s, text=text)

    def park(self, update: StatusUpdate) -> None:
        needs_auth = update.state == Interruption.AUTH_REQUIRED.value
        self._end(type="auth_request" if needs_auth else "approval_request", text=update.text)

    def _end(self, **event: Any) -> None:
        if not self.ended:
            self.ended = True
            self._before_end()
            self._output.write(**event)


def _read_answers(lines: BinaryIO, calls: _Calls, loop: asyncio.AbstractEventLoop) -> None:
    """Runs in a thread: reads answers to calls until the daemon closes the pipe."""
    decode = msgspec.json.Decoder(ProgramCallAnswer).decode
    for line in lines:
        loop.call_soon_threadsafe(calls.receive, decode(line))
    os._exit(DAEMON_GONE)  # the daemon is gone, or has ended this turn: further output would be lost


async def _perform(
    agent: Agent, turn_input: IsolatedTurn, answers: BinaryIO, output: _Output, printed: _PrintedLines
) -> None:
    calls = _Calls(output)
    turn = _Turn(turn_input.leased, output, calls, printed.close_line)
    loop = asyncio.get_running_loop()
    threading.Thread(target=_read_answers, args=(answers, calls, loop), daemon=True).start()
    try:
        await FunctionAgent(agent).perform(turn, turn, turn_input.history)
    except StepError as wrong:
        traceback.print_exc()
        turn.fail(f"{FAILED}: {wrong.message}")
    except BaseException:  # noqa: BLE001  (whatever it is, only its task fails)
        traceback.print_exc()
        turn.fail(FAILED)


def main() -> NoReturn:
    path, name = sys.argv[1:]
    # Standard input and output carry lines of the daemon. The function and its programs must neither read nor mix them.
    lines = os.fdopen(os.dup(0), "rb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    output = _Output(os.dup(1))
    os.dup2(2, 1)
    printed = _PrintedLines(output)
    sys.stdout = printed
    logging.basicConfig(level=logging.INFO, handlers=[_LogHandler(output)])
    turn_input = msgspec.json.decode(lines.readline(), type=IsolatedTurn)
    try:
        agent = find_agent(Path(path), name)
    except CannotLoad as wrong:
        sys.stderr.write(f"{wrong}\n")
        output.write(type="error", message=FAILED)
    else:
        asyncio.run(_perform(agent, turn_input, lines, output, printed))
    sys.stderr.flush()
    os._exit(0)  # does not wait for threads that the function has left behind


if __name__ == "__main__":
    main()
