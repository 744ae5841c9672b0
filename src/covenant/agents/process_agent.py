"""Process agents: a command started for each turn. It reads the turn as one line and writes its events line by line.

Standard input is one JSON object: `type` "turn", `task_id`, `context_id`, `message_id`, `text`, `parts`, `history`,
`turn`, `attempt`, `metadata` and `source` "agent". Then standard input is closed. Each line of standard output is a
JSON object with a `type`:

    assistant          a message, streamed: `text`, or `content`, or `message.content`, as a string or as blocks of text
    artifact           `name`, and one of `text`, `data` (base64), `url`, `value`; perhaps `media_type`; or `part`
    status             `text`: a report of progress, perhaps `progress`: the share that is done, from 0 to 1
    log                `text`, perhaps `level` (info, warning, error): a line for the log of the task
    usage              `usage`: the amounts used since the last such line, by name
    result             the turn is done: perhaps `text`, `usage`, `status` "ok" or "partial"; "error" fails it
    reply              `parts`: the turn is done, and the answer is a bare message
    session_exited, session_stopped    the turn is done
    approval_request   `text`: the task waits for its sender, and the program is ended
    auth_request       `text`: the same, for an authentication that the sender does outside of the task
    retry              `after_s`, perhaps `text`: the turn begins again after that time, as a further attempt
    reject             `text`: the task ends as rejected
    error, session_error               the turn failed: `message`

Other types are ignored. So is everything after the first line that ends the turn. Without such a line the exit status
decides: 0 completes the turn, anything else fails it. A program is ended with all its children: SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from covenant.agents.api import BaseTurn
from covenant.agents.function_agent import turn_history
from covenant.agents.runtime import turn_files
from covenant.agents.runtime.durable_step import finish
from covenant.agents.runtime.job import Job
from covenant.agents.runtime.job_buffer import FAILED
from covenant.agents.runtime.turn_output import TurnOutput
from covenant.agents.runtime.turn_steps import SECONDS_MAX
from covenant.model.content import Content, SentContent, Text
from covenant.model.task_event import Interruption, MessageUpdate, StatusUpdate
from covenant.model.usage import read_usage

if TYPE_CHECKING:
    from covenant.agents.isolated_agent import ProgramCalls

LINE_BYTES_MAX: Final = 1024 * 1024
OUTPUT_BYTES_MAX: Final = 32 * 1024 * 1024
MESSAGES_MAX: Final = 100
"""The most messages of one turn that are separate blocks of its result; more messages become one text."""
TERMINATE_S: Final = 1.0
"""How long a program has to exit after SIGTERM before it is killed."""
KILLED_S: Final = 10.0
"""How long a killed program may take to exit: only the kernel can hold it."""
LINGER_S: Final = 0.25
"""How long the program's children may go on after it has exited."""
LOOK_S: Final = 0.1
NOT_STARTED: Final = "the agent could not be started"
APPROVAL: Final = "the agent asks for approval"
_NAMES: Final = {"artifact": "an artifact", "call": "a call", "reply": "a reply", "status": "a status"}

log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
LOGGED_LENGTH_MAX: Final = 20_000
STDERR_LINES_MAX: Final = 10_000
"""The most lines of a program's standard error in one turn."""
STDERR_LINE_LENGTH_MAX: Final = 1_000


