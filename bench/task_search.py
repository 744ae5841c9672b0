"""search: what a page of each filter costs with a million finished tasks in the archive."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

from bench.report import Level, Row, Table, at_most, fact
from covenant.ledger.contract.task_query import TaskQuery
from covenant.ledger.embedded.archive.archive_file import ARCHIVE_NAME, open_writer
from covenant.ledger.embedded.archive.history import History
from covenant.ledger.embedded.archive.task_packs import TaskParts, pack
from covenant.ledger.machine.states import DRAINED, QUEUED
from covenant.model.ids import PublicKey
from covenant.model.task import Ending

NAME: Final = "search"
MOST_MS: Final = 5.0
SCALES: Final[dict[Level, tuple[int, int]]] = {"full": (1_000_000, 101), "quick": (50_000, 21), "smoke": (2_000, 1)}
"""Tasks, and how often each page is asked for."""
BASE_MS: Final = 1_700_000_000_000
STEP_MS: Final = 10
PACKS: Final = 10
KEY: Final = "9" * 44
TASK: Final = (
    '{"id":"00000000-0000-4000-8000-000000000000","sender":{"display":"client@default","pubkey":"'
    + KEY
    + '"},"recipient":{"display":"agent-1@default","pubkey":"'
    + KEY
    + '"},"intent_text":"'
    + "say what was said, and nothing else; " * 16
    + '","context_id":"00000000-0000-4000-8000-000000000000","tenant":"default","origin":"a2a"}'
)
RESULT: Final = (
    '{"task_id":"00000000-0000-4000-8000-000000000000","status":"ok","content":[{"type":"text","text":"said"}]}'
)

# A tenth is the mailbox's; one of a hundred failed, ten were rejected; one agent and one tenant are rare.
ROWS: Final = """
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :tasks)
INSERT INTO a2a_tasks (
    task_no, task_id, tenant_id, agent_id, context_id, context_no, parent, parent_no, created_at, updated_at,
    ledger_state, state, digest, sender_display, sender_pubkey, recipient_display, recipient_pubkey, task_kind,
    deadline_ms, origin, idempotency_key, place, settled_place, generation, turn, attempt, interrupted, ending, cause
)
SELECT
    i << 20,
    printf('%08x-0000-4000-8000-%012x', (i * 2654435761) & 4294967295, i),
    CASE WHEN i % 10 = 0 THEN '' WHEN i % 997 = 0 THEN 'acme' ELSE 'default' END,
    'agent', printf('%08x-0000-4000-8000-%012x', (i * 2654435761) & 4294967295, i),
    (i << 20) * 2, NULL, iif(i % 100 = 1, ((i - 1) << 20) * 2, NULL),
    :base + i * :step, :base + i * :step + 5,
    'resolved', CASE WHEN i % :rejected = 7 THEN 'rejected' WHEN i % 100 = 3 THEN 'failed' ELSE 'completed' END,
    printf('%064x', i), iif(i % 10 = 0, 'alice@here', 'client@default'), :key,
    iif(i % 50000 = 11, 'rare@default', printf('agent-%d@default', i % 20)), :recipient,
    CASE WHEN i % 5001 = 0 THEN 'audit' WHEN i % 20 = 5 THEN 'invoice' END, NULL,
    CASE WHEN i % 10 = 0 THEN 'mailbox' WHEN i % 10007 = 0 THEN 'delegation' ELSE 'a2a' END,
    iif(i % 50 = 9, printf('key-%d', i), NULL), i << 20, (i << 20) + 1, 3, 1, iif(i % 200 = 3, 2, 1), 0,
    CASE WHEN i % :rejected = 7 THEN 'rejected' WHEN i % 100 = 3 THEN 'failed' ELSE 'completed' END,
    iif(i % 1000 = 3, 'timeout', 'result')
