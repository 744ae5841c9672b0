"""A hop: how deep in a chain of calls a call is made, who is in that chain, how long it may take, in whose trace.

It travels with every call from agent to agent (see `wire.hops`), so that A → B → A ends, and time does not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from covenant.model.errors import Invalid
from covenant.model.ids import AgentId

CLAIMED_DEPTH_MAX: Final = 64
"""More than any limit that is set: what claims to be deeper is not believed to be anything else."""
CHAIN_MAX: Final = 64
NAME_CHARS_MAX: Final = 256


class Hop(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What a call says of those before it. A call that begins a chain has depth 0 and nobody in its chain."""

    depth: int = 0
    chain: tuple[str, ...] = ()
    """Who called whom, the first caller first."""
    deadline_ms: int | None = None
    """When the answer is of no use any more, in epoch milliseconds."""
    traceparent: str | None = None
    tracestate: str | None = None

    def next(self, caller: str, *, deadline_ms: int | None = None) -> Hop:
        """What `caller` says when it calls somebody on behalf of this hop: one deeper, and never later."""
        known = [moment for moment in (self.deadline_ms, deadline_ms) if moment is not None]
        return Hop(
            depth=self.depth + 1,
            chain=(*self.chain, caller)[-CHAIN_MAX:],
            deadline_ms=min(known) if known else None,
            traceparent=self.traceparent,
            tracestate=self.tracestate,
        )


DEFAULT_DEPTH_MAX: Final = 3


def check_chain(depth: int, chain: Sequence[str], callee: AgentId, depth_max: int) -> None:
    if callee.pubkey in chain:
        above = len(chain) - chain.index(callee.pubkey)
        raise Invalid(
            "loop_detected",
            f"{callee.display} is in this chain of calls already, {above} call{'s' if above > 1 else ''} up; "
            "it is not called again on its own behalf",
        )
    if depth > depth_max:
        raise Invalid(
            "depth_exceeded", f"this call is {depth} deep in a chain of calls; at most {depth_max} are allowed here"
        )


def check_hop(hop: Hop | None, callee: AgentId, depth_max: int) -> None:
    """What arrives by a door."""
    if hop is not None and (hop.depth or hop.chain):
        check_chain(hop.depth, hop.chain, callee, depth_max)
