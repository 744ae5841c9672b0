"""Both engines side by side, in any order: each command gets the same answer from both, and each question too.

Ids that an engine makes up differ; they are compared by the order in which they were first seen.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, Final

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.contract.task_query import TaskQuery
from covenant.ledger.contract.tasks import ListQuery, QueueQuery
from covenant.ledger.embedded.open import memory_ledger
from covenant.ledger.machine.commands import (
    Accept,
    Advance,
    Cancel,
    CancelOrphans,
    Command,
    Continue,
    Drain,
    DropPush,
    GiveBack,
    Interrupt,
    LeasedTask,
    MovePushes,
    PutPush,
    Release,
    Renew,
    Repair,
    Report,
    RetryStale,
    Settle,
    Starter,
    Sweep,
    Take,
    Withdraw,
)
from covenant.ledger.machine.entry import Entry
from covenant.ledger.machine.identity_commands import Enroll, MakeGrant, PurgeGrants, RevokeGrant, RevokeIdentity
from covenant.model.a2a_requests import PushConfig
from covenant.model.content import Text
from covenant.model.errors import Refusal
from covenant.model.grant import send_actions
from covenant.model.ids import AgentId, TaskId
from covenant.model.push import move_of
from covenant.model.retry_policy import ForceError, Posture, Requeue, RetryPolicy
from covenant.model.settings import Limits
from covenant.model.task import DELEGATION, Task, fingerprint
from covenant.model.task_event import ArtifactUpdate, MessageUpdate, StatusUpdate, Update
from tests.ledger_contract.embedded_engine import NODE
from tests.ledger_contract.grants import sending
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.postgres_server import Databases
from tests.ledger_contract.samples import (
    ALICE,
    BOB,
    CAROL,
    OPERATOR,
    failed,
    idempotent,
    make_grant,
    make_identity,
    make_task,
    ok,
    task_id,
)

UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
LIMITS: Final = Limits(
    queued_per_recipient_max=4,
    undrained_per_sender_max=4,
    live_tasks_max=8,
    followers_max=2,
    messages_kept_max=2,
    cache_entries_max=1,
    pushes_per_task_max=2,
    retention_ms=5_000,
    cache_age_ms_max=5_000,
)
LEASE_MS: Final = 600_000
NUMBERS: Final = st.integers(1, 8)
WHO: Final = st.sampled_from([BOB, BOB, CAROL])
REQUESTS: Final = st.sampled_from([None, None, "r1", "r2", "nul \x00"])
TEXTS: Final = st.sampled_from(["yes", "no", "nul \x00 and \x01", "ä" * 3])
HOOKS: Final = tuple(PushConfig(id=f"p{number}", url=f"https://hooks.example/{number}") for number in range(3))


class Side:
    """One engine, and the names that its ids go by."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._names: dict[str, str] = {}

    def plain(self, answer: object) -> str:
        return UUID.sub(self._name, repr(answer))

    def _name(self, found: re.Match[str]) -> str:
        known = found[0].startswith("00000000-")
        return found[0] if known else self._names.setdefault(found[0], f"id {len(self._names)}")


Leases = tuple[LeasedTask, LeasedTask]


