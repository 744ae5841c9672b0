"""What the daemon says while it runs: one line an event on stderr, for people or as JSON.

An event has a name and fields, never a sentence built from values, so that it can be searched for. Modules below log
through the standard library, with their fields in `extra`. One event has at most so many lines a minute: whoever can
cause it, from however many addresses, does not fill a disk with it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

from covenant.daemon.settings import LogFormat, LogLevel

ROOT: Final = "covenant"
_OWN: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "fields", "taskName"}


LINES_MAX: Final = 300
"""Of one event in a window."""
WINDOW_S: Final = 60.0
EVENTS_MAX: Final = 1_000


class Log:
    """`log.info("ledger.opened", replayed=3)`."""

    def __init__(self, name: str = ROOT) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, **fields: object) -> None:
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: object) -> None:
        self._logger.warning(event, extra={"fields": fields})

    def exception(self, event: str, **fields: object) -> None:
        """With the traceback of what is being handled: for what nobody expected."""
        self._logger.error(event, extra={"fields": fields}, exc_info=True)  # noqa: LOG014  (the caller handles it)


class Throttle(logging.Filter):
    """Leaves lines out and counts them; the first line of the next window says how many, as `left_out`."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic_s = monotonic_s
        self._windows: dict[str, tuple[float, int]] = {}
        """Since when each event is counted, and how many there were."""

    def filter(self, record: logging.LogRecord) -> bool:
        now_s, event = self._monotonic_s(), str(record.msg)
        since_s, count = self._windows.get(event, (now_s, 0))
        if now_s - since_s >= WINDOW_S:
            if count > LINES_MAX:
                record.left_out = count - LINES_MAX
            since_s, count = now_s, 0
        elif not count and len(self._windows) >= EVENTS_MAX:
            self._windows.clear()
        self._windows[event] = (since_s, count + 1)
        return count < LINES_MAX


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        stamp = f"{seconds}.{int(record.msecs):03d}Z"
        words = [stamp, record.levelname.lower(), record.getMessage()]
        words += [f"{name}={_word(value)}" for name, value in _fields(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Objects(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "ts_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    extra = {name: value for name, value in record.__dict__.items() if name not in _OWN}
    return extra | getattr(record, "fields", {})


def _word(value: object) -> str:
    # A line break in a value must not look like another event.
    text = str(value)
    plain = text.isprintable() and text and not any(character in text for character in ' "=')
    return text if plain else json.dumps(text, ensure_ascii=False)


def start_logging(kind: LogFormat, level: LogLevel, stream: TextIO | None = None) -> None:
    """Send everything to stderr. Uvicorn's own lines too, from warnings on: it has no fields to offer."""
    lines = logging.StreamHandler(stream or sys.stderr)
    lines.addFilter(Throttle())
    lines.setFormatter(_Objects() if kind == "json" else _Lines())
    root = logging.getLogger()
    root.handlers[:] = [lines]
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(level.upper())
