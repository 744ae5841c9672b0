"""Settings that layers below the daemon read: a section each, with its defaults, bounds and meanings.

`daemon/settings` has the tree of all sections. A setting stands nowhere else: whoever needs it is given its section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from covenant.model.settings_field import agent_id, choice, line, setting, switch, url, whole

HOUR_MS: Final = 3_600_000
MIB: Final = 1024 * 1024
DEPTH_MAX: Final = 3
"""Of a chain of calls from agent to agent, unless a setting says otherwise."""
MESSAGE_BYTES_MAX: Final = MIB

Anonymous = Literal["never", "loopback", "anywhere"]
RootForm = Literal["both", "1.0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what callers may pile up. Above one of them a request is refused (413 or 429), never queued."""

    task_bytes_max: int = setting(MIB, whole(1024, 1024 * MIB), "Largest task.")
    result_bytes_max: int = setting(3 * MIB, whole(1024, 1024 * MIB), "Largest result.")
    update_bytes_max: int = setting(MIB, whole(1024, 1024 * MIB), "Largest update of a running task.")
    page_max: int = setting(1_000, whole(1, 100_000), "Most rows in one answer.")
    wait_ms_max: int = setting(60_000, whole(0, HOUR_MS), "Longest wait that a receive or drain may ask for.")
    waits_max: int = setting(10_000, whole(1), "Most receives and drains that wait at once.")
    waits_per_caller_max: int = setting(1_000, whole(1), "Most of one identity that wait at once.")
    body_bytes_on_disk: int = setting(
        64 * 1024,
        whole(1024, 1024 * MIB),
        "A task that has not ended and whose body is at least this large keeps it on disk, and not in memory.",
    )
    batch_max: int = setting(100, whole(1, 10_000), "Most tasks or results taken at once.")
    batch_bytes_max: int = setting(
        3 * MIB, whole(1024, 1024 * MIB), "Size of what is taken at once, unless a single task or result is larger."
    )
    queued_per_recipient_max: int = setting(100_000, whole(1), "Most tasks queued for one recipient.")
    undrained_per_sender_max: int = setting(100_000, whole(1), "Most results that wait for one sender.")
    undrained_bytes_per_sender_max: int = setting(
        256 * MIB, whole(1024), "Size of the results that wait for one sender; above it the sender sends nothing new."
    )
    followers_max: int = setting(100, whole(1), "Most tasks that wait for the same work under one idempotency key.")
    artifacts_per_attempt_max: int = setting(1_000, whole(1), "Most artifacts that one attempt may write.")
    messages_kept_max: int = setting(100, whole(1), "Most messages to one task that wait for its next turn.")
    tenants_max: int = setting(10_000, whole(1), "Most tenants.")
    agents_per_tenant_max: int = setting(1_000, whole(0), "Most agents stored for one tenant.")
    peers_max: int = setting(100, whole(0, 10_000), "Most peers.")
    delegations_kept_max: int = setting(
        10_000, whole(1), "Most delegations that are listed after they have ended; their tasks stay in history."
    )
    parcels_per_peer_max: int = setting(
        10_000, whole(1), "Most messages that wait for one peer; above it nothing new is begun with it (429)."
    )
    envelopes_per_peer_max: int = setting(
        100_000, whole(100), "Most messages of one peer remembered at once, so that none is taken twice (429 above)."
    )
    pushes_per_task_max: int = setting(10, whole(0), "Most push configurations of one task.")
    pushes_max: int = setting(
        100_000,
        whole(0),
        "Most push configurations whose last delivery is still to come; one tenant has at most half of them.",
    )
    cache_entries_max: int = setting(100_000, whole(0), "Most results kept to answer the same idempotent work again.")
    cache_bytes_max: int = setting(256 * MIB, whole(0), "Size of these results together; the oldest go first.")
    cache_age_ms_max: int = setting(7 * 24 * HOUR_MS, whole(0), "How long such a result is kept.")
    requests_remembered_max: int = setting(65_536, whole(1), "Most receives and drains remembered by request id.")
    retention_ms: int = setting(30 * 24 * HOUR_MS, whole(1_000), "How long a result waits for a sender to drain it.")
    live_tasks_max: int = 100_000
    """This and the next one are `tenants.live_tasks` and `tenants.queued_bytes`, for accounts without their own."""
    queued_bytes_max: int = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class A2aSettings:
    """What strangers are told and allowed, and what stands in every card."""

    publish: str = setting(
        "", agent_id, "Agent of the tenant `default` whose card everybody may read at /.well-known/agent-card.json."
    )
    publish_anonymous: Anonymous = setting(  # noqa: RUF009  (makes a dataclass field)
        "never",
        choice("never", "loopback", "anywhere"),
        "Who may call the published agent without a token: nobody, callers on this machine, or everybody. Behind a "
        "proxy everybody seems to be on this machine: so not with http.public_base_url or http.trusted_proxies.",
    )
    provider_org: str = setting(
        "", line, "Who provides the agents, as cards tell it; empty: the host of provider_url.", also="A2A_PROVIDER_ORG"
    )
    provider_url: str = setting(
        "", url, "Its web address; empty, with a provider_org: this daemon's.", also="A2A_PROVIDER_URL"
    )
    docs_url: str = setting("", url, "Where the agents are documented.", also="A2A_DOCS_URL")
    push_notifications: bool = setting(
        False, switch, "Whether clients may have the steps of their tasks posted to a webhook."
    )
    message_bytes_max: int = setting(
        MESSAGE_BYTES_MAX, whole(1024, 64 * MIB), "Largest message to an agent, as it is kept."
    )
    blocking_ms_max: int = setting(
        10 * 60_000, whole(1, 24 * HOUR_MS), "After this long a blocking send answers with the task as it is."
    )
    inbound_rate_per_min: int = setting(
        5,
        whole(0, 1_000_000),
        "Tasks that one token may send by the simple door in any minute (429 above); 0: no limit.",
        also="A2A_INBOUND_RATE_LIMIT_PER_MIN",
    )
    agent_concurrency: int = setting(64, whole(1, 100_000), "Turns at once of an agent that does not say how many.")
    turn_updates_max: int = setting(100_000, whole(1, 10_000_000), "Updates that an agent may make in one turn.")
    turn_bytes_max: int = setting(16 * MIB, whole(1024, 1024 * MIB), "How much an agent may say in one turn.")
    context_history: bool = setting(
        True,
        switch,
        "Whether model agents and pydantic-ai agents are given what was said earlier in a message's context.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSettings:
    """How cards are written."""

    root_form: RootForm = setting(  # noqa: RUF009  (makes a dataclass field)
        "both",
        choice("both", "1.0"),
        "The card at /.well-known/agent-card.json for callers that do not say A2A-Version: 1.0: with the fields of "
        "0.3 beside those of 1.0, or in the form of 1.0 alone.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegationSettings:
    """What an agent may give to other agents while it works on a task."""

    depth_max: int = setting(
        DEPTH_MAX,
        whole(0, 64),
        "How deep a chain of calls from agent to agent may be; a call that is deeper is refused where it arrives.",
        also="MAX_A2A_DEPTH",
    )
    calls_max: int = setting(
        10,
        whole(0, 1_000),
        "Calls to agents elsewhere that one task may make.",
        also="MAX_REMOTE_INVOCATIONS_PER_SESSION",
    )
    agents_max: int = setting(
        3, whole(0, 1_000), "Different agents elsewhere that one task may call.", also="MAX_UNIQUE_AGENTS_PER_SESSION"
    )
    cooldown_ms: int = setting(
        5_000,
        whole(0, HOUR_MS),
        "Pause between two calls of one task to agents elsewhere; calls made at once count as one. 0: none.",
        also="A2A_INVOCATION_COOLDOWN_MS",
    )
    children_max: int = setting(100, whole(0, 10_000), "Calls that one task may make, of either kind.")
    remote_concurrency: int = setting(256, whole(1, 100_000), "Calls to addresses elsewhere at once, of one tenant.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """Limits of tenants that have none of their own. 0: no limit."""

    concurrency: int = setting(
        256, whole(0, 1_000_000), "Turns of a tenant that the daemon's own agents work on at once; more of them wait."
    )
    rate_per_min: int = setting(0, whole(0, 1_000_000), "Requests that a tenant may make a minute (429 above).")
    burst: int = setting(0, whole(0, 1_000_000), "Requests that may come at once; 0: as many as a minute's.")
    connections: int = setting(
        1_024,
        whole(0, 1_000_000),
        "Requests of a tenant that are answered at once, streams and long waits among them (429 above).",
    )
    streams: int = setting(512, whole(0, 1_000_000), "Open streams of a tenant, subscriptions among them (429 above).")
    live_tasks: int = setting(
        100_000,
        whole(0, 1_000_000),
        "Tasks of a tenant that have not ended, or of a mailbox identity outside of a tenant's work (429 above).",
    )
    queued_bytes: int = setting(
        256 * MIB,
        whole(0, 1024 * 1024 * MIB),
        "Size of these tasks, and of the messages that wait for them (429 above).",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """Push notifications: how long and how hard a delivery is tried. Where it may go is a matter of `outbound`."""

    attempts_max: int = setting(8, whole(1, 100), "Tries of one delivery before its configuration is given up.")
    pause_ms: int = setting(
        3_000, whole(1, HOUR_MS), "Pause after the first failure; three times as long after each that follows."
    )
    pause_ms_max: int = setting(HOUR_MS, whole(1, 24 * HOUR_MS), "Longest pause, also where a receiver asks for more.")
    at_once_max: int = setting(32, whole(1, 1_000), "Deliveries at once; no tenant has more than half of them.")
    at_once_per_host_max: int = setting(4, whole(1, 1_000), "Deliveries at once of one tenant to one host.")
