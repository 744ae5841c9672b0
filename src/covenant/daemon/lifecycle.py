"""A daemon's life: open, listen, work, stop. Everything that runs is in one task group on one loop.

The order of a stop: no more leases and waits; the daemon's own agents finish their leased tasks, except those that only
follow remote work; requests under way get the rest of the grace time; the doors close; the ledger is flushed and
closed. Leases of external workers stay. A second signal ends the grace time.

The process ends within `END_S` after the stop, also if an async function ignores its cancellation: the home is open to
others by then.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

import uvloop

from covenant.agents.agent_loader import LoadedAgent, ServedFile, load_agents
from covenant.daemon.demo import demo_agents, open_demo
from covenant.daemon.environment import environment
from covenant.daemon.home import SOCKET_NAME, published_url
from covenant.daemon.listeners import PEER_CONNECTIONS_MAX, http_bounds
from covenant.daemon.log_capture import capture_streams
from covenant.daemon.schedulers import Scheduler
from covenant.daemon.settings import Settings
from covenant.daemon.settings_loader import Loaded
from covenant.daemon.telemetry import Log, start_logging
from covenant.daemon.watchdog import HealthResponder, Watchdog
from covenant.daemon.wiring.daemon import Daemon, open_daemon
from covenant.model.errors import Unavailable

END_S: Final = 5.0
"""The longest time from the last record to the end of the process."""
BLOCKED_END_S: Final = 5.0
"""A loop that runs nothing for this long after the grace time is blocked: the process ends."""
SLOW_END_S: Final = 30.0
"""The longest time from the end of the grace time to the end of the process, if the loop is not blocked."""
LOOP_PROBE_S: Final = 0.5
DRAIN_REPORT_S: Final = 2.0
"""The longest time from the end of a drain to the stop: a client that follows the drain asks how it ended."""
HOME_FILES_MAX: Final = 256
"""Descriptors for the journal, the archive, the logs and everything else that is no connection."""
CONNECTIONS_MIN: Final = 16
"""The lowest limit of HTTP connections, however few open files the system allows."""
# The sync thread waits for the interpreter's lock after each system call; beside a busy loop the usual 5 ms made a
# sync's median 6 ms, this 0.7 ms.
SWITCH_INTERVAL_S: Final = 0.0005
# Live tasks are frozen out of the garbage collector. What it still walks are requests, which reference counts free.
GC_THRESHOLDS: Final = (50_000, 20, 100)
RESTART_S: Final = 1.0
REFUSED_S: Final = 60.0
"""A scheduler whose ledger is unavailable is logged at most this often."""
NOTIFY_VARIABLE: Final = "NOTIFY_SOCKET"


def run_to_end(main: Coroutine[Any, Any, Sequence[str]], log: Log) -> None:
    """Runs `main`, which returns the names of agents that ignored their cancellation; then ends the process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        task = loop.create_task(main)
        while not task.done():
            try:
                loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as error:
                # An agent's asyncio task raised it, and has ended with it. The loop goes on.
                if task.done():
                    raise
                log.warning("agent.exited", error=repr(error))
        _end_soon(task.result(), log)


def _end_soon(abandoned: Sequence[str], log: Log) -> None:
    """Ends the process: at once if these agents still run, else within `END_S`. All data is written by now."""

    def end(*agents: str) -> None:
        log.warning("daemon.abandoned", agents=", ".join(agents) or "unknown: a task or thread that an agent began")
        _exit(0)

    if abandoned:
        end(*abandoned)
    timer = threading.Timer(END_S, end)
    timer.daemon = True
    timer.start()


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


