"""Process agents: real programs, what they say, and that none of them outlives its turn."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.process_agent import STDERR_LINES_MAX, ProcessAgent
from covenant.ledger.contract.ledger import Ledger
from covenant.model.content import Json, Resource, ResourceLink, Text
from covenant.model.task_event import StatusUpdate
from covenant.model.task_view import TaskState
from tests.agents.pool_under_test import HOUR_MS, PoolUnderTest, chunks, endings, open_pool, time_out, told
from tests.waits import BOUND_S

PRELUDE = """
import json, os, signal, sys, time
def say(type, **fields):
    print(json.dumps({"type": type, **fields}), flush=True)
"""


def program(source: str, **terms: Any) -> ProcessAgent:
    """A Python program that has `say`."""
    text = PRELUDE + textwrap.dedent(source)
    return ProcessAgent([sys.executable, "-c", text], environment={"PATH": os.defpath}, **terms)


def events(*rows: dict[str, Any] | str, code: int = 0) -> ProcessAgent:
    """A program that writes these lines and exits."""
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    return program(f"sys.stdout.write({lines!r}); sys.stdout.flush(); sys.exit({code})")


DONE, FAILED, WAITS = TaskState.COMPLETED, TaskState.FAILED, TaskState.INPUT_REQUIRED
HI: dict[str, Any] = {"type": "assistant", "text": "hi"}
BLOCKS = [{"type": "text", "text": "b"}, {"type": "x"}]
ODD = "the agent wrote an artifact that is invalid: an artifact needs text, data, url or value"
ODD_PROGRESS = "the agent wrote a status that is invalid: progress must be from 0 to 1, not 2.0"
NO_SECONDS = "the agent asked for a retry, and its after_s is no number of seconds up to ten years"
ENDS: list[tuple[str, list[Any], int, TaskState, str]] = [
    ("nothing, exit 0", [], 0, DONE, ""),
    ("words, exit 0", [HI], 0, DONE, "hi"),
    ("words, exit 3", [HI], 3, FAILED, "the agent exited with status 3"),
    ("result", [HI, {"type": "result"}], 0, DONE, "hi"),
    ("result with its own text", [HI, {"type": "result", "text": "in short: hi"}], 0, DONE, "in short: hi"),
    ("result, then exit 1", [{"type": "result", "text": "x"}], 1, DONE, "x"),
    ("result that is an error", [{"type": "result", "status": "error", "error": "no"}], 0, FAILED, "no"),
    ("session_exited", [HI, {"type": "session_exited"}], 0, DONE, "hi"),
    ("session_stopped", [HI, {"type": "session_stopped"}], 0, DONE, "hi"),
    ("error", [HI, {"type": "error", "message": "out of luck"}], 0, FAILED, "out of luck"),
    ("error without a word", [{"type": "error"}], 0, FAILED, "the agent failed"),
    ("session_error", [{"type": "session_error", "error": "broke"}], 0, FAILED, "broke"),
    ("error after exit", [{"type": "session_exited"}, {"type": "error", "message": "x"}], 1, DONE, ""),
    ("exit after error", [{"type": "error", "message": "x"}, {"type": "session_exited"}], 0, FAILED, "x"),
    ("words after the end", [HI, {"type": "session_exited"}, HI], 0, DONE, "hi"),
    ("approval_request", [{"type": "approval_request", "text": "may I?"}], 0, WAITS, "may I?"),
    ("approval_request, then exit", [{"type": "approval_request"}, HI], 1, WAITS, "the agent asks for approval"),
    ("blocks", [{"type": "assistant", "message": {"content": BLOCKS}}], 0, DONE, "b"),
    ("types it does not know", [{"type": "tool_status"}, {"type": 7}, {}, HI], 0, DONE, "hi"),
    ("blank lines", ["", "  ", json.dumps(HI)], 0, DONE, "hi"),
    ("no JSON", ["hello"], 0, FAILED, "the agent wrote a line that is not a JSON object"),
    ("no object", ["[1]"], 0, FAILED, "the agent wrote a line that is not a JSON object"),
    ("deep JSON", ["[" * 100_000], 0, FAILED, "the agent wrote a line that is not a JSON object"),
    ("odd artifact", [{"type": "artifact", "name": "x"}], 0, FAILED, ODD),
    ("odd progress", [{"type": "status", "progress": 2}], 0, FAILED, ODD_PROGRESS),
    ("retry after words", [{"type": "retry", "after_s": "60"}], 0, FAILED, NO_SECONDS),
    ("retry before now", [{"type": "retry", "after_s": -5}], 0, FAILED, NO_SECONDS),
    ("retry after ages", [{"type": "retry", "after_s": 1e12}], 0, FAILED, NO_SECONDS),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "code", "state", "said"), [row[1:] for row in ENDS], ids=[row[0] for row in ENDS])
async def test_each_event_makes_at_most_one_legal_move(
    pool: PoolUnderTest, rows: list[Any], code: int, state: TaskState, said: str
) -> None:
    pool.serve(events(*rows, code=code))
    view = await pool.until(await pool.send(), lambda view: view.state.terminal or view.state.waits)
    assert (view.state, told(view)) == (state, said)
    await pool.idle()
    steps = await pool.steps(view.task.id)
    assert len(endings(steps)) == (0 if state is WAITS else 1)


async def test_a_program_is_told_of_its_turn_in_one_line(pool: PoolUnderTest) -> None:
    pool.serve(program("turn = json.loads(sys.stdin.read()); say('artifact', name='turn', value=turn)"))
    parts = (Text("look"), Json({"a": 1}))
    fields: dict[str, Any] = {"message_id": "m-1", "context_id": "c-1", "metadata": {"lang": "en"}}
    view = await pool.ask("look", parts=parts, **fields)
    (given,) = view.artifacts[0].parts
    assert isinstance(given, Json)
    assert given.value == {
        "type": "turn",
        "task_id": view.task.id,
        "context_id": "c-1",
        "message_id": "m-1",
        "text": "look",
        "parts": [{"type": "text", "text": "look"}, {"type": "json", "value": {"a": 1}}],
        "history": [],
        "turn": 1,
        "attempt": 1,
        "metadata": {"lang": "en"},
        "source": "agent",
    }


async def test_an_approval_is_the_next_turn_of_the_same_task(pool: PoolUnderTest) -> None:
    pool.serve(
        program("""
            turn = json.loads(sys.stdin.readline())
            if turn["turn"] == 1:
                say("approval_request", text="delete it?")
                time.sleep(600)
            said = [message["parts"][0]["text"] for message in turn["history"]]
            say("result", text=f"{said} {turn['text']}")
        """)
    )
    task_id = await pool.send("tidy up")
    await pool.parked(task_id)
    await pool.idle()
    await pool.say(task_id, "yes")
    assert told(await pool.ended(task_id)) == "['tidy up', 'delete it?'] yes"


async def test_artifacts_status_and_usage_are_told(pool: PoolUnderTest) -> None:
    pool.serve(
        events(
            {"type": "status", "text": "reading", "progress": 0.5},
            {"type": "artifact", "name": "a.txt", "data": "aGk="},
            {"type": "artifact", "name": "b.md", "text": "# b", "media_type": "text/markdown"},
            {"type": "artifact", "name": "c", "url": "https://host/c"},
            {"type": "artifact", "name": "d", "value": [1]},
            {"type": "result", "text": "ok", "status": "partial", "usage": {"tokens": 5, "odd": "x"}},
        )
    )
    view = await pool.ask()
    (read,) = [step.what for step in await pool.steps(view.task.id) if isinstance(step.what, StatusUpdate)]
    assert (read.text, read.metadata) == ("reading", {"progress": 0.5})
    file, page, link, data, text = (artifact.parts[0] for artifact in view.artifacts)
    assert isinstance(file, Resource)
    assert (file.filename, file.resource.blob, file.resource.mimeType) == ("a.txt", "aGk=", "text/plain")
    assert page == Text("# b", "text/markdown", "b.md")
    assert link == ResourceLink("https://host/c", "c")
    assert data == Json([1], filename="d")
    assert text == Text("ok")
    assert view.result is not None
    assert (view.partial, view.result.metadata) == (True, {"usage": {"tokens": 5}})


@pytest.mark.parametrize("command", [["no-such-program-here"], ["/"], ["x\0y"]], ids=["missing", "folder", "nul"])
async def test_a_program_that_cannot_be_started_fails_its_task(pool: PoolUnderTest, command: list[str]) -> None:
    pool.serve(ProcessAgent(command, environment={"PATH": os.defpath}))
    view = await pool.ask()
    assert (view.state, told(view)) == (FAILED, "the agent could not be started")


async def test_a_program_sees_nothing_of_our_environment(pool: PoolUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVENANT_TOKEN", "secret")
    pool.serve(program("say('result', text=' '.join(sorted(os.environ)))"))
    assert set(told(await pool.ask()).split()) <= {"PATH", "LC_CTYPE"}


async def test_a_line_and_all_lines_together_have_a_limit(pool: PoolUnderTest) -> None:
    pool.serve(program("say('assistant', text='x' * 5000)", line_bytes_max=1_000))
    assert told(await pool.ask()) == "the agent wrote a line of more than 1000 bytes"
    pool.serve(program("while True: say('tool_status', text='x' * 500)", output_bytes_max=100_000))
    view = await pool.ask()
    assert (view.state, told(view)) == (FAILED, "the agent wrote more than 100000 bytes")
    await pool.idle()


async def test_what_a_program_complains_of_is_for_the_log_alone(
    pool: PoolUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    pool.serve(
        program(f"""
            for number in range({STDERR_LINES_MAX + 1_000}):
                print("complaint", number, file=sys.stderr)
            say("result", text="ok")
        """)
    )
    view = await pool.ask()
    await pool.idle()
    noted = [record.said for record in caplog.records if record.message == "process.said"]  # type: ignore[attr-defined]
    assert 0 < len(noted) <= STDERR_LINES_MAX
    assert "complaint" not in str(await pool.steps(view.task.id))


STUBBORN = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    say("assistant", text=f"{os.getpid()} {child}")
    time.sleep(600)
"""
POLITE = """
    import pathlib
    def last_words(*_):
        pathlib.Path(json.loads(sys.stdin.readline())["text"]).write_text("ended politely")
        sys.exit(0)
    signal.signal(signal.SIGTERM, last_words)
    say("assistant", text=str(os.getpid()))
    while True:
        time.sleep(0.05)
        say("assistant", text=" more")
"""


