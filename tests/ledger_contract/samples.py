"""Who plays in the suites, and what they hand each other. Everything is the same in every run."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from covenant.model.content import Text
from covenant.model.grant import Grant, Identity, Scope
from covenant.model.ids import AgentId, PublicKey, TaskId, base58
from covenant.model.task import DuplicateSafety, Idempotency, Result, ResultStatus, Task
from tests.ledger_contract.fake_clock import START_MS


def agent(display: str) -> AgentId:
    """An agent whose key follows from its name."""
    return AgentId(display, PublicKey(base58(hashlib.sha256(display.encode()).digest())))


ALICE: Final = agent("alice@here")
BOB: Final = agent("bob@here")
CAROL: Final = agent("carol@here")
DAVE: Final = agent("dave@here")
OPERATOR: Final = agent("operator@here")


def task_id(number: int) -> TaskId:
    return TaskId(f"00000000-0000-4000-8000-{number:012x}")


def make_task(number: int = 1, *, sender: AgentId = ALICE, recipient: AgentId = BOB, **fields: Any) -> Task:
    """Task number n, from Alice to Bob unless told otherwise."""
    fields.setdefault("intent_text", f"do piece of work {number}")
    return Task(id=task_id(number), sender=sender, recipient=recipient, **fields)


def idempotent(key: str = "invoice-7") -> Idempotency:
    return Idempotency(DuplicateSafety.IDEMPOTENT, key)


def unsafe(key: str = "invoice-7") -> Idempotency:
    return Idempotency(DuplicateSafety.UNSAFE, key)


def same_work(number: int, key: str = "invoice-7", **fields: Any) -> Task:
    """Tasks with different numbers and the same key are the same work."""
    return make_task(number, task_kind="invoice", idempotency=idempotent(key), **fields)


def ok(which: TaskId, text: str = "done") -> Result:
    return Result(task_id=which, status=ResultStatus.OK, content=(Text(text),))


def failed(which: TaskId, message: str = "could not") -> Result:
    return Result(task_id=which, status=ResultStatus.ERROR, error_message=message)


def partial(which: TaskId, text: str = "half") -> Result:
    return Result(task_id=which, status=ResultStatus.PARTIAL, content=(Text(text),))


def make_identity(who: AgentId, *, number: int = 1) -> Identity:
    digest = hashlib.sha256(f"token {number} of {who.display}".encode()).hexdigest()
    return Identity(agent=who, token_sha256=digest, token_prefix=digest[:6], registered_at_ms=START_MS)


def make_grant(
    subject: AgentId,
    action: str,
    *,
    nonce: str = "1",
    pins: Scope | None = None,
    max_uses: int | None = None,
    expires_at: int | None = None,
) -> Grant:
    """A grant as the operator's key would have signed it; the ledger trusts whoever calls it for that."""
    handle = hashlib.sha512(f"{subject.pubkey} {action} {nonce}".encode()).digest()
    return Grant(
        signature_b58=base58(handle),
        subject=subject,
        action=action,
        granted_by=OPERATOR,
        granted_at_ms=START_MS,
        nonce=nonce,
        pins=pins or Scope(),
        expires_at=expires_at,
        max_uses=max_uses,
    )
