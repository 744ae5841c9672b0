"""Health, readiness, metrics and the protocol's version. No token is needed, except for metrics if a setting has one.

No answer names a task, and only callers with a token see agents' names. The metrics are made at most once a second,
however many ask for them.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from covenant.doors.http.bearer_auth import bearer_token
from covenant.doors.http.responses import TRANSPORT, Problem
from covenant.doors.metrics import PeerNumbers
from covenant.doors.operator_api.operation import ApiContext, encode
from covenant.exchange.tasks.writer import DRAINING
from covenant.ledger.contract.ledger import Counts
from covenant.model.errors import Refusal, Unavailable
from covenant.model.peers.instance import InstanceId
from covenant.model.peers.usage_by_day import COUNTED, day_of

# A disk that hangs blocks every reader of the ledger; a health check must not hang with it.
COUNTS_TIMEOUT_S: Final = 2.0
ARCHIVE_LAG_MAX: Final = 100_000
METRICS_KEPT_S: Final = 1.0
"""Metrics of at most this age are sent again."""
_CHALLENGE: Final = {"www-authenticate": "Bearer", "cache-control": "no-store"}
QUEUES_LABELLED_MAX: Final = 50
"""The most recipients with a label of their own."""
PEERS_LABELLED_MAX: Final = 50
"""The most peers with a label of their own; the others are counted together."""
OTHERS: Final = "others"
ALIVE_PATHS: Final = ("/healthz", "/health")
"""The paths that are answered even when the server is full."""


class Health:
    """`metrics_token`: the token that reading the metrics needs; empty: none.

    `notices` returns problems that an operator should look at although work continues.
    """

    def __init__(
        self, api: ApiContext, *, metrics_token: str = "", notices: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._notices = notices
        self._metrics_token = metrics_token.encode()
        self._text_task: asyncio.Task[bytes | None] | None = None
        self._text_task_at_s = 0.0
        self._ledger = api.services.ledger
        self._waits = api.waits
        self._intake = api.services.intake
        self._meter = api.meter
        self._info = encode(api.info)

    async def alive(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """200 `ready`; 200 `degraded`: takes work, but an operator should look; 503 `unready`, `draining`."""
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
            return _unready([*reasons, *_archive_problems(counts)])
        reasons = [*_archive_problems(counts), *self._notices()]
        answer: dict[str, Any] = {"status": "degraded" if reasons else "ready", "reasons": reasons}
        if paused_ms := self._ledger.clock.paused_ms_left:
            # Work continues; only actions that depend on an age wait.
            answer["clock"] = {"stepped_ms": self._ledger.clock.ages.steps[-1].step_ms, "paused_ms": paused_ms}
        return json_response(answer)

    async def metrics(self, request: Request) -> Response:
        token = bearer_token(request.scope) or ""
        if self._metrics_token and not hmac.compare_digest(token.encode("latin-1"), self._metrics_token):
            self._meter.refused(TRANSPORT, "unauthenticated")
            refused = Problem(error="missing or invalid bearer token", code="unauthenticated")
            return Response(msgspec.json.encode(refused), 401, _CHALLENGE, media_type="application/json")
        text = await asyncio.shield(self._text())
        if text is None:
            return _unready(["the ledger does not answer"])
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    def _text(self) -> asyncio.Task[bytes | None]:
        """The metrics as text, made at most once a second and shared by all callers."""
        now_s = asyncio.get_running_loop().time()
        task = self._text_task
        if task is None or (task.done() and (now_s - self._text_task_at_s >= METRICS_KEPT_S or _failed(task))):
            task = self._text_task = asyncio.create_task(self._make_text())
            self._text_task_at_s = now_s
        return task

    async def _make_text(self) -> bytes | None:
        counts = await self._counts()
        if counts is None:
            return None
        queues = await self._queues() if self._metrics_token else ()
        peers = await self._peers() if self._metrics_token else ()
        # In a thread: formatting a few thousand lines would hold the event loop for milliseconds.
        numbers = self._meter.read(counts, queues, peers, models=bool(self._metrics_token))
        return await asyncio.to_thread(numbers.text)

    async def _queues(self) -> Sequence[tuple[str, int, float]]:
        """The longest queues. Only for callers with the token, since it names agents."""
        now_ms = self._ledger.now_ms()
        try:
            found = await asyncio.wait_for(self._ledger.queue_depths(QUEUES_LABELLED_MAX), COUNTS_TIMEOUT_S)
        except (TimeoutError, OSError, Refusal):
            return ()
        return [(each.agent, each.depth, max(0, now_ms - each.oldest_at_ms) / 1000) for each in found]

    async def _peers(self) -> Sequence[PeerNumbers]:
        """Today's busiest peers by name, and all others together, so that the number of labels is bounded."""
        try:
            found = await asyncio.wait_for(self._ledger.peer_usage(day_of(self._ledger.now_ms())), COUNTS_TIMEOUT_S)
        except (TimeoutError, OSError, Refusal):
            return ()
        offers: Counter[InstanceId] = Counter()
        for each in found:
            offers[each.peer] += each.offers
        known = {peer.id: peer.name for peer in self._ledger.peers()}
        named = {peer: known.get(peer, peer) for peer, _ in offers.most_common(PEERS_LABELLED_MAX)}
        sums: dict[tuple[str, str], Counter[str]] = {}
        for each in found:
            totals = sums.setdefault((named.get(each.peer, OTHERS), each.role.value), Counter())
            totals.update({name: getattr(each, name) for name in COUNTED})
        return [
            PeerNumbers(peer, role, {name: totals[name] for name in COUNTED if name != "tokens"}, totals["tokens"])
            for (peer, role), totals in sums.items()
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


def _archive_problems(counts: Counts) -> list[str]:
    """Problems of the archive that do not stop the daemon."""
    reasons = []
    if counts.history_failure is not None:
        reasons.append(f"the archive cannot be written: {counts.history_failure}")
    if counts.rejected:
        reasons.append(f"the archive has set aside {counts.rejected} record(s); see `covenant doctor`")
    return reasons


def _failed(task: asyncio.Task[bytes | None]) -> bool:
    """Whether the text could not be made, so that the next request makes it again."""
    return task.cancelled() or task.exception() is not None or task.result() is None


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, {"cache-control": "no-store"}, media_type="application/json")
