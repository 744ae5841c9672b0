"""The common end of both command lines: turns the chosen options into a run and an exit code."""

from __future__ import annotations

import asyncio
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from covenant.prove.command_options import OPTIONS, make_parser
from covenant.prove.report import finding_lines, junit, summary
from covenant.prove.runner import ROWS, Finding, Report, Target, prove
from covenant.prove.trial import Extent


def main(arguments: list[str], prog: str = "python -m covenant.prove") -> int:
    parser = make_parser(prog)
    chosen = vars(parser.parse_args(arguments))
    if wrong := wrong_usage(chosen):
        parser.error(wrong)
    return run(chosen)


def run(chosen: dict[str, Any]) -> int:
    """Returns the exit code. `chosen` has each option under its name with underscores, checked by `wrong_usage`."""
    if chosen["list"]:
        for row in ROWS:
            sys.stdout.write(f"{row.name:16}{row.promise}\n{'':16}{row.how}\n")
        return 0
    wanted = set(chosen["row"])
    report = _prove(chosen, [row for row in ROWS if not wanted or row.name in wanted])
    if chosen["json"]:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n")
    else:
        sys.stdout.write(f"\n{summary(report)}\n")
    if chosen["junit"]:
        Path(chosen["junit"]).write_bytes(junit(report))
    return report.exit_code


def wrong_usage(chosen: dict[str, Any]) -> str | None:
    """An error text for an option that cannot be used; None if all can. Called before anything is started."""
    if chosen["list"]:
        return None
    for option in OPTIONS:
        value = chosen[option.name.replace("-", "_")]
        if option.required and not value:
            return f"--{option.name} is missing; --help says what it is"
        if option.default is not None and not (value > 0 and math.isfinite(value)):
            return f"--{option.name} has to be more than 0: {value}"
    if unknown := set(chosen["row"]) - {row.name for row in ROWS}:
        return f"no such row: {', '.join(sorted(unknown))} (--list has them)"
    try:
        shlex.split(chosen["command"])
    except ValueError as wrong:
        return f"--command cannot be split into words: {wrong}"
    file = Path(chosen["junit"] or ".junit")
    if chosen["junit"] and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        return f"--junit cannot be written: {file}"
    return None


def _prove(chosen: dict[str, Any], rows: list[Any]) -> Report:
    target = Target(
        command=chosen["command"],
        card=chosen["card"],
        name=chosen["name"],
        token_file=chosen["token_file"],
        version=chosen["protocol_version"],
        binding=chosen["binding"],
        start_s=chosen["start_bound"],
    )
    extent = Extent(
        bound_s=chosen["bound"],
        sends=chosen["sends"],
        senders=chosen["senders"],
        kills=chosen["kills"],
        idempotency_header=chosen["idempotency_header"],
        at_least_once=chosen["at_least_once"],
    )
    colour = sys.stdout.isatty()

    def say(finding: Finding) -> None:
        # With --json only the report goes to stdout; progress goes to stderr.
        place = sys.stderr if chosen["json"] else sys.stdout
        place.write(finding_lines(finding, colour=colour, evidence=chosen["evidence"]) + "\n")
        place.flush()

    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    trying = prove(target, rows, extent, began=began, row_s=chosen["row_bound"], report=say)
    try:
        return asyncio.run(_until_stopped(trying))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


async def _until_stopped(trying: Coroutine[Any, Any, Report]) -> Report:
    """Ends the started server on SIGTERM too, as on SIGINT."""
    task = asyncio.ensure_future(trying)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task
