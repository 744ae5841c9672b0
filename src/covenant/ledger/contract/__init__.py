"""The ledger's contract: what every engine promises, a module a noun. A consumer asks for the protocol it needs.

Promises of every engine:
- `commit` decides a command once and answers when what it decided is durable. An answer, a refusal or a read never
  depends on a fact that is not durable yet.
- Commands are decided one after the other, as if nobody else were there. What is counted for a limit may be passed by
  what others decide at the same moment.
- Repeating a command under the same ids gives the same answer.
- A receive or drain without a request id whose caller is cancelled while it waits is given back before the cancel is
  passed on. With a request id it stands: the same request again returns the same.
- After a failed write, `commit` raises `Unavailable` if it cannot find out what became of it. Reads go on.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from covenant.ledger.clock import Clock
from covenant.ledger.machine.commands import Command
from covenant.model.settings import Limits

A = TypeVar("A")


class Commits(Protocol):
    """Deciding commands. Every other protocol of the contract is this and what it reads."""

    @property
    def limits(self) -> Limits: ...
    @property
    def node(self) -> str: ...
    @property
    def boot(self) -> str: ...
    @property
    def clock(self) -> Clock: ...
    def now_ms(self) -> int:
        """The wall clock, for stamps. Waits use `clock.monotonic_ms`, and what acts on ages `clock.ages`."""

    def alive(self, node: str | None, boot: str) -> bool:
        """Whether a run of a node may still be there: a lease of one that is not has lost its holder."""

    async def commit(self, command: Command[A]) -> A: ...
    async def durable(self) -> None:
        """Return when look-ups tell everything that anybody was told before this call."""
