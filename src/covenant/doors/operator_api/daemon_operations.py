"""The operator's operations on the daemon as a whole: backups of its ledger, a drain for a deploy, its settings,
and the daemons that share its ledger."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import msgspec

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services, fill
from covenant.exchange.access.principals import Principal, require_operator
from covenant.ledger.contract.ledger import LedgerNode
from covenant.ledger.embedded.backup_file import StagedBackup, StagedBackups
from covenant.model.errors import Invalid, NotFound, Unavailable
from covenant.wire.mailbox import EmptyRequest, StrictRequest, Whole

TIMEOUT_MS: Final = 60_000
TIMEOUT_MS_MAX: Final = 24 * 3_600_000
WAIT_MS_MAX: Final = 60_000
DRAIN: Final = "/v1/admin/drain"
BACKUPS: Final = "/v1/admin/backups"


class EndBackupRequest(StrictRequest, frozen=True, kw_only=True):
    backup_id: str = ""


class BackupBegun(ApiAnswer, StagedBackup, frozen=True, kw_only=True, tag="backup_begun"):
    """`folder` is on the daemon's machine, and stays until `end_backup`."""


class BackupEnded(ApiAnswer, frozen=True, kw_only=True, tag="backup_ended"):
    backup_id: str


class SettingShown(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`source`: default, file, environment or flag. Passwords in `value` are left out."""

    name: str
    value: Any
    default: Any
    source: str
    variable: str
    meaning: str


class SettingsShown(ApiAnswer, frozen=True, kw_only=True, tag="settings"):
    settings: tuple[SettingShown, ...]


def _backups(services: Services) -> StagedBackups:
    if services.backups is None:
        raise Unavailable("no_backup", "the ledger is on PostgreSQL: its own tools make backups of it (pg_dump)")
    return services.backups


async def begin_backup(services: Services, caller: Principal, _: EmptyRequest) -> BackupBegun:
    await require_operator(services.ledger, caller, "backup")
    staged = await _backups(services).begin()
    await services.exchange.note(caller, "backup_begun", backup_id=staged.id, position=staged.position)
    return fill(BackupBegun, staged)


async def end_backup(services: Services, caller: Principal, request: EndBackupRequest) -> BackupEnded:
    await require_operator(services.ledger, caller, "backup")
    if not await _backups(services).end(request.backup_id):
        raise NotFound("unknown_backup", "there is no such copy; a restart and later backups remove older ones")
    return BackupEnded(backup_id=request.backup_id)


class BeginDrainRequest(StrictRequest, frozen=True, kw_only=True):
    timeout_ms: int | None = None
    """How long running turns have. Turns that still run then are handed back, as by a signal.

    None: 60 seconds, or as long as they have already."""


class DrainStatusRequest(StrictRequest, frozen=True, kw_only=True):
    wait_ms: Whole | None = None
    """How long the answer may wait for the end of the drain."""


class DrainProgress(ApiAnswer, frozen=True, kw_only=True, tag="drain_progress"):
    """`running`: turns of the daemon's own agents. `drained`: the drain is over, `handed_back` turns ran too long, and
    the daemon stops. The others are counts of the ledger as it is now: all leases, those of running turns too; tasks
    that are queued or wait for their sender; results that nobody has drained."""

    draining: bool
    drained: bool
    running: int
    left_ms: int
    handed_back: int
    leased: int
    queued: int
    parked: int
    results: int


async def begin_drain(services: Services, caller: Principal, request: BeginDrainRequest) -> DrainProgress:
    await require_operator(services.ledger, caller, "draining")
    timeout_ms = request.timeout_ms
    if timeout_ms is None:
        if services.intake.drain_requested.is_set():
            return await _progress(services)
        timeout_ms = TIMEOUT_MS
    if not 0 <= timeout_ms <= TIMEOUT_MS_MAX:
        raise Invalid("invalid_timeout", f"timeout_ms must be between 0 and {TIMEOUT_MS_MAX}")
    await services.exchange.note(caller, "drain_begun", timeout_ms=timeout_ms)
    services.intake.close(timeout_ms)
    return await _progress(services)


async def drain_status(services: Services, caller: Principal, request: DrainStatusRequest) -> DrainProgress:
    await require_operator(services.ledger, caller, "draining")
    wait_ms = request.wait_ms or 0
    if wait_ms > WAIT_MS_MAX:
        raise Invalid("invalid_wait", f"wait_ms must be at most {WAIT_MS_MAX}")
    if wait_ms and services.intake.drain_requested.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(services.intake.stops.wait(), wait_ms / 1000)
    return await _progress(services)


async def _progress(services: Services) -> DrainProgress:
    # The drain is read first, so that the counts include what a finished drain handed back.
    status = services.intake.status()
    counts = await services.ledger.counts()
    if status.drained:
        services.intake.outcome_read.set()
    of_ledger = {"leased": counts.leased, "queued": counts.queued, "parked": counts.parked, "results": counts.settled}
    return fill(DrainProgress, status, **of_ledger)


async def show_settings(services: Services, caller: Principal, _: EmptyRequest) -> SettingsShown:
    await require_operator(services.ledger, caller, "settings")
    return SettingsShown(settings=services.settings)


class NodeList(ApiAnswer, frozen=True, kw_only=True, tag="node_list"):
    nodes: tuple[LedgerNode, ...]


async def list_nodes(services: Services, caller: Principal, _: EmptyRequest) -> NodeList:
    await require_operator(services.ledger, caller, "nodes")
    return NodeList(nodes=tuple(await services.ledger.nodes()))


OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("POST", BACKUPS, begin_backup, "Copy the ledger as it is now into a folder of the home", status=201),
    ApiOperation("DELETE", f"{BACKUPS}/{{backup_id}}", end_backup, "Remove such a copy"),
    ApiOperation("POST", DRAIN, begin_drain, "Accept no new work, let running turns end, then stop the daemon"),
    ApiOperation("GET", DRAIN, drain_status, "The progress of a drain"),
    ApiOperation("GET", "/v1/admin/nodes", list_nodes, "The daemons that serve this ledger"),
    ApiOperation("GET", "/v1/admin/settings", show_settings, "The settings in force, and where each came from"),
)
