"""Write the hashes of all files of every pin into requirements/*.lock.

Change a pin, or add a line `name==version`, and run this. It keeps the versions and the comment at the top of each
file, and asks the configured index for the hashes of every wheel and source archive of each version: so the locks
serve every supported Python and system, and name no index. It needs `uv`, in an environment of its own:

    python3 -m venv /tmp/lock && /tmp/lock/bin/pip install uv
    .venv/bin/python scripts/lock.py --uv /tmp/lock/bin/uv
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "requirements"
PYTHON: Final = "3.11"
_PIN: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*(?:\[[a-z0-9,-]+\])?==[A-Za-z0-9.+!]+)(?: *; *[^\\]+?)?(?: \\)?")


def comments_and_pins(text: str) -> tuple[list[str], list[str]]:
    comments, pins = [], []
    for line in text.splitlines():
        if line.startswith("#"):
            comments.append(line)
        elif line.strip() and not line.startswith(" "):
            if _PIN.fullmatch(line) is None:
                sys.exit(f"{line!r} is no pin; write name==version")
            pins.append(line.removesuffix("\\").strip())
    return comments, pins


def hashed(uv: str, pins: list[str]) -> str:
    command = [uv, "pip", "compile", "-", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate"]
    command += ["--python-version", PYTHON, "--quiet"]
    done = subprocess.run(command, input="\n".join(pins), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", default="uv", help="where uv is")
    parser.add_argument("locks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.lock")))
    given = parser.parse_args()
    for lock in given.locks:
        comments, pins = comments_and_pins(lock.read_text(encoding="utf-8"))
        lock.write_text("\n".join([*comments, hashed(given.uv, pins)]), encoding="utf-8")
        print(f"{lock.name}: {len(pins)} pins")


if __name__ == "__main__":
    main()
