"""Operations of the mailbox and of operators, and their answers: one shape over HTTP and the local socket.

Routes, kinds of frames, the OpenAPI document and the metrics are all read from the table of operations. Of an answer,
fields without a default are always there, also as `null`; the others are left out if they have their default.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, get_type_hints

import msgspec

from covenant.doors.metrics import Meter
from covenant.doors.waits import Pause, Waits
from covenant.exchange.access.identities import IdentityAdmin
from covenant.exchange.access.principals import IdentityAuth, LoginCodes, Principal, require_operator
from covenant.exchange.access.tenants import TenantAccess, TenantLimiter
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.frame_log import FrameLog
from covenant.exchange.id_prefixes import EVERY, UUID_LENGTH, find_lease_id, find_push_id, find_task_id
from covenant.exchange.mailbox import MailboxExchange
from covenant.exchange.request_checks import check_limit
from covenant.exchange.schedules import ScheduleAdmin
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.task_logs import TaskLogs
from covenant.exchange.task_search import scoped
from covenant.exchange.tasks.writer import Intake
from covenant.exchange.tenant_removal import TenantRemovals
from covenant.exchange.tenant_use import TenantUsage
from covenant.ledger.contract.ledger import Ledger
from covenant.model.errors import Conflict, Invalid, Refusal
from covenant.model.ids import TaskId
from covenant.wire.ipc_frames import FRAME_BYTES_MAX
from covenant.wire.mailbox import Request, Wrapped

if TYPE_CHECKING:
    from covenant.doors.operator_api.daemon_operations import SettingShown
    from covenant.doors.operator_api.inspection import AgentInspector
    from covenant.doors.operator_api.peers import PeerOperations
    from covenant.ledger.embedded.backup_file import StagedBackups


T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
encode: Final[Callable[[Any], bytes]] = msgspec.json.Encoder().encode
# The tag comes first, so only the first bytes differ in the older spelling.
_KIND: Final = b'{"kind":"a2a_'
_LEGACY_KIND: Final = b'{"kind":"a2_a_'
# The rest of the frame is for the fields around the page.
PAGE_BYTES_MAX: Final = FRAME_BYTES_MAX - 64 * 1024
R = TypeVar("R", bound=Request)
_PLACEHOLDER_ID: Final = "-" * UUID_LENGTH


class ApiAnswer(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="kind", omit_defaults=True):
    """The base of all answers."""


class ErrorAnswer(ApiAnswer, frozen=True, kw_only=True, tag="error"):
    code: str
    message: str
    retry_after_ms: int | None = None


class ProtocolVersions(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    protocol: str = "covenant.ipc"
    version: int = 1
    min_supported: int = 1
    max_supported: int = 1


class ProtocolInfo(ApiAnswer, frozen=True, kw_only=True, tag="protocol_info"):
    info: ProtocolVersions
    server: str


class Authenticated(ApiAnswer, frozen=True, kw_only=True, tag="authenticated"):
    display: str


class AuthenticationFailed(ApiAnswer, frozen=True, kw_only=True, tag="authentication_failed"):
    reason: str


class Pong(ApiAnswer, frozen=True, kw_only=True, tag="pong"):
    pass


def encode_legacy(answer: ApiAnswer) -> bytes:
    """`a2_a_…` instead of `a2a_…`, for clients of the protocol's first implementation."""
    body = encode(answer)
    return _LEGACY_KIND + body[len(_KIND) :] if body.startswith(_KIND) else body


def error_of(refusal: Refusal) -> ErrorAnswer:
    return ErrorAnswer(code=refusal.code, message=refusal.message, retry_after_ms=refusal.retry_after_ms)


INTERNAL_ERROR: Final = ErrorAnswer(code="internal", message="internal error")


def fill(answer: type[S], source: object, /, **given: Any) -> S:
    """An answer with the attributes of `source` that have the names of its fields, except the fields in `given`."""
    names = answer.__struct_fields__
    return answer(
        **{name: getattr(source, name) for name in names if name not in given and hasattr(source, name)}, **given
    )


def page_limit(requested: int | None, default: int, most: int | None = None) -> int:
    limit = default if requested is None else requested
    return limit if most is None else check_limit(limit, most)


def fit(items: Sequence[T], bytes_max: int = PAGE_BYTES_MAX) -> tuple[T, ...]:
    """The first items, as many as fit into `bytes_max`."""
    size = 0
    for index, item in enumerate(items):
        size += len(encode(item)) + 1
        if size > bytes_max:
            return tuple(items[:index])
    return tuple(items)


def size_of(items: Sequence[object]) -> int:
    return sum(len(encode(item)) + 1 for item in items)


