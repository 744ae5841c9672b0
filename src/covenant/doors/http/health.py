"""What operators and their tools ask without a token: is it alive, is it ready, in numbers, which protocol.

None of it names an agent or a task.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from covenant.doors.answers import Protocol, ProtocolInfo, encode
from covenant.doors.metrics import Meter, archive_lag
from covenant.doors.waiting import Waits
from covenant.ledger.contract import Counts, Ledger

# A disk that hangs keeps every reader of the ledger waiting; whoever asks for health must not hang with it.
COUNTS_TIMEOUT_S: Final = 2.0
ARCHIVE_LAG_MAX: Final = 100_000
ALIVE_PATHS: Final = ("/healthz", "/health")
"""Answered however many connections there are."""


class Health:
    def __init__(self, ledger: Ledger, waits: Waits, meter: Meter, *, server: str) -> None:
        self._ledger = ledger
        self._waits = waits
        self._meter = meter
        self._info = encode(ProtocolInfo(info=Protocol(), server=server))

    async def alive(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        reasons = await self._reasons()
        if not reasons:
            return json_response({"status": "ready", "reasons": []})
        return json_response({"status": "unready", "reasons": reasons}, 503)

    async def _reasons(self) -> list[str]:
        if self._waits.stopping:
            return ["the daemon is stopping"]
        counts = await self._counts()
        if counts is None:
            return [f"the ledger has not answered for {COUNTS_TIMEOUT_S:g} s"]
        reasons = []
        if counts.failure is not None:
            reasons.append(f"the writer has failed: {counts.failure}")
        if (lag := archive_lag(counts)) > ARCHIVE_LAG_MAX:
            reasons.append(f"the archive is {lag} records behind")
        return reasons

    async def metrics(self, _: Request) -> Response:
        counts = await self._counts()
        if counts is None:
            return json_response({"status": "unready", "reasons": ["the ledger does not answer"]}, 503)
        return Response(self._meter.expose(counts), headers={"content-type": CONTENT_TYPE_LATEST})

    async def version(self, _: Request) -> Response:
        return Response(self._info, media_type="application/json")

    async def _counts(self) -> Counts | None:
        try:
            return await asyncio.wait_for(self._ledger.counts(), COUNTS_TIMEOUT_S)
        except TimeoutError:
            return None


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, {"cache-control": "no-store"}, media_type="application/json")
