"""Run a program of Python with a clock that is wrong: `python skewed_clock.py SECONDS PROGRAM WORD…`."""

import runpy
import sys
import time

offset_s, program = int(sys.argv[1]), sys.argv[2]
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + offset_s
time.time_ns = lambda: _time_ns() + offset_s * 1_000_000_000
sys.argv = sys.argv[2:]
runpy.run_path(program, run_name="__main__")
