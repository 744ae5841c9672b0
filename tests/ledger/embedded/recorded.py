"""A journal that a test writes by hand, and the state that its events come to: what an archive must agree with."""

import uuid
from collections.abc import Iterable, Sequence

import msgspec

from covenant.ledger.embedded.journal.record import encode_line
from covenant.ledger.embedded.journal.segments import Cursor, Lines
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import Audited, LedgerEvent, TaskEvent, TaskLeased, TaskSent, TaskSettled
from covenant.ledger.machine.evolution import evolve
from covenant.model.grant import GENESIS, AuditHead, AuditRow, link
from covenant.model.ids import AgentId, LeaseId, PublicKey, TaskId
from covenant.model.task import Cause, Ending, Lease, Result, ResultStatus, Task

encode = msgspec.json.Encoder().encode

START_MS = 1_700_000_000_000
NODE, BOOT = "node-1", "boot-2"


def agent(name: str) -> AgentId:
    return AgentId(f"{name}@host", PublicKey(f"key-of-{name}"))


ALICE, BOB, CAROL = agent("alice"), agent("bob"), agent("carol")


def task_id(number: int) -> TaskId:
    return TaskId(str(uuid.UUID(int=number)))


def lease_id(number: int) -> LeaseId:
    return LeaseId(str(uuid.UUID(int=number)))


def task(number: int, sender: AgentId = ALICE, recipient: AgentId = BOB, **fields: object) -> Task:
    return msgspec.structs.replace(
        Task(id=task_id(number), sender=sender, recipient=recipient, intent_text=f"do {number}"), **fields
    )


def sent(number: int, sender: AgentId = ALICE, recipient: AgentId = BOB, **fields: object) -> TaskSent:
    made = task(number, sender, recipient, **fields)
    return TaskSent(made.id, made, f"digest-{number}")


def leased(
    number: int, to: AgentId = BOB, *, at_ms: int = START_MS, attempt: int = 1, turn: int = 1, boot: str | None = None
) -> TaskLeased:
    lease = Lease(
        lease_id=lease_id(1_000_000 * turn + 1_000 * attempt + number),
        leased_to=to,
        leased_at_ms=at_ms,
        attempt=attempt,
        node=None if boot is None else NODE,
        boot=boot,
    )
    return TaskLeased(task_id(number), lease, 2 if attempt == turn == 1 else 0)


def result(number: int, text: str | None = None) -> Result:
    if text is None:
        return Result(task_id=task_id(number), status=ResultStatus.OK)
    return Result(task_id=task_id(number), status=ResultStatus.ERROR, error_message=text)


def settled(number: int, generation: int = 3, text: str | None = None) -> TaskSettled:
    ending = Ending.COMPLETED if text is None else Ending.FAILED
    return TaskSettled(task_id(number), result(number, text), ending, Cause.RESULT, generation)


class Recorded:
    """A source of records. `record` adds one decision; `entries` is what the machine makes of them all."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.records: list[tuple[int, Sequence[LedgerEvent]]] = []
        self.entries: dict[TaskId, Entry] = {}
        self.audit_head: AuditHead = GENESIS
        self.trimmed = 0

    @property
    def last_seq(self) -> int:
        return len(self.lines)

    def record(self, *events: LedgerEvent, ts_ms: int | None = None) -> int:
        seq = len(self.lines) + 1
        at_ms = START_MS + seq if ts_ms is None else ts_ms
        self.lines.append(encode_line(seq, at_ms, seq - 1, encode(events)))
        self.records.append((at_ms, events))
        for event in events:
            if isinstance(event, TaskEvent):
                self.entries[event.task_id] = evolve(self.entries.get(event.task_id), event, at_ms)
        return seq

    def each(self, events: Iterable[LedgerEvent]) -> None:
        for event in events:
            self.record(event)

    def audited(self, issuer: AgentId, word: str, ts_ms: int = START_MS) -> Audited:
        row = AuditRow(id=word, timestamp_ms=ts_ms, issuer=issuer, kind={"type": word})
        text = encode(row).decode()
        self.audit_head = link(self.audit_head, text)
        return Audited(self.audit_head.index, self.audit_head.chain_hash, issuer.pubkey, text)

    def read_through(self, after_seq: int, last_seq: int) -> Lines:
        return Lines(b"".join(self.lines[after_seq:last_seq]), last_seq, Cursor(last_seq, 1, 0))

    def cursor(self, after_seq: int) -> Cursor:
        return Cursor(after_seq, 1, 0)

    def read(self, cursor: Cursor, max_bytes: int) -> Lines:
        last_seq, size = cursor.seq, 0
        for line in self.lines[cursor.seq :]:
            size += len(line)
            if size > max_bytes and last_seq > cursor.seq:
                break
            last_seq += 1
        return self.read_through(cursor.seq, last_seq)

    def trim(self, seq: int) -> None:
        self.trimmed = seq

    def release(self) -> None:
        """Nothing is open."""
