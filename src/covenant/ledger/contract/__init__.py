"""The ledger's contract: the promises of every engine, one module a noun. A consumer takes the protocol that it needs.

Promises of every engine:
- `commit` decides a command once and returns when the decision is durable. No answer, refusal or read ever depends on a
  fact that is not durable yet.
- Commands are decided as if one after the other. Commands that are decided at the same time may together exceed a limit
  that is counted.
- Repeating a command under the same ids gives the same answer.
- If the caller of a receive or drain without a request id is cancelled while it waits, what it took is given back
  before the cancel is passed on. With a request id nothing is given back: the same request again returns the same.
- After a failed write, `commit` raises `Unavailable` if it cannot find out whether the write succeeded. Reads go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:  # the process that writes the archive needs the types of `retention` and starts with each daemon
    from covenant.ledger.clock import Clock
    from covenant.ledger.machine.commands import Command
    from covenant.model.settings import Limits

A = TypeVar("A")


class Commits(Protocol):
    """Decides commands. Every other protocol of the contract adds its own reads to this one."""

    @property
    def limits(self) -> Limits: ...
    @property
    def node(self) -> str: ...
    @property
    def boot(self) -> str: ...
    @property
    def clock(self) -> Clock: ...
    def now_ms(self) -> int:
        """The wall clock, for timestamps. Waits use `clock.monotonic_ms`; decisions by age use `clock.ages`."""

    def alive(self, node: str | None, boot: str) -> bool:
        """Whether this run of a node may still be alive. The leases of any other run have lost their holder."""

    async def commit(self, command: Command[A]) -> A: ...
    async def durable(self) -> None:
        """Returns when reads show everything that any caller was told before this call."""
