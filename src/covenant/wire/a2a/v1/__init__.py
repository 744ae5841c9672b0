"""A2A 1.0 on the wire. Both dialects have the same functions, so that a door can be given either.

decode_*   params -> what is asked (`model.asking`), or an `InvalidParams` that names the field
encode_*   what is told -> JSON, the `result` of a JSON-RPC response, the body of a REST one, or a frame's payload
query_*    a path's id and a query string -> what is asked, for the REST binding
"""

from covenant.wire.a2a.error_codes import Dialect
from covenant.wire.a2a.v1.queries import query_get_task, query_list_push, query_list_tasks
from covenant.wire.a2a.v1.replies import (
    DELETED,
    encode_message,
    encode_page,
    encode_push,
    encode_pushes,
    encode_sent,
    encode_snapshot,
    encode_step,
    encode_task,
)
from covenant.wire.a2a.v1.requests import (
    decode_cancel,
    decode_create_push,
    decode_delete_push,
    decode_get_push,
    decode_get_task,
    decode_list_push,
    decode_list_tasks,
    decode_nothing,
    decode_send,
    decode_subscribe,
)

DIALECT = Dialect.V1

__all__ = [
    "DELETED",
    "DIALECT",
    "decode_cancel",
    "decode_create_push",
    "decode_delete_push",
    "decode_get_push",
    "decode_get_task",
    "decode_list_push",
    "decode_list_tasks",
    "decode_nothing",
    "decode_send",
    "decode_subscribe",
    "encode_message",
    "encode_page",
    "encode_push",
    "encode_pushes",
    "encode_sent",
    "encode_snapshot",
    "encode_step",
    "encode_task",
    "query_get_task",
    "query_list_push",
    "query_list_tasks",
]
