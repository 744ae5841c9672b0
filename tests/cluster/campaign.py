"""A campaign: clients work while faults are done to the deployment; then all is mended, and the history is checked."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import httpx2

from tests.cluster.checker import check
from tests.cluster.clients import Clients
from tests.cluster.deployment import NODES, deployed
from tests.cluster.faults import FAULTS, UPGRADE, upgrade_in_turn
from tests.cluster.history import History
from tests.cluster.other_doors import OtherDoors
from tests.waits import BOUND_S

CALM_S: Final = 1.0
"""Between two faults."""


async def run(folder: Path, faults: Sequence[str], *, seconds: float, seed: int, before: Path | None = None) -> History:
    """Each fault once, in this order, and then any of them until the time is over.

    `before`: the tree of an older version, which runs until it is upgraded.
    """
    history, chance = History(), random.Random(seed)
    async with AsyncExitStack() as stack:
        deployment = await stack.enter_async_context(deployed(folder, before))
        clients = Clients(deployment, history, seed)
        doors = OtherDoors(clients)
        others = await stack.enter_async_context(doors.open())
        ends_s = time.monotonic() + seconds
        working = asyncio.create_task(clients.run(others))
        try:
            await asyncio.wait_for(clients.enrolled.wait(), BOUND_S)
            await asyncio.sleep(CALM_S)
            left = list(faults)
            while left or time.monotonic() < ends_s:
                name = left.pop(0) if left else chance.choice(faults)
                if name == "failover" and deployment.promoted:
                    continue
                history.faults[name] += 1
                await (FAULTS | {UPGRADE: upgrade_in_turn})[name](deployment, chance)
                await asyncio.sleep(CALM_S)
        finally:
            clients.stopped = True
            await working
        await asyncio.wait_for(_mended(clients), BOUND_S)
        await doors.all_told()
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
