"""Notes that agents keep between tasks. An agent's notes are one file in the home's `memory` folder, or one row in a
ledger that several daemons share. No other agent can read them.

An acknowledged note is durable. A note that exceeds a limit is refused.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from covenant.agents.keyword_match import overlap
from covenant.agents.runtime.durable_step import finish
from covenant.ledger.embedded.disk import make_owned_folder, open_owned, sync_dir
from covenant.model.errors import Invalid, NotFound, Unavailable

NOTES_MAX: Final = 500
NOTE_BYTES_MAX: Final = 16 * 1024
TITLE_CHARACTERS_MAX: Final = 200
BYTES_MAX: Final = 512 * 1024
FOUND_MAX: Final = 10
TRIES: Final = 10
_encode: Final = msgspec.json.Encoder().encode


class MemoryNote(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    id: int
    title: str
    text: str
    at_ms: int


class _Notes(msgspec.Struct, frozen=True, kw_only=True):
    """The notes of one agent. `last_id` grows with each note, so that an id is never used twice, even after a clear."""

    last_id: int = 0
    notes: tuple[MemoryNote, ...] = ()


_decode: Final = msgspec.json.Decoder(_Notes).decode


class NoteLedger(Protocol):
    """A ledger that several daemons share."""

    async def notes(self, tenant: str, agent_id: str) -> tuple[int, str | None]: ...
    async def keep_notes(self, tenant: str, agent_id: str, version: int, body: str) -> bool: ...


class NoteStore(Protocol):
    """Stores the notes of one agent."""

    async def read(self) -> bytes | None: ...
    async def replace(self, data: bytes) -> bool:
        """Replaces the version that was read last. False: somebody else has written meanwhile."""


class NoteFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> bytes | None:
        try:
            return await asyncio.to_thread(self._path.read_bytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable() from error

    async def replace(self, data: bytes) -> bool:
        try:
            # Its caller's lock must be held until the thread has ended, even if the caller is canceled.
            _, canceled = await finish(asyncio.to_thread(_write, self._path, data))
        except OSError as error:
            raise Unavailable("memory_unwritten", "the memory cannot be written") from error
        if canceled:
            raise asyncio.CancelledError
        return True


class NoteRow:
    def __init__(self, ledger: NoteLedger, tenant: str, agent_id: str) -> None:
        self._ledger = ledger
        self._key = (tenant, agent_id)
        self._version = 0

    async def read(self) -> bytes | None:
        self._version, body = await self._ledger.notes(*self._key)
        return body.encode() if body is not None else None

    async def replace(self, data: bytes) -> bool:
        return await self._ledger.keep_notes(*self._key, self._version, data.decode())


class AgentMemories:
    """`ledger` holds the notes, if they are not in the folder."""

    def __init__(self, folder: Path, now_ms: Callable[[], int], ledger: NoteLedger | None = None) -> None:
        self._folder = folder
        self._now_ms = now_ms
        self._ledger = ledger
        self._locks: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    def of(self, tenant: str, agent_id: str) -> AgentMemory:
        store: NoteStore
        if self._ledger is not None:
            store = NoteRow(self._ledger, tenant, agent_id)
        else:
            store = NoteFile(self._folder / tenant / f"{agent_id}.json")
        return AgentMemory(store, self._locks[tenant, agent_id], self._now_ms)


class AgentMemory:
    def __init__(self, store: NoteStore, lock: asyncio.Lock, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._lock = lock
        self._now_ms = now_ms

    async def write(self, text: str, title: str = "") -> MemoryNote:
        text, title = text.strip(), " ".join(title.split())[:TITLE_CHARACTERS_MAX]
        if not text:
            raise Invalid("empty_note", "a note needs a text")
        if len(text.encode()) > NOTE_BYTES_MAX:
            raise Invalid("note_too_large", f"a note may have {NOTE_BYTES_MAX} bytes")
        note = MemoryNote(id=0, title=title or " ".join(text.split())[:60], text=text, at_ms=self._now_ms())

        def add(known: _Notes) -> _Notes:
            numbered = msgspec.structs.replace(note, id=known.last_id + 1)
            kept = _Notes(last_id=numbered.id, notes=(*known.notes, numbered))
            if len(kept.notes) > NOTES_MAX or len(_encode(kept)) > BYTES_MAX:
                raise Invalid("memory_full", f"the memory is full, with {len(known.notes)} notes: clear some first")
            return kept

        _, kept = await self._change(add)
        return kept.notes[-1]

    async def notes(self) -> tuple[MemoryNote, ...]:
        """All notes, oldest first."""
        async with self._lock:
            return (await self._read()).notes

    async def note(self, note_id: int) -> MemoryNote:
        for note in await self.notes():
            if note.id == note_id:
                return note
        raise NotFound("unknown_note", f"there is no note {note_id}")

    async def search(self, text: str) -> list[MemoryNote]:
        """The notes that share words with the text, best match first."""
        notes = await self.notes()
        ranked = overlap(text, [f"{note.title} {note.text}" for note in notes])
        return [notes[at] for at in ranked[:FOUND_MAX]]

    async def clear(self, note_id: int | None = None) -> int:
        """Removes one note, or all of them; returns how many were removed."""

        def drop(known: _Notes) -> _Notes:
            remaining = tuple(note for note in known.notes if note_id is not None and note.id != note_id)
            if note_id is not None and len(remaining) == len(known.notes):
                raise NotFound("unknown_note", f"there is no note {note_id}")
            return _Notes(last_id=known.last_id, notes=remaining)

        before, after = await self._change(drop)
        return len(before.notes) - len(after.notes)

    async def _change(self, change: Callable[[_Notes], _Notes]) -> tuple[_Notes, _Notes]:
        """Applies `change`, again if another daemon wrote first; returns the notes before and after."""
        async with self._lock:
            for _ in range(TRIES):
                before = await self._read()
                after = change(before)
                if await self._store.replace(_encode(after)):
                    return before, after
        raise Unavailable("memory_unwritten", "the memory cannot be written: other daemons change it all the time")

    async def _read(self) -> _Notes:
        data = await self._store.read()
        try:
            return _decode(data) if data is not None else _Notes()
        except msgspec.DecodeError as error:
            raise _unreadable() from error


def _unreadable() -> Unavailable:
    return Unavailable("memory_unreadable", "the memory cannot be read")


def _write(path: Path, data: bytes) -> None:
    for folder in (path.parent.parent, path.parent):
        make_owned_folder(folder, exist_ok=True)
    new_file = path.with_suffix(".new")
    new_file.unlink(missing_ok=True)
    with open(new_file, "wb", opener=open_owned) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new_file.replace(path)
    sync_dir(path.parent)