class _TurnLine(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "turn"
    task_id: str
    context_id: str
    message_id: str | None
    text: str
    parts: tuple[Content, ...]
    history: tuple[MessageUpdate, ...]
    turn: int
    attempt: int
    metadata: dict[str, Any]
    source: str = "agent"


class ProcessAgent:
    """`environment` is all that the program sees of the daemon's environment; None: all of it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None,
        line_bytes_max: int = LINE_BYTES_MAX,
        output_bytes_max: int = OUTPUT_BYTES_MAX,
    ) -> None:
        if not command:
            raise ValueError("a process agent needs a command")
        self._command = tuple(command)
        self._environment = dict(environment) if environment is not None else None
        self._line_bytes_max = line_bytes_max
        self._output_bytes_max = output_bytes_max

    async def turn_input(self, job: Job) -> bytes:
        message, parts = job.messages[-1], tuple(part for each in job.messages for part in each.parts)
        turn = _TurnLine(
            task_id=job.task.id,
            context_id=job.task.context_id or job.task.id,
            message_id=message.message_id,
            text="\n".join(part.text for part in parts if isinstance(part, Text)),
            parts=parts,
            history=await turn_history(job),
            turn=job.leased.turn,
            attempt=job.leased.lease.attempt,
            metadata=message.metadata or {},
        )
        return _encode(turn) + b"\n"

    def calls(self, job: Job, stdin: asyncio.StreamWriter) -> ProgramCalls | None:  # noqa: ARG002
        """Performs the program's calls, if it may make any. None: standard input is closed after the turn is written.

        A program that may make calls must end its turn before it exits.
        """
        return None

    async def run(self, job: Job) -> None:
        turn_line = await self.turn_input(job)
        try:
            process = await start_program(self._command, self._environment, self._line_bytes_max)
        except (OSError, ValueError):
            log.warning("process.not_started", exc_info=True, extra=job.fields(command=self._command[0]))
            job.fail(NOT_STARTED, reason="not_started")
            return
        assert process.stdin is not None
        calls = self.calls(job, process.stdin)
        stderr_reader = asyncio.create_task(log_stderr(process, lambda line: log_line(job, line, stream="stderr")))
        helpers = [
            stderr_reader,
            asyncio.create_task(_write_turn(process.stdin, turn_line, close=calls is None)),
            asyncio.create_task(_end_orphans(process)),
        ]
        try:
            await self._read_output(process, job, calls)
        finally:
            # However often this is canceled: nothing else ends the program, closes its pipes and cancels its calls.
            _, canceled = await finish(_clean_up(process, stderr_reader, helpers, calls))
        if canceled:
            raise asyncio.CancelledError

    async def _read_output(self, process: asyncio.subprocess.Process, job: Job, calls: ProgramCalls | None) -> None:
        assert process.stdout is not None
        output, total = ProgramOutput(job, calls), 0
        while not job.ended:
            try:
                line = await process.stdout.readline()
            except ValueError:
                job.fail(f"the agent wrote a line of more than {self._line_bytes_max} bytes")
                return
            if not line:
                break
            total += len(line)
            if total > self._output_bytes_max:
                job.fail(f"the agent wrote more than {self._output_bytes_max} bytes")
                return
            if not line.isspace():
                output.read_line(line)
            if job.full:
                await job.room()
        if not job.ended:
            output.exited(await _exited(process))


async def start_program(
    command: Sequence[str], environment: Mapping[str, str] | None, line_bytes_max: int
) -> asyncio.subprocess.Process:
    """Starts the program in a process group of its own, so that its children can be ended with it."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
        limit=line_bytes_max,
    )


async def _write_turn(stdin: asyncio.StreamWriter, turn_line: bytes, *, close: bool) -> None:
    with contextlib.suppress(ConnectionError):  # a program need not read its turn
        stdin.write(turn_line)
        await stdin.drain()
        if close:
            stdin.close()
            await stdin.wait_closed()


async def _exited(process: asyncio.subprocess.Process) -> int:
    """The program's exit code. `process.wait` alone also waits for other processes that hold the pipes."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait((waiting,), timeout=LOOK_S)
    finally:
        waiting.cancel()
    return process.returncode


async def _end_orphans(process: asyncio.subprocess.Process) -> None:
    """Kills the program's orphans. One that left its group may hold the output open, so the output ends here."""
    assert process.stdout is not None
    await _exited(process)
    await asyncio.sleep(LINGER_S)
    signal_group(process, signal.SIGKILL)
    await asyncio.sleep(LINGER_S)
    process.stdout.feed_eof()