async def pids(pool: PoolUnderTest, task_id: Any) -> list[int]:
    view = await pool.until(task_id, lambda view: bool(view.artifacts))
    part = view.artifacts[0].parts[0]
    assert isinstance(part, Text)
    return [int(word) for word in part.text.split() if word.isdigit()]


async def gone(pid: int) -> None:
    """A process that is gone, or dead and not yet fetched by its parent."""
    async with asyncio.timeout(BOUND_S):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("how", ["cancel", "timeout", "stop"])
async def test_a_program_that_ignores_sigterm_is_killed_with_what_it_started(ledger: Ledger, how: str) -> None:
    async with open_pool(ledger) as pool:
        pool.serve(program(STUBBORN), timeout_ms=HOUR_MS if how == "timeout" else None)
        task_id = await pool.send()
        found = await pids(pool, task_id)
        assert len(found) == 2
        if how == "cancel":
            await pool.cancel(task_id)
        elif how == "timeout":
            time_out(pool.workers)
            assert told(await pool.ended(task_id)) == "Task timed out"
        else:
            await pool.cut_short()
        for pid in found:
            await gone(pid)
        await pool.idle()
        said = chunks(await pool.steps(task_id))
        assert [chunk.last_chunk for chunk in said] == ([False] if how == "stop" else [False, True])
        assert len(endings(await pool.steps(task_id))) == (0 if how == "stop" else 1)


