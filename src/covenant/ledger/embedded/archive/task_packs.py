"""Packs: everything that is stored of a finished task beside its row, as one compressed text.

A finished task is read rarely, and repeats itself: its words are in the request, in an artifact and in the result. So
when a task is finished, its request, steps, handovers and result become one JSON text, compressed. Its row stays,
because lists and queries read it. Of the result the row keeps the error message.

A task may also be stored unpacked: while it is live, when it is too large, or when an earlier version wrote it. Reads
take either form, by the functions that `define_functions` adds to a connection.

A pack is a byte for its dictionary, and a raw deflate stream.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw

from covenant.ledger.contract.task_query import fold
from covenant.ledger.embedded.archive.row_updates import DRAINED, Rows
from covenant.ledger.embedded.archive.sql import ask_rows, write_rows

PACK_BYTES_MAX: Final = 256 << 10
"""A larger task stays unpacked: a page of its steps must not cost all of them."""

ROW_BYTES: Final = 900
"""The approximate size of a finished task beside its pack: its row, its id, and its index entries."""

LEVEL: Final = 3
SMALL_BYTES: Final = 6 << 10
SMALL: Final = (-13, 6)
LARGE: Final = (-15, 8)
"""Window and memory, in zlib's terms. Clearing a large window costs more than a small text gains by it."""
WINDOW_MAX: Final = -15

_DICTIONARY: Final = (
    b'"request_metadata":{"parts":[{"type":"data","data":{"type":"file","name":"","media_type":"application/json"'
    b'"text/plain","bytes":"","released","requeued","parked","continued","returned","type":"message","role":"agent"'
    b'"type":"status","text":"","error_message":"","metadata":{"covenant.usage":{"input_tokens":'
    b'"idempotency":{"posture":"idempotent","key":"","deadline_ms":,"parent":"","task_kind":"'
    b'"status":"error","content":[]},"updates":[[1,"submitted",17,null],[2,"working",17,null],[3,"artifact",17,'
    b'{"type":"artifact","artifact_id":"-text-0","parts":[{"type":"text","text":""}],"name":"response",'
    b'"last_chunk":true}],[4,"settled",17,null]],"handovers":[[1,"leased",17,{"lease_id":"","leased_to":{"display":"'
    b'@local","pubkey":""},"leased_at_ms":17,"attempt":1,"node":"","boot":""},null],[,"settled",17,null,null]]}'
    b'{"task":{"id":"","sender":{"display":"client@default","pubkey":""},"recipient":{"display":"@default","pubkey":"'
    b'"},"intent_text":"","context_id":"","tenant":"default","origin":"a2a","message_id":""},"result":{"task_id":"",'
    b'"status":"ok","content":[{"type":"text","text":"'
)
DICTIONARIES: Final = {1: _DICTIONARY}
"""Dictionaries by number. A used one is never changed."""
NEWEST: Final = 1
_encode: Final = msgspec.json.Encoder().encode
_decode_end: Final = msgspec.json.Decoder(tuple[str | None, str | None]).decode
_NOTHING: Final = Raw(b"{}")
_DELETE_PARTS: Final = (
    "DELETE FROM requests WHERE task_no = ?",
    "DELETE FROM updates WHERE task_no = ?",
    "DELETE FROM handovers WHERE task_no = ?",
)


class TaskParts(msgspec.Struct, gc=False, array_like=True):
    """The stored JSON of one task beside its row, still encoded. Steps by generation, handovers by place."""

    task_no: int
    task: str | None
    result: str | None
    updates: list[tuple[int, str, int, str | None]]
    handovers: list[tuple[int, str, int, str | None, str | None]]


class _Packed(msgspec.Struct, frozen=True, gc=False):
    task: Raw
    result: Raw
    updates: list[tuple[int, str, int, Raw]]
    handovers: list[tuple[int, str, int, Raw, Raw]]


class _Step(msgspec.Struct, frozen=True, gc=False):
    generation: int
    kind: str
    ts_ms: int
    body: Raw


class _End(msgspec.Struct, frozen=True, gc=False):
    ending: str | None
    cause: str | None
    result: Raw


