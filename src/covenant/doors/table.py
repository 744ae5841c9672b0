"""All operations, in the order in which they are documented."""

from __future__ import annotations

from typing import Final

from covenant.doors import mailbox, peers, pushes, registry, tenants
from covenant.doors.operation import AnyOperation
from covenant.wire.ipc_frames import canonical_kind

OPERATIONS: Final[tuple[AnyOperation, ...]] = (
    *mailbox.OPERATIONS,
    *registry.OPERATIONS,
    *tenants.OPERATIONS,
    *pushes.OPERATIONS,
    *peers.OPERATIONS,
)
BY_KIND: Final = {canonical_kind(operation.kind): operation for operation in OPERATIONS}
