"""A daemon's life: open, listen, work, stop. One loop, and everything that runs belongs to one task group.

Stopping, in this order: no more leases and no more waits; the daemon's own agents finish what they hold, except what
only follows work elsewhere; requests under way get the rest of the grace time; the doors close; the ledger is flushed
and closed. Leases of workers outside stay as they are: a stop takes nothing away from anybody. A second signal ends the
grace time.

An async function that does not stop when it is cancelled would keep the process alive, with the home open to others.
So the process of a daemon that has stopped ends within `main_loop.END_S`, whatever of an agent still runs in it.
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from covenant.agents.agent_loader import AgentStacks, LoadedAgent, load_agents
from covenant.daemon.demo import Echo, demo_agents, enroll_demo
from covenant.daemon.home import SOCKET_NAME, left_in
from covenant.daemon.http_listener import bound, make_server, url_of
from covenant.daemon.logs import Log, start_logging
from covenant.daemon.main_loop import StopSignals, fit_open_files, run_to_end
from covenant.daemon.schedulers import ArchiveReport, Maintenance, RetryScheduler, Scheduler, Sweeper
from covenant.daemon.settings_loader import Loaded
from covenant.daemon.watchdog import HealthStandIn, Watchdog
from covenant.daemon.wiring.agent_sync import AgentSync
from covenant.daemon.wiring.node import Node, open_node
from covenant.doors.http.app import TracedDoor
from covenant.doors.http.server.http_server import HttpServer
from covenant.exchange.delegation import OrphanCanceller
from covenant.model.retry_policy import RetryPolicy

# The sync thread waits for the interpreter's lock after each system call; beside a busy loop the usual 5 ms made a
# sync's median 6 ms, this 0.7 ms.
SWITCH_INTERVAL_S: Final = 0.0005
# Live tasks are kept out of the collector's sight; what it still walks are requests, which are freed by counting.
GC_THRESHOLDS: Final = (50_000, 20, 100)
MAINTENANCE_INTERVAL_MS: Final = 5_000
RESTART_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Listening:
    url: str
    socket: Path
    agents: tuple[str, ...] = ()
    """The ids of those that were found in served files."""


class Worker(Protocol):
    """An agent of the daemon's own, or all of them."""

    async def run(self) -> None:
        """Until it was stopped and has finished. Canceled, it puts down what it holds."""

    def stop(self) -> None:
        """Take nothing new."""


Announce = Callable[[Listening], None]


def run_daemon(loaded: Loaded, announce: Announce, *, demo: bool = False, files: Sequence[Path] = ()) -> None:
    """Blocks until the daemon was told to stop. `announce` is called once, when it listens.

    `files` are Python files with agents to serve; CannotLoad says which of them is no good, and why.
    """
    settings = loaded.settings
    start_logging(settings.log.format, settings.log.level)
    log = Log()
    for name in loaded.unread:
        log.warning("settings.unread", variable=name)
    found = [*load_agents(files), *(demo_agents() if demo else ())]
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    loaded = loaded._replace(settings=fit_open_files(settings, log))
    run_to_end(_live(loaded, announce, log, found, demo=demo), log)


async def _live(
    loaded: Loaded, announce: Announce, log: Log, found: Sequence[LoadedAgent], *, demo: bool
) -> tuple[str, ...]:
    """Until it has stopped. Returns the agents that go on regardless."""
    settings = loaded.settings
    stops = StopSignals(settings.daemon.grace_ms / 1000, log)
    async with open_node(settings, log) as node:
        with bound(settings.http) as listener:
            if not ipaddress.ip_address(settings.http.bind_addr).is_loopback:
                log.warning("http.exposed", bind_addr=settings.http.bind_addr, why="tokens travel in the clear")
            door = TracedDoor(node.http, node.tracer) if node.tracer.on else node.http
            server = make_server(door, settings.http, node.http.refusal_form)
            staff = AgentSync(node.ledger, node.catalogue, node.workers, log, elsewhere=node.elsewhere, cast=node.cast)
            staff.remote_concurrency = settings.delegation.remote_concurrency
            staff.serve(found)
            if node.peering is not None:
                staff.peers = node.peering.requester
                node.peering.listening(*listener.getsockname()[:2])
            await staff.step()
            workers: list[Worker] = [node.workers, *([await _demo_agent(node, log)] if demo else [])]
            await node.ipc.start()
            try:
                await _start_grpc(node, listener, log)
                served = tuple(agent.definition.id for agent in found)
                listening = Listening(url_of(listener), settings.home / SOCKET_NAME, served)
                schedulers = [*_schedulers(node, log), staff]
                telling = partial(announce, listening)
                watchdog = _watchdog(node, server, listener, found, log)
                with left_in(settings.home, listening.url):
                    await server.start(listener)
                    with watchdog.watching(asyncio.get_running_loop()):
                        await _serve(node, server, workers, schedulers, stops, log=log, announce=telling)
            finally:
                await server.stop(0)
                await node.ipc.stop(0)
    log.info("daemon.stopped")
    stops.close()
    return node.workers.abandoned


