"""A decision in the making: the events it has come to so far, and the rows it owes the audit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from covenant.ledger.machine.events import AnyEvent, Audited
from covenant.ledger.machine.view import View
from covenant.model.clock_steps import STEADY, Ages
from covenant.model.audit_chain import AuditHead, AuditRow, link
from covenant.model.errors import Refusal
from covenant.model.ids import AgentId

NewId = Callable[[], str]

_encode = msgspec.json.Encoder().encode


class Refused(Exception):
    """A refusal, and the audit rows that must be durable before it is told. Nothing else: no use is spent."""

    def __init__(self, refusal: Refusal, events: list[AnyEvent]) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.events: list[AnyEvent] = [event for event in events if isinstance(event, Audited)]


class Decide:
    """What one decision reads and what it has decided. Lives for one call and keeps nothing."""

    __slots__ = ("_head", "add", "ages", "events", "new_id", "now_ms", "view")

    def __init__(self, view: View, now_ms: int, new_id: NewId, ages: Ages = STEADY) -> None:
        self.view = view
        self.now_ms = now_ms
        self.ages = ages
        self.new_id = new_id
        self.events: list[AnyEvent] = []
        self.add = self.events.append
        self._head: AuditHead | None = None

    def has_passed(self, deadline_ms: int | None) -> bool:
        """Whether it is too late for something. While ages are paused, nothing is."""
        return deadline_ms is not None and deadline_ms <= self.now_ms and not self.ages.paused

    @property
    def expiry_ms(self) -> int:
        """The moment by which grants have expired."""
        return self.ages.expiry_ms(self.now_ms)

    def audit(self, issuer: AgentId, kind: dict[str, Any] | msgspec.Raw) -> None:
        row = AuditRow(id=self.new_id(), timestamp_ms=self.now_ms, issuer=issuer, kind=kind)
        text = _encode(row).decode()
        self._head = head = link(self._head or self.view.audit_head, text)
        self.events.append(Audited(head.index, head.chain_hash, issuer.pubkey, text))

    def refuse(self, refusal: Refusal) -> Refused:
        return Refused(refusal, self.events)