async def _clean_up(
    process: asyncio.subprocess.Process,
    stderr_reader: asyncio.Task[None],
    helpers: Sequence[asyncio.Task[None]],
    calls: ProgramCalls | None,
) -> None:
    try:
        await end_program(process, TERMINATE_S, stderr_reader)
    finally:
        if calls is not None:
            await calls.close()
        for each in helpers:
            each.cancel()
        await asyncio.wait(helpers)


async def end_program(
    process: asyncio.subprocess.Process, wait_s: float, stderr_reader: asyncio.Task[None], *, by_input: bool = False
) -> None:
    """Ends the program with its children, and reads the rest of its standard error.

    The program gets SIGTERM, and `wait_s` later SIGKILL. `by_input`: first its input is closed, and it has as long to
    exit by itself.
    """
    try:
        if by_input and process.stdin is not None:
            process.stdin.close()
            await _exits_within(process, wait_s)
        signal_group(process, signal.SIGTERM)
        await _exits_within(process, wait_s)
        signal_group(process, signal.SIGKILL)
        await _exits_within(process, KILLED_S)
        await asyncio.wait((stderr_reader,), timeout=LINGER_S)
    finally:
        # Also kills processes that the program left behind, whether it exited or not, and also when this is canceled.
        signal_group(process, signal.SIGKILL)
        process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001  (nothing else lets go of its pipes)


