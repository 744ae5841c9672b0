"""The number of tasks that ended in each of the last 60 minutes, and how many of them failed."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

import msgspec
from starlette.types import Scope

from covenant.dashboard.session_operations import role_forbidden
from covenant.dashboard.sessions import Role, UiSession
from covenant.doors.operator_api.operation import Services
from covenant.exchange import task_search
from covenant.exchange.access.principals import Principal

MINUTES: Final = 60
MINUTE_S: Final = 60.0


class Rates(msgspec.Struct, frozen=True, kw_only=True, tag="ui_rates", tag_field="kind"):
    """Counts a minute, oldest first: for the last hour, or since the daemon's start (`since_ms`) if that is shorter."""

    since_ms: int
    settled: tuple[int, ...]
    failed: tuple[int, ...]
    step_ms: int = 60_000


class RateSampler:
    """Samples the running totals once a minute and on each request. The last count is that of the current minute."""

    def __init__(self, services: Services, operator: Principal) -> None:
        self._services = services
        self._operator = operator
        self._settled: deque[int] = deque(maxlen=MINUTES - 1)
        self._failed: deque[int] = deque(maxlen=MINUTES - 1)
        self._since_ms = services.ledger.now_ms()
        self._last_totals: tuple[int, int] | None = None

    async def run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(MINUTE_S)

    async def sample(self) -> None:
        """Closes the current minute."""
        ended, failed = await self._totals()
        if self._last_totals is not None:
            # Totals shrink when history is purged.
            self._settled.append(max(0, ended - self._last_totals[0]))
            self._failed.append(max(0, failed - self._last_totals[1]))
        self._last_totals = ended, failed

    async def rates(self) -> Rates:
        ended, failed = await self._totals()
        before = self._last_totals or (ended, failed)
        settled = (*self._settled, max(0, ended - before[0]))
        failures = (*self._failed, max(0, failed - before[1]))
        return Rates(since_ms=self._since_ms, settled=settled, failed=failures)

    async def _totals(self) -> tuple[int, int]:
        lanes = (await task_search.count(self._services.ledger, self._operator)).lanes
        return lanes.result_pending + lanes.failed + lanes.done, lanes.failed

    async def page(self, session: UiSession, _: Scope) -> Rates:
        """The rates for the operator or a viewer."""
        if session.role is Role.TENANT:
            raise role_forbidden(session.role, "rates")
        return await self.rates()
