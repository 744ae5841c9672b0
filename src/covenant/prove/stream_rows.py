"""Rows on streams, artifacts and readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

from covenant.prove.a2a_client import ServerUnreachable
from covenant.prove.protocol import EventSeen, ServerRefused, TaskSeen
from covenant.prove.trial import Assembly, Broken, NotOffered, Row, Trial, counted, gap_or_repeat, refused_as

CHUNKS: Final = 20
CHUNK_MS: Final = 150
CHUNKS_BEFORE_KILL: Final = 5
SLOW_CHUNKS: Final = 192
SLOW_BYTES: Final = 65_536
OTHER_SENDS: Final = 20
RECEIVE_BYTES: Final = 4_096
STANDSTILL_LOOK_S: Final = 0.5
UNSUPPORTED: Final = frozenset({-32004, -32601, 405, 501})
"""Codes by which a server says that it does not offer an operation, or not for a task in this state."""


async def resumed(trial: Trial) -> None:
    await _resumable(trial)
    assembly = await _cut_by_kill(trial)
    before = counted(assembly.text)
    task = TaskSeen(assembly.task_id, "", assembly.state, "", {}, {})
    await trial.find(task)
    trial.note(
        f"subscribing after event {assembly.last_number!r}"
        if assembly.last_number
        else "subscribing; events have no ids"
    )
    refusal: ServerRefused | None = None
    try:
        async with trial.client.subscribe(assembly.task_id, assembly.last_number) as events:
            await _read(events, assembly, trial.extent.bound_s)
    except ServerRefused as refused:
        refusal = refused
    except ServerUnreachable as gone:
        trial.note(f"the subscription: {gone}")
    now = await trial.until(task, lambda seen: seen.ended)
    trial.note(f"told {len(before)} chunks before, {len(counted(assembly.text))} in all; the task is {now.state}")
    if wrong := gap_or_repeat(assembly.text):
        raise Broken(f"the stream as its reader put it together has a gap or a repeat: {wrong}")
    if refusal is not None and now.ended and refusal.code in UNSUPPORTED:
        raise NotOffered(f"the task ended over the restart, and the server has no stream of such a task: {refusal}")
    if refusal is not None:
        raise Broken(f"the stream is refused after the restart, and the task is {now.state_text}: {refusal}")
    if not now.ended:
        raise Broken(f"the stream did not go on, and the task is still {now.state_text}")
    if not assembly.ended:
        raise Broken(f"the stream did not go on to the end of the task, which GetTask alone tells: {now.state_text}")
    if assembly.text != now.text:
        raise Broken(f"the reader has {assembly.text!r}, and the task has {now.text!r}")
    if counted(now.text)[: len(before)] != before:
        raise Broken(f"{len(before)} chunks were told before kill -9, and {len(counted(now.text))} are there now")


async def _resumable(trial: Trial) -> None:
    """Checks that a stream can be resumed while the server lives; otherwise the row is not offered."""
    assembly = Assembly()
    with refused_as(NotOffered, "no stream", ServerUnreachable):
        async with trial.client.stream(f"stream {trial.key()} 10 {CHUNK_MS}") as events:
            await _read(events, assembly, trial.extent.bound_s, chunks=2)
    if not assembly.task_id or assembly.ended:
        raise NotOffered("the stream names no task that could be subscribed to while it is at work")
    with refused_as(NotOffered, "a stream cannot be taken up again, even by a server that lives", ServerUnreachable):
        async with trial.client.subscribe(assembly.task_id, assembly.last_number) as events:
            await _read(events, assembly, trial.extent.bound_s)
    trial.note(f"without a kill: taken up again, to {assembly.state!r}")


async def _cut_by_kill(trial: Trial) -> Assembly:
    assembly = Assembly()
    try:
        async with trial.client.stream(f"stream {trial.key()} {CHUNKS} {CHUNK_MS}") as events:
            await _read(events, assembly, trial.extent.bound_s, chunks=CHUNKS_BEFORE_KILL)
            await trial.server.end()
            trial.note(f"kill -9 after {CHUNKS_BEFORE_KILL} chunks of {CHUNKS}")
            await _read(events, assembly, trial.extent.bound_s)
    except (ServerRefused, ServerUnreachable) as failed:
        trial.note(f"the reader: {failed}")
    if not assembly.task_id:
        raise NotOffered("the stream names no task")
    await trial.client.reset()
    await trial.restart()
    return assembly


async def _read(
    events: AsyncIterator[EventSeen], assembly: Assembly, bound_s: float, chunks: int | None = None
) -> None:
    """Reads until the task or the stream has ended, or until the text has this many chunks."""
    try:
        async with asyncio.timeout(bound_s):
            async for event in events:
                assembly.add(event)
                if assembly.ended or (chunks is not None and len(counted(assembly.text)) >= chunks):
                    return
    except TimeoutError:
        return


async def artifacts(trial: Trial) -> None:
    whole = await trial.client.begin(f"stream {trial.key()} {CHUNKS} 0", waits=True)
    whole = await trial.until(whole, lambda now: now.ended)
    if len(counted(whole.text)) != CHUNKS:
        raise NotOffered(f"the agent's {CHUNKS} chunks became {whole.text!r}")
    key = trial.key()
    task = await trial.client.begin(f"stream {key} {CHUNKS} {CHUNK_MS}")
    seen = await trial.until(task, lambda now: len(counted(now.text)) >= CHUNKS_BEFORE_KILL or now.ended)
    await trial.crash(f"after {len(counted(seen.text))} of {CHUNKS} chunks were seen by GetTask")
    found = await trial.find(whole)
    trial.note(f"task {whole.id}: {len(counted(found.text))} of {CHUNKS} chunks")
    if found.text != whole.text:
        raise Broken(f"the completed task had {whole.text!r}, and has {found.text!r} after kill -9")
    part = await trial.find(task)
    if trial.runs(key) > 1:
        part = await trial.until(task, lambda now: now.ended)
    trial.note(f"task {task.id}: {len(counted(part.text))} of {CHUNKS} chunks, {part.state}")
    if wrong := gap_or_repeat(part.text):
        raise Broken(f"the chunks of the interrupted task have a gap or a repeat: {wrong}")
    if trial.runs(key) == 1 and len(counted(part.text)) < len(counted(seen.text)):
        raise Broken(
            f"{len(counted(seen.text))} chunks were told, and {len(counted(part.text))} are there after kill -9"
        )


async def slow_reader(trial: Trial) -> None:
    text = f"stream {trial.key()} {SLOW_CHUNKS} 0 {SLOW_BYTES}"
    with refused_as(NotOffered, "no stream"):
        async with trial.client.with_receive_buffer(RECEIVE_BYTES) as reader, reader.stream(text) as events:
            first = await anext(events, None)
            if first is None or not first.task_id:
                raise NotOffered("the stream names no task")
            trial.note(f"a stream of {SLOW_CHUNKS * SLOW_BYTES >> 20} MiB was begun, and nobody reads it")
            slowest_s = 0.0
            for _ in range(OTHER_SENDS):
                begun_s = time.monotonic()
                other = await trial.client.begin(f"complete {trial.key()}", waits=True)
                other = await trial.until(other, lambda now: now.ended)
                slowest_s = max(slowest_s, time.monotonic() - begun_s)
                if other.state != "completed":
                    raise Broken(f"while nobody read the stream, another's task {other.id} is {other.state!r}")
            trial.note(f"{OTHER_SENDS} tasks of others completed meanwhile, the slowest after {slowest_s:.2f} s")
            slow = TaskSeen(first.task_id, "", "", "", {}, {})
            seen = await _until_standstill(trial, slow)
            chunks = len(counted(seen.text))
            trial.note(f"the slow reader's own task: {seen.state}, {chunks} chunks")
            if seen.state != "completed":
                stands = f"has stood still at {chunks} chunks for {trial.extent.bound_s:g} s"
                raise Broken(f"the task whose reader does not read is {seen.state!r}, and {stands}")


async def _until_standstill(trial: Trial, task: TaskSeen) -> TaskSeen:
    """The task when it has ended, or has made no progress within the bound. The server may be slow."""
    seen, moved_s = await trial.find(task), time.monotonic()
    while not seen.ended and time.monotonic() - moved_s < trial.extent.bound_s:
        await asyncio.sleep(STANDSTILL_LOOK_S)
        now = await trial.find(task)
        if (now.state, len(now.text)) != (seen.state, len(seen.text)):
            moved_s = time.monotonic()
        seen = now
    return seen


STREAM_ROWS: Final = (
    Row(
        "stream-resumed",
        "A stream goes on after kill -9 without gap or repeat",
        f"kill -9 after {CHUNKS_BEFORE_KILL} of {CHUNKS} chunks, restart, subscribe after the last event that was seen",
        resumed,
    ),
    Row(
        "artifacts",
        "Artifacts are whole and in order after kill -9",
        "a completed and an interrupted task of many chunks; their artifacts before and after",
        artifacts,
    ),
    Row(
        "slow-reader",
        "A reader that does not read harms nobody",
        f"a stream of {SLOW_CHUNKS * SLOW_BYTES >> 20} MiB that nobody reads, "
        f"and {OTHER_SENDS} tasks of others meanwhile",
        slow_reader,
    ),
)
