"""The settings: one frozen tree. Each value has its default, limits and meaning once: here, or in its section.

`settings_loader` fills the tree; docs/settings.md is written from it. Each part of the daemon gets its section.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from covenant.model.settings import (
    HOUR_MS,
    MIB,
    A2aSettings,
    BlobSettings,
    CardSettings,
    DelegationSettings,
    Limits,
    PushSettings,
    TenantSettings,
    UiSettings,
)
from covenant.model.settings_field import (
    address,
    base_url,
    choice,
    command_line,
    database_url,
    grpc_address,
    hosts,
    line,
    model_name,
    model_names,
    networks,
    node_name,
    origins,
    search_place,
    setting,
    switch,
    url,
    variable,
    whole,
)
from covenant.outbound.outbound_settings import OutboundSettings
from covenant.peers.peer_settings import PeerSettings

ClientAuth = Literal["optional", "required"]
Durability = Literal["fsync", "os"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Traces = Literal["auto", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """HTTP: its address, its limits, and the hosts and clients that it serves."""

    bind_addr: str = setting("127.0.0.1", address, "Address that HTTP listens on.", alias="BIND_HOST")
    port: int = setting(
        8421, whole(0, 65_535), "Port that HTTP listens on; 0 lets the system choose one.", alias="PORT"
    )
    body_bytes_max: int = setting(8 * MIB, whole(1024, 1024 * MIB), "Largest request body (413 above it).")
    connections_max: int = setting(
        4_096,
        whole(1, 1_000_000),
        "Most open HTTP connections. Above it the connection that was idle longest is closed; if none is idle, the "
        "new one gets 503.",
    )
    connections_per_address_max: int = setting(
        1_024,
        whole(1, 1_000_000),
        "Most open HTTP connections of one address (IPv6: of one /64). `trusted_proxies` have no such limit.",
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
        "Most bytes that all callers without a token together may occupy in memory, over HTTP and gRPC (503 above it).",
    )
    stranger_body_ms: int = setting(
        20_000, whole(100, 600_000), "Longest time in which a caller without a token may send one message."
    )
    origins: tuple[str, ...] = setting((), origins, "Web origins whose pages may call the HTTP routes (CORS).")
    allowed_hosts: tuple[str, ...] = setting(
        ("localhost", "127.0.0.1", "[::1]"),
        hosts,
        "Names that a request's Host header may have, in addition to the address that HTTP listens on and the host of "
        "http.public_base_url.",
    )
    public_base_url: str = setting(
        "",
        base_url,
        "The URL under which callers reach this daemon, for cards; empty: http:// (https:// with TLS) and the "
        "request's Host.",
        alias="COVENANT_PUBLIC_BASE_URL",
        flag="--public-base-url",
    )
    tls_cert: str = setting(
        "",
        line,
        "File with the certificate that HTTP and gRPC show, and those that lead to its authority, in PEM; empty: no "
        "TLS. It is read again when it changes.",
    )
    tls_key: str = setting("", line, "File with the key of that certificate, in PEM; only its owner may read it.")
    tls_client_ca: str = setting(
        "",
        line,
        "File with the authorities whose client certificates are taken, in PEM; empty: clients are not asked for one.",
    )
    tls_client_auth: ClientAuth = setting(  # noqa: RUF009  (makes a dataclass field)
        "optional",
        choice("optional", "required"),
        "Whether a client without a certificate is admitted. Over gRPC a client is asked for one only if it is "
        "required.",
    )
    metrics_token_file: str = setting(
        "",
        line,
        "File with the token that /metrics asks for, as Authorization: Bearer; empty: everybody may read the metrics.",
    )
    trusted_proxies: tuple[str, ...] = setting(
        (), networks, "Peers whose X-Forwarded-Proto and X-Forwarded-Host are believed."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSettings:
    """A2A over gRPC, on a port of its own. Needs the extra `grpc`."""

    enabled: bool = setting(False, switch, "Whether agents can be called over gRPC. Their cards then say so.")
    bind_addr: str = setting("127.0.0.1", address, "Address that gRPC listens on.")
    port: int = setting(8422, whole(0, 65_535), "Port that gRPC listens on; 0 lets the system choose one.")
    public_address: str = setting(
        "",
        grpc_address,
        "The address of gRPC in cards; empty: the host of HTTP with this port. Needed behind a proxy.",
    )
    message_bytes_max: int = setting(8 * MIB, whole(1024, 1024 * MIB), "Largest request (RESOURCE_EXHAUSTED above it).")
    calls_max: int = setting(
        4_096,
        whole(1, 1_000_000),
        "Most calls under way, streams among them (RESOURCE_EXHAUSTED above it), and most connections.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcSettings:
    """The socket in the home."""

    frame_bytes_max: int = setting(8 * MIB, whole(65_536, 64 * MIB), "Largest frame, in both directions.")
    connections_max: int = setting(1_024, whole(1, 100_000), "Most open connections on the socket.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """The ledger: files in the home, or a database that several daemons share."""

    url: str = setting(
        "",
        database_url,
        "The PostgreSQL database that holds the ledger, for several daemons; empty: files in the home.",
        flag="--ledger",
    )
    pooler: bool = setting(
        False,
        switch,
        "A transaction pooler is in front of the database: nothing is kept in a session, and changes are polled for.",
    )
    node_lease_ms: int = setting(
        3_000,
        whole(1_000, 60_000),
        "On PostgreSQL: how long a daemon may be silent before the others declare it lost. After two thirds of this "
        "without the database it accepts nothing new.",
    )
    durability: Durability = setting(  # noqa: RUF009  (makes a dataclass field)
        "fsync",
        choice("fsync", "os"),
        "When a write counts as done: synced to the disk, or handed to the system (a power failure may lose it).",
    )
    segment_bytes: int = setting(16 * MIB, whole(4096, 1024 * MIB), "Size at which a journal segment is sealed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupSettings:
    """Sealed segments of the journal, shipped to another place: a backup can then be restored to any later moment."""

    command: str = setting(
        "",
        command_line,
        "A command that is run for each sealed segment before the segment is dropped, without a shell. {path}, {name} "
        "and {incarnation} are filled in. Empty: segments are not shipped.",
    )
    command_ms: int = setting(60_000, whole(100, HOUR_MS), "Longest time for the command; then it is killed.")
    seal_ms: int = setting(
        300_000, whole(1_000, 24 * HOUR_MS), "How long records wait in a segment that is not full until it is shipped."
    )
    kept_bytes_max: int = setting(
        4096 * MIB,
        whole(0),
        "Most bytes of segments that are kept while the command fails. Above it the oldest are dropped unshipped.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrySettings:
    """The retry scheduler: requeues stale leases of idempotent work. Off unless switched on."""

    scheduler: bool = setting(False, switch, "Whether the daemon runs the retry gate by itself.")
    interval_ms: int = setting(60_000, whole(1), "Pause before each pass of the retry gate.")
    min_lease_age_ms: int = setting(300_000, whole(0), "Age from which a lease is stale.")
    max_attempts: int = setting(3, whole(0), "Attempts after which a task is left to the operator.")
    max_requeues: int = setting(1, whole(0), "Most tasks requeued in one pass.")
    scan_limit: int = setting(100, whole(0, 10_000), "Most leases looked at in one pass.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Rules of access."""

    recipient_admission: bool = setting(
        False, switch, "Whether a recipient must hold `a2a.recv.<sender>` before anybody may send to it."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Model agents. Providers read their keys from the environment, as their libraries do."""

    name: str = setting(
        "",
        model_name,
        "The model of model agents, as provider:name; empty: no model, and `index` chooses agents by keywords.",
    )
    others: tuple[str, ...] = setting(
        (), model_names, "Other models that an agent definition may name. A model that is not listed is not used."
    )
    fallbacks: tuple[str, ...] = setting(
        (),
        model_names,
        "Models to ask, in this order, when a model cannot answer and its agent names no fallback_models. A "
        "definition may name them too.",
    )
    base_url: str = setting(
        "",
        url,
        "The URL of an OpenAI-compatible server, for the provider in `model.name`; empty: the provider's own.",
    )
    api_key_env: str = setting(
        "", variable, "The environment variable with that server's key; empty: the server needs no key."
    )
    search: str = setting(
        "",
        search_place,
        "How agents search the web: a URL with `{query}` in it, or a tool as mcp:server.tool; empty: not at all.",
    )
    task_tokens_max: int = setting(
        200_000, whole(0), "Most tokens that one task may use, with all that it delegates; 0: no limit."
    )
    request_ms: int = setting(120_000, whole(1, HOUR_MS), "Longest time for one answer of a model, with retries.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorSettings:
    """Answers of the mailbox."""

    legacy_kinds: bool = setting(False, switch, "Whether answers are named `a2_a_…` instead of `a2a_…`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """The process itself."""

    node: str = setting(
        "",
        node_name,
        "Permanent name of this daemon, as in the leases of its own agents; empty: made from the machine's name.",
    )
    grace_ms: int = setting(10_000, whole(0, HOUR_MS), "How long a stop waits for work and requests under way.")
    sweep_interval_ms: int = setting(
        1_000, whole(10, HOUR_MS), "Pause between two checks of deadlines, timeouts and undrained results."
    )
    clock_pause_ms: int = setting(
        60_000,
        whole(1_000, 24 * HOUR_MS),
        "How long the wall clock must be steady after a step before tasks expire, time out or are retried again.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """How long finished tasks and the audit are kept. A tenant's own limits take precedence."""

    task_hours: int = setting(
        0, whole(0, 1_000_000), "Hours that a finished task is kept, with its artifacts; 0: for ever."
    )
    tenant_bytes: int = setting(
        0,
        whole(0, 1024 * 1024 * MIB),
        "Approximate size on disk of the finished tasks of one tenant, or of the mailbox; above it the oldest are "
        "erased. 0: no limit.",
    )
    audit_hours: int = setting(0, whole(0, 1_000_000), "Hours that rows of the audit are kept; 0: for ever.")
    interval_ms: int = setting(60_000, whole(100, 24 * HOUR_MS), "Pause between two passes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """The daemon's log on stderr, and the logs that it keeps for each task."""

    format: LogFormat = setting(  # noqa: RUF009  (makes a dataclass field)
        "text", choice("text", "json"), "Lines for people, or one JSON object a line."
    )
    level: LogLevel = setting(  # noqa: RUF009  (makes a dataclass field)
        "info", choice("debug", "info", "warning", "error"), "The least important lines to write."
    )
    task_bytes_max: int = setting(
        16 * MIB,
        whole(MIB, 1024 * MIB),
        "Bytes of task logs (`covenant logs`) that are kept in memory, and as many in the home; the oldest go first.",
    )
    frame_bytes_max: int = setting(
        0,
        whole(0, 1024 * MIB),
        "Bytes of frames (`covenant a2a frames`) that are kept in memory: requests and answers of each task, without "
        "secrets. 0: none are kept.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """Spans, by OpenTelemetry. Its own variables, such as OTEL_EXPORTER_OTLP_ENDPOINT, say where they go."""

    traces: Traces = setting(  # noqa: RUF009  (makes a dataclass field)
        "auto",
        choice("auto", "off"),
        "Whether the daemon makes spans: when a variable of OpenTelemetry asks for them and its SDK is "
        "installed, or never.",
    )
    content: bool = setting(
        False, switch, "Whether spans hold the text of messages. Off: only agents, times, counts and outcomes."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    home: Path
    http: HttpSettings = field(default_factory=HttpSettings)
    ui: UiSettings = field(default_factory=UiSettings)
    grpc: GrpcSettings = field(default_factory=GrpcSettings)
    ipc: IpcSettings = field(default_factory=IpcSettings)
    ledger: LedgerSettings = field(default_factory=LedgerSettings)
    backup: BackupSettings = field(default_factory=BackupSettings)
    blobs: BlobSettings = field(default_factory=BlobSettings)
    limits: Limits = field(default_factory=Limits)
    retry: RetrySettings = field(default_factory=RetrySettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    tenants: TenantSettings = field(default_factory=TenantSettings)
    a2a: A2aSettings = field(default_factory=A2aSettings)
    cards: CardSettings = field(default_factory=CardSettings)
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
    return replace(settings.limits, live_tasks_max=tenants.live_tasks, queued_bytes_max=tenants.queued_bytes)
