"""The surroundings of the process: the environment, the clock and the name of the machine.

No other module of the daemon reads the environment or the wall clock. Standard library only, since
every command of the CLI imports this.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

HOME_VARIABLE: Final = "COVENANT_HOME"
TOKEN_VARIABLE: Final = "COVENANT_TOKEN"  # noqa: S105  (the name of a variable, not a secret)
PASSPHRASE_VARIABLE: Final = "COVENANT_PASSPHRASE"  # noqa: S105
PASSPHRASE_FILE_VARIABLE: Final = "COVENANT_PASSPHRASE_FILE"  # noqa: S105
HOME_DEFAULT: Final = "~/.covenant"
PROGRAM_VARIABLES: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")

Named = Literal["flag", "environment", "default"]
# On Linux this clock also runs while the machine sleeps, so waking up does not look like a step of the wall clock.
_MONOTONIC: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def environment() -> Mapping[str, str]:
    return os.environ


def program_environment() -> dict[str, str]:
    """The variables that programs started by the daemon get: no secrets."""
    return {name: os.environ[name] for name in PROGRAM_VARIABLES if name in os.environ}


def find_home(flag: str | Path | None, variables: Mapping[str, str]) -> tuple[Path, Named]:
    """The home, and where it was named: flag, environment or default."""
    if flag is not None:
        return Path(flag).expanduser().absolute(), "flag"
    named = variables.get(HOME_VARIABLE)
    if named:
        return Path(named).expanduser().absolute(), "environment"
    return Path(HOME_DEFAULT).expanduser(), "default"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    return (time.clock_gettime_ns(_MONOTONIC) if _MONOTONIC is not None else time.monotonic_ns()) // 1_000_000


def machine_name() -> str:
    return platform.node() or "unnamed"
