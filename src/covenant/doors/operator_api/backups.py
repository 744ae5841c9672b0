"""The operator's operations on backups: a copy of the ledger is made for whoever can read the home's files."""

from __future__ import annotations

from typing import Final, Protocol

from covenant.doors.operator_api.operation import AnyApiOperation, ApiAnswer, ApiOperation, Services, fill
from covenant.exchange.access.principals import Principal, require_operator
from covenant.ledger.embedded.backup_file import StagedBackup
from covenant.model.errors import NotFound, Unavailable
from covenant.wire.mailbox import EmptyRequest, StrictRequest


class EndBackupRequest(StrictRequest, frozen=True, kw_only=True):
    backup_id: str = ""


class BackupBegun(ApiAnswer, frozen=True, kw_only=True, tag="backup_begun"):
    """`folder`, on the daemon's machine, has the ledger through record `position`, until `end_backup`."""

    id: str
    folder: str
    position: int
    incarnation: str
    made_at_ms: int


class BackupEnded(ApiAnswer, frozen=True, kw_only=True, tag="backup_ended"):
    backup_id: str


class BackupOperations(Protocol):
    """What a daemon with a ledger in files can do."""

    @property
    def warning(self) -> str | None:
        """What an operator should know of the segments that are shipped, in words."""

    async def begin(self) -> StagedBackup: ...
    async def end(self, backup_id: str) -> bool: ...


def _backups(services: Services) -> BackupOperations:
    if services.backups is None:
        raise Unavailable("no_backup", "the ledger is on PostgreSQL: its own tools make backups of it (pg_dump)")
    return services.backups


async def begin_backup(services: Services, caller: Principal, _: EmptyRequest) -> BackupBegun:
    await require_operator(services.ledger, caller, "backup")
    staged = await _backups(services).begin()
    await services.exchange.note_backup(caller, staged.id, staged.position)
    return fill(BackupBegun, staged)


async def end_backup(services: Services, caller: Principal, request: EndBackupRequest) -> BackupEnded:
    await require_operator(services.ledger, caller, "backup")
    if not await _backups(services).end(request.backup_id):
        raise NotFound("unknown_backup", "there is no such copy; a restart and later backups remove older ones")
    return BackupEnded(backup_id=request.backup_id)


BACKUPS: Final = "/v1/admin/backups"
OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    ApiOperation("POST", BACKUPS, begin_backup, "Copy the ledger as it is now into a folder of the home", status=201),
    ApiOperation("DELETE", f"{BACKUPS}/{{backup_id}}", end_backup, "Remove such a copy"),
)
