"""The log engine against a model, in any order: sent, leased, answered, repaired, compacted, crashed and opened again.

After every step the ledger gave the answer the model gives, and every task is where the model has it. In the end, and
after every restart, history tells the same story: generations without a gap, one terminal update, the same artifacts,
an audit that verifies.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.open import Compacted, FileStorage, compact
from covenant.ledger.machine.commands import Accepted, LeasedTask
from covenant.model.content import Text
from covenant.model.errors import Refusal
from covenant.model.ids import LeaseId, TaskId
from covenant.model.retry_policy import RetryPolicy
from covenant.model.settings import Limits
from covenant.model.task import Result, ResultStatus, Task
from covenant.model.task_event import ArtifactUpdate, StatusUpdate, Update
from tests.ledger_contract.driver import LedgerDriver, check_generations
from tests.ledger_contract.embedded_engine import EmbeddedEngine
from tests.ledger_contract.samples import idempotent, make_task, task_id
from tests.ledger_contract.updates import fold
from tests.properties.model import Model, No, Piece

T = TypeVar("T")

NUMBERS = st.integers(1, 5)
REQUESTS = st.sampled_from([None, None, "r1", "r2"])
COUNTS = st.integers(1, 3)
KEYS = st.sampled_from([None, "a", "a", "b"])
DUE = st.sampled_from(["none", "none", "deadline", "timeout"])
DUES = st.tuples(KEYS, DUE)


class InProcess(EmbeddedEngine):
    """Merges segments in a thread instead of a process: the same function, without the wait for an interpreter."""

    async def open(self, limits: Limits | None = None) -> Ledger:
        ledger = await super().open(limits)
        assert isinstance(ledger, EmbeddedLedger)
        storage = ledger._storage
        assert isinstance(storage, FileStorage)

        async def merge(through_seq: int, limits: Limits) -> Compacted:
            return await asyncio.to_thread(compact, self.home / "journal", through_seq, limits)

        storage._merge = merge  # type: ignore[method-assign]
        return ledger


def result_of(which: str, status: str, text: str) -> Result:
    if status == "error":
        return Result(task_id=TaskId(which), status=ResultStatus.ERROR, error_message=text)
    return Result(task_id=TaskId(which), status=ResultStatus(status), content=(Text(text),))


class LedgerMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    """Every lease ever given, live or not."""

    @initialize(target=leases, dues=st.lists(DUES, max_size=4), count=st.integers(0, 3))
    def begin(self, dues: list[tuple[str | None, str]], count: int) -> Any:
        """Some work, and some of it under way: otherwise most examples end before anything has begun."""
        self.folder = Path(tempfile.mkdtemp(prefix="covenant-property-"))
        self.runner = asyncio.Runner()
        self.engine = InProcess(self.folder, segment_bytes=1_500)
        self.driver = LedgerDriver(self.run(self.engine.open()), self.engine.clock)
        self.model = Model()
        self.ever: set[str] = set()
        for number, (key, due) in enumerate(dues, 1):
            self.send(number, 0, key, due)
        return self.take(count, None) if count else multiple()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    @property
    def now_ms(self) -> int:
        return self.engine.clock()

    def both(self, real: Coroutine[Any, Any, T], expected: Callable[[], Any]) -> tuple[T | None, Any]:
        """Ask the ledger and the model; if one refuses, the other does, for the same reason."""
        try:
            answer: T | None = self.run(real)
            code = None
        except Refusal as refusal:
            answer, code = None, refusal.code
        wanted, wanted_code = None, None
        try:
            wanted = expected()
        except No as no:
            wanted_code = no.code
        assert code == wanted_code
        return answer, wanted

    def task(self, number: int, variant: int, key: str | None, due: str) -> tuple[Task, Piece]:
        """What is sent under a number is always the same, but for the variant: so ids meet again."""
        fields: dict[str, Any] = {"idempotency": idempotent(key), "task_kind": "work"} if key else {}
        deadline_ms = {"none": None, "deadline": 1_700_000_003_000, "timeout": None}[due]
        timeout_ms = 1_000 if due == "timeout" else None
        task = make_task(
            number, intent_text=f"variant {variant}", deadline_ms=deadline_ms, timeout_ms=timeout_ms, **fields
        )
        content = f"{variant} {key} {due}"
        return task, Piece(id=task.id, content=content, key=key, deadline_ms=deadline_ms, timeout_ms=timeout_ms)

    @rule(
        number=NUMBERS,
        variant=st.sampled_from([0, 0, 0, 1]),
        key=KEYS,
        due=DUE,
    )
    def send(self, number: int, variant: int, key: str | None, due: str) -> None:
        task, piece = self.task(number, variant, key, due)
        accepted, how = self.both(self.driver.send(task), lambda: self.model.send(piece, self.now_ms))
        if accepted is None:
            return
        known = self.model.pieces[task.id]
        following = self.model.leaders.get(known.key or "") if known.state == "following" else None
        assert accepted == Accepted(
            task_id=task.id,
            duplicate=how == "duplicate",
            replayed=known.cause == "replayed",
            following=TaskId(following) if following else None,
        )

    @rule(target=leases, count=COUNTS, request=REQUESTS)
    def take(self, count: int, request: str | None) -> Any:
        taken = self.run(self.driver.take(count=count, request_id=request))
        given = [(leased.task.id, leased.lease.lease_id) for leased in taken]
        again = self.model.takes_again(request) if request else None
        if again is not None:
            assert given == again
            return multiple()
        assert [which for which, _ in given] == self.model.next(count, self.now_ms)
        for leased in taken:
            which, lease = leased.task.id, leased.lease
            assert lease.lease_id not in self.ever
            self.ever.add(lease.lease_id)
            self.model.lease(which, lease.lease_id, self.now_ms)
            assert lease.attempt == self.model.pieces[which].attempt
        if request and taken:
            self.model.takes[request] = [(str(which), str(lease)) for which, lease in given]
        return multiple(*taken)

    @rule(leased=leases)
    def renew(self, leased: LeasedTask) -> None:
        self.both(self.driver.renew(leased), lambda: self.model.renew(leased.task.id, leased.lease.lease_id))

    @rule(leased=leases)
    def release(self, leased: LeasedTask) -> None:
        self.both(self.driver.release(leased), lambda: self.model.release(leased.task.id, leased.lease.lease_id))

    @rule(leased=leases, hold_ms=st.sampled_from([0, 1_000]))
    def interrupt(self, leased: LeasedTask, hold_ms: int) -> None:
        self.both(
            self.driver.interrupt(leased, hold_ms=hold_ms),
            lambda: self.model.interrupt(leased.task.id, leased.lease.lease_id, self.now_ms, hold_ms),
        )

    @rule(leased=leases, number=st.integers(0, 2), text=st.sampled_from("xyz"), name=st.sampled_from(["", "a", "b"]))
    def report(self, leased: LeasedTask, number: int, text: str, name: str) -> None:
        append = text != "x"
        update: Update = ArtifactUpdate(name, (Text(text),), append=append) if name else StatusUpdate(text)
        reported, wanted = self.both(
            self.driver.report(leased, update, number),
            lambda: self.model.report(
                leased.task.id, leased.lease.lease_id, number, (name, text, append) if name else None
            ),
        )
        if reported is not None:
            assert (reported.generation, reported.duplicate) == wanted

    @rule(leased=leases)
    def park(self, leased: LeasedTask) -> None:
        self.both(self.driver.park(leased), lambda: self.model.park(leased.task.id, leased.lease.lease_id))

    @rule(leased=leases, message=st.sampled_from(["m1", "m2", "m3"]))
    def say(self, leased: LeasedTask, message: str) -> None:
        said, wanted = self.both(
            self.driver.say(leased.task.id, message), lambda: self.model.say(leased.task.id, message)
        )
        if said is not None:
            assert (said.generation, said.duplicate) == wanted

    @rule(
        leased=leases,
        named=st.sampled_from([True, True, True, False]),
        status=st.sampled_from(["ok", "ok", "error", "partial"]),
        text=st.sampled_from("xy"),
    )
    def settle(self, leased: LeasedTask, named: bool, status: str, text: str) -> None:
        lease_id: LeaseId | None = leased.lease.lease_id if named else None
        if lease_id in self.model.pieces[leased.task.id].turned_by:
            return
        settled, duplicate = self.both(
            self.driver.settle(result_of(leased.task.id, status, text), lease_id=lease_id),
            lambda: self.model.answer(leased.task.id, lease_id, (status, text)),
        )
        if settled is not None:
            assert settled.duplicate is duplicate

    @rule(leased=leases)
    def requeue(self, leased: LeasedTask) -> None:
        self.both(self.driver.requeue(leased.task.id), lambda: self.model.requeue(leased.task.id))

    @rule(leased=leases)
    def force_error(self, leased: LeasedTask) -> None:
        self.both(self.driver.force_error(leased.task.id), lambda: self.model.force_error(leased.task.id))

    @rule(number=NUMBERS)
    def cancel(self, number: int) -> None:
        which = task_id(number)
        if which in self.model.pieces:
            canceled, wanted = self.both(self.driver.cancel(which), lambda: self.model.cancel(which))
            assert canceled is not None
            assert canceled.canceled is wanted

    @rule(count=COUNTS, request=REQUESTS)
    def drain(self, count: int, request: str | None) -> None:
        results = self.run(self.driver.drain(count=count, request_id=request))
        assert [result.task_id for result in results] == self.model.drain(count, request)
        for result in results:
            known = self.model.pieces[result.task_id].result
            assert known is not None
            assert result == result_of(result.task_id, *known)

    @rule(age_ms=st.sampled_from([0, 1_000]), requeues=st.integers(0, 2))
    def retry(self, age_ms: int, requeues: int) -> None:
        policy = RetryPolicy(enabled=True, min_lease_age_ms=age_ms, max_requeues=requeues, max_attempts=2)
        report = self.run(self.driver.retry(policy))
        assert len(report.requeued) <= requeues
        for requeued in report.requeued:
            piece = self.model.pieces[requeued.task_id]
            assert piece.key is not None, "unsafe work was redelivered by the system"
            assert piece.attempt < 2
            self.model.requeue(requeued.task_id)

    @rule(ms=st.sampled_from([1, 400, 1_000, 3_000]))
    def time_passes(self, ms: int) -> None:
        self.engine.clock.advance(ms)

    @rule(target=leases, ms=st.sampled_from([-3_600_000, -500, 3_600_000]))
    def clock_jumps_and_is_set_right(self, ms: int) -> Any:
        self.engine.clock.advance(ms)
        taken = self.take(1, None)
        self.engine.clock.advance(-ms)
        return taken

    # What is rare by chance, and worth seeing often.

    @rule(target=leases, leased=leases)
    def lose_and_lease_again(self, leased: LeasedTask) -> Any:
        self.report(leased, 0, "y", "a")
        self.requeue(leased)
        taken = self.take(3, None)
        for again in taken.values:
            self.report(again, 0, "z", "a")
        return taken

    @rule(target=leases, leased=leases, message=st.sampled_from(["m1", "m2", "m3"]))
    def ask_and_lease_again(self, leased: LeasedTask, message: str) -> Any:
        self.park(leased)
        self.say(leased, message)
        return self.take(3, None)

    @rule(ms=st.sampled_from([1_000, 3_000]), first=st.booleans())
    def time_passes_over_a_restart(self, ms: int, first: bool) -> None:
        if first:
            self.compact()
        self.restart("crash")
        self.time_passes(ms)
        self.sweep()

    @rule()
    def sweep(self) -> None:
        swept = self.run(self.driver.sweep())
        causes = [
            *((which, "timeout") for which in swept.timed_out),
            *((which, "interrupted") for which in swept.interrupted),
            *((which, "deadline_exceeded") for which in swept.expired),
        ]
        cause_of = dict(causes)
        assert len(cause_of) == len(causes)
        left = set(cause_of)
        while left:  # which of several comes first is the engine's to choose; that each is due in its turn is not
            due = self.model.due(self.now_ms)
            first = next(which for which in self._order() if which in left)
            assert due[first] == cause_of[first]
            self.model.expire(first, self.now_ms)
            left.remove(first)
        assert self.model.due(self.now_ms) == {}

    def _order(self) -> list[TaskId]:
        """The order in which results arrived, as the sender sees it."""
        results = self.run(self.driver.ledger.recent_results(None, 1_000))
        return [result.task_id for result in reversed(results)]

    @rule()
    def compact(self) -> None:
        self.run(self.driver.ledger.compact())

    @rule(how=st.sampled_from(["crash", "close"]))
    def restart(self, how: str) -> None:
        again = self.engine.crash_and_reopen if how == "crash" else self.engine.close_and_reopen
        self.driver = LedgerDriver(self.run(again(self.driver.ledger)), self.engine.clock)

    @invariant()
    def every_task_is_where_the_model_has_it(self) -> None:
        for piece in self.model.pieces.values():
            entry = self.run(self.driver.ledger.entry(TaskId(piece.id)))
            if entry is None:
                assert piece.state == "resolved"
                continue
            lease = entry.lease.lease_id if entry.lease is not None else None
            seen = (entry.state.wire_name, entry.turn, entry.attempt, entry.generation, lease)
            assert seen == (piece.state, piece.turn, piece.attempt, piece.generation, piece.lease)

    @invariant()
    def nothing_is_counted_twice_or_forgotten(self) -> None:
        counts = self.run(self.driver.ledger.counts())
        states = [piece.state for piece in self.model.pieces.values()]
        for name, state in (
            ("queued", "queued"),
            ("leased", "in_flight"),
            ("parked", "parked"),
            ("following", "following"),
            ("settled", "result_pending"),
        ):
            assert getattr(counts, name) == states.count(state)

    def check_history(self) -> None:
        for piece in self.model.pieces.values():
            shown = self.run(check_generations(self.driver, TaskId(piece.id)))
            assert (shown.state, shown.generation) == (piece.state, piece.generation)
            assert [update.kind for update in shown.updates].count("settled") == piece.ended
            assert fold(shown.updates) == piece.artifacts
            live = [lease.lease_id for lease in shown.leases if lease.outcome is None]
            assert live == ([piece.lease] if piece.state == "in_flight" else [])
            if piece.result is not None:
                assert shown.result == result_of(piece.id, *piece.result)
        self.run(self.driver.check_audit())

    def check_order(self) -> None:
        """Who is next, whose result is next, whose lease is the oldest."""
        assert self.run(self.driver.queued_ids()) == self.model.queue
        assert self._order() == self.model.results
        report = self.run(self.driver.retry(RetryPolicy(min_lease_age_ms=1 << 60)))
        assert [skip.task_id for skip in report.skipped] == self.model.held_longest

    def cancel_all(self) -> None:
        """To the end: as each leader is canceled, the right follower takes its place."""
        while left := [number for number in range(1, 6) if self._leads(number)]:
            self.cancel(left[0])
            self.every_task_is_where_the_model_has_it()

    def _leads(self, number: int) -> bool:
        piece = self.model.pieces.get(task_id(number))
        return piece is not None and not piece.ended and piece.state != "following"

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        try:
            self.check_history()
            self.check_order()
            shown = [self.run(self.driver.show(TaskId(which))) for which in self.model.pieces]
            self.run(self.driver.ledger.compact())
            self.restart("crash")
            self.every_task_is_where_the_model_has_it()
            assert [self.run(self.driver.show(TaskId(which))) for which in self.model.pieces] == shown
            self.check_order()
            self.cancel_all()
        finally:
            self.run(self.engine.close())
            self.runner.close()
            shutil.rmtree(self.folder)


# Files, threads and a database make an example dear; what is bought is many steps in each.
LedgerMachine.TestCase.settings = settings(
    max_examples=settings().max_examples,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# A failure is made small before it is told, which takes longer than any test that passes.
TestLogLedgerInAnyOrder = pytest.mark.matrix(pytest.mark.timeout(1_800)(LedgerMachine.TestCase))


def test_the_model_itself_refuses_what_it_should() -> None:
    model = Model()
    assert model.send(Piece(id="1", content="a", key=None, deadline_ms=None, timeout_ms=None), 0) == "new"
    assert model.next(5, 0) == ["1"]
    model.lease("1", "l1", 0)
    assert msgspec.to_builtins(model.pieces["1"])["state"] == "in_flight"
    assert model.answer("1", "l1", ("ok", "x")) is False
    assert model.answer("1", "l1", ("ok", "x")) is True
    assert model.drain(5, None) == ["1"]
