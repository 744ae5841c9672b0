"""The log is bounded: one event that somebody causes again and again does not fill a disk."""

import io
import logging

import pytest

from covenant.daemon.telemetry import LINES_MAX, WINDOW_S, Log, Throttle, start_logging


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def test_one_event_has_at_most_so_many_lines_and_others_are_still_told(stream: io.StringIO) -> None:
    root, level = logging.getLogger(), logging.getLogger().level
    kept = list(root.handlers)
    try:
        start_logging("json", "info", stream)
        for number in range(LINES_MAX + 500):
            Log().warning("door.failed", address=f"10.0.{number // 250}.{number % 250}")
        Log().info("door.opened")
    finally:
        root.handlers[:] = kept
        root.setLevel(level)
    lines = stream.getvalue().splitlines()
    assert len(lines) == LINES_MAX + 1
    assert "door.opened" in lines[-1]


def test_what_was_left_out_is_told_in_the_next_window() -> None:
    now_s = [0.0]
    throttle = Throttle(lambda: now_s[0])

    def told(event: str) -> logging.LogRecord | None:
        record = logging.makeLogRecord({"msg": event})
        return record if throttle.filter(record) else None

    assert sum(told("a") is not None for _ in range(LINES_MAX + 7)) == LINES_MAX
    now_s[0] = WINDOW_S
    after = told("a")
    assert after is not None
    assert after.__dict__["left_out"] == 7
    later = told("a")
    assert later is not None
    assert "left_out" not in later.__dict__