class _Error(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    error_message: str | None = None


class _Texts(msgspec.Struct, frozen=True, gc=False):
    intent_text: str | None = None
    error_message: str | None = None


_decode: Final = msgspec.json.Decoder(_Packed).decode
_decode_error: Final = msgspec.json.Decoder(_Error).decode
_decode_texts: Final = msgspec.json.Decoder(_Texts).decode
decode_parts: Final = msgspec.json.Decoder(list[TaskParts]).decode


def pack(parts: TaskParts) -> bytes | None:
    """The pack of a task; None if it is too large, or its request or result is missing."""
    if parts.task is None or parts.result is None:
        return None
    updates = ",".join([f'[{at},"{kind}",{ts_ms},{body or "null"}]' for at, kind, ts_ms, body in parts.updates])
    handovers = ",".join(
        [
            f'[{at},"{event}",{ts_ms},{lease or "null"},{reason or "null"}]'
            for at, event, ts_ms, lease, reason in parts.handovers
        ]
    )
    text = f'{{"task":{parts.task},"result":{parts.result},"updates":[{updates}],"handovers":[{handovers}]}}'
    data = text.encode()
    if len(data) > PACK_BYTES_MAX:
        return None
    window, memory = SMALL if len(data) <= SMALL_BYTES else LARGE
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, window, memory, zlib.Z_DEFAULT_STRATEGY, DICTIONARIES[NEWEST])
    return bytes((NEWEST,)) + packer.compress(data) + packer.flush()


def _unpack(data: bytes) -> _Packed:
    return _decode(zlib.decompressobj(WINDOW_MAX, DICTIONARIES[data[0]]).decompress(data[1:]))


def unpack(task_no: int, data: bytes) -> TaskParts:
    found = _unpack(data)
    return TaskParts(
        task_no,
        _text(found.task),
        _text(found.result),
        [(at, kind, ts_ms, _text(body)) for at, kind, ts_ms, body in found.updates],
        [(at, event, ts_ms, _text(lease), _text(why)) for at, event, ts_ms, lease, why in found.handovers],
    )


def archived_texts(db: sqlite3.Connection) -> Iterator[str]:
    """Yields the stored JSON of each request, update and result, packed or not."""
    for query in (
        "SELECT task FROM requests",
        "SELECT body FROM updates WHERE body IS NOT NULL",
        "SELECT result FROM a2a_tasks WHERE result IS NOT NULL",
    ):
        yield from (text for (text,) in db.execute(query))
    for task_no, data in db.execute("SELECT task_no, pack FROM packs"):
        found = unpack(task_no, data)
        for text in (found.task, found.result, *(body for *_, body in found.updates)):
            if text is not None:
                yield text


def _text(raw: Raw) -> str | None:
    text = str(raw, "utf-8")
    return None if text == "null" else text


class _Reader:
    """The functions of one connection. The last pack is cached: a query may read it several times."""

    def __init__(self) -> None:
        self._last: tuple[bytes, _Packed] | None = None

    def _read(self, data: bytes) -> _Packed:
        if self._last is None or self._last[0] != data:
            self._last = (data, _unpack(data))
        return self._last[1]

    def task(self, data: bytes | None) -> str | None:
        return None if data is None else str(self._read(data).task, "utf-8")

    def result(self, data: bytes | None) -> str | None:
        return None if data is None else str(self._read(data).result, "utf-8")

    def rows(self, name: str, data: bytes | None) -> str:
        """The rows as a JSON array of arrays, in which nested JSON is a text."""
        if data is None:
            return "[]"
        found: list[tuple[int | str | Raw, ...]] = getattr(self._read(data), name)
        texts = [[_text(cell) if isinstance(cell, Raw) else cell for cell in row] for row in found]
        return _encode(texts).decode()

    def steps(self, data: bytes | None, after: int, limit: int, artifacts: int, end: bytes | str) -> str | None:
        """The steps of a packed task, as `steps.sql` has those of others. `end`: its ending and cause, as JSON."""
        if data is None:
            return None
        found = self._read(data)
        chosen = [row for row in found.updates if row[0] > after and (artifacts or row[1] != "artifact")]
        if limit >= 0:
            chosen = chosen[:limit]
        steps: list[_Step] = []
        for generation, kind, ts_ms, body in chosen:
            content = body if bytes(body) != b"null" else _NOTHING
            if kind == "submitted":
                content = found.task
            elif kind == "settled":
                ending, cause = _decode_end(end)
                content = Raw(_encode(_End(ending, cause, found.result)))
            steps.append(_Step(generation, kind, ts_ms, content))
        return _encode(steps).decode()


# SQLite's own functions end a text at a NUL.
def _json_text(document: str | None, name: str) -> str | None:
    return None if document is None or document == "null" else getattr(_decode_texts(document), name)


def _beginning(text: str | None, chars: int) -> str | None:
    return None if text is None else text[:chars]


def _has_intent(task: str | None, folded: str) -> bool:
    return folded in fold(_json_text(task, "intent_text") or "")


