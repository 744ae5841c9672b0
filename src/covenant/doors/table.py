"""All operations, in the order in which they are documented."""

from __future__ import annotations

from typing import Final

from covenant.doors import mailbox, peers, pushes, registry, tenants
from covenant.doors.operation import AnyOperation
from covenant.wire.frames import squashed

OPERATIONS: Final[tuple[AnyOperation, ...]] = (
    *mailbox.OPERATIONS,
    *registry.OPERATIONS,
    *tenants.OPERATIONS,
    *pushes.OPERATIONS,
    *peers.OPERATIONS,
)
BY_KIND: Final = {squashed(operation.kind): operation for operation in OPERATIONS}
