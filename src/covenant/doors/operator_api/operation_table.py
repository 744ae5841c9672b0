"""The table of operations of the mailbox and of operators."""

from __future__ import annotations

from typing import Final

from covenant.doors import file_transfer
from covenant.doors.operator_api import (
    attention,
    daemon_operations,
    delegation,
    identities,
    inspection,
    mailbox,
    peers,
    tasks,
    tenants,
)
from covenant.doors.operator_api.operation import AnyApiOperation
from covenant.wire.ipc_frames import canonical_kind

OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    *mailbox.OPERATIONS,
    *tasks.OPERATIONS,
    *attention.OPERATIONS,
    *identities.OPERATIONS,
    *tenants.OPERATIONS,
    *file_transfer.OPERATIONS,
    *peers.OPERATIONS,
    *delegation.OPERATIONS,
    *inspection.OPERATIONS,
    *daemon_operations.OPERATIONS,
)
"""In the order in which they are documented."""
BY_KIND: Final = {canonical_kind(operation.kind): operation for operation in OPERATIONS}