def define_functions(db: sqlite3.Connection) -> None:
    """Defines functions for texts and packs on one connection. For null, each returns null or nothing."""
    db.create_function("json_text", 2, _json_text, deterministic=True)
    db.create_function("beginning", 2, _beginning, deterministic=True)
    db.create_function("has_intent", 2, _has_intent, deterministic=True)
    reader = _Reader()
    db.create_function("packed_task", 1, reader.task, deterministic=True)
    db.create_function("packed_result", 1, reader.result, deterministic=True)
    db.create_function("packed_updates", 1, partial(reader.rows, "updates"), deterministic=True)
    db.create_function("packed_handovers", 1, partial(reader.rows, "handovers"), deterministic=True)
    db.create_function("packed_steps", 5, reader.steps, deterministic=True)


def pack_finished(rows: Rows, stored: Mapping[int, TaskParts | None]) -> tuple[list[tuple[int, bytes]], list[int]]:
    """Packs the finished tasks of a batch, and removes their parts from `rows`.

    `stored` has the archived parts of tasks that began earlier; None for one that is too large. Returns the packs, and
    the numbers of tasks whose stored parts are now in one.
    """
    ended = {
        row.task_no: row
        for row in rows.tasks.values()
        if row.ledger_state == DRAINED and stored.get(row.task_no, True) is not None
    }
    if not ended:
        return [], []
    parts = {number: stored.get(number) or TaskParts(number, None, None, [], []) for number in ended}
    for number, task in rows.requests:
        if number in parts:
            parts[number].task = task
    for update in rows.updates:
        if update[0] in parts:
            parts[update[0]].updates.append(update[1:])
    for handover in rows.handovers:
        if handover[0] in parts:
            parts[handover[0]].handovers.append(handover[1:])
    packs: dict[int, bytes] = {}
    for number, row in ended.items():
        task_parts = parts[number]
        task_parts.updates = [part for _, part in sorted({part[0]: part for part in task_parts.updates}.items())]
        task_parts.handovers = [part for _, part in sorted({part[0]: part for part in task_parts.handovers}.items())]
        task_parts.result = row.result or task_parts.result
        data = pack(task_parts)
        if data is not None and task_parts.result is not None:
            packs[number] = data
            row.result = error_of(task_parts.result) or ("null" if number in stored else None)
    rows.requests = [row for row in rows.requests if row[0] not in packs]
    rows.updates = [row for row in rows.updates if row[0] not in packs]
    rows.handovers = [row for row in rows.handovers if row[0] not in packs]
    return list(packs.items()), [number for number in packs if number in stored]


def error_of(result: str) -> str | None:
    """The part of a packed result that its row keeps."""
    error = _decode_error(result)
    return _encode(error).decode() if error.error_message is not None else None


def unpack_task(db: sqlite3.Connection, task_no: int) -> None:
    """Unpacks a finished task that changes nevertheless: it no longer counts as finished."""
    write_rows(db, "write_sizes", [(tenant, -1, -size) for tenant, size in kept_sizes(db, [task_no]).values()])
    found = db.execute("SELECT pack FROM packs WHERE task_no = ?", (task_no,)).fetchone()
    if found is None:
        return
    parts = unpack(task_no, found[0])
    db.execute("DELETE FROM packs WHERE task_no = ?", (task_no,))
    db.execute("UPDATE a2a_tasks SET result = ? WHERE task_no = ?", (parts.result, task_no))
    write_rows(db, "write_requests", [(task_no, parts.task)])
    write_rows(db, "write_updates", [(task_no, *update) for update in parts.updates])
    write_rows(db, "write_handovers", [(task_no, *handover) for handover in parts.handovers])


def kept_sizes(db: sqlite3.Connection, numbers: Iterable[int]) -> dict[int, tuple[str, int]]:
    """The tenant and the size of each finished task, by number."""
    query = "SELECT tenant_id, bytes FROM kept_sizes WHERE task_no = ?"
    found = ((number, db.execute(query, (number,)).fetchone()) for number in numbers)
    return {number: row for number, row in found if row is not None}


def read_parts(db: sqlite3.Connection, numbers: Iterable[int]) -> dict[int, TaskParts]:
    """The unpacked parts of these tasks, by number, except for tasks that are too large for a pack."""
    wanted = [(number, PACK_BYTES_MAX) for number in numbers]
    return {parts.task_no: parts for found in ask_rows(db, "known_parts", wanted) for parts in decode_parts(found)}


def delete_parts(db: sqlite3.Connection, numbers: Sequence[int]) -> None:
    for sql in _DELETE_PARTS:
        db.executemany(sql, [(number,) for number in numbers])