async def _serve(
    node: Node,
    server: HttpServer,
    workers: Sequence[Worker],
    schedulers: Sequence[Scheduler],
    stops: StopSignals,
    *,
    log: Log,
    announce: Callable[[], None],
) -> None:
    """Everything that runs, until it was asked to stop and has stopped."""
    grace_s = node.settings.daemon.grace_ms / 1000
    async with asyncio.TaskGroup() as group:
        scheduled = [group.create_task(_supervised(each, log)) for each in schedulers]
        working = [group.create_task(worker.run()) for worker in workers]
        _settle_memory()
        announce()
        await stops.asked.wait()
        log.info("daemon.stopping", grace_s=grace_s)
        for scheduler in scheduled:
            scheduler.cancel()
        closing = group.create_task(_close(node, server, workers, working))
        hurried = group.create_task(stops.hurried.wait())
        await asyncio.wait((closing, hurried), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if not closing.done():
            log.warning("daemon.hurried", signal=stops.hurried.is_set())
        # Whoever still waits is told before what they wait for is put down.
        closing.cancel()
        await server.stop(0)
        for task in (hurried, *working):
            task.cancel()


async def _close(
    node: Node, server: HttpServer, workers: Sequence[Worker], working: Sequence[asyncio.Task[None]]
) -> None:
    """In order; returns when all that was under way has ended."""
    node.exchange.leasing = False
    node.waits.stop()
    if node.peering is not None:
        node.peering.hush()
    for worker in workers:
        worker.stop()
    await asyncio.gather(*working)
    grace_s = node.settings.daemon.grace_ms / 1000
    stops = [server.stop(grace_s), node.ipc.stop(grace_s)]
    if node.grpc is not None:
        stops.append(node.grpc.stop(grace_s))
    await asyncio.gather(*stops)


def _watchdog(
    node: Node, server: HttpServer, listener: socket.socket, found: Sequence[LoadedAgent], log: Log
) -> Watchdog:
    """What notices agents that block the loop, and those that go on in their threads."""
    node.meter.gauge(
        "covenant_agent_threads_abandoned",
        "Threads of plain functions that go on although their turns are over.",
        lambda: node.workers.threads_abandoned,
    )
    loop = asyncio.get_running_loop()
    stand_in = HealthStandIn(
        (listener,),
        lambda made: loop.call_soon_threadsafe(server.adopt, made),
        connections_max=node.settings.http.connections_max,
    )
    return Watchdog(stand_in=stand_in, agent_at=AgentStacks(found).agent_at, log=log, held=node.meter.loop_held)


async def _start_grpc(node: Node, http: socket.socket, log: Log) -> None:
    if node.grpc is None:
        return
    bind_addr = node.settings.grpc.bind_addr
    if not ipaddress.ip_address(bind_addr).is_loopback:
        log.warning("grpc.exposed", bind_addr=bind_addr, why="tokens travel in the clear")
    host, port = http.getsockname()[:2]
    await node.grpc.start((host, port))
    log.info("grpc.listening", bind_addr=bind_addr, port=node.grpc.port)


def _schedulers(node: Node, log: Log) -> list[Scheduler]:
    retry, daemon = node.settings.retry, node.settings.daemon
    found: list[Scheduler] = [
        Sweeper(node.ledger, node.operator.agent, log=log, interval_ms=daemon.sweep_interval_ms),
        Maintenance(node.ledger.maintain, log=log, interval_ms=MAINTENANCE_INTERVAL_MS),
        ArchiveReport(node.ledger, log=log, interval_ms=MAINTENANCE_INTERVAL_MS),
        OrphanCanceller(node.ledger),
        node.agent_files,
        node.reach,
        node.mcp,
    ]
    if node.peering is not None:
        found.append(node.peering)
    if node.push_runner is not None:
        found.append(node.push_runner)
    if retry.scheduler:
        policy = RetryPolicy(
            enabled=True,
            min_lease_age_ms=retry.min_lease_age_ms,
            max_attempts=retry.max_attempts,
            max_requeues=retry.max_requeues,
            scan_limit=retry.scan_limit,
        )
        found.append(RetryScheduler(node.exchange, node.operator, policy, interval_ms=retry.interval_ms, log=log))
    return found


async def _supervised(scheduler: Scheduler, log: Log) -> None:
    while True:
        try:
            await scheduler.run()
        except Exception:  # a fault in one scheduler must not close the doors
            log.exception("scheduler.failed", scheduler=type(scheduler).__name__)
            await asyncio.sleep(RESTART_S)


async def _demo_agent(node: Node, log: Log) -> Echo:
    me = await enroll_demo(node.settings.home, node.ledger, node.registry, node.operator)
    return Echo(node.ledger, node.exchange, me, log)


def _settle_memory() -> None:
    """What start-up made stays for good: the collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
