"""A campaign: clients work while faults are done to the deployment; then all is mended, and the history is checked."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx2

from tests.cluster.checker import check
from tests.cluster.clients import Clients
from tests.cluster.deployment import NODES, deployed
from tests.cluster.faults import FAULTS
from tests.cluster.history import History

CALM_S: Final = 1.0
"""Between two faults."""
MENDED_S: Final = 20.0


async def run(folder: Path, faults: Sequence[str], *, seconds: float, seed: int) -> History:
    """Each fault once, in this order, and then any of them until the time is over."""
    history, chance = History(), random.Random(seed)
    async with deployed(folder) as deployment:
        clients = Clients(deployment, history, seed)
        ends_s = time.monotonic() + seconds
        working = asyncio.create_task(clients.run())
        try:
            await asyncio.sleep(CALM_S)
            left = list(faults)
            while left or time.monotonic() < ends_s:
                name = left.pop(0) if left else chance.choice(faults)
                if name == "failover" and deployment.promoted:
                    continue
                history.faults[name] += 1
                await FAULTS[name](deployment, chance)
                await asyncio.sleep(CALM_S)
        finally:
            clients.stopped = True
            await working
        await asyncio.wait_for(_mended(clients), MENDED_S)
        await check(deployment, history)
    return history


async def _mended(clients: Clients) -> None:
    """Every daemon says that it takes requests."""
    async with httpx2.AsyncClient(timeout=5.0) as http:
        for node in NODES:
            while True:
                with suppress(httpx2.HTTPError):
                    answer = await http.get(f"{clients.deployment.daemons[node].url}/readyz")
                    if answer.status_code == 200:
                        break
                await asyncio.sleep(0.1)
