"""Notes that agents keep between tasks: one file an agent in the home's `memory` folder, which no other agent can read.

An acknowledged note is on disk. What does not fit is refused.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from covenant.agents.keyword_match import overlap
from covenant.ledger.embedded.disk import make_owned_folder, open_owned, sync_dir
from covenant.model.errors import Invalid, NotFound, Unavailable

NOTES_MAX: Final = 500
NOTE_BYTES_MAX: Final = 16 * 1024
TITLE_CHARACTERS_MAX: Final = 200
BYTES_MAX: Final = 512 * 1024
FOUND_MAX: Final = 10


class MemoryNote(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    id: int
    title: str
    text: str
    at_ms: int


class _Notes(msgspec.Struct, frozen=True, kw_only=True):
    """`last_id`: no number is given out twice, not even one that was cleared."""

    last_id: int = 0
    notes: tuple[MemoryNote, ...] = ()


_decode: Final = msgspec.json.Decoder(_Notes).decode
_encode: Final = msgspec.json.Encoder().encode


class AgentMemories:
    def __init__(self, folder: Path, now_ms: Callable[[], int]) -> None:
        self._folder = folder
        self._now_ms = now_ms
        self._locks: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    def of(self, tenant: str, agent_id: str) -> AgentMemory:
        return AgentMemory(self._folder / tenant / f"{agent_id}.json", self._locks[tenant, agent_id], self._now_ms)


class AgentMemory:
    def __init__(self, path: Path, lock: asyncio.Lock, now_ms: Callable[[], int]) -> None:
        self._path = path
        self._lock = lock
        self._now_ms = now_ms

    async def write(self, text: str, title: str = "") -> MemoryNote:
        text, title = text.strip(), " ".join(title.split())[:TITLE_CHARACTERS_MAX]
        if not text:
            raise Invalid("empty_note", "a note needs a text")
        if len(text.encode()) > NOTE_BYTES_MAX:
            raise Invalid("note_too_large", f"a note may have {NOTE_BYTES_MAX} bytes")
        async with self._lock:
            known = await self._read()
            note = MemoryNote(
                id=known.last_id + 1, title=title or " ".join(text.split())[:60], text=text, at_ms=self._now_ms()
            )
            kept = _Notes(last_id=note.id, notes=(*known.notes, note))
            data = _encode(kept)
            if len(kept.notes) > NOTES_MAX or len(data) > BYTES_MAX:
                raise Invalid("memory_full", f"the memory is full, with {len(known.notes)} notes: clear some first")
            await self._replace(data)
        return note

    async def notes(self) -> tuple[MemoryNote, ...]:
        """The oldest first."""
        async with self._lock:
            return (await self._read()).notes

    async def note(self, note_id: int) -> MemoryNote:
        for note in await self.notes():
            if note.id == note_id:
                return note
        raise NotFound("unknown_note", f"there is no note {note_id}")

    async def search(self, text: str) -> list[MemoryNote]:
        """Those that share words with the text, the best first."""
        notes = await self.notes()
        ranked = overlap(text, [f"{note.title} {note.text}" for note in notes])
        return [notes[at] for at in ranked[:FOUND_MAX]]

    async def clear(self, note_id: int | None = None) -> int:
        """One note, or all of them; how many that were."""
        async with self._lock:
            known = await self._read()
            left = tuple(note for note in known.notes if note_id is not None and note.id != note_id)
            if note_id is not None and len(left) == len(known.notes):
                raise NotFound("unknown_note", f"there is no note {note_id}")
            await self._replace(_encode(_Notes(last_id=known.last_id, notes=left)))
            return len(known.notes) - len(left)

    async def _read(self) -> _Notes:
        try:
            return _decode(await asyncio.to_thread(self._path.read_bytes))
        except FileNotFoundError:
            return _Notes()
        except (OSError, msgspec.DecodeError) as error:
            raise Unavailable("memory_unreadable", "the memory cannot be read") from error

    async def _replace(self, data: bytes) -> None:
        try:
            await asyncio.to_thread(_write, self._path, data)
        except OSError as error:
            raise Unavailable("memory_unwritten", "the memory cannot be written") from error


def _write(path: Path, data: bytes) -> None:
    for folder in (path.parent.parent, path.parent):
        make_owned_folder(folder, exist_ok=True)
    aside = path.with_suffix(".new")
    aside.unlink(missing_ok=True)
    with open(aside, "wb", opener=open_owned) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_dir(path.parent)
