"""What a gRPC client is told when it is refused: a status by the one table of faults, and details in a trailer."""

from __future__ import annotations

from typing import Any, Final, NoReturn

import grpc  # type: ignore[import-untyped]
from google.protobuf.json_format import ParseDict
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from covenant.wire.a2a_errors import details, fault_of, message_of

DETAILS: Final = "grpc-status-details-bin"
KNOWN: Final = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
"""What details are made of. Whoever reads `Any` finds its kind only if that was imported."""


def status_of(error: BaseException) -> bytes:
    """`google.rpc.Status`, as the other bindings tell it. A fault of ours tells nothing."""
    code: int = grpc.StatusCode[fault_of(error).grpc].value[0]
    told = {"code": code, "message": message_of(error), "details": details(error)}
    status: bytes = ParseDict(told, status_pb2.Status()).SerializeToString()
    return status


async def refuse(context: Any, error: BaseException) -> NoReturn:
    """End the call. Trailers that were set already stay."""
    trailers = (*(context.trailing_metadata() or ()), (DETAILS, status_of(error)))
    await context.abort(grpc.StatusCode[fault_of(error).grpc], message_of(error), trailers)
    raise AssertionError("ending a call raises")
