"""The settings: one frozen tree. Each value has its default, limits and meaning once: here, or in its section.

`settings_loader` fills the tree; docs/settings.md is written from it. Each part of the daemon gets its section.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from covenant.ledger.machine.view import Limits
from covenant.model.settings_field import (
    Kind,
    address,
    agent_id,
    base_url,
    choice,
    hosts,
    line,
    model_name,
    model_names,
    networks,
    node_name,
    origins,
    setting,
    several,
    switch,
    url,
    variable,
    whole,
)
from covenant.outbound.address_guard import read_entry
from covenant.peers.peer_settings import PeerSettings, name_servers

HOUR_MS: Final = 3_600_000
MIB: Final = 1024 * 1024

Durability = Literal["fsync", "os"]
LogFormat = Literal["text", "json"]
Anonymous = Literal["never", "loopback", "anywhere"]
LogLevel = Literal["debug", "info", "warning", "error"]
Traces = Literal["auto", "off"]


callees: Final = Kind(
    several(lambda item: bool(read_entry(item))),
    "host names and addresses, each with :port or without, and networks such as 10.0.0.0/8, separated by commas "
    "(a list in the file)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """HTTP: where it listens, and to whom."""

    bind_addr: str = setting("127.0.0.1", address, "Address that HTTP listens on.", also="BIND_HOST")
    port: int = setting(8421, whole(0, 65_535), "Port that HTTP listens on; 0 lets the system choose one.", also="PORT")
    body_bytes_max: int = setting(8 * MIB, whole(1024, 1024 * MIB), "Largest request body (413 above it).")
    connections_max: int = setting(
        4_096,
        whole(1, 1_000_000),
        "Open HTTP connections at once; for another one, the longest silent one is closed, or else it gets 503.",
    )
    connections_per_address_max: int = setting(
        1_024,
        whole(1, 1_000_000),
        "Those of one address (IPv6: of one /64); `trusted_proxies` have no such bound.",
    )
    head_ms: int = setting(10_000, whole(10, HOUR_MS), "Longest time for the head of a request (408 after it).")
    body_idle_ms: int = setting(30_000, whole(10, HOUR_MS), "Longest pause within a request's body (408 after it).")
    body_ms: int = setting(300_000, whole(10, 24 * HOUR_MS), "Longest time for a request's whole body (408 after it).")
    keep_alive_ms: int = setting(75_000, whole(10, 24 * HOUR_MS), "How long a connection is kept between two requests.")
    unread_ms: int = setting(
        30_000, whole(10, HOUR_MS), "How long a client may read nothing of an answer before it is cut off."
    )
    stranger_bytes_max: int = setting(
        64 * MIB,
        whole(48 * MIB, 1024 * 1024 * MIB),
        "Bytes that all who have shown no token may make the daemon hold at once, over HTTP and gRPC (503 above it).",
    )
    stranger_body_ms: int = setting(
        20_000, whole(100, 600_000), "How long somebody who has shown no token has for sending one message."
    )
    origins: tuple[str, ...] = setting((), origins, "Web origins whose pages may call the HTTP routes (CORS).")
    allowed_hosts: tuple[str, ...] = setting(
        ("localhost", "127.0.0.1", "[::1]"),
        hosts,
        "Names that a request's Host header may have, besides the address that HTTP listens on and the host of "
        "http.public_base_url.",
    )
    public_base_url: str = setting(
        "",
        base_url,
        "Where callers reach this daemon, as cards tell it; empty: http:// and the request's Host.",
        also="COVENANT_PUBLIC_BASE_URL",
        flag="--public-base-url",
    )
    metrics_token_file: str = setting(
        "",
        line,
        "File with the token that /metrics asks for, as Authorization: Bearer; empty: everybody may read the numbers.",
    )
    trusted_proxies: tuple[str, ...] = setting(
        (), networks, "Peers whose X-Forwarded-Proto and X-Forwarded-Host are believed."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSettings:
    """A2A over gRPC, on a port of its own. Needs the extra `grpc`."""

    enabled: bool = setting(False, switch, "Whether agents can be called over gRPC; their cards then say so.")
    bind_addr: str = setting("127.0.0.1", address, "Address that gRPC listens on.")
    port: int = setting(8422, whole(0, 65_535), "Port that gRPC listens on; 0 lets the system choose one.")
    message_bytes_max: int = setting(8 * MIB, whole(1024, 1024 * MIB), "Largest request (RESOURCE_EXHAUSTED above it).")
    calls_max: int = setting(
        4_096,
        whole(1, 1_000_000),
        "Calls under way at once, streams among them (RESOURCE_EXHAUSTED above); connections too.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcSettings:
    """The socket in the home."""

    frame_bytes_max: int = setting(8 * MIB, whole(65_536, 64 * MIB), "Largest frame, in both directions.")
    connections_max: int = setting(1_024, whole(1, 100_000), "Open connections on the socket at once.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """The ledger's files."""

    durability: Durability = setting(  # noqa: RUF009  (makes a dataclass field)
        "fsync",
        choice("fsync", "os"),
        "When a write counts as done: synced to the disk, or handed to the system (a power cut may take it back).",
    )
    segment_bytes: int = setting(16 * MIB, whole(4096, 1024 * MIB), "Size at which a journal segment is sealed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """The retry scheduler: requeues stale leases of idempotent work. Off unless switched on."""

    scheduler: bool = setting(False, switch, "Whether the daemon runs the retry gate by itself.")
    interval_ms: int = setting(60_000, whole(1), "Pause before each pass.")
    min_lease_age_ms: int = setting(300_000, whole(0), "Age from which a lease counts as stale.")
    max_attempts: int = setting(3, whole(0), "Attempts after which a task is left to the operator.")
    max_requeues: int = setting(1, whole(0), "Most tasks requeued in one pass.")
    scan_limit: int = setting(100, whole(0, 10_000), "Most leases looked at in one pass.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Who may do what."""

    recipient_admission: bool = setting(
        False, switch, "Whether a recipient must hold `a2a.recv.<sender>` before anybody may send to it."
    )


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
    message_bytes_max: int = setting(MIB, whole(1024, 64 * MIB), "Largest message to an agent, as it is kept.")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Agents that a language model plays. Providers read their keys from the environment, as their libraries do."""

    name: str = setting(
        "", model_name, "The model that plays agents, as provider:name; empty: none, and `index` goes by words alone."
    )
    others: tuple[str, ...] = setting(
        (), model_names, "Models that an agent definition may name instead. Any other one that it names is not used."
    )
    base_url: str = setting(
        "",
        url,
        "Where an OpenAI-compatible server is, for the provider that `model.name` names; empty: where its own is.",
    )
    api_key_env: str = setting("", variable, "The variable that has the key of that server; empty: it needs none.")
    task_tokens_max: int = setting(
        200_000, whole(0), "Tokens that one task may use, with what it delegates; 0: no limit."
    )
    request_ms: int = setting(
        120_000, whole(1, HOUR_MS), "Longest that one answer of a model may take, from the question on, with retries."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegationSettings:
    """What an agent may give to other agents while it works on a task."""

    depth_max: int = setting(
        3,
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
class DoorSettings:
    """What the mailbox's doors say."""

    legacy_kinds: bool = setting(False, switch, "Whether answers are named `a2_a_…` instead of `a2a_…`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundSettings:
    """Calls that the daemon makes itself. Only public addresses are called, on the ports that speak HTTP."""

    allow: tuple[str, ...] = setting(
        (),
        callees,
        "What may be called besides: by name (private and loopback addresses only), by address, by network; with a "
        "port for one that is closed otherwise.",
    )
    name_servers: tuple[str, ...] = setting(
        (), name_servers, "Whom to ask for addresses; none named: the system, with its hosts file."
    )
    body_bytes_max: int = setting(4 * MIB, whole(1024, 1024 * MIB), "Largest answer, also after decompression.")
    total_ms: int = setting(30_000, whole(1, HOUR_MS), "Longest call, redirects included.")
    connect_ms: int = setting(5_000, whole(1, HOUR_MS), "Longest look-up and connection.")
    idle_ms: int = setting(15_000, whole(1, HOUR_MS), "Longest pause of the other side.")
    redirects_max: int = setting(3, whole(0, 20), "Most redirects followed in one call, each judged as the first URL.")
    connections_max: int = setting(1_000, whole(1, 10_000), "Calls at once; more of them wait.")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """The process itself."""

    node: str = setting("", node_name, "Name of this daemon in the leases of its own agents; empty: the machine's.")
    grace_ms: int = setting(10_000, whole(0, HOUR_MS), "How long a stop waits for work and requests under way.")
    sweep_interval_ms: int = setting(
        1_000, whole(10, HOUR_MS), "Pause between two looks for passed deadlines, timeouts and retention."
    )
    clock_pause_ms: int = setting(
        60_000,
        whole(1_000, 24 * HOUR_MS),
        "How long the wall clock must be steady after a step before anything is expired, timed out or retried again.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What the daemon says on stderr."""

    format: LogFormat = setting(  # noqa: RUF009  (makes a dataclass field)
        "text", choice("text", "json"), "Lines for people, or one JSON object a line."
    )
    level: LogLevel = setting(  # noqa: RUF009  (makes a dataclass field)
        "info", choice("debug", "info", "warning", "error"), "The least important lines to write."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """Spans, by OpenTelemetry. Where they go is said by its own variables, such as OTEL_EXPORTER_OTLP_ENDPOINT."""

    traces: Traces = setting(  # noqa: RUF009  (makes a dataclass field)
        "auto",
        choice("auto", "off"),
        "Whether there are spans: if a variable of OpenTelemetry asks for them and its SDK is installed, or never.",
    )
    content: bool = setting(
        False, switch, "Whether spans hold what was said. Off: only who, when, how often and how it ended."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    home: Path
    http: HttpSettings = field(default_factory=HttpSettings)
    grpc: GrpcSettings = field(default_factory=GrpcSettings)
    ipc: IpcSettings = field(default_factory=IpcSettings)
    ledger: LedgerSettings = field(default_factory=LedgerSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    retry: RetrySettings = field(default_factory=RetrySettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    tenants: TenantSettings = field(default_factory=TenantSettings)
    a2a: A2aSettings = field(default_factory=A2aSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    delegation: DelegationSettings = field(default_factory=DelegationSettings)
    peers: PeerSettings = field(default_factory=PeerSettings)
    doors: DoorSettings = field(default_factory=DoorSettings)
    outbound: OutboundSettings = field(default_factory=OutboundSettings)
    push: PushSettings = field(default_factory=PushSettings)
    daemon: DaemonSettings = field(default_factory=DaemonSettings)
    log: LogSettings = field(default_factory=LogSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)


def ledger_limits(settings: Settings) -> Limits:
    tenants = settings.tenants
    limits = msgspec.convert(settings.limits, Limits, from_attributes=True)
    return msgspec.structs.replace(limits, live_tasks_max=tenants.live_tasks, queued_bytes_max=tenants.queued_bytes)
