"""One way of asking for an operation by its kind, over either door: what is true of one must be true of the other."""

import re
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from covenant.doors.http.responses import PROBLEM, style_of
from covenant.doors.operator_api.operation_table import BY_KIND
from covenant.wire.ipc_frames import canonical_kind
from tests.doors.doors_under_test import DoorsUnderTest, EnrolledCaller

WRAPPED = {
    "send_a2a_task": "task",
    "post_a2a_result": "result",
    "repair_a2a_task": "request",
    "retry_a2a_stale": "policy",
}


@dataclass(frozen=True, slots=True)
class Told:
    """An answer; `status` only where the door has one."""

    answer: dict[str, Any]
    status: int | None


class Speaker(Protocol):
    async def tell(self, actor: EnrolledCaller, kind: str, **fields: Any) -> Told: ...

    async def ask(self, actor: EnrolledCaller, kind: str, **fields: Any) -> dict[str, Any]:
        """What is asked must not be refused."""
        told = await self.tell(actor, kind, **fields)
        assert told.answer["kind"] != "error", told
        assert told.status in (None, BY_KIND[canonical_kind(kind)].status)
        return told.answer


class HttpSpeaker(Speaker):
    async def tell(self, actor: EnrolledCaller, kind: str, **fields: Any) -> Told:
        operation = BY_KIND[canonical_kind(kind)]
        target = operation.path
        for name in re.findall(r"\{(\w+)\}", target):
            target = target.replace(f"{{{name}}}", quote(str(fields.pop(name)), safe=""))
        if operation.in_body:
            body = fields[WRAPPED[kind]] if kind in WRAPPED and WRAPPED[kind] in fields else fields
            reply = await actor.http.ask(operation.method, target, body)
        else:
            reply = await actor.http.ask(operation.method, f"{target}?{urlencode(fields)}" if fields else target)
        answer = reply.json
        if style_of(target) is PROBLEM and reply.status >= 400:
            # The same refusal in this path's words.
            answer = {"kind": "error", "code": answer["code"], "message": answer["error"]}
        return Told(answer, reply.status)


class IpcSpeaker(Speaker):
    def __init__(self, under_test: DoorsUnderTest) -> None:
        self._world = under_test

    async def tell(self, actor: EnrolledCaller, kind: str, **fields: Any) -> Told:
        async with self._world.connect() as connection:
            await connection.authenticate(actor.token)
            return Told(await connection.ask(kind, **fields), None)