FROM n
"""


def run(level: Level, workspace: Path) -> Table:
    tasks, times = SCALES[level]
    path = workspace / ARCHIVE_NAME
    bare, whole = _build(path, tasks)
    rows: list[Row] = []
    for name, query, bounded in _queries(tasks):
        spent_ms = asyncio.run(_time(path, query, times))
        rows.append(fact(name, spent_ms, "ms") if bounded else at_most(name, spent_ms, MOST_MS, "ms"))
    rows.append(fact("bytes of a task in the indexes for this", (whole - bare) / tasks, "bytes"))
    return Table(
        part=NAME,
        title=f"a page of 50 with {tasks:,} finished tasks",
        rows=rows,
        notes=[
            f"medians of {times} pages each, asked one after the other, in a thread of the archive's readers",
            "a page that passes over a bounded number of tasks, and says where to go on, has no bound of its own",
        ],
    )


def _build(path: Path, tasks: int) -> tuple[int, int]:
    """How many bytes the archive has without the indexes for finding tasks, and with them."""
    with closing(open_writer(path, lasting=False)) as db:
        found = db.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND name LIKE 'found%'").fetchall()
        for name, _ in found:
            db.execute(f"DROP INDEX {name}")
        db.execute("BEGIN")
        values = {
            "tasks": tasks,
            "base": BASE_MS,
            "step": STEP_MS,
            "key": KEY,
            "recipient": "8" * 44,
            "rejected": max(20, tasks // 10),
        }
        db.execute(ROWS, values)
        db.execute("INSERT INTO ids_old SELECT task_id, task_no FROM a2a_tasks ORDER BY task_id")
        for number in range(PACKS):  # a reader keeps the last one: neighbours must differ
            task = TASK.replace("nothing else", f"nothing else, {number} times", 1)
            packed = pack(TaskParts(0, task, RESULT, [(1, "submitted", 1, None)], []))
            chosen = "SELECT task_no, ? FROM a2a_tasks WHERE (task_no >> 20) % ? = ?"
            db.execute(f"INSERT INTO packs {chosen}", (packed, PACKS, number))
        db.execute("DELETE FROM task_counts")
        db.execute(
            "INSERT INTO task_counts"
            " SELECT recipient_pubkey, recipient_display, tenant_id, ledger_state, state, count(*)"
            " FROM a2a_tasks GROUP BY 1, 2, 3, 4, 5"
        )
        db.execute("COMMIT")
        bare = _bytes(db)
        for _, sql in found:
            db.execute(sql)
        return bare, _bytes(db)


def _bytes(db: sqlite3.Connection) -> int:
    pages: int = db.execute("PRAGMA page_count").fetchone()[0] - db.execute("PRAGMA freelist_count").fetchone()[0]
    return pages * int(db.execute("PRAGMA page_size").fetchone()[0])


def _queries(tasks: int) -> list[tuple[str, TaskQuery, bool]]:
    """What is asked for, and whether a page of it is bounded by how many tasks it passes over."""
    some = f"{(9 * 2654435761) & 0xFFFFFFFF:08x}-0000-4000-8000-{9:012x}"
    parent = f"{(100 * 2654435761) & 0xFFFFFFFF:08x}-0000-4000-8000-{100:012x}"
    late, failed = BASE_MS + (tasks - 1_000) * STEP_MS, (Ending.FAILED,)
    fields: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("no filter", {}),
        ("state: done", {"states": (DRAINED,)}),
        ("state: queued", {"states": (QUEUED,)}),
        ("outcome: failed", {"outcomes": failed}),
        ("outcome: rejected, ten of them", {"outcomes": (Ending.REJECTED,)}),
        ("agent", {"agent": "agent-1@default"}),
        ("agent, a rare one", {"agent": "rare@default"}),
        ("agent and outcome", {"agent": "agent-3@default", "outcomes": failed}),
        ("agent, outcome and since", {"agent": "agent-3@default", "outcomes": failed, "since_ms": late}),
        ("sender", {"sender": "alice@here"}),
        ("tenant", {"tenant": "default"}),
        ("tenant, a rare one", {"tenant": "acme"}),
        ("kind", {"task_kind": "invoice"}),
        ("kind, a rare one", {"task_kind": "audit"}),
        ("origin", {"origin": "mailbox"}),
        ("origin, a rare one", {"origin": "delegation"}),
        ("parent", {"parent": parent}),
        ("context", {"context": some}),
        ("key", {"key": "key-9"}),
        ("id, eight digits", {"id": some[:8]}),
        ("cause", {"cause": "timeout"}),
        ("attempt", {"attempt_min": 2}),
        ("since", {"since_ms": late}),
        ("until", {"until_ms": BASE_MS + 100 * STEP_MS}),
        ("moved", {"order": "moved"}),
        ("moved, of an agent", {"order": "moved", "agent": "agent-1@default"}),
        ("moved since", {"moved_since_ms": late}),
        ("an identity's own", {"viewer": PublicKey(KEY), "viewer_names": ("alice@here",)}),
        ("text", {"text": "nothing else"}),
        ("agent and outcome, counted", {"agent": "agent-3@default", "outcomes": failed, "count": True}),
    )
    passing: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("text that nobody wrote: the newest 1,000", {"text": "no such words"}),
        ("sender, counted to 100,000", {"sender": "alice@here", "count": True}),
    )
    return [(name, TaskQuery(**query), False) for name, query in fields] + [
        (name, TaskQuery(**query), True) for name, query in passing
    ]


async def _time(path: Path, query: TaskQuery, times: int) -> float:
    history = History(path, boot="bench")
    spent: list[float] = []
    try:
        await history.find(query)
        for _ in range(times):
            started_s = perf_counter()
            await history.find(query)
            spent.append((perf_counter() - started_s) * 1_000)
    finally:
        await history.close()
    return median(spent)
