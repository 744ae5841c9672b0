"""Answers that fit a frame. What cannot be told is undone where it can be: a lease nobody hears of is given back."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from covenant.doors.answers import Answer, ResultOpt, TaskOpt
from covenant.doors.operation import Office
from covenant.exchange.access.principals import Principal
from covenant.model.errors import TooLarge

Encode = Callable[[Answer], bytes]


async def fitted(office: Office, caller: Principal, answer: Answer, encode: Encode, bytes_max: int) -> bytes:
    body = encode(answer)
    if len(body) <= bytes_max:
        return body
    # Of a single one the list only repeats what stands at the top.
    if isinstance(answer, ResultOpt) and len(answer.results) == 1:
        body = encode(msgspec.structs.replace(answer, results=()))
    elif isinstance(answer, TaskOpt):
        if len(answer.tasks) == 1:
            body = encode(msgspec.structs.replace(answer, tasks=()))
        if len(body) > bytes_max:
            for leased in answer.tasks:
                await office.exchange.release(caller, leased.task.id, leased.lease.lease_id, "too large for one frame")
    if len(body) > bytes_max:
        raise TooLarge("answer_too_large", f"the answer has {len(body)} bytes, a frame {bytes_max}; ask for fewer")
    return body