@dataclass(frozen=True, slots=True)
class Services:
    exchange: MailboxExchange
    registry: IdentityAdmin
    ledger: Ledger
    tenancy: TenantAccess
    catalogue: Catalogue
    task_logs: TaskLogs
    intake: Intake
    tenant_usage: TenantUsage
    peers: PeerOperations | None = None
    """None: peers are switched off."""
    login_codes: LoginCodes | None = None
    """None: this daemon serves no dashboard."""
    backups: StagedBackups | None = None
    """None: the ledger is no folder of files."""
    removals: TenantRemovals | None = None
    """None: there is no home to search."""
    settings: tuple[SettingShown, ...] = ()
    """All settings in force."""
    frames: FrameLog | None = None
    """None: no frames are kept."""
    files: StoredFiles | None = None
    """None: bytes stay in the ledger."""
    http_url: str = ""
    """The URL of this daemon's HTTP server on this machine."""
    inspector: AgentInspector | None = None
    """None: this daemon calls no agents."""
    schedules: ScheduleAdmin | None = None
    """None: no agents work here."""

    async def require_peers(self, caller: Principal, what: str) -> PeerOperations:
        """Raises unless the caller is an operator and peers are switched on. The audit row of a refusal has `what`."""
        await require_operator(self.ledger, caller, what)
        if self.peers is None:
            raise Conflict(
                "peers_off",
                "this daemon has no peers; set enabled = true under [peers] in its settings.toml, and restart it",
            )
        return self.peers

    def give_up_ms(self, wait_ms: int | None) -> int:
        """The end of a wait, by the monotonic clock."""
        wait_ms, wait_ms_max = wait_ms or 0, self.exchange.limits.wait_ms_max
        if wait_ms > wait_ms_max:
            raise Invalid("invalid_wait", f"wait_ms must be between 0 and {wait_ms_max}")
        return self.ledger.clock.monotonic_ms() + wait_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """Shared by HTTP and the local socket: authentication, services, limits, and the encoding of answers."""

    services: Services
    identity_auth: IdentityAuth
    waits: Waits
    meter: Meter
    version: str
    limiter: TenantLimiter | None = None
    """The limiter of tenants, for operations that tenants may use."""
    legacy_kinds: bool = False

    @property
    def encode(self) -> Callable[[ApiAnswer], bytes]:
        return encode_legacy if self.legacy_kinds else encode

    @property
    def info(self) -> ProtocolInfo:
        return ProtocolInfo(info=ProtocolVersions(), server=f"covenant/{self.version}")


def has_short_id(request: Request) -> bool:
    """Whether one of the request's ids is only the beginning of an id."""
    return any(len(getattr(request, name) or _PLACEHOLDER_ID) < UUID_LENGTH for name in request.ids)


async def expand_ids(services: Services, caller: Principal, request: R) -> R:
    """The request with its short ids replaced by the whole ids, found among those that the caller may see."""
    ledger, full_ids = services.ledger, dict[str, str]()
    visible = await scoped(ledger, caller, EVERY)
    for name in request.ids:
        given = getattr(request, name)
        if given is None:
            continue
        if name == "lease_id":
            full_ids[name] = await find_lease_id(ledger, caller, TaskId(full_ids["task_id"]), given)
        elif name == "push_id":
            full_ids[name] = await find_push_id(ledger, caller, TaskId(full_ids["task_id"]), given)
        else:
            full_ids[name] = await find_task_id(ledger, given, visible)
    return msgspec.structs.replace(request, **full_ids)


class ApiOperation(Generic[R]):
    """An operation, named after the function that runs it.

    The function's annotations give the request and the answer.
    """

    def __init__(
        self,
        method: str,
        path: str,
        run: Callable[[Services, Principal, R], Awaitable[ApiAnswer]],
        summary: str,
        *,
        status: int = 200,
        for_tenants: bool = False,
        frame: type[Wrapped] | None = None,
        wait: Callable[[Services, Principal, R, Pause], Awaitable[ApiAnswer]] | None = None,
    ) -> None:
        """`frame`: the struct that wraps the request on the local socket; without it, a frame has the request's fields.

        `for_tenants`: over HTTP, also for the token of a tenant, within its limits.
        `wait`: the function that runs the operation if the caller is ready to wait (`wait_ms`).
        """
        self.kind: Final = run.__name__
        """The kind of its frames on the local socket."""
        self.method, self.path, self.run, self.summary = method, path, run, summary
        self.status, self.for_tenants, self.frame, self.wait = status, for_tenants, frame, wait
        self.request: type[R]
        self.answer: type[ApiAnswer]
        _services, _caller, self.request, self.answer = get_type_hints(run).values()
        self.in_body = method in ("POST", "PATCH", "PUT")
        """Whether HTTP carries the request in the body; otherwise in the query."""


AnyApiOperation = ApiOperation[Any]
