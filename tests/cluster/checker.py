"""The history checker: what clients were told, against what the ledger has when everything is mended.

It asks for what the contract of the ledger promises: acknowledged is there once, unknown once or never; the
steps of a task have no gap and one end, and are the same at every node; one lease at a time; nothing is done twice
without a repair; what was drained was drained once; the counts are those of the rows; the chains of the audit hold.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import asyncpg
import httpx2

from covenant.daemon.environment import monotonic_ms, now_ms
from covenant.ledger.postgres.open_postgres import open_postgres_ledger
from covenant.ledger.postgres.postgres_ledger import PostgresLedger
from covenant.model.ids import TaskId
from covenant.model.task_event import Ended
from tests.cluster.deployment import NODES, Deployment
from tests.cluster.history import History

COMPARED: Final = 100
"""Tasks that are read at every node."""
STEPS_MAX: Final = 10_000
DEFECTS: Final = (
    "never retrieved",
    "agent.take_failed",
    "agent.unwritten",
    "http.failed",
    "ledger.batch_failed",
    "push.fault",
    "push.stopped",
    "scheduler.failed",
    "worker.failed",
)
OTHERS: Final = ("REST send", "gRPC send", "push")

ROWS: Final = {
    "a task is live or ended, and has one id": """
        SELECT count(*) FROM ids AS i LEFT JOIN live AS l ON l.no = i.no LEFT JOIN tasks AS t ON t.no = i.no
        WHERE (l.no IS NULL) = (t.no IS NULL)
    """,
    "what is queued is in its queue": """
        SELECT count(*) FROM live AS l FULL JOIN queue AS q ON q.no = l.no
        WHERE (l.state = 'queued') IS DISTINCT FROM (q.no IS NOT NULL) AND (l.state = 'queued' OR q.no IS NOT NULL)
    """,
    "what is settled waits for its sender": """
        SELECT count(*) FROM live AS l FULL JOIN results AS r ON r.no = l.no
        WHERE (l.state = 'settled') IS DISTINCT FROM (r.no IS NOT NULL) AND (l.state = 'settled' OR r.no IS NOT NULL)
    """,
    "states are counted": """
        SELECT count(*) FROM (SELECT state, count(*) AS n FROM live GROUP BY state) AS l
        FULL JOIN (SELECT lane AS state, sum(n) AS n FROM counts WHERE kind = 'state' GROUP BY lane) AS c
            ON c.state = l.state
        WHERE coalesce(l.n, 0) <> coalesce(c.n, 0)
    """,
    "queues are counted": """
        SELECT count(*) FROM (SELECT recipient, count(*) AS n FROM queue GROUP BY recipient) AS l
        FULL JOIN (SELECT lane AS recipient, sum(n) AS n FROM counts WHERE kind = 'queued' GROUP BY lane) AS c
            ON c.recipient = l.recipient
        WHERE coalesce(l.n, 0) <> coalesce(c.n, 0)
    """,
    "a task that nobody released or repaired was leased once": """
        SELECT count(*) FROM (
            SELECT
                no, count(*) FILTER (WHERE kind = 'task_leased') AS leases,
                count(*) FILTER (WHERE kind IN ('lease_released', 'task_requeued', 'task_continued', 'turn_ended'))
                    AS again
            FROM events GROUP BY no
        ) AS e
        WHERE e.leases > e.again + 1
    """,
    "a task has one end": """
        SELECT count(*) FROM (
            SELECT
                no, count(*) FILTER (WHERE kind IN ('task_settled', 'task_closed')) AS ends,
                count(*) FILTER (WHERE kind = 'result_returned') AS again
            FROM events GROUP BY no
        ) AS e
        WHERE e.ends > 1
    """,
}
"""What there must be none of."""


async def check(deployment: Deployment, history: History) -> None:
    connection = await asyncpg.connect(deployment.url)
    try:
        for rule, asked in ROWS.items():
            wrong = await connection.fetchval(asked)
            if wrong:
                history.violated(rule, f"{wrong} rows")
    finally:
        await connection.close()
    ledger = await open_postgres_ledger(
        deployment.url, clock=now_ms, monotonic_ms=monotonic_ms, node="checker", durability="os"
    )
    try:
        await _acknowledged(ledger, history)
        report = await ledger.audit_verify()
        if not report.valid:
            history.violated("the chains of the audit hold", "; ".join(report.failures))
    finally:
        await ledger.close()
    _no_defects(deployment, history)
    _done_once(deployment, history)
    _drained_once(history)
    await _same_everywhere(deployment, history)


def _asked(history: History) -> set[str]:
    """The ids of tasks that were acknowledged."""
    calls = (*history.of("SendMessage"), *history.of("SendStreamingMessage"))
    found = {each.answer["result"]["task"]["id"] for each in calls if each.answer}
    found |= {each.answer["task"]["id"] for kind in OTHERS for each in history.of(kind)}
    found |= {each.answer["id"] for each in history.of("simple send")}
    return found | {each.about for each in history.of("send")}


async def _acknowledged(ledger: PostgresLedger, history: History) -> None:
    for task_id in _asked(history):
        steps = await ledger.steps(TaskId(task_id), 0, STEPS_MAX)
        if not steps:
            history.violated("acknowledged is there", task_id)
            continue
        if [step.generation for step in steps] != list(range(1, len(steps) + 1)):
            history.violated("steps have no gap", f"{task_id}: {[step.generation for step in steps]}")
        ends = [at for at, step in enumerate(steps) if isinstance(step.what, Ended)]
        if len(ends) > 1 or (ends and ends[0] != len(steps) - 1):
            history.violated("one end, and nothing after it", task_id)
    for settled in history.of("settle"):
        steps = await ledger.steps(TaskId(settled.about), 0, STEPS_MAX)
        if not any(isinstance(step.what, Ended) for step in steps):
            history.violated("a result that was acknowledged is there", settled.about)


def _no_defects(deployment: Deployment, history: History) -> None:
    """Whatever goes wrong outside, a daemon knows what it is: no error of its own is in a log."""
    for node in NODES:
        for line in (deployment.folder / f"{node}.log").read_text().splitlines():
            if any(sign in line for sign in DEFECTS):
                history.violated("no daemon logs a defect", f"{node}: {line[:200]}")


def _done_once(deployment: Deployment, history: History) -> None:
    begun = Counter(deployment.done.read_text().split() if deployment.done.exists() else ())
    for task_id, times in begun.items():
        if times > 1:
            history.violated("nothing is done twice without a repair", f"{task_id}: {times} times")


def _drained_once(history: History) -> None:
    """By one request id each."""
    drained: dict[str, set[str]] = {}
    for operation in history.of("drain"):
        for result in operation.answer.get("results", ()):
            drained.setdefault(result["task_id"], set()).add(operation.about)
    for task_id, requests in drained.items():
        if len(requests) > 1:
            history.violated("a result is drained once", f"{task_id}: {sorted(requests)}")
    taken: dict[str, set[str]] = {}
    for operation in history.of("take"):
        if operation.answer.get("lease"):
            taken.setdefault(operation.answer["task"]["id"], set()).add(operation.answer["lease"]["lease_id"])
    for task_id, leases in taken.items():
        if len(leases) > 1:
            history.violated("one lease wins", f"{task_id}: {sorted(leases)}")


async def _same_everywhere(deployment: Deployment, history: History) -> None:
    headers = {"authorization": f"Bearer {deployment.token}"}
    async with httpx2.AsyncClient(timeout=30.0, headers=headers) as http:
        for task_id in sorted(_asked(history))[:COMPARED]:
            urls = [f"{deployment.daemons[node].url}/a2a/tasks/{task_id}/show" for node in NODES]
            answers = await asyncio.gather(*(http.get(url) for url in urls))
            if len({_plain(answer.json()) for answer in answers}) > 1:
                history.violated("a task is the same at every node", task_id)


def _plain(answer: dict[str, Any]) -> str:
    return json.dumps({name: answer[name] for name in _names(answer)}, sort_keys=True)


def _names(answer: dict[str, Any]) -> Iterable[str]:
    return sorted(name for name in answer if name != "holder_lost")
