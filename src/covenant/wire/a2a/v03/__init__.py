"""A2A 0.3 on the wire: the slash methods. It has the same functions as the other dialect, `a2a_v1`.

decode_*   params -> what is asked (`model.asking`), or an `InvalidParams` that names the field
encode_*   what is told -> JSON, the `result` of a JSON-RPC response or a frame's payload
"""

from covenant.wire.a2a.error_codes import Dialect
from covenant.wire.a2a.v03.replies import (
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
from covenant.wire.a2a.v03.requests import (
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

DIALECT = Dialect.V03

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
]
