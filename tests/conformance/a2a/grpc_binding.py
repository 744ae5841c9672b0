"""gRPC, 1.0: the same answers, as JSON has them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc  # type: ignore[import-untyped]
from a2a.types import a2a_pb2
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # noqa: F401  (known to `Any`)

from tests.conformance.a2a.bindings import CODES, DOMAIN, ERROR_INFO, New, Refused
from tests.conformance.a2a.client_answers import Frame, Page, page_v1
from tests.waits import BOUND_S

SERVICE: Final = a2a_pb2.DESCRIPTOR.services_by_name["A2AService"]
METHODS: Final = {method.name: method for method in SERVICE.methods}


_WHOLE_SECOND: Final = re.compile(r'(T\d\d:\d\d:\d\d)Z"')


def as_json(message: Any) -> Any:
    """A moment has no text on its way here, and protobuf's own leaves out decimals that are zero: one in a thousand."""
    return json.loads(_WHOLE_SECOND.sub(r'\1.000Z"', json.dumps(MessageToDict(message))))


@dataclass(frozen=True, kw_only=True)
class Grpc(New):
    def _call(self, operation: str, params: dict[str, Any]) -> Any:
        method = METHODS[self.METHODS[operation]]
        request = ParseDict({**params, "tenant": self.agent}, GetMessageClass(method.input_type)())
        make = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        told = GetMessageClass(method.output_type).FromString
        metadata = [(name.lower(), value) for name, value in self._headers().items()]
        return make(f"/{SERVICE.full_name}/{method.name}", type(request).SerializeToString, told)(
            request, metadata=metadata, timeout=BOUND_S
        )

    async def answer(self, operation: str, params: dict[str, Any]) -> Any:
        try:
            return as_json(await self._call(operation, params))
        except grpc.aio.AioRpcError as error:
            raise refused(error) from None

    async def page(self, **params: Any) -> Page:
        """What is nothing is not sent: it is there all the same."""
        nothing = {"tasks": [], "nextPageToken": "", "pageSize": 0, "totalSize": 0}
        return page_v1({**nothing, **await self.answer("list", params)})

    @asynccontextmanager
    async def frames(self, operation: str, params: dict[str, Any]) -> AsyncIterator[AsyncIterator[Frame]]:
        call = self._call(operation, params)
        try:
            yield self._frames(call)
        finally:
            call.cancel()

    async def _frames(self, call: Any) -> AsyncIterator[Frame]:
        """A stream that is ended before its task ends here; the others just end."""
        begun = False
        try:
            async for event in call:
                body = as_json(event)
                (told,) = body.values()
                number = int(told["metadata"].pop("covenant.generation"))
                if "task" in body:
                    told["metadata"]["covenant.generation"] = number
                elif not told["metadata"]:
                    del told["metadata"]
                yield self._frame(number, body)
                begun = True
        except grpc.aio.AioRpcError as error:
            if not begun:
                raise refused(error) from None


def refused(error: grpc.aio.AioRpcError) -> Refused:
    """Its name, checked against its status."""
    code, trailers = error.code().name, dict(error.trailing_metadata() or ())
    found = trailers.get("grpc-status-details-bin")
    if found is None:
        # The library itself, which knows nothing of A2A.
        assert code == "RESOURCE_EXHAUSTED", error
        return Refused("REQUEST_TOO_LARGE", error.details())
    status = status_pb2.Status.FromString(found)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    details = [MessageToDict(detail) for detail in status.details]
    (info,) = [detail for detail in details if detail["@type"] == ERROR_INFO]
    assert info["domain"] == DOMAIN
    assert CODES[info["reason"]][3] == code, (code, info)
    return Refused(info["reason"], error.details(), details)
