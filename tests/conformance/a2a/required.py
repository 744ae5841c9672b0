"""The fields that the protocol requires of every message, read from the official stubs, so that none is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.api import field_behavior_pb2  # type: ignore[import-untyped]

_REQUIRED: Final = field_behavior_pb2.FieldBehavior.Value("REQUIRED")
_BEHAVIOR: Final = field_behavior_pb2.field_behavior
_MAY_BE_EMPTY: Final = {"lf.a2a.v1.ListTasksResponse.tasks", "lf.a2a.v1.AgentCard.skills"}
"""A page of nothing is a page, and an agent that nobody plays can do nothing."""


def missing(kind: Any, body: dict[str, Any], path: str = "") -> Iterator[str]:
    """What a message of this descriptor lacks: what is required and not there, or an empty list; and within it too."""
    for field in kind.fields:
        value = body.get(field.json_name)
        nothing = value is None or (value == [] and field.full_name not in _MAY_BE_EMPTY)
        if nothing and _REQUIRED in field.GetOptions().Extensions[_BEHAVIOR]:
            yield f"{path}{field.json_name}"
        inner = field.message_type
        if value is None or inner is None or inner.file is not kind.file or inner.GetOptions().map_entry:
            continue
        for place, each in enumerate(value if isinstance(value, list) else [value]):
            yield from missing(inner, each, f"{path}{field.json_name}[{place}].")
