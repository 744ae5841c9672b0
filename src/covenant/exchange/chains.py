"""Where chains of calls end: too deep, or back at somebody who is in them already.

Whoever calls says how deep the call is and who is in its chain, by key (see `model.hop`). It is checked where a call is
made, and again where it arrives: a caller need not be one of us, and whom it calls is known only there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from covenant.model.errors import Invalid
from covenant.model.hop import Hop
from covenant.model.ids import AgentId

DEPTH_MAX: Final = 3


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
