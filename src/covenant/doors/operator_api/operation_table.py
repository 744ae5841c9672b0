"""All operations, in the order in which they are documented."""

from __future__ import annotations

from typing import Final

from covenant.doors.operator_api import delegation, mailbox, peers, tasks, tenants
from covenant.doors.operator_api import identities as registry
from covenant.doors.operator_api import push as pushes
from covenant.doors.operator_api.operation import AnyApiOperation
from covenant.wire.ipc_frames import canonical_kind

OPERATIONS: Final[tuple[AnyApiOperation, ...]] = (
    *mailbox.OPERATIONS,
    *tasks.OPERATIONS,
    *registry.OPERATIONS,
    *tenants.OPERATIONS,
    *pushes.OPERATIONS,
    *peers.OPERATIONS,
    *delegation.OPERATIONS,
)
BY_KIND: Final = {canonical_kind(operation.kind): operation for operation in OPERATIONS}