async def _exits_within(process: asyncio.subprocess.Process, wait_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await _exited(process)


def signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


class ProgramOutput:
    """Turns a program's lines into updates of its job. `calls`: None if the program may not call."""

    def __init__(self, job: Job, calls: ProgramCalls | None = None) -> None:
        self._job = job
        self._calls = calls
        self._output = TurnOutput(job)

    def read_line(self, line: bytes) -> None:
        try:
            event = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            event = None
        if not isinstance(event, dict):
            log_line(self._job, line[:STDERR_LINE_LENGTH_MAX].decode(errors="replace").rstrip(), stream="stdout")
            self._job.fail("the agent wrote a line that is not a JSON object")
            return
        kind = event.get("type")
        try:
            self._apply(kind, event)
        except (ValueError, TypeError) as wrong:
            self._job.fail(f"the agent wrote {_NAMES.get(str(kind), kind)} that is invalid: {wrong}")

    def _apply(self, kind: Any, event: dict[str, Any]) -> None:
        job, output = self._job, self._output
        match kind:
            case "assistant":
                output.write_text(_text_of(event))
            case "artifact":
                output.write_content(_content(event))
            case "status":
                output.write_status(BaseTurn.status(_text_of(event), progress=event.get("progress")))
            case "log":
                level = LEVELS.get(str(event.get("level", "info")).lower(), logging.INFO)
                log_line(job, _text_of(event)[:LOGGED_LENGTH_MAX], level, stream=_stream(event))
            case "usage":
                job.spend(read_usage(event.get("usage")))
            case "call" if self._calls is not None:
                self._calls.begin(event)
            case "call_off" if self._calls is not None:
                self._calls.cancel(event)
            case "result":
                self._result(event)
            case "reply":
                parts = msgspec.convert(event.get("parts"), tuple[SentContent, ...])
                # From the second turn on the sender knows the task.
                job.complete(*parts, reply=job.leased.turn == 1)
            case "session_exited" | "session_stopped":
                job.complete(*self._close())
            case "approval_request" | "auth_request":
                output.close()
                state = Interruption.INPUT_REQUIRED if kind == "approval_request" else Interruption.AUTH_REQUIRED
                job.park(StatusUpdate(_text_of(event) or APPROVAL, state.value))
            case "retry":
                after_s = event.get("after_s", 1.0)
                if isinstance(after_s, int | float) and 0 <= after_s <= SECONDS_MAX:
                    job.retry(after_s, _text_of(event))
                else:
                    job.fail("the agent asked for a retry, and its after_s is no number of seconds up to ten years")
            case "reject":
                job.reject(_text_of(event) or FAILED)
            case "error" | "session_error":
                job.fail(_error_text(event), reason="failed")
            case _:
                log.debug("process.passed_over", extra=job.fields(type=str(kind)[:100]))

    def _result(self, event: dict[str, Any]) -> None:
        self._job.spend(read_usage(event.get("usage")))
        if event.get("status") == "error" or event.get("is_error") is True:
            self._job.fail(_error_text(event), reason="failed")
            return
        text, partial = _text_of(event), event.get("status") == "partial"
        if not self._output.text:
            self._output.write_whole_text(text)
        parts = self._close()
        differs = text and text != self._output.text
        self._job.complete(*((Text(text),) if differs else parts), partial=partial)

    def _close(self) -> tuple[Content, ...]:
        """The program's output: each message is a block of its own. A function sends one message in many chunks."""
        parts, messages = self._output.close(), self._output.chunks
        return messages if self._calls is None and len(messages) <= MESSAGES_MAX else parts

    def exited(self, code: int) -> None:
        if code == 0 and self._calls is not None:
            self._job.fail("the agent's process exited in the middle of its turn")
        elif code == 0:
            self._job.complete(*self._close())
        elif code < 0:
            self._job.fail(f"the agent's process was killed by signal {-code}", reason="exited")
        else:
            self._job.fail(f"the agent exited with status {code}", reason="exited")


def _text_of(event: dict[str, Any]) -> str:
    """The text of an event, in any of the fields where programs put it."""
    message = event.get("message")
    within = message.get("content") if isinstance(message, dict) else message
    for found in (event.get("text"), event.get("content"), event.get("result"), within):
        if isinstance(found, str):
            return found
        if isinstance(found, list):
            blocks = (block.get("text") for block in found if isinstance(block, dict) and block.get("type") == "text")
            return "".join(text for text in blocks if isinstance(text, str))
    return ""


def _error_text(event: dict[str, Any]) -> str:
    for found in (event.get("message"), event.get("error"), event.get("text")):
        if isinstance(found, str) and found:
            return found
    return FAILED


def _content(event: dict[str, Any]) -> Content:
    if "part" in event:
        part: Content = msgspec.convert(event["part"], type=SentContent)
        return part
    name, media_type = event.get("name") or "artifact", event.get("media_type")
    if not isinstance(name, str) or not isinstance(media_type, str | None):
        raise TypeError("name and media_type must be strings")
    if "value" in event:
        return msgspec.structs.replace(turn_files.data(event["value"]), filename=name, mimeType=media_type)
    match event:
        case {"url": str(url)}:
            return turn_files.file(name, url=url, media_type=media_type)
        case {"data": str(data)}:
            return turn_files.file(name, turn_files.from_base64(data), media_type=media_type)
        case {"text": str(text)}:
            return Text(text, mimeType=media_type, filename=name)
        case _:
            raise ValueError("an artifact needs text, data, url or value")


def log_line(job: Job, line: str, level: int = logging.INFO, *, stream: str = "log") -> None:
    """Logs a line of the agent in its task's log."""
    log.log(level, "process.said", extra=job.fields(said=line, stream=stream))


def _stream(event: dict[str, Any]) -> str:
    return "stdout" if event.get("stream") == "stdout" else "log"


async def log_stderr(process: asyncio.subprocess.Process, write: Callable[[str], None]) -> None:
    """Passes lines to `write`, at most `STDERR_LINES_MAX`. Drops further lines: a full pipe would block the program."""
    assert process.stderr is not None
    count = 0
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:
            continue
        if not line:
            return
        count += 1
        if count <= STDERR_LINES_MAX:
            write(line[:STDERR_LINE_LENGTH_MAX].decode(errors="replace").rstrip())
