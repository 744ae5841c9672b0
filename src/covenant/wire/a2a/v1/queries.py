"""The REST binding's reads: params in a query string, in the names that bodies use; ids come from the path."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from covenant.model import a2a_requests as asking
from covenant.wire.a2a.error_codes import InvalidParams
from covenant.wire.a2a.v1.requests import decode_get_task, decode_list_push, decode_list_tasks
from covenant.wire.json_input import QUERY_FIELDS_MAX

_BOOLEANS: Final = {"true": True, "false": False}
_encode = msgspec.json.Encoder().encode


def query_get_task(task_id: str, query: bytes) -> asking.GetTask:
    return decode_get_task(_encode(_fields(query)), task_id)


def query_list_tasks(query: bytes) -> asking.ListTasks:
    return decode_list_tasks(_encode(_fields(query)))


def query_list_push(task_id: str, query: bytes) -> asking.ListPush:
    return decode_list_push(_encode(_fields(query)), task_id)


def _fields(query: bytes) -> dict[str, Any]:
    """As the JSON object that would say the same; of a field given twice, the last one counts."""
    try:
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX)
    except ValueError:
        raise InvalidParams("query", f"may have at most {QUERY_FIELDS_MAX} fields") from None
    return {name: _value(name, text) for name, text in pairs if text}


def _value(name: str, text: str) -> Any:
    if name in ("includeArtifacts", "include_artifacts"):
        if text not in _BOOLEANS:
            raise InvalidParams("includeArtifacts", "must be true or false")
        return _BOOLEANS[text]
    # An enum may be its number, and here everything is text.
    return int(text) if name == "status" and text.isascii() and text.isdigit() and len(text) < 10 else text