class TwoEngines(RuleBasedStateMachine):
    databases: ClassVar[Databases]
    leases = Bundle("leases")

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.runner.run(self._begin())

    async def _begin(self) -> None:
        self.url = await self.databases.borrow()
        # The loop stands still between two steps, for long on a busy machine: nobody is to be declared lost for it.
        self.engine = PostgresEngine(self.url, lease_ms=LEASE_MS)
        self.clock = self.engine.clock
        self.granted: Counter[int] = Counter()
        self.sides = (
            Side(await memory_ledger(clock=self.clock, limits=LIMITS, node=NODE, boot="boot-1")),
            Side(await self.engine.open(LIMITS)),
        )

    def ask(self, *commands: Command[Any]) -> tuple[Any, Any]:
        """The same of both, or one for each where they name what differs."""
        return self.runner.run(self._ask(commands if len(commands) == 2 else commands * 2))

    async def _ask(self, commands: Sequence[Command[Any]]) -> tuple[Any, Any]:
        answers, texts = [], []
        for side, command in zip(self.sides, commands, strict=True):
            try:
                answer = await side.ledger.commit(command)
                text = side.plain(answer)
            except Refusal as refusal:
                answer, text = None, side.plain((refusal.code, refusal.message))
            answers.append(answer)
            texts.append(text)
        assert texts[0] == texts[1], commands[0]
        return answers[0], answers[1]

    def compare(self, *questions: Coroutine[Any, Any, tuple[object, ...]]) -> None:
        """Part by part, so that a difference is told and not all that is equal."""
        found = [self.runner.run(question) for question in questions]
        for parts in zip(*found, strict=True):
            one, other = (side.plain(part) for side, part in zip(self.sides, parts, strict=True))
            assert one == other, _difference(one, other)

    @rule(
        number=NUMBERS,
        recipient=WHO,
        key=st.sampled_from([None, None, "a", "b"]),
        due=st.sampled_from([{}, {}, {"deadline_ms": 1_700_000_003_000}, {"timeout_ms": 1_000}]),
        door=st.sampled_from(["mailbox", "a2a", "simple", "started", "part", "pushed", "granted"]),
        text=TEXTS,
    )
    def send(
        self, *, number: int, recipient: AgentId, key: str | None, due: dict[str, int], door: str, text: str
    ) -> None:
        fields: dict[str, Any] = dict(due)
        if key is not None:
            fields |= {"idempotency": idempotent(key), "task_kind": "work"}
        if door in ("a2a", "simple", "started"):
            fields |= {"origin": "a2a" if door == "started" else door, "tenant": "acme", "context_id": text}
        if door == "part":
            fields |= {"origin": DELEGATION, "parent": task_id(number + 1)}
        task = make_task(number, recipient=recipient, intent_text=text, **fields)
        starters = [Starter(recipient, NODE, side.ledger.boot) if door == "started" else None for side in self.sides]
        self.ask(*(self._accept(task, door, starter) for starter in starters))

    def _accept(self, task: Task, door: str, starter: Starter | None) -> Accept:
        return Accept(
            task=task,
            digest=fingerprint(task)[0],
            starter=starter,
            push=HOOKS[0] if door == "pushed" else None,
            access=sending(task) if door == "granted" else None,
        )

    @rule(target=leases, who=WHO, count=st.integers(1, 3), request=REQUESTS, everyone=st.booleans())
    def take(self, who: AgentId, count: int, request: str | None, everyone: bool) -> Any:
        recipient = None if everyone else who.pubkey
        one, other = self.ask(Take(holder=who, recipient=recipient, count=count, request_id=request))
        if one is None:
            return multiple()
        return multiple(*zip(one.tasks, other.tasks, strict=True))

    def of(self, kind: type[Any], leased: Leases, **fields: Any) -> tuple[Any, Any]:
        return self.ask(
            *(
                kind(task_id=each.task.id, holder=each.lease.leased_to, lease_id=each.lease.lease_id, **fields)
                for each in leased
            )
        )

    @rule(leased=leases, what=st.sampled_from([Renew, Release, Interrupt]))
    def hold(self, leased: Leases, what: type[Any]) -> None:
        self.of(what, leased, **({} if what is Renew else {"reason": "nul \x00"}))

    @rule(leased=leases, text=TEXTS, number=st.integers(0, 2), kind=st.sampled_from(["status", "park", "artifact"]))
    def report(self, leased: Leases, text: str, number: int, kind: str) -> None:
        update: Update = StatusUpdate(text=text, state="input-required" if kind == "park" else "working")
        if kind == "artifact":
            update = ArtifactUpdate(artifact_id="a", parts=(Text(text),), append=True)
        self.of(Report, leased, update=update, update_no=number)

    @rule(leased=leases, text=TEXTS, ends=st.booleans())
    def advance(self, leased: Leases, text: str, ends: bool) -> None:
        result = ok(leased[0].task.id, text) if ends else None
        self.of(Advance, leased, updates=(StatusUpdate(text=text),), result=result)

    @rule(leased=leases, text=TEXTS, is_ok=st.booleans())
    def settle(self, leased: Leases, text: str, is_ok: bool) -> None:
        result = ok(leased[0].task.id, text) if is_ok else failed(leased[0].task.id, text)
        self.of(Settle, leased, result=result)

    @rule(leased=leases)
    def give_back(self, leased: Leases) -> None:
        self.ask(*(GiveBack(leases=((each.task.id, each.lease.lease_id),)) for each in leased))

    @rule(number=NUMBERS, text=TEXTS)
    def say(self, number: int, text: str) -> None:
        message = MessageUpdate(role="user", parts=(Text(text),))
        self.ask(Continue(task_id=task_id(number), message=message, message_id=text))

    @rule(number=NUMBERS)
    def cancel(self, number: int) -> None:
        self.ask(Cancel(task_id=task_id(number), by=ALICE, reason="not wanted"))

    @rule(number=NUMBERS, force=st.booleans())
    def repair(self, number: int, force: bool) -> None:
        command = ForceError("it is gone") if force else Requeue(Posture.OPERATOR_ACCEPTED)
        self.ask(Repair(task_id=task_id(number), by=OPERATOR, command=command, reason="gone"))

    @rule(count=st.integers(1, 3), request=REQUESTS, which=st.none() | NUMBERS, everyone=st.booleans())
    def drain(self, count: int, request: str | None, which: int | None, everyone: bool) -> None:
        sender = None if everyone else ALICE.pubkey
        only = task_id(which) if which is not None else None
        self.ask(Drain(by=ALICE, sender=sender, count=count, request_id=request, task_id=only))

    @rule(number=NUMBERS)
    def return_result(self, number: int) -> None:
        self.ask(GiveBack(results=(task_id(number),)))

    @rule(request=st.sampled_from(["r1", "r2"]), by=st.sampled_from([ALICE, BOB]))
    def withdraw(self, request: str, by: AgentId) -> None:
        self.ask(Withdraw(by=by, request_id=request))

    @rule(ms=st.sampled_from([1, 500, 3_000, 10_000]))
    def pass_time(self, ms: int) -> None:
        self.clock.advance(ms)
        self.ask(Sweep(count=3))

    @rule()
    def cancel_orphans(self) -> None:
        self.ask(CancelOrphans(count=2))

    @rule(enabled=st.booleans())
    def retry(self, enabled: bool) -> None:
        self.ask(RetryStale(by=OPERATOR, policy=RetryPolicy(enabled=enabled, min_lease_age_ms=500)))

    @rule(number=NUMBERS, hook=st.sampled_from(HOOKS), drops=st.booleans())
    def push(self, number: int, hook: PushConfig, drops: bool) -> None:
        if drops:
            self.ask(DropPush(task_id=task_id(number), id=hook.id or ""))
        else:
            self.ask(PutPush(task_id=task_id(number), config=hook))

    @rule(number=NUMBERS, delivered=st.integers(0, 4), dead=st.booleans())
    def deliver(self, number: int, delivered: int, dead: bool) -> None:
        known = [self.runner.run(_pushes(side.ledger, task_id(number))) for side in self.sides]
        if known[0]:
            moves = [msgspec.structs.replace(move_of(each[0]), delivered=delivered, dead=dead) for each in known]
            self.ask(*(MovePushes(moves=(move,)) for move in moves))

    @rule(number=st.integers(1, 2), how=st.sampled_from(["enroll", "revoke", "grant", "revoke_grant", "purge"]))
    def register(self, number: int, how: str) -> None:
        identity = make_identity(ALICE, number=number)
        # Nonces are made up by chance: nobody makes the same grant twice.
        self.granted[number] += how == "grant"
        nonce = f"{number}.{self.granted[number]}"
        grant = make_grant(ALICE, send_actions(BOB)[0], nonce=nonce, max_uses=2)
        commands: dict[str, Command[Any]] = {
            "enroll": Enroll(by=OPERATOR, identity=identity),
            "revoke": RevokeIdentity(by=OPERATOR, token_sha256=identity.token_sha256),
            "grant": MakeGrant(by=OPERATOR, grant=grant),
            "revoke_grant": RevokeGrant(by=OPERATOR, signature_b58=grant.signature_b58),
            "purge": PurgeGrants(by=OPERATOR, before_ms=self.clock()),
        }
        self.ask(commands[how])

    @invariant()
    def lists_agree(self) -> None:
        if not hasattr(self, "sides"):
            return
        self.compare(*(_lists(side.ledger) for side in self.sides))

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        try:
            self.compare(*(_everything(side.ledger) for side in self.sides))
        finally:
            self.runner.run(self._end())
            self.runner.close()

    async def _end(self) -> None:
        await self.sides[0].ledger.close()
        await self.engine.close()
        await self.databases.give_back(self.url)


