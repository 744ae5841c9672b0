"""Isolated functions: a function agent whose turns run in processes of their own, one process a turn.

The process is `python -m covenant.agents.isolated_program FILE AGENT`: it is told the turn, imports the author's file,
runs the function, and speaks as process agents do (see `process`). Besides, it asks for calls of other agents (see
`program_calls`). If it dies, its task fails, and nothing else; at the end of its turn it is ended.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import msgspec

from covenant.agents.authoring import Agent
from covenant.agents.function import earlier
from covenant.agents.job import Job
from covenant.agents.process import OUTPUT_BYTES_MAX, ProcessBody
from covenant.ledger.machine.commands import LeasedTask
from covenant.model.task_event import MessageUpdate

PROGRAM: Final = "covenant.agents.isolated_program"
PROCESSES_MAX: Final = 8
"""Turns of one isolated agent at once, unless it says otherwise: each is a whole interpreter."""

_encode = msgspec.json.Encoder().encode


class IsolatedTurn(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="turn"):
    """What the program is told."""

    leased: LeasedTask
    history: tuple[MessageUpdate, ...]


class IsolatedBody(ProcessBody):
    """The program sees the daemon's environment, as a function in the daemon would."""

    def __init__(self, agent: Agent, path: Path) -> None:
        if agent.function is None:
            raise TypeError(f"agent {agent.name!r} has no function: decorate one with it")
        command = (sys.executable, "-P", "-m", PROGRAM, str(path.resolve()), agent.name)
        super().__init__(command, environment=None, line_bytes_max=OUTPUT_BYTES_MAX, converses=True)

    async def given(self, job: Job) -> bytes:
        return _encode(IsolatedTurn(leased=job.leased, history=await earlier(job))) + b"\n"
