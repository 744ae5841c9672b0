"""Runs a program under a wall clock that a test can set: `stepped.py <file> <program> [arguments]`.

The file holds the offset in milliseconds, as eight bytes; it is read at each look at the clock. Only the wall clock is
changed. The monotonic one goes on, as on a real machine whose time is set.
"""

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path


def main() -> None:
    with Path(sys.argv[1]).open("r+b") as file:
        offset = mmap.mmap(file.fileno(), 8)
    real_time_ns = time.time_ns

    def time_ns() -> int:
        (offset_ms,) = struct.unpack("<q", offset[:8])
        return real_time_ns() + int(offset_ms) * 1_000_000

    time.time_ns = time_ns
    time.time = lambda: time_ns() / 1e9
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
