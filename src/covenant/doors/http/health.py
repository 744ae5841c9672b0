"""Health, readiness, metrics and the protocol's version. None of it needs a token, unless a setting asks for one.

None of it names a task, nor an agent to those who show no token. The metrics are made at most once a second, however
many ask for them.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from covenant.doors.http.bearer_auth import bearer
from covenant.doors.http.responses import TRANSPORT, Problem
from covenant.doors.metrics import PeerNumbers
from covenant.doors.operator_api.operation import ApiContext, encode
from covenant.exchange.tasks.writer import DRAINING
from covenant.ledger.contract.ledger import Counts
from covenant.model.errors import Refusal, Unavailable
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.usage_by_day import COUNTED, day_of

# A disk that hangs keeps every reader of the ledger waiting; whoever asks for health must not hang with it.
COUNTS_TIMEOUT_S: Final = 2.0
ARCHIVE_LAG_MAX: Final = 100_000
METRICS_KEPT_S: Final = 1.0
"""How old the numbers may be that are told again."""
_CHALLENGE: Final = {"www-authenticate": "Bearer", "cache-control": "no-store"}
QUEUES_TOLD_MAX: Final = 50
"""How many recipients have a label of their own."""
PEERS_TOLD_MAX: Final = 50
OTHERS: Final = "others"
ALIVE_PATHS: Final = ("/healthz", "/health")
"""Answered however many connections there are."""


class Health:
    """`metrics_token`: what whoever asks for the numbers must show; empty: nothing."""

    def __init__(self, api: ApiContext, *, metrics_token: str = "") -> None:
        self._metrics_token = metrics_token.encode()
        self._numbers: asyncio.Task[bytes | None] | None = None
        self._numbers_at_s = 0.0
        self._ledger = api.services.ledger
        self._waits = api.waits
        self._intake = api.services.intake
        self._meter = api.meter
        self._info = encode(api.info)

    async def alive(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """200 `ready`; 200 `degraded`: it takes work, and an operator should look; 503 `unready`, `draining`: none."""
        if self._waits.stopping:
            return _unready(["the daemon is stopping"])
        if self._intake.closed is not None:
            return _unready([f"the daemon is draining; {self._intake.running()} turn(s) run"], status=DRAINING)
        counts = await self._counts()
        if counts is None:
            return _unready([f"the ledger has not answered for {COUNTS_TIMEOUT_S:g} s, or cannot be read"])
        reasons = []
        if counts.failure is not None:
            reasons.append(f"the writer has failed: {counts.failure}")
        if (lag := counts.behind) > ARCHIVE_LAG_MAX:
            reasons.append(f"the archive is {lag} records behind")
        if reasons:
            return _unready([*reasons, *_of_archive(counts)])
        reasons = _of_archive(counts)
        answer: dict[str, Any] = {"status": "degraded" if reasons else "ready", "reasons": reasons}
        if paused_ms := self._ledger.clock.paused_ms_left:
            # Work goes on; only what is done for its age waits.
            answer["clock"] = {"stepped_ms": self._ledger.clock.ages.steps[-1].step_ms, "paused_ms": paused_ms}
        return json_response(answer)

    async def metrics(self, request: Request) -> Response:
        token = bearer(request.scope) or ""
        if self._metrics_token and not hmac.compare_digest(token.encode("latin-1"), self._metrics_token):
            self._meter.refused(TRANSPORT, "unauthenticated")
            refused = Problem(error="missing or invalid bearer token", code="unauthenticated")
            return Response(msgspec.json.encode(refused), 401, _CHALLENGE, media_type="application/json")
        text = await asyncio.shield(self._told())
        if text is None:
            return _unready(["the ledger does not answer"])
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    def _told(self) -> asyncio.Task[bytes | None]:
        """The numbers as text: those of this second, which many may wait for together."""
        now_s = asyncio.get_running_loop().time()
        told = self._numbers
        if told is None or (told.done() and (now_s - self._numbers_at_s >= METRICS_KEPT_S or _missed(told))):
            told = self._numbers = asyncio.create_task(self._tell())
            self._numbers_at_s = now_s
        return told

    async def _tell(self) -> bytes | None:
        counts = await self._counts()
        if counts is None:
            return None
        queues = await self._queues() if self._metrics_token else ()
        peers = await self._peers() if self._metrics_token else ()
        # Text for a few thousand lines takes milliseconds, in which nobody else would be served.
        return await asyncio.to_thread(self._meter.read(counts, queues, peers).text)

    async def _queues(self) -> Sequence[tuple[str, int, float]]:
        """The longest queues: for those who showed the token, since it names agents."""
        now_ms = self._ledger.now_ms()
        try:
            found = await asyncio.wait_for(self._ledger.queue_depths(QUEUES_TOLD_MAX), COUNTS_TIMEOUT_S)
        except (TimeoutError, OSError, Refusal):
            return ()
        return [(each.agent, each.depth, max(0, now_ms - each.oldest_at_ms) / 1000) for each in found]

    async def _peers(self) -> Sequence[PeerNumbers]:
        """The busiest peers of today, by name, and all others together: no peer adds labels without end."""
        try:
            found = await asyncio.wait_for(self._ledger.peer_usage(day_of(self._ledger.now_ms())), COUNTS_TIMEOUT_S)
        except (TimeoutError, OSError, Refusal):
            return ()
        offers: Counter[InstanceId] = Counter()
        for each in found:
            offers[each.peer] += each.offers
        known = {peer.id: peer.name for peer in self._ledger.peers()}
        named = {peer: known.get(peer, peer) for peer, _ in offers.most_common(PEERS_TOLD_MAX)}
        sums: dict[tuple[str, str], Counter[str]] = {}
        for each in found:
            of = sums.setdefault((named.get(each.peer, OTHERS), each.role.value), Counter())
            of.update({name: getattr(each, name) for name in COUNTED})
        return [
            PeerNumbers(peer, role, {name: of[name] for name in COUNTED if name != "tokens"}, of["tokens"])
            for (peer, role), of in sums.items()
        ]

    async def version(self, _: Request) -> Response:
        return Response(self._info, media_type="application/json")

    async def _counts(self) -> Counts | None:
        try:
            return await asyncio.wait_for(self._ledger.counts(), COUNTS_TIMEOUT_S)
        except (TimeoutError, OSError, Unavailable):
            return None


def _unready(reasons: list[str], *, status: str = "unready") -> Response:
    return json_response({"status": status, "reasons": reasons}, 503)


def _of_archive(counts: Counts) -> list[str]:
    """What is wrong with history while work goes on."""
    reasons = []
    if counts.history_failure is not None:
        reasons.append(f"the archive cannot be written: {counts.history_failure}")
    if counts.rejected:
        reasons.append(f"the archive has set aside {counts.rejected} record(s); see `covenant doctor`")
    return reasons


def _missed(told: asyncio.Task[bytes | None]) -> bool:
    """Whether there is no text in it: then the next who asks has it tried again."""
    return told.cancelled() or told.exception() is not None or told.result() is None


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, {"cache-control": "no-store"}, media_type="application/json")
