"""Every request of the mailbox and of operators, a module a noun: what is asked, what is answered, what is done."""

from __future__ import annotations

from typing import Final

from covenant.doors.operator_api import (
    attention,
    daemon_operations,
    delegation,
    file_operations,
    identities,
    inspection,
    mailbox,
    peer_usage,
    peers,
    task_queue,
    tasks,
    tenants,
)
from covenant.doors.operator_api.operation import AnyApiOperation
from covenant.wire.ipc_frames import canonical_kind

OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    *mailbox.OPERATIONS,
    *task_queue.OPERATIONS,
    *tasks.OPERATIONS,
    *attention.OPERATIONS,
    *identities.OPERATIONS,
    *tenants.OPERATIONS,
    *file_operations.OPERATIONS,
    *peers.OPERATIONS,
    *delegation.OPERATIONS,
    *peer_usage.OPERATIONS,
    *inspection.OPERATIONS,
    *daemon_operations.OPERATIONS,
)
"""In the order in which they are documented."""
BY_KIND: Final = {canonical_kind(operation.kind): operation for operation in OPERATIONS}
