"""The state of a batch: the input of its decisions (it is the machine's `View`), and their changes.

Reading a row that was not loaded raises `Missing`. A decision is applied before the next command of the batch is
decided, so that each command is decided on top of those before it. Nothing here waits or talks to the database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from msgspec.structs import replace

from covenant.ledger.contract.task_query import excerpt
from covenant.ledger.machine import effects
from covenant.ledger.machine.effects import RequestKey
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.events import (
    AnyEvent,
    Audited,
    AuditPurged,
    CacheDropped,
    GrantUsed,
    LeaseRenewed,
    PeerEvent,
    PushEvent,
    PushPut,
    RequestWithdrawn,
    ResultDrained,
    ResultReturned,
    TaskClosed,
    TaskEvent,
    TaskFollowed,
    TaskLeased,
    TaskSent,
    TaskSettled,
)
from covenant.ledger.machine.evolution import evolve, start
from covenant.ledger.machine.states import DRAINED, LEASED, QUEUED, SETTLED
from covenant.ledger.machine.view import Account, Archived, Remembered
from covenant.ledger.postgres.cache_rows import SharedRows
from covenant.ledger.postgres.counters import ALL, KEPT_BYTES, Counters, contribution
from covenant.ledger.postgres.missing_rows import (
    LoadedRows,
    Missing,
    Want,
    WantBody,
    WantDue,
    WantLeases,
    WantOrphans,
    WantPushes,
    WantQueue,
    WantRecipients,
    WantRequest,
    WantResults,
    WantTask,
)
from covenant.ledger.postgres.peer_rows import PeerRows
from covenant.ledger.postgres.push_rows import PushRows
from covenant.ledger.postgres.queue_head import BatchQueues, QueueHead, queue_place
from covenant.ledger.postgres.register_view import RegisterView
from covenant.ledger.postgres.registers import Registers
from covenant.ledger.postgres.stored_task import BIGINT_MAX, NOT_KEPT, Slot, column, encode_event, is_task_event
from covenant.model.clock_steps import Ages
from covenant.model.grant import AuditHead
from covenant.model.ids import PublicKey, TaskId
from covenant.model.settings import Limits
from covenant.model.task import CacheKey, Task, utf8_length

LOOK_MAX: Final = 10_000
"""After a step of the clock no column says which tasks are due: at most this many are looked at."""
IN_TURN_MAX: Final = 1_000
"""The most rows that are loaded for a take of all recipients' tasks, if that leaves each recipient one."""


_BEGINS: Final = frozenset({TaskSent, TaskFollowed})
_ENDS: Final = frozenset({TaskSettled, TaskClosed})
_GIVES: Final = frozenset({TaskLeased, ResultDrained})