class StopSignals:
    """`stop_requested` is set by the first signal, `hurried` by the second.

    After the grace time a thread watches the loop. It ends the process, as a crash would, if an agent blocks the loop
    for `BLOCKED_END_S`, or if the stop takes `SLOW_END_S`. A stop that is only slow, as on a busy machine, goes on.
    """

    def __init__(self, grace_s: float, log: Log) -> None:
        self.stop_requested = asyncio.Event()
        self.hurried = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._grace_s = grace_s
        self._log = log
        self._closed = threading.Event()
        self._guard: threading.Thread | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it
            signal.signal(signal.SIGHUP, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._guard is None:
            self._guard = threading.Thread(target=self._end_held, daemon=True)
            self._guard.start()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._count_signal)

    def _count_signal(self) -> None:
        (self.hurried if self.stop_requested.is_set() else self.stop_requested).set()

    def close(self) -> None:
        """Everything is written and closed: `run_to_end` ends the process."""
        self._closed.set()

    def _end_held(self) -> None:
        if self._closed.wait(self._grace_s):
            return
        latest_s = time.monotonic() + SLOW_END_S
        why = "the stop did not end in time"
        while time.monotonic() < latest_s:
            if not self._loop_runs():
                why = "an agent blocks the loop"
                break
            if self._closed.wait(LOOP_PROBE_S):
                return
        if not self._closed.is_set():
            self._log.warning("daemon.held", why=why)
            _exit(1)

    def _loop_runs(self) -> bool:
        ran = threading.Event()
        self._loop.call_soon_threadsafe(ran.set)
        return ran.wait(BLOCKED_END_S)


def fit_open_files(settings: Settings, log: Log) -> Settings:
    """Raises the limit of open files, or else lowers that of HTTP connections: the ledger needs files of its own."""
    calls_max = settings.grpc.calls_max if settings.grpc.enabled else 0
    other_files = http_bounds(settings.http).connections_reserved_max + settings.ipc.connections_max + calls_max
    other_files += PEER_CONNECTIONS_MAX if settings.peers.enabled and settings.peers.listen else 0
    other_files += HOME_FILES_MAX + (http_bounds(settings.http).handshakes_max if settings.http.tls_cert else 0)
    wanted = settings.http.connections_max
    granted = _allow_files(wanted + other_files)
    room = max(CONNECTIONS_MIN, granted - other_files)
    if room >= wanted:
        return settings
    log.warning("http.connections_lowered", connections_max=room, open_files=granted, look="ulimit -n")
    return replace(settings, http=replace(settings.http, connections_max=room))


