"""Reserved metadata: keys that mean something to the daemon, and that only the daemon writes.

Everything under `covenant.` and `x-arbiter.` is reserved, and so are the keys that say in whose trace a message is. A
client may send the documented ones (an idempotency key, the calls before this one): its door reads them into typed
fields. None of them is kept in what the client said. So whatever stands under such a key in the ledger was said by the
daemon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from covenant.model.content import Audio, Content, Image
from covenant.model.update import ArtifactUpdate, MessageUpdate, StatusUpdate, Update

PREFIXES: Final = ("covenant.", "x-arbiter.")
TRACE_KEYS: Final = frozenset({"traceparent", "tracestate"})


def is_reserved(key: str) -> bool:
    return key.startswith(PREFIXES) or key in TRACE_KEYS


def without_reserved(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What others said under keys of their own; None if that is nothing."""
    if not metadata:
        return None
    return {key: value for key, value in metadata.items() if not is_reserved(key)} or None


def unreserved_parts(parts: tuple[Content, ...]) -> tuple[Content, ...]:
    """The same tuple, if none of its parts has a reserved key."""
    if not any(_has_reserved(part) for part in parts):
        return parts
    return tuple(_unreserved(part) for part in parts)


def unreserved_update(update: Update) -> Update:
    parts, metadata = unreserved_parts(update.parts), update.metadata
    if metadata is not None and any(map(is_reserved, metadata)):
        metadata = without_reserved(metadata)
    if parts is update.parts and metadata is update.metadata:
        return update
    changed: StatusUpdate | ArtifactUpdate | MessageUpdate = msgspec.structs.replace(
        update, parts=parts, metadata=metadata
    )
    return changed


def _has_reserved(part: Content) -> bool:
    if isinstance(part, Image | Audio) or part.metadata is None:
        return False
    return any(map(is_reserved, part.metadata))


def _unreserved(part: Content) -> Content:
    if isinstance(part, Image | Audio) or part.metadata is None:
        return part
    return msgspec.structs.replace(part, metadata=without_reserved(part.metadata))
