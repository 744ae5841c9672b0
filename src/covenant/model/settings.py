"""Settings that layers below the daemon read: a section each, with its defaults, bounds and meanings.

`daemon/settings` has the tree of all sections; `outbound` and `peers` have a module each for their own. The users of a
setting get its section as a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from covenant.model.settings_field import (
    agent_id,
    auto_switch,
    base_url,
    bucket_url,
    choice,
    line,
    region_name,
    setting,
    switch,
    url,
    whole,
)

HOUR_MS: Final = 3_600_000
MIB: Final = 1024 * 1024
DEPTH_MAX: Final = 3
"""The default limit of a chain of calls from agent to agent."""
MESSAGE_BYTES_MAX: Final = MIB

Anonymous = Literal["never", "loopback", "anywhere"]
AutoSwitch = Literal["auto", "on", "off"]
RootForm = Literal["both", "1.0"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on what callers may store. Above one of them a request is refused (413 or 429), never queued."""

    task_bytes_max: int = setting(MIB, whole(1024, 1024 * MIB), "Largest task.")
    result_bytes_max: int = setting(3 * MIB, whole(1024, 1024 * MIB), "Largest result.")
    update_bytes_max: int = setting(MIB, whole(1024, 1024 * MIB), "Largest update of a running task.")
    page_max: int = setting(1_000, whole(1, 100_000), "Most rows in one answer.")
    wait_ms_max: int = setting(60_000, whole(0, HOUR_MS), "Longest wait that a receive or drain may ask for.")
    waits_max: int = setting(10_000, whole(1), "Most receives and drains that wait at once.")
    waits_per_caller_max: int = setting(1_000, whole(1), "Most receives and drains of one identity that wait at once.")
    body_bytes_on_disk: int = setting(
        64 * 1024,
        whole(1024, 1024 * MIB),
        "A live task with a body of at least this size keeps the body on disk and not in memory.",
    )
    batch_max: int = setting(100, whole(1, 10_000), "Most tasks or results taken at once.")
    batch_bytes_max: int = setting(
        3 * MIB, whole(1024, 1024 * MIB), "Most bytes of tasks or results taken at once, unless a single one is larger."
    )
    queued_per_recipient_max: int = setting(100_000, whole(1), "Most tasks queued for one recipient.")
    undrained_per_sender_max: int = setting(100_000, whole(1), "Most results that wait for one sender.")
    undrained_bytes_per_sender_max: int = setting(
        256 * MIB,
        whole(1024),
        "Most bytes of results that wait for one sender. Above it the sender may send nothing new.",
    )
    followers_max: int = setting(100, whole(1), "Most tasks that wait for the same work under one idempotency key.")
    artifacts_per_attempt_max: int = setting(1_000, whole(1), "Most artifacts that one attempt may write.")
    messages_kept_max: int = setting(100, whole(1), "Most messages to one task that wait for its next turn.")
    tenants_max: int = setting(10_000, whole(1), "Most tenants.")
    agents_per_tenant_max: int = setting(1_000, whole(0), "Most agents stored for one tenant.")
    peers_max: int = setting(100, whole(0, 10_000), "Most peers.")
    delegations_kept_max: int = setting(
        10_000, whole(1), "Most ended delegations that are listed; their tasks stay in history."
    )
    outbox_per_peer_max: int = setting(
        10_000, whole(1), "Most messages that wait for one peer. Above it no new delegation with the peer begins (429)."
    )
    envelopes_per_peer_max: int = setting(
        100_000,
        whole(100),
        "Most messages of one peer that are remembered, so that none is processed twice (429 above it).",
    )
    pushes_per_task_max: int = setting(10, whole(0), "Most push configurations of one task.")
    pushes_max: int = setting(
        100_000,
        whole(0),
        "Most push configurations whose last delivery is still to come; one tenant has at most half of them.",
    )
    cache_entries_max: int = setting(100_000, whole(0), "Most results kept to answer the same idempotent work again.")
    cache_bytes_max: int = setting(
        256 * MIB, whole(0), "Most bytes of the results that are kept for idempotent work; the oldest go first."
    )
    cache_age_ms_max: int = setting(7 * 24 * HOUR_MS, whole(0), "How long a result is kept for idempotent work.")
    requests_remembered_max: int = setting(65_536, whole(1), "Most receives and drains remembered by request id.")
    retention_ms: int = setting(30 * 24 * HOUR_MS, whole(1_000), "How long a result waits for a sender to drain it.")
    live_tasks_max: int = 100_000
    """This and the next one are `tenants.live_tasks` and `tenants.queued_bytes`, for accounts without their own."""
    queued_bytes_max: int = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class A2aSettings:
    """Rules for callers without a token, and the fields that every card has."""

    publish: str = setting(
        "", agent_id, "Agent of the tenant `default` whose card everybody may read at /.well-known/agent-card.json."
    )
    publish_anonymous: Anonymous = setting(  # noqa: RUF009  (makes a dataclass field)
        "never",
        choice("never", "loopback", "anywhere"),
        "Who may call the published agent without a token: nobody, callers on this machine, or everybody. Behind a "
        "proxy everybody seems to be on this machine, so loopback is refused with http.public_base_url or "
        "http.trusted_proxies.",
    )
    anonymous_lists: bool = setting(
        False,
        switch,
        "Whether a caller without a token may list the tasks of all callers without a token. "
        "Without it, such a caller sees only the tasks whose ids it was given.",
    )
    provider_org: str = setting(
        "",
        line,
        "The organisation that provides the agents, for cards; empty: the host of provider_url.",
        alias="A2A_PROVIDER_ORG",
    )
    provider_url: str = setting(
        "",
        url,
        "The web address of that organisation, for cards; empty, with a provider_org: this daemon's.",
        alias="A2A_PROVIDER_URL",
    )
    docs_url: str = setting("", url, "The URL of the agents' documentation, for cards.", alias="A2A_DOCS_URL")
    push_notifications: bool = setting(
        False, switch, "Whether clients may register webhooks for the steps of their tasks."
    )
    message_bytes_max: int = setting(
        MESSAGE_BYTES_MAX, whole(1024, 64 * MIB), "Largest message to an agent, in its stored form."
    )
    blocking_ms_max: int = setting(
        10 * 60_000, whole(1, 24 * HOUR_MS), "Longest wait of a blocking send; then it answers with the task as it is."
    )
    inbound_rate_per_min: int = setting(
        5,
        whole(0, 1_000_000),
        "Tasks that one token may send by the simple door in any minute (429 above); 0: no limit.",
        alias="A2A_INBOUND_RATE_LIMIT_PER_MIN",
    )
    agent_concurrency: int = setting(
        64, whole(1, 100_000), "Most turns at once of an agent that names no number of its own."
    )
    hold_ms: int = setting(
        HOUR_MS,
        whole(0, 10_000 * HOUR_MS),
        "How long the interrupted work of an agent with on_lost=hold waits for an operator; then its task fails. "
        "0: for ever.",
    )
    turn_updates_max: int = setting(100_000, whole(1, 10_000_000), "Most updates of an agent in one turn.")
    turn_bytes_max: int = setting(16 * MIB, whole(1024, 1024 * MIB), "Most bytes of an agent's output in one turn.")
    context_history: bool = setting(
        True,
        switch,
        "Whether model agents and pydantic-ai agents get the earlier messages of a message's context.",
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
    """Limits of the calls that an agent makes to other agents during a task."""

    depth_max: int = setting(
        DEPTH_MAX,
        whole(0, 64),
        "Deepest chain of calls from agent to agent. A deeper call is refused where it arrives.",
        alias="MAX_A2A_DEPTH",
    )
    calls_max: int = setting(
        10,
        whole(0, 1_000),
        "Most calls of one task to remote agents.",
        alias="MAX_REMOTE_INVOCATIONS_PER_SESSION",
    )
    agents_max: int = setting(
        3,
        whole(0, 1_000),
        "Most different remote agents that one task may call.",
        alias="MAX_UNIQUE_AGENTS_PER_SESSION",
    )
    cooldown_ms: int = setting(
        5_000,
        whole(0, HOUR_MS),
        "Pause between two calls of one task to remote agents; calls made at once count as one. 0: none.",
        alias="A2A_INVOCATION_COOLDOWN_MS",
    )
    children_max: int = setting(100, whole(0, 10_000), "Most calls of one task, to local and remote agents.")
    remote_concurrency: int = setting(256, whole(1, 100_000), "Most calls of one tenant to remote agents at once.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """Limits of tenants that have none of their own. 0: no limit."""

    concurrency: int = setting(
        256,
        whole(0, 1_000_000),
        "Most turns of a tenant that the daemon's own agents work on at once; further turns wait.",
    )
    rate_per_min: int = setting(0, whole(0, 1_000_000), "Most requests of a tenant in a minute (429 above it).")
    burst: int = setting(0, whole(0, 1_000_000), "Most requests of a tenant at once; 0: a minute's worth.")
    connections: int = setting(
        1_024,
        whole(0, 1_000_000),
        "Most requests of a tenant under way, streams and long waits among them (429 above it).",
    )
    streams: int = setting(
        512, whole(0, 1_000_000), "Most open streams of a tenant, subscriptions among them (429 above it)."
    )
    live_tasks: int = setting(
        100_000,
        whole(0, 1_000_000),
        "Most live tasks of a tenant, or of a mailbox identity outside of a tenant's work (429 above it).",
    )
    queued_bytes: int = setting(
        256 * MIB,
        whole(0, 1024 * 1024 * MIB),
        "Most bytes of live tasks and of the messages that wait for them (429 above it).",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobSettings:
    """Files beside the ledger: which, how many, and for how long."""

    url: str = setting(
        "",
        bucket_url,
        "With ledger.url: the S3-compatible bucket that holds the bytes of files, with a prefix for this ledger alone. "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN are read from the environment. Empty: the "
        "bytes are in the database.",
    )
    endpoint: str = setting("", base_url, "Where this store is. Empty: AWS, in blobs.region.")
    region: str = setting("us-east-1", region_name, "The region of this store, for which requests are signed.")
    inline_bytes_max: int = setting(
        256 * 1024, whole(1024, 8 * MIB), "A part with more bytes than this is a file, and not in the ledger itself."
    )
    file_bytes_max: int = setting(
        4 * 1024 * MIB, whole(1024, 1024 * 1024 * MIB), "Most bytes of one file (413 above it)."
    )
    tenant_bytes_max: int = setting(
        100 * 1024 * MIB,
        whole(0, 1024 * 1024 * 1024 * MIB),
        "Most bytes of the files of one tenant, or of one mailbox identity (429 above it); 0: no limit.",
    )
    tenant_files_max: int = setting(
        100_000, whole(0, 100_000_000), "Most files of one tenant, or of one mailbox identity; 0: no limit."
    )
    uploads_max: int = setting(8, whole(1, 10_000), "Most uploads of one tenant at once (429 above it).")
    upload_ms_max: int = setting(HOUR_MS, whole(100, 24 * HOUR_MS), "Longest time for one upload (408 after it).")
    link_ms: int = setting(
        HOUR_MS,
        whole(1_000, 7 * 24 * HOUR_MS),
        "How long the signed URL of a file works without a token.",
    )
    kept_ms: int = setting(
        24 * HOUR_MS,
        whole(60_000, 365 * 24 * HOUR_MS),
        "How long a file without a task is kept after its upload, or after its task was erased.",
    )
    collect_interval_ms: int = setting(
        60_000, whole(100, 24 * HOUR_MS), "Pause between two passes that collect files without a task."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """Push notifications: attempts and pauses of deliveries. `outbound` says which addresses may be called."""

    attempts_max: int = setting(8, whole(1, 100), "Most attempts at one delivery; then its configuration is given up.")
    pause_ms: int = setting(
        3_000, whole(1, HOUR_MS), "Pause after the first failure; three times as long after each further one."
    )
    pause_ms_max: int = setting(HOUR_MS, whole(1, 24 * HOUR_MS), "Longest pause, even if a receiver asks for more.")
    at_once_max: int = setting(32, whole(1, 1_000), "Most deliveries at once; no tenant has more than half of them.")
    at_once_per_host_max: int = setting(4, whole(1, 1_000), "Most deliveries at once of one tenant to one host.")


@dataclass(frozen=True, slots=True, kw_only=True)
class UiSettings:
    """The dashboard at `/ui`."""

    enabled: AutoSwitch = setting(  # noqa: RUF009  (makes a dataclass field)
        "auto", auto_switch, "Whether HTTP serves the dashboard; auto: if HTTP listens on a loopback address."
    )
    sessions_max: int = setting(
        256,
        whole(1, 100_000),
        "Most browsers that are logged in. Above it the session that was idle longest is logged out.",
    )
    idle_ms: int = setting(HOUR_MS, whole(60_000, 24 * HOUR_MS), "How long a session lasts while nobody uses it.")
    session_ms: int = setting(12 * HOUR_MS, whole(60_000, 7 * 24 * HOUR_MS), "How long a session lasts at most.")
    feeds_max: int = setting(64, whole(1, 10_000), "Most browsers that follow the feed of changes at once.")