class BatchState(RegisterView, SharedRows, PushRows, PeerRows):
    def __init__(
        self,
        limits: Limits,
        registers: Registers,
        base: Counters,
        *,
        audit_head: AuditHead,
        place: int,
        new_no: Callable[[], int],
        turns: dict[str, int],
        used: Callable[[TaskId], dict[str, Any] | None] | None = None,
    ) -> None:
        LoadedRows.__init__(self)
        RegisterView.__init__(self, registers)
        SharedRows.__init__(self)
        PushRows.__init__(self)
        PeerRows.__init__(self)
        self.limits = limits
        self.base = base
        """The counts before this batch."""
        self.counts = Counters()
        self.audit_head = audit_head
        self._place = place
        self._new_no = new_no
        self._turns = turns
        """By recipient: the place at which this node last took one of its tasks. The longest waiting comes first."""
        self._used = used
        self.entries: dict[TaskId, Entry | None] = {}
        self.slots: dict[TaskId, Slot] = {}
        self._archived: dict[TaskId, Archived | None] = {}
        self._erased: set[TaskId] = set()
        self.queue, self.results = BatchQueues(), BatchQueues(of_all=True)
        # The changes to write.
        self.moved: dict[TaskId, None] = {}
        self.events: list[tuple[int, int, int, int, str, str]] = []
        self.started: dict[str, None] = {}
        """Recipients whose new task began at once: no other task may be queued for them."""
        self.requests_put: dict[RequestKey, tuple[int, Remembered]] = {}
        self.requests_new: dict[RequestKey, None] = {}
        self.audit: list[tuple[int, int, int, str, str, str]] = []
        self.purged: AuditPurged | None = None

    def next_place(self) -> int:
        self._place += 1
        return self._place

    @property
    def has_rare_rows(self) -> bool:
        """Whether `write_rare_rows` has anything to write."""
        return bool(
            self.requests_put
            or self.uses_put
            or self.pushes_put
            or self.pushes_gone
            or self.peer_writes
            or self.purged is not None
            or any(each.moved for each in self.shared.values())
        )

    # Loading

    def load_entry(self, task_id: TaskId, entry: Entry, slot: Slot) -> None:
        """Loads an entry, unless this batch has already changed it."""
        if task_id not in self.slots:
            self.entries[task_id], self.slots[task_id] = entry, slot

    def load_archived(self, task_id: TaskId, archived: Archived | None, slot: Slot | None) -> None:
        if task_id in self.entries:
            return
        self.entries[task_id] = None
        self._archived[task_id] = archived
        if slot is not None:
            self.slots[task_id] = slot
        if archived is not None and archived.task is not None:
            self.load(WantBody(task_id), archived.task)

    def new_task(self, task_id: TaskId) -> None:
        """Notes that a new id belongs to no task yet."""
        self.entries.setdefault(task_id, None)
        self._archived.setdefault(task_id, None)

    def load_erased(self, task_id: TaskId) -> None:
        """Notes that only the id of a task is left."""
        self.load_archived(task_id, None, None)
        self._erased.add(task_id)

    # Reads of decisions

    def entry(self, task_id: TaskId) -> Entry | None:
        if task_id not in self.entries:
            raise Missing(WantTask(task_id))
        return self.entries[task_id]

    def archived(self, task_id: TaskId) -> Archived | None:
        if task_id not in self.entries:
            raise Missing(WantTask(task_id))
        return self._archived.get(task_id)

    def is_erased(self, task_id: TaskId) -> bool:
        return task_id in self._erased

    def task(self, entry: Entry) -> Task | None:
        if not entry.body_on_disk:
            return entry.task
        return self.loaded(WantBody(entry.task.id))

    def _known(self, task_ids: Sequence[TaskId]) -> list[Entry]:
        missing = [WantTask(task_id) for task_id in task_ids if self.entries.get(task_id) is None]
        if missing:
            raise Missing(*missing)
        return [entry for task_id in task_ids if (entry := self.entries[task_id]) is not None]

    def queued(self, recipient: PublicKey | None, count: int) -> Sequence[Entry]:
        if recipient is None:
            return self._queued_in_turn(count)
        return self._first(self.queue.heads[recipient], count, lambda wanted: WantQueue(recipient, wanted))

    def _first(self, head: QueueHead, count: int, want: Callable[[int], Want[None]]) -> Sequence[Entry]:
        found = head.first(count)
        if found is None:
            raise Missing(want(head.wanted(count)))
        return self._known(found)

    def _queued_in_turn(self, count: int) -> Sequence[Entry]:
        """The oldest task of each recipient, then the second of each, and so on."""
        recipients = self.loaded(WantRecipients())
        order = sorted(recipients, key=lambda each: max(self._turns.get(each, 0), recipients[each]))[:count]
        each_count = count if len(order) * count <= IN_TURN_MAX else 1
        lanes, missing = [], []
        for recipient in map(PublicKey, order):
            lane = self.queue.heads[recipient]
            found = lane.first(each_count)
            if found is None:
                missing.append(WantQueue(recipient, lane.wanted(each_count)))
            else:
                lanes.append(found)
        if missing:
            raise Missing(*missing)
        rounds = max(map(len, lanes), default=0)
        return self._known([lane[at] for at in range(rounds) for lane in lanes if at < len(lane)][:count])

    def queued_count(self, recipient: PublicKey) -> int:
        """The count as of the last news, but at least one if a task was loaded."""
        counted, head = self._count("queued", recipient), self.queue.heads.get(recipient)
        return max(counted, len(head.first(1) or ()) if head is not None and counted <= 0 else 0)

    def account(self, name: str) -> Account:
        account = Account()
        account.tasks, account.size = self._count("tasks", name), self._count("size", name)
        return account

    def settled(self, sender: PublicKey | None, count: int) -> Sequence[Entry]:
        return self._first(self.results.heads[sender], count, lambda wanted: WantResults(sender, wanted))

    def settled_count(self, sender: PublicKey) -> int:
        return self._count("settled", sender)

    def undrained_bytes(self, sender: PublicKey) -> int:
        return self._count("undrained", sender)

    def _count(self, kind: str, lane: str) -> int:
        return self.base.get(kind, lane) + self.counts.get(kind, lane)

    def leases(self) -> Iterator[Entry]:
        task_ids = self.loaded(WantLeases(LOOK_MAX))
        return iter(self._known(task_ids))

    def due(self, now_ms: int, count: int, ages: Ages) -> Sequence[Entry]:
        """Due tasks, at most one of a cache key at a time: settling one may change the others."""
        task_ids = self.loaded(WantDue(BIGINT_MAX, LOOK_MAX) if ages.steps else WantDue(now_ms, count))
        keys: set[CacheKey] = set()
        found: list[Entry] = []
        for entry in self._known(task_ids):
            moment_ms, key = entry.due_at_ms(now_ms, ages), entry.cache_key
            if moment_ms is None or moment_ms > now_ms or key in keys:
                continue
            if key is not None:
                keys.add(key)
            found.append(entry)
        return found[:count]

    def usage_so_far(self, task_id: TaskId) -> dict[str, Any] | None:
        return self._used(task_id) if self._used is not None else None

    def orphans(self, count: int) -> Sequence[Entry]:
        return self._known(self.loaded(WantOrphans(count))[:count])

    def forgettable(self, now_ms: int, count: int, ages: Ages) -> Sequence[Entry]:
        return effects.forgettable(self.settled(None, count), self.limits.retention_ms, now_ms, ages)

    def remembered(self, verb: str, holder: PublicKey, request_id: str) -> Remembered | None:
        return self.loaded(WantRequest(verb, holder, request_id))

    # Changes

    def check(self, events: Sequence[AnyEvent]) -> None:
        """Raises `Missing` for rows that `apply` would need besides those that the decision read."""
        for event in events:
            if is_task_event(event):
                entry, slot = self.entries.get(event.task_id), self.slots.get(event.task_id)
                if entry is not None:
                    self.check_sharing(event, entry.cache_key)
                ended = type(event) in _ENDS
                if ended and slot is not None and slot.pushed and not self.pushes_loaded(event.task_id):
                    raise Missing(WantPushes(event.task_id))
            elif isinstance(event, PeerEvent):
                self.check_peer_event(event)
            elif isinstance(event, CacheDropped):
                self.check_dropped(event)

    def apply(self, events: Sequence[AnyEvent], encoded: Sequence[bytes], ts_ms: int) -> None:
        self.counts.count("commits", ALL, 1)
        if len(events) == 2 and self._start(events[0], events[1], encoded, ts_ms):
            return
        before: dict[TaskId, Entry | None] = {}
        for event, text in zip(events, encoded, strict=True):
            if is_task_event(event):
                if event.task_id not in before:
                    before[event.task_id] = self.entries.get(event.task_id)
                self._apply_task(event, text, ts_ms)
            elif isinstance(event, PushEvent):
                self.apply_push(event, ts_ms)
                if isinstance(event, PushPut) and self.entries.get(event.task_id) is not None:
                    slot = self.slots[event.task_id]
                    slot.pushed = True
                    slot.n += 1  # so that a node that does not know of the push cannot end the task
                    self.moved[event.task_id] = None
            elif isinstance(event, PeerEvent):
                self.apply_peer(event, ts_ms)
            elif isinstance(event, RequestWithdrawn):
                for verb in ("take", "drain"):
                    self._remember((verb, event.by, event.request_id), Remembered(()))
            elif isinstance(event, CacheDropped):
                self.drop_cached(event)
            elif isinstance(event, GrantUsed):
                self.use_grant(event.signature_b58)
            elif isinstance(event, Audited):
                self.audit_head = AuditHead(event.index, event.chain_hash)
                self.audit.append((event.index, self.next_place(), ts_ms, event.issuer, event.chain_hash, event.row))
            elif isinstance(event, AuditPurged):
                self.purged = event
        for task_id, old in before.items():
            self._recount(task_id, old)

    def _start(self, sent: AnyEvent, leased: AnyEvent, encoded: Sequence[bytes], ts_ms: int) -> bool:
        """Applies the events of a task that was leased on acceptance: it enters no queue. False for other events."""
        if type(sent) is not TaskSent or type(leased) is not TaskLeased or leased.task_id != sent.task_id:
            return False
        task, task_id = sent.task, sent.task_id
        if task_id in self.slots or task.idempotency is not None or leased.request_id is not None:
            return False
        self.entries[task_id] = start(sent, leased, ts_ms)
        self.moved[task_id] = None
        slot = self.slots[task_id] = Slot(self._new_no())
        for event, generation, text in ((sent, sent.generation, encoded[0]), (leased, leased.generation, encoded[1])):
            slot.n += 1
            slot.size += len(text)
            self.events.append((slot.no, slot.n, generation, ts_ms, *encode_event(event, text)))
        slot.place = queue_place(self.next_place(), task.priority)
        slot.intent = column(excerpt(task.intent_text))
        slot.touched = self._turns[task.recipient.pubkey] = self.next_place()
        self._recount(task_id, None)
        return True

    def _apply_task(self, event: TaskEvent, encoded: bytes, ts_ms: int) -> None:
        task_id, kind = event.task_id, type(event)
        returned = kind is ResultReturned
        old = self.entries.get(task_id)
        self.entries[task_id] = new = evolve(old, event, ts_ms)
        slot = self.slots.get(task_id)
        if slot is None:
            slot = self.slots[task_id] = Slot(self._new_no())
        if old is None and returned:
            self.entries[task_id] = new = replace(new, attempt=slot.attempt, turn=slot.turn)
        self.moved[task_id] = None
        slot.n += 1
        if returned:
            self.counts.count(KEPT_BYTES, new.task.tenant or ALL, -slot.size)
        if kind not in NOT_KEPT:
            name, text = encode_event(event, encoded)
            slot.size += utf8_length(text) if returned else len(encoded)
            generation = 0 if returned else getattr(event, "generation", 0)
            self.events.append((slot.no, slot.n, generation, ts_ms, name, text))
        ended = kind in _ENDS
        if kind in _BEGINS:
            slot.place = queue_place(self.next_place(), new.task.priority)
            slot.intent = column(excerpt(new.task.intent_text))
        elif ended:
            slot.ended_n, slot.settled_place = slot.n, self.next_place()
        self._index(event, old, new, slot)
        if new.task.idempotency is not None:
            self.share(event, new, ts_ms, self.next_place())
        if ended and slot.pushed:
            self.end_pushes(task_id, new.generation)
        elif kind in _GIVES and isinstance(event, (TaskLeased, ResultDrained)) and event.request_id is not None:
            key, remembered = effects.request_given(event, new)
            self._remember(key, effects.merge_remembered(self.if_loaded(WantRequest(*key)), remembered))
        if new.state is DRAINED:
            self.counts.count("resolved", ALL, new.events)
            self.counts.count(KEPT_BYTES, new.task.tenant or ALL, slot.size)

    def _index(self, event: TaskEvent, old: Entry | None, new: Entry, slot: Slot) -> None:
        """Moves a task from the queue of its old state to that of its new one."""
        before, after = old.state if old is not None else None, new.state
        task_id, recipient, sender = new.task.id, new.task.recipient.pubkey, new.task.sender.pubkey
        if type(event) is LeaseRenewed or (after is LEASED and before is not LEASED):
            slot.touched = self.next_place()
        if before is after:
            return
        if before is QUEUED:
            self.queue.leave(recipient, slot.place)
            self._turns[recipient] = self.next_place()
        elif before is SETTLED:
            assert slot.settled_place is not None
            self.results.leave(sender, slot.settled_place)
        if after is QUEUED:
            # A task that goes first returns to its place: no queued task was before it.
            if before is not None and not effects.goes_first(event):
                slot.place = queue_place(self.next_place(), new.task.priority)
            self.queue.enter(recipient, slot.place, slot.no, task_id)
            # This task is not counted yet: a recipient that had none comes last.
            if self._count("queued", recipient) <= 0:
                self._turns[recipient] = self.next_place()
            if (recipients := self.if_loaded(WantRecipients())) is not None:
                recipients.setdefault(recipient, slot.place)
        elif after is SETTLED:
            assert slot.settled_place is not None
            self.results.enter(sender, slot.settled_place, slot.no, task_id)

    def _recount(self, task_id: TaskId, old: Entry | None) -> None:
        """After a command: replaces a task's earlier counts by its present ones."""
        new = self.entries[task_id]
        assert new is not None
        slot = self.slots[task_id]
        # A task whose result came back was listed before it ended.
        listed = old is not None or slot.table != "tasks"
        before = None if old is None else slot.counted or contribution(old, listed=listed)
        after = contribution(new, listed=listed)
        slot.counted = after if listed else None
        self.counts.change(before, after)

    def _remember(self, key: RequestKey, remembered: Remembered) -> None:
        want = WantRequest(*key)
        if self.if_loaded(want) is None:
            self.requests_new[key] = None
            self.counts.count("requests", ALL, 1)
        place = self.requests_put[key][0] if key in self.requests_put else self.next_place()
        self.load(want, remembered)
        self.requests_put[key] = (place, remembered)
