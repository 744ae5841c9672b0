"""Operations of the mailbox and of operators, and their answers: one shape over HTTP and the local socket.

Routes, kinds of frames, the OpenAPI document and the metrics are all read from the table of operations. Of an answer,
fields without a default are always there, `null` included; the others are left out when they say nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, get_type_hints

import msgspec

from covenant.doors.metrics import Meter
from covenant.doors.waits import Pause, Waits
from covenant.exchange.access.identities import IdentityAdmin
from covenant.exchange.access.principals import IdentityAuth, LoginCodes, Principal
from covenant.exchange.access.tenants import TenantAccess, TenantLimiter
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.frame_log import FrameLog
from covenant.exchange.id_prefixes import EVERY, UUID_LENGTH, find_lease_id, find_push_id, find_task_id
from covenant.exchange.mailbox import MailboxExchange
from covenant.exchange.stored_files import StoredFiles
from covenant.exchange.task_logs import TaskLogs
from covenant.exchange.task_search import scoped
from covenant.exchange.tasks.writer import Intake
from covenant.exchange.tenant_removal import TenantRemovals
from covenant.ledger.contract.ledger import Ledger
from covenant.model.errors import Invalid, Refusal
from covenant.model.ids import TaskId
from covenant.wire.ipc_frames import FRAME_BYTES_MAX
from covenant.wire.mailbox import Request, Wrapped

if TYPE_CHECKING:
    from covenant.doors.operator_api.daemon_operations import BackupOperations, SettingShown
    from covenant.doors.operator_api.inspection import AgentInspector
    from covenant.doors.operator_api.peers import PeerOperations


T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class ApiAnswer(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag_field="kind", omit_defaults=True):
    """The root of everything a caller may be told."""


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


encode: Final[Callable[[Any], bytes]] = msgspec.json.Encoder().encode

# The tag comes first, so the older spelling is a matter of the first bytes.
_KIND: Final = b'{"kind":"a2a_'
_LEGACY_KIND: Final = b'{"kind":"a2_a_'


def encode_legacy(answer: ApiAnswer) -> bytes:
    """`a2_a_…` instead of `a2a_…`, for clients of the protocol's first implementation."""
    body = encode(answer)
    return _LEGACY_KIND + body[len(_KIND) :] if body.startswith(_KIND) else body


def error_of(refusal: Refusal) -> ErrorAnswer:
    return ErrorAnswer(code=refusal.code, message=refusal.message, retry_after_ms=refusal.retry_after_ms)


INTERNAL_ERROR: Final = ErrorAnswer(code="internal", message="internal error")


def fill(answer: type[S], source: object, /, **given: Any) -> S:
    """An answer whose fields are the attributes of `source` by the same name, except those that are given."""
    names = answer.__struct_fields__
    return answer(
        **{name: getattr(source, name) for name in names if name not in given and hasattr(source, name)}, **given
    )


def page_limit(asked: int | None, default: int, most: int | None = None) -> int:
    limit = default if asked is None else asked
    if most is not None and not 1 <= limit <= most:
        raise Invalid("invalid_limit", f"limit must be between 1 and {most}")
    return limit


# The rest of the frame is for what stands around the page.
PAGE_BYTES_MAX: Final = FRAME_BYTES_MAX - 64 * 1024


def fit(items: Sequence[T], bytes_max: int = PAGE_BYTES_MAX) -> tuple[T, ...]:
    """As many of the first items as fit."""
    size = 0
    for index, item in enumerate(items):
        size += len(encode(item)) + 1
        if size > bytes_max:
            return tuple(items[:index])
    return tuple(items)


def size_of(items: Sequence[object]) -> int:
    return sum(len(encode(item)) + 1 for item in items)


R = TypeVar("R", bound=Request)
_WHOLE: Final = "-" * UUID_LENGTH


@dataclass(frozen=True, slots=True)
class Services:
    """What is behind the doors: operations work with this, and with nothing else."""

    exchange: MailboxExchange
    registry: IdentityAdmin
    ledger: Ledger
    tenancy: TenantAccess
    catalogue: Catalogue
    task_logs: TaskLogs
    intake: Intake
    peers: PeerOperations | None = None
    """None: this daemon has none."""
    login_codes: LoginCodes | None = None
    """None: this daemon serves no dashboard."""
    backups: BackupOperations | None = None
    """None: the ledger is no folder of files."""
    removals: TenantRemovals | None = None
    """None: there is no home to search."""
    settings: tuple[SettingShown, ...] = ()
    """All that are in force."""
    frames: FrameLog | None = None
    """None: no frames are kept."""
    files: StoredFiles | None = None
    """None: bytes stay in the ledger."""
    http_url: str = ""
    """Where this machine finds HTTP."""
    inspector: AgentInspector | None = None
    """None: nothing is called from here."""

    def give_up_ms(self, wait_ms: int | None) -> int:
        """When a wait is over, by a clock that nobody sets."""
        wait_ms, wait_ms_max = wait_ms or 0, self.exchange.limits.wait_ms_max
        if wait_ms > wait_ms_max:
            raise Invalid("invalid_wait", f"wait_ms must be between 0 and {wait_ms_max}")
        return self.ledger.clock.monotonic_ms() + wait_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """What HTTP and the local socket share: who is let in, what operations work with, and how answers are written."""

    services: Services
    identity_auth: IdentityAuth
    waits: Waits
    meter: Meter
    version: str
    limiter: TenantLimiter | None = None
    """Of tenants, where operations are for those too."""
    legacy_kinds: bool = False

    @property
    def encode(self) -> Callable[[ApiAnswer], bytes]:
        return encode_legacy if self.legacy_kinds else encode

    @property
    def info(self) -> ProtocolInfo:
        return ProtocolInfo(info=ProtocolVersions(), server=f"covenant/{self.version}")


def has_short_id(request: Request) -> bool:
    """Whether it names something by the beginning of its id."""
    return any(len(getattr(request, name) or _WHOLE) < UUID_LENGTH for name in request.ids)


async def spell_ids(services: Services, caller: Principal, request: R) -> R:
    """The request with its ids whole, among those of what the caller may see."""
    ledger, whole = services.ledger, dict[str, str]()
    seen = await scoped(ledger, caller, EVERY)
    for name in request.ids:
        given = getattr(request, name)
        if given is None:
            continue
        if name == "lease_id":
            whole[name] = await find_lease_id(ledger, caller, TaskId(whole["task_id"]), given)
        elif name == "push_id":
            whole[name] = await find_push_id(ledger, caller, TaskId(whole["task_id"]), given)
        else:
            whole[name] = await find_task_id(ledger, given, seen)
    return msgspec.structs.replace(request, **whole)


class ApiOperation(Generic[R]):
    """Named after what runs it, whose annotations say what is asked and answered."""

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
        """`frame`: what wraps the request on the local socket; without it, a frame has the request's fields.

        `for_tenants`: over HTTP, also for the token of a tenant, within its limits.
        `wait`: how to run it when the caller is ready to wait (`wait_ms`). Pauses end early, commits never do.
        """
        self.kind: Final = run.__name__
        """Of its frames on the local socket."""
        self.method, self.path, self.run, self.summary = method, path, run, summary
        self.status, self.for_tenants, self.frame, self.wait = status, for_tenants, frame, wait
        self.request: type[R]
        self.answer: type[ApiAnswer]
        _services, _caller, self.request, self.answer = get_type_hints(run).values()
        self.in_body = method in ("POST", "PATCH", "PUT")
        """Whether HTTP carries the request in the body; otherwise in the query."""


AnyApiOperation = ApiOperation[Any]
