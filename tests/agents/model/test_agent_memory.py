"""Notes of agents: each agent's own, on disk before they are acknowledged, within bounds."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from covenant.agents.model import agent_memory as module
from covenant.agents.model.agent_memory import NOTE_BYTES_MAX, AgentMemories
from covenant.model.errors import Invalid, NotFound, Unavailable
from tests.waits import BOUND_S


def memories(folder: Path) -> AgentMemories:
    return AgentMemories(folder, lambda: 1_000)


async def test_notes_are_numbered_found_again_and_forgotten(tmp_path: Path) -> None:
    mine = memories(tmp_path).of("default", "bot")
    assert await mine.notes() == ()
    first = await mine.write("  Tea is green ", "a  title\n")
    second = await mine.write("Rome is old")
    assert (first.id, first.title, first.text, second.id, second.title) == (
        1,
        "a title",
        "Tea is green",
        2,
        "Rome is old",
    )
    again = memories(tmp_path).of("default", "bot")
    assert await again.notes() == (first, second)
    assert await again.note(2) == second
    assert await again.search("how old is rome") == [second]
    assert await again.clear(1) == 1
    with pytest.raises(NotFound):
        await again.note(1)
    with pytest.raises(NotFound):
        await again.clear(1)
    # A number is never given out twice.
    assert (await again.write("third")).id == 3
    assert await again.clear() == 2
    assert (await again.write("fourth")).id == 4


async def test_nobody_reads_anybody_elses_notes(tmp_path: Path) -> None:
    kept = memories(tmp_path)
    await kept.of("default", "bot").write("mine")
    for tenant, agent in (("default", "bot2"), ("other", "bot")):
        assert await kept.of(tenant, agent).notes() == ()


async def test_what_does_not_fit_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NOTES_MAX", 2)
    mine = memories(tmp_path).of("default", "bot")
    for text, code in (("", "empty_note"), ("é" * NOTE_BYTES_MAX, "note_too_large")):
        with pytest.raises(Invalid) as refused:
            await mine.write(text)
        assert refused.value.code == code
    await mine.write("one")
    await mine.write("two")
    with pytest.raises(Invalid) as full:
        await mine.write("three")
    assert full.value.code == "memory_full"
    assert [note.text for note in await mine.notes()] == ["one", "two"]


async def test_notes_written_at_once_are_all_kept(tmp_path: Path) -> None:
    kept = memories(tmp_path)
    written = await asyncio.gather(*(kept.of("default", "bot").write(f"note {number}") for number in range(20)))
    assert sorted(note.id for note in written) == list(range(1, 21))
    assert len(await kept.of("default", "bot").notes()) == 20


async def test_a_memory_that_cannot_be_read_is_said_to_be_so_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "default" / "bot.json"
    path.parent.mkdir()
    path.write_text("{torn")
    with pytest.raises(Unavailable):
        await memories(tmp_path).of("default", "bot").write("x")
    assert path.read_text() == "{torn"


async def test_a_canceled_write_keeps_other_writers_out_until_its_thread_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, began, go_on = memories(tmp_path).of("default", "bot"), threading.Event(), threading.Event()
    fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        began.set()
        go_on.wait(BOUND_S)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    first = asyncio.create_task(mine.write("first"))
    await asyncio.to_thread(began.wait, BOUND_S)
    first.cancel()
    second = asyncio.create_task(mine.write("second"))
    for _ in range(20):
        await asyncio.sleep(0)
    ended = first.done()
    go_on.set()
    assert not ended, "its thread still writes the file"
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert [note.text for note in await mine.notes()] == ["first", "second"]
