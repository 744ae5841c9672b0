"""What is done to the deployment while clients work: each by its name, and mended before it returns."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from typing import Final

from tests.cluster.deployment import LEASE_MS, NODES, Deployment

Fault = Callable[[Deployment, random.Random], Awaitable[None]]

SHORT_S: Final = 0.5
LONG_S: Final = LEASE_MS * 2 / 1_000
"""Longer than a node may be silent: the others declare it lost."""


async def kill_daemon(deployment: Deployment, chance: random.Random) -> None:
    node = chance.choice(NODES)
    await deployment.kill(node)
    await asyncio.sleep(chance.choice((0.0, LONG_S)))
    await deployment.start(node)


async def stop_the_clock_of_a_daemon(deployment: Deployment, chance: random.Random) -> None:
    """It finds itself declared lost, and goes on as a new run."""
    process = deployment.daemons[chance.choice(NODES)].process
    process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(LONG_S)
    finally:
        process.send_signal(signal.SIGCONT)


async def kill_database(deployment: Deployment, _: random.Random) -> None:
    await deployment.restart_database()


async def terminate_backends(deployment: Deployment, _: random.Random) -> None:
    await deployment.terminate_backends()


async def cut_connections(deployment: Deployment, chance: random.Random) -> None:
    deployment.proxies[chance.choice(NODES)].cut()


async def lose_answers(deployment: Deployment, chance: random.Random) -> None:
    """A partition in one direction: what is asked arrives, and no answer comes back."""
    proxy = deployment.proxies[chance.choice(NODES)]
    proxy.answers_lost = True
    try:
        await asyncio.sleep(chance.choice((SHORT_S, LONG_S)))
    finally:
        proxy.answers_lost = False
        proxy.cut()


async def partition(deployment: Deployment, chance: random.Random) -> None:
    """In both directions."""
    proxy = deployment.proxies[chance.choice(NODES)]
    proxy.silence()
    try:
        await asyncio.sleep(chance.choice((SHORT_S, LONG_S)))
    finally:
        proxy.mend()


async def restart_in_turn(deployment: Deployment, _: random.Random) -> None:
    for node in NODES:
        await deployment.stop(node)
        await deployment.start(node)


async def fail_over(deployment: Deployment, _: random.Random) -> None:
    if not deployment.promoted:
        await deployment.promote()


FAULTS: Final[dict[str, Fault]] = {
    "daemon killed": kill_daemon,
    "daemon stopped for longer than its lease": stop_the_clock_of_a_daemon,
    "database killed": kill_database,
    "backends terminated": terminate_backends,
    "connections cut": cut_connections,
    "answers lost": lose_answers,
    "partition": partition,
    "rolling restart": restart_in_turn,
    "failover": fail_over,
}
