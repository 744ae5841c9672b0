"""The process of a daemon: its loop, its signals, its open files, and that it ends.

Agents share the process. One that raises `SystemExit` or `KeyboardInterrupt` in a task of its own does not end the
daemon, and one that blocks the loop does not keep a stop from ending.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Final, NoReturn

import uvloop

from covenant.daemon.listeners import http_bounds
from covenant.daemon.logs import Log
from covenant.daemon.settings import Settings

END_S: Final = 5.0
"""From the last record to the end of the process, at most."""
HELD_END_S: Final = 5.0
"""From the end of the grace time to the end of the process, at most, if the loop is blocked."""
FILES_BESIDES: Final = 256
CONNECTIONS_MIN: Final = 16
"""So many HTTP connections are served however few open files the system allows."""


def run_to_end(main: Coroutine[Any, Any, Sequence[str]], log: Log) -> None:
    """Run `main`, which returns the names of agents that go on regardless; then end the process, whatever they do."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        task = loop.create_task(main)
        while not task.done():
            try:
                loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as error:
                # A task of an agent raised it. The task has ended with it; the loop only has to go on.
                if task.done():
                    raise
                log.warning("agent.exited", error=repr(error))
        _end_soon(task.result(), log)


def _end_soon(abandoned: Sequence[str], log: Log) -> None:
    """End the process: at once if these agents go on, else within `END_S`.

    What may hold it up are tasks and threads that agents have begun by themselves. By now all is written and closed.
    """

    def end(*agents: str) -> None:
        log.warning("daemon.abandoned", agents=", ".join(agents) or "unknown: a task or thread that an agent began")
        _exit(0)

    if abandoned:
        end(*abandoned)
    _start_timer(END_S, end)


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _start_timer(after_s: float, call: Any) -> threading.Timer:
    timer = threading.Timer(after_s, call)
    timer.daemon = True
    timer.start()
    return timer


class StopSignals:
    """What the outside asks: `asked` with the first signal, `hurried` with the second.

    The handlers run in Python, also while an agent blocks the loop. If the process has not ended `HELD_END_S` after
    the grace time, a thread ends it: what was acknowledged is on disk, as after a crash.
    """

    def __init__(self, grace_s: float, log: Log) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._end_s = grace_s + HELD_END_S
        self._log = log
        self._timer: threading.Timer | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self._timer is None:
            self._timer = _start_timer(self._end_s, self._end_held)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ask)

    def _ask(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()

    def close(self) -> None:
        """All is written and closed: `run_to_end` ends the process."""
        if self._timer is not None:
            self._timer.cancel()

    def _end_held(self) -> None:
        self._log.warning("daemon.held", why="the stop did not end in time: an agent blocks the loop")
        _exit(1)


def fit_open_files(settings: Settings, log: Log) -> Settings:
    """Have as many open files allowed as there may be connections; where the system allows fewer, so many connections
    fewer: without a descriptor the journal could not begin a segment."""
    calls_max = settings.grpc.calls_max if settings.grpc.enabled else 0
    besides = http_bounds(settings.http).connections_reserved_max + settings.ipc.connections_max + calls_max
    besides += FILES_BESIDES
    wanted = settings.http.connections_max
    granted = _allow_files(wanted + besides)
    room = max(CONNECTIONS_MIN, granted - besides)
    if room >= wanted:
        return settings
    log.warning("http.connections_lowered", connections_max=room, open_files=granted, look="ulimit -n")
    return replace(settings, http=replace(settings.http, connections_max=room))


def _allow_files(wanted: int) -> int:
    """As many open files as wanted, as far as the system lets us: many start with 1,024. How many it lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return wanted if soft == resource.RLIM_INFINITY else soft