async def test_a_program_may_end_politely_and_nothing_it_says_then_is_heard(
    pool: PoolUnderTest, tmp_path: Path
) -> None:
    pool.serve(program(POLITE))
    note = tmp_path / "note"
    task_id = await pool.send(str(note))
    (pid,) = await pids(pool, task_id)
    await pool.cancel(task_id)
    await pool.idle()
    await gone(pid)
    assert note.read_text() == "ended politely"
    steps = await pool.steps(task_id)
    assert steps[-1].what is endings(steps)[0]


def pipes() -> set[str]:
    """The open pipes and sockets of this process."""
    found: set[str] = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing itself, which is over
            found.add(str(each.readlink()))
    return {each for each in found if each.startswith(("pipe:", "socket:"))}


@pytest.mark.parametrize("cancels", [2, 3])
async def test_a_turn_that_is_canceled_again_while_it_cleans_up_leaves_nothing_behind(
    ledger: Ledger, cancels: int
) -> None:
    """Its child has a group of its own, and holds the pipes: they are closed here, or never."""
    async with open_pool(ledger) as pool:
        before = pipes()
        pool.serve(
            program("""
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if os.fork() == 0:
                    os.setsid()
                    say("assistant", text=f"{os.getppid()} {os.getpid()}")
                time.sleep(600)
            """)
        )
        task_id = await pool.send()
        runner = next(each for each in asyncio.all_tasks() if each.get_name() == "job")
        program_pid, child = await pids(pool, task_id)
        await pool.cancel(task_id)
        for _ in range(cancels - 1):
            await asyncio.sleep(0)  # it is in its cleanup
            runner.cancel()
        await asyncio.wait((runner,), timeout=BOUND_S)
        os.kill(child, 0)  # it still has the pipes
        os.kill(child, signal.SIGKILL)
        await gone(program_pid)
        helpers = [task for task in asyncio.all_tasks() if "covenant/agents/process_agent" in str(task)]
        assert (helpers, pipes() - before) == ([], set())


@pytest.mark.parametrize("leaves", [False, True], ids=["in its group", "in a group of its own"])
async def test_what_a_program_leaves_behind_does_not_hold_its_task(pool: PoolUnderTest, leaves: bool) -> None:
    pool.serve(
        program(f"""
            child = os.fork()
            if child == 0:
                if {leaves}:
                    os.setsid()
                time.sleep(600)
                os._exit(0)
            say("assistant", text=str(child))
            os._exit(0)
        """)
    )
    view = await pool.ask()
    assert view.state is DONE
    child = int(told(view))
    if leaves:
        os.kill(child, signal.SIGKILL)
    await gone(child)
    await pool.idle()


async def test_many_words_of_a_program_arrive_in_order(pool: PoolUnderTest) -> None:
    pool.serve(program("for n in range(5000): say('assistant', text=f'{n} ')"))
    view = await pool.ask()
    assert told(view) == "".join(f"{n} " for n in range(5000))