def _allow_files(wanted: int) -> int:
    """Raises the limit of open files as far as the system allows. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return wanted if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True, slots=True)
class DaemonAddresses:
    url: str
    socket: Path
    agents: tuple[tuple[str, str], ...] = ()
    """The agents of served files whose tenant exists, by tenant and id."""


Announce = Callable[[DaemonAddresses], None]


def run_daemon(
    loaded: Loaded, announce: Announce, *, demo: bool = False, files: Sequence[ServedFile] = (), reload: bool = False
) -> None:
    """Blocks until the daemon has stopped. `announce` is called once, when it listens.

    `files` are Python files with agents to serve. Raises CannotLoad, which says which file cannot be loaded and why.
    `reload`: the files are loaded again whenever they change.
    """
    settings = loaded.settings
    start_logging(settings.log.format, settings.log.level)
    log = Log()
    for name in loaded.unknown_variables:
        log.warning("settings.unknown_variable", variable=name)
    found = [*load_agents(files), *(demo_agents() if demo else ())]
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    loaded = loaded._replace(settings=fit_open_files(settings, log))
    run_to_end(_serve_until_stopped(loaded, announce, log, found, demo=demo, reloaded=files if reload else ()), log)


async def _serve_until_stopped(
    loaded: Loaded,
    announce: Announce,
    log: Log,
    found: Sequence[LoadedAgent],
    *,
    demo: bool,
    reloaded: Sequence[ServedFile],
) -> tuple[str, ...]:
    """Returns the agents that ignored their cancellation."""
    settings = loaded.settings
    stops = StopSignals(settings.daemon.grace_ms / 1000, log)
    async with open_daemon(settings, log, served=found, reloaded=reloaded, sources=loaded.sources) as daemon:
        url = daemon.base.listeners.url
        tenant = daemon.base.storage.ledger.tenant
        served = tuple(agent.key for agent in found if tenant(agent.tenant) is not None)
        listening = DaemonAddresses(url, settings.home / SOCKET_NAME, served)
        if demo:
            await open_demo(daemon)
        with ExitStack() as stack:
            stack.enter_context(capture_streams(daemon.base.telemetry.task_logs))
            async with serving(daemon, hurried=stops.hurried):
                # The address is published only now, since clients call at once. It stays until the doors are closed.
                stack.enter_context(published_url(settings.home, url))
                _freeze_startup_objects()
                announce(listening)
                notify_service_manager("READY=1", log)
                await _wait_for_stop(daemon, stops.stop_requested)
                notify_service_manager("STOPPING=1", log)
                log.info("daemon.stopping", grace_s=settings.daemon.grace_ms / 1000)
    log.info("daemon.stopped")
    stops.close()
    return daemon.agents.workers.abandoned


async def _wait_for_stop(daemon: Daemon, stop: asyncio.Event) -> None:
    """Waits for a signal, or for the end of a drain: nothing runs any more, or its time is over."""
    signalled = asyncio.ensure_future(stop.wait())
    draining = asyncio.ensure_future(drain(daemon))
    await asyncio.wait((signalled, draining), return_when=asyncio.FIRST_COMPLETED)
    for each in (signalled, draining):
        each.cancel()
    await asyncio.gather(signalled, draining, return_exceptions=True)


async def drain(daemon: Daemon) -> None:
    """Waits for an operator to ask for a drain, then for running turns, within the drain's time. The remaining turns
    are handed back while the doors are open, so that the operator gets the final report.
    """
    intake, workers, log = daemon.base.access.intake, daemon.agents.workers, daemon.base.telemetry.log
    await intake.drain_requested.wait()
    log.info("daemon.draining", running=intake.running(), timeout_s=intake.left_ms / 1000)
    finished = asyncio.ensure_future(workers.drain())
    try:
        while not finished.done() and intake.left_ms:
            await asyncio.wait((finished,), timeout=min(1.0, intake.left_ms / 1000))
        if not finished.done():
            await workers.hand_back()
    finally:
        finished.cancel()
    log.info("daemon.drained", handed_back=workers.handed_back)
    intake.end(workers.handed_back)
    with suppress(TimeoutError):
        await asyncio.wait_for(intake.outcome_read.wait(), DRAIN_REPORT_S)


def notify_service_manager(state: str, log: Log) -> None:
    """Tells systemd the state, if it started this process as a service of the type `notify`. Waits for nothing."""
    address = environment().get(NOTIFY_VARIABLE)
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            sender.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
        except OSError as error:
            log.warning("service.not_notified", state=state, why=str(error))


@asynccontextmanager
async def serving(daemon: Daemon, *, hurried: asyncio.Event | None = None) -> AsyncIterator[None]:
    """Opens the doors and runs the schedulers and agents; stops them in order at the end.

    `hurried` ends the grace time of the stop.
    """
    doors, log = daemon.doors, daemon.base.telemetry.log
    failed: Exception | None = None
    try:
        await doors.ipc.start()
        await _start_grpc(daemon)
        await doors.http.start(daemon.base.listeners.http)
        await _start_for_peers(daemon)
        with _watchdog(daemon).watching(asyncio.get_running_loop()):
            async with asyncio.TaskGroup() as group:
                scheduled = [group.create_task(_supervised(each, log)) for each in daemon.schedulers]
                working = group.create_task(daemon.agents.workers.run())
                try:
                    yield
                    for scheduler in scheduled:
                        scheduler.cancel()
                    await _stop(daemon, group, working, hurried or asyncio.Event())
                except Exception as error:  # noqa: BLE001  (raised below, as it is and not as one of a group)
                    failed = error
                    for task in (*scheduled, working):
                        task.cancel()
        if failed is not None:
            raise failed
    finally:
        await doors.stop_http(0)
        await doors.ipc.stop(0)


async def _stop(daemon: Daemon, group: asyncio.TaskGroup, working: asyncio.Task[None], hurried: asyncio.Event) -> None:
    """Waits until all work under way has ended, the grace time is over, or a second signal came."""
    grace_s = daemon.base.settings.daemon.grace_ms / 1000
    closing = group.create_task(_close(daemon, working, grace_s))
    hurrying = group.create_task(hurried.wait())
    await asyncio.wait((closing, hurrying), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    if not closing.done():
        daemon.base.telemetry.log.warning("daemon.hurried", signal=hurried.is_set())
    # Clients that still wait are answered before the services that they wait for are closed.
    closing.cancel()
    await daemon.doors.stop_http(0)
    for task in (hurrying, working):
        task.cancel()


async def _close(daemon: Daemon, working: asyncio.Task[None], grace_s: float) -> None:
    daemon.base.access.mailbox.leasing = False
    daemon.doors.waits.stop()
    if daemon.peers is not None:
        daemon.peers.end_polls()
    daemon.agents.workers.stop()
    await asyncio.wait((working,))
    daemon.base.access.intake.stops.set()
    grpc = daemon.base.listeners.grpc
    stops = [daemon.doors.stop_http(grace_s), daemon.doors.ipc.stop(grace_s)]
    await asyncio.gather(*stops, *([grpc.stop(grace_s)] if grpc is not None else []))


def _watchdog(daemon: Daemon) -> Watchdog:
    meter, workers, server = daemon.base.telemetry.meter, daemon.agents.workers, daemon.doors.http
    meter.gauge(
        "covenant_agent_threads_abandoned",
        "Threads of plain functions that go on although their turns are over.",
        lambda: workers.threads_abandoned,
    )
    loop = asyncio.get_running_loop()
    responder = HealthResponder(
        (daemon.base.listeners.http,),
        lambda made: loop.call_soon_threadsafe(server.adopt, made),
        connections_max=daemon.base.settings.http.connections_max,
    )
    agent_at = daemon.agents.stacks.agent_at
    return Watchdog(responder=responder, agent_at=agent_at, log=daemon.base.telemetry.log, on_hold=meter.loop_held)


async def _start_grpc(daemon: Daemon) -> None:
    server, calls = daemon.base.listeners.grpc, daemon.doors.grpc
    if server is not None and calls is not None:
        await server.start(calls)
        daemon.base.telemetry.log.info(
            "grpc.listening", bind_addr=daemon.base.settings.grpc.bind_addr, port=server.port
        )


async def _start_for_peers(daemon: Daemon) -> None:
    server, listener = daemon.doors.peers, daemon.base.listeners.peers
    if server is not None and listener is not None:
        await server.start(listener)
        host, port = daemon.base.listeners.peers_at
        daemon.base.telemetry.log.info("peers.listening", bind_addr=host, port=port)


async def _supervised(scheduler: Scheduler, log: Log) -> None:
    refused_s = -REFUSED_S
    while True:
        try:
            await scheduler.run()
        except Unavailable as away:
            now_s = asyncio.get_running_loop().time()
            if now_s - refused_s >= REFUSED_S:
                refused_s = now_s
                name = type(scheduler).__name__
                log.warning("scheduler.refused", scheduler=name, code=away.code, reason=away.message)
            await asyncio.sleep(RESTART_S)
        except Exception:  # a fault in one scheduler must not close the doors
            log.exception("scheduler.failed", scheduler=type(scheduler).__name__)
            await asyncio.sleep(RESTART_S)


def _freeze_startup_objects() -> None:
    """Frees the garbage collector from walking the objects of the start-up, which stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