def _difference(one: str, other: str) -> str:
    at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"{one[max(0, at - 300) : at + 300]}\n\nand\n\n{other[max(0, at - 300) : at + 300]}"


async def _pushes(ledger: Ledger, which: TaskId) -> Sequence[Any]:
    return await ledger.pushes(which)


async def _lists(ledger: Ledger) -> tuple[object, ...]:
    counts = await ledger.counts()
    names = "queued leased parked following settled cached holders_lost oldest_lease_age_ms pushes pushes_dead commits"
    return (
        await ledger.queue(QueueQuery(limit=100)),
        await ledger.recent_tasks(None, 100),
        await ledger.recent_results(None, 100),
        [getattr(counts, name) for name in names.split()],
    )


def _entry(entry: Entry | None) -> Entry | None:
    """Of a result that came back, one engine knows in memory who had it, and how often; both show it the same."""
    if entry is None or not entry.finished:
        return entry
    return msgspec.structs.replace(entry, lease=None, attempt=0, turn=1)


async def _everything(ledger: Ledger) -> tuple[object, ...]:
    tasks = [task_id(number) for number in range(1, 9)]
    return (
        [_entry(await ledger.entry(which)) for which in tasks],
        [await ledger.steps(which, 0, 1_000) for which in tasks],
        *[await ledger.show(which, None, 100) for which in tasks],
        *[await ledger.show(which, who.pubkey, 100) for which in tasks for who in (ALICE, BOB, CAROL)],
        *[await ledger.tree(which, None) for which in tasks],
        *map(msgspec.to_builtins, (await ledger.find(TaskQuery(limit=200))).tasks),
        [await ledger.parties(which) for which in tasks],
        [sorted(await ledger.pushes(which), key=lambda push: push.id) for which in tasks],
        [
            await ledger.listing(ListQuery(recipient=who.pubkey, state=state, limit=limit, artifacts=True))
            for who in (BOB, CAROL)
            for state in (None, "working", "completed")
            for limit in (50,)
        ],
        [await ledger.of_tenant("acme", 10, simple=simple) for simple in (False, True)],
        sorted(await ledger.grants(), key=lambda grant: grant.signature_b58),
        sorted(await ledger.identities(), key=lambda identity: identity.token_sha256),
        [record.row for record in await ledger.audit_recent(None, 1_000, None)],
        (await ledger.audit_verify()).valid,
    )


# A failure is made small before it is told, which takes longer than any test that passes.
@pytest.mark.timeout(600)
def test_both_engines_give_the_same_answers(databases: Databases) -> None:
    class Machine(TwoEngines):
        pass

    Machine.databases = databases
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=max(10, settings().max_examples // 4),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
