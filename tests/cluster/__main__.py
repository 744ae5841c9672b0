"""`python -m tests.cluster [--seconds 1200] [--seed N] [--folder F]`: three daemons and a PostgreSQL under fire."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.campaign import run
from tests.cluster.faults import FAULTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1_200.0, help="how long faults are done")
    parser.add_argument("--seed", type=int, default=time.time_ns() & 0xFFFF_FFFF)
    parser.add_argument("--folder", type=Path, help="keep the homes and logs here; default: nothing is kept")
    given = parser.parse_args()
    sys.stdout.write(f"seed {given.seed}\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="cc") as nothing_kept:
        folder = given.folder or Path(nothing_kept)
        folder.mkdir(exist_ok=True)
        history = asyncio.run(run(folder, list(FAULTS), seconds=given.seconds, seed=given.seed))
    sys.stdout.write(f"{history.summary()}\n")
    return 1 if history.violations else 0


if __name__ == "__main__":
    sys.exit(main())
