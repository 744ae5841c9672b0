"""The machine without an engine: decide, apply, look. No loop, no disk, no clock but a number."""

from collections.abc import Callable
from typing import TypeVar

from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.commands import Accept, Command, LeasedTask, Take
from covenant.ledger.machine.decisions import decide
from covenant.ledger.machine.decisions.context import CommandRefused
from covenant.ledger.machine.events import AnyEvent
from covenant.ledger.machine.view import View
from covenant.model.ids import AgentId
from covenant.model.settings import Limits
from covenant.model.task import Task, fingerprint
from tests.ledger_contract.fake_clock import START_MS
from tests.ledger_contract.samples import BOB

A = TypeVar("A")


class Pure:
    def __init__(self, limits: Limits | None = None) -> None:
        self.state = LedgerState(limits or Limits())
        self.now_ms = START_MS
        self.seq = 0
        self.view: Callable[[LedgerState], View] = lambda state: state
        self._ids = 0

    def new_id(self) -> str:
        self._ids += 1
        return f"11111111-1111-4111-8111-{self._ids:012x}"

    def decide(self, command: Command[A]) -> tuple[list[AnyEvent], A]:
        """What would happen, without it happening."""
        decision = decide(self.view(self.state), command, self.now_ms, self.new_id)
        return decision.events, decision.answer

    def do(self, command: Command[A]) -> A:
        """Decide and apply; a refusal's rows are applied too."""
        try:
            events, answer = self.decide(command)
        except CommandRefused as refused:
            self.apply(refused.events)
            raise refused.refusal from None
        self.apply(events)
        return answer

    def apply(self, events: list[AnyEvent]) -> None:
        self.seq += 1
        self.state.apply(events, self.now_ms, self.seq)

    def send(self, task: Task) -> None:
        self.do(Accept(task=task, digest=fingerprint(task)[0]))

    def take(self, holder: AgentId = BOB) -> LeasedTask:
        (leased,) = self.do(Take(holder=holder, recipient=holder.pubkey)).tasks
        return leased

    def taken(self, task: Task) -> LeasedTask:
        self.send(task)
        return self.take(task.recipient)
