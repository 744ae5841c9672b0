"""A process that fills a home: `python -m bench.history_builder HOME WHAT COUNT LIVE`, where WHAT is

    cycles    COUNT tasks through their whole life, four events each
    history   COUNT finished tasks, the quick way: all but one are replays of the first one's result
    a2a       COUNT tasks as the daemon has them for a blocking SendMessage to an agent that echoes: two records each
    echoes    the same with 600 bytes in each, every text another
    compact   nothing but a compaction

and LIVE tasks stay queued at the end. HOME is a folder, or the URL of a database. In a folder, durability is "os": a
builder that dies starts again.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import choices
from typing import Final
from uuid import uuid4

import msgspec

from bench.workload import PAYLOAD, PAYLOAD_BYTES, RECIPIENT, SENDER, Callers, archived, new_task, run
from covenant import Mailbox
from covenant.daemon.environment import monotonic_ms, now_ms
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.commands import Accept, Advance, Drain, Settle, Starter, Take
from covenant.ledger.postgres.open_postgres import open_postgres_ledger
from covenant.model.content import Text
from covenant.model.ids import TaskId
from covenant.model.task import DuplicateSafety, Idempotency, Result, ResultStatus, Task, fingerprint
from covenant.model.task_event import ArtifactUpdate

CALLERS: Final = 256
DRAINED_AT_ONCE: Final = 100
SLICE: Final = 50_000
WORDS: Final = "hello world"
VOCABULARY: Final = tuple(f"{number * 7_919 % 99_991:05d}" for number in range(20_000))
_STARTER: Final = Starter(RECIPIENT, "bench", "boot")


class Built(msgspec.Struct, frozen=True, kw_only=True):
    last_seq: int
    seconds: float
    cpu_s: float
    """From when it was open until everything was archived."""


async def main(home: str, what: str, count: int, live: int) -> Built:
    begun = time.perf_counter()
    ledger = await _open(home)
    opened_cpu_s = time.process_time()
    try:
        mailbox = Mailbox(ledger)
        if what == "cycles":
            await Callers(mailbox, count).run(CALLERS)
        elif what == "history":
            await _history(ledger, mailbox, count)
        elif what == "a2a":
            await _a2a_tasks(ledger, mailbox, count, lambda: WORDS)
        elif what == "echoes":
            await _a2a_tasks(ledger, mailbox, count, _different_words)
        await _repeat(live, lambda: mailbox.send_task(new_task()))
        await archived(mailbox)
        cpu_s = time.process_time() - opened_cpu_s
        if what == "compact":
            await ledger.compact()
        counts = await ledger.counts()
    finally:
        await ledger.close()
    return Built(last_seq=counts.commits, seconds=time.perf_counter() - begun, cpu_s=cpu_s)


async def _open(home: str) -> Ledger:
    if "://" in home:
        return await open_postgres_ledger(home, clock=now_ms, monotonic_ms=monotonic_ms)
    return await open_ledger(Path(home), clock=now_ms, durability="os")


async def _history(ledger: Ledger, mailbox: Mailbox, count: int) -> None:
    """A task that repeats idempotent work is settled as it is accepted: two records for three events."""
    first = _repeated()
    await _accept(ledger, first)
    await ledger.commit(Take(holder=RECIPIENT, recipient=RECIPIENT.pubkey))
    result = Result(task_id=first.id, status=ResultStatus.OK)
    await ledger.commit(Settle(task_id=first.id, holder=RECIPIENT, result=result))
    for done in range(1, count, SLICE):
        await _repeat(min(SLICE, count - done), lambda: _replay(ledger))
        while (await ledger.commit(_DRAIN)).results:
            pass
        await archived(mailbox)  # it is slower than this, and would refuse more in the end


_DRAIN: Final = Drain(by=SENDER, sender=SENDER.pubkey, count=DRAINED_AT_ONCE)


async def _replay(ledger: Ledger) -> None:
    task = _repeated()
    await _accept(ledger, task)
    if task.id[:2] in {"00", "55", "aa"}:  # often enough that undrained results do not pile up
        await ledger.commit(_DRAIN)


async def _accept(ledger: Ledger, task: Task) -> None:
    await ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))


def _repeated() -> Task:
    task = new_task()
    same = Idempotency(DuplicateSafety.IDEMPOTENT, "same")
    return Task(
        id=task.id,
        sender=SENDER,
        recipient=RECIPIENT,
        intent_text=PAYLOAD,
        task_kind="repeated",
        idempotency=same,
    )


def _different_words() -> str:
    """As long as a payload; of a vocabulary, as what people write is."""
    return " ".join(choices(VOCABULARY, k=PAYLOAD_BYTES // 4))[:PAYLOAD_BYTES]


async def _a2a_tasks(ledger: Ledger, mailbox: Mailbox, count: int, text: Callable[[], str]) -> None:
    for done in range(0, count, SLICE):
        await _repeat(min(SLICE, count - done), lambda: _a2a_task(ledger, text()))
        await archived(mailbox)


async def _a2a_task(ledger: Ledger, text: str) -> None:
    task_id = TaskId(str(uuid4()))
    task = Task(
        id=task_id,
        sender=SENDER,
        recipient=RECIPIENT,
        intent_text=text,
        context_id=task_id,
        tenant="bench",
        origin="a2a",
        message_id=str(uuid4()),
    )
    accepted = await ledger.commit(Accept(task=task, digest=fingerprint(task)[0], starter=_STARTER, minted=True))
    assert accepted.leased is not None
    answer = ArtifactUpdate(f"{task_id}-text-0", (Text(text),), name="response")
    end = ArtifactUpdate(f"{task_id}-text-0", (Text(""),), append=True, last_chunk=True)
    await ledger.commit(
        Advance(
            task_id=task_id,
            holder=RECIPIENT,
            lease_id=accepted.leased.lease.lease_id,
            updates=(answer, end),
            result=Result(task_id=task_id, status=ResultStatus.OK, content=(Text(text),)),
        )
    )


async def _repeat(count: int, make: Callable[[], Awaitable[object]]) -> None:
    """Do it so many times, with many callers at once."""
    left = count

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await make()

    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(caller())


if __name__ == "__main__":
    built = run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    print(msgspec.json.encode(built).decode())
