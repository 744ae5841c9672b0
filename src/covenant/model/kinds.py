"""Agent kinds: one row for each kind, with every fact that other code decides by.

No other module compares a kind's name. A new kind is a row here, a module in `agents` that runs it, and the line in
the daemon's wiring that joins the two.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

AgentKind = Literal["function", "process", "worker", "model", "remote", "peer"]


class KindRules(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    stored_by: Literal["code", "operator", "tenant"]
    """Who may declare an agent of this kind. `operator`: the kind runs programs or makes calls on this machine."""
    place: Literal["here", "remote", "peer"] = "here"
    """Where the agent's work is done."""
    pooled: bool = False
    """The daemon registers the agent with its worker pool as soon as it is in the catalogue."""
    first_tenant_only: bool = False
    """The pool runs agents of this kind for the first tenant alone."""
    timeout_ms: int | None = None
    """The time limit of a turn where the agent sets none. None: no limit."""
    waits_for_others: bool = False
    """The agent mostly waits for other systems, so more of its tasks may run at once than of one that computes."""
    retried: bool = False
    """An agent's definition may say how often a failed turn is begun again."""
    repeatable: bool = False
    """A new attempt continues the work of the attempt before it."""
    offered_to_peers: bool = False
    routed: bool = True
    enrolled: bool = False
    """An identity may be enrolled under the agent's name, so that an external worker leases its tasks."""
    needs_model: bool = False
    """The agent runs on a language model: the daemon carries out its slash commands and makes its MCP calls."""
    key: str = ""
    """The key of the definition that only this kind may have."""
    key_required: bool = False


KINDS: Final[dict[AgentKind, KindRules]] = {
    "function": KindRules(stored_by="code", offered_to_peers=True),
    "worker": KindRules(stored_by="tenant", offered_to_peers=True, enrolled=True),
    "model": KindRules(
        stored_by="tenant", pooled=True, waits_for_others=True, retried=True, offered_to_peers=True, needs_model=True
    ),
    "process": KindRules(
        stored_by="operator",
        pooled=True,
        timeout_ms=5 * 60_000,
        retried=True,
        offered_to_peers=True,
        key="command",
        key_required=True,
    ),
    "remote": KindRules(stored_by="operator", place="remote", pooled=True, waits_for_others=True, key="url"),
    "peer": KindRules(
        stored_by="operator",
        place="peer",
        pooled=True,
        waits_for_others=True,
        repeatable=True,
        routed=False,
        key="peer",
    ),
}

STORED_KINDS: Final = tuple(kind for kind, rules in KINDS.items() if rules.stored_by != "code")
"""Kinds that the catalogue can store."""
ENROLLED_KINDS: Final = frozenset(kind for kind, rules in KINDS.items() if rules.enrolled)
