"""Steps: what happened to a task, as those who watch it see it. One step is one generation, and one frame on a stream.

A reader that has every step from 1 on knows the task: `folding` says how. The ledger's own events say more (who holds
a lease, what was audited); none of that is for a watcher.
"""

from __future__ import annotations

import msgspec

from covenant.model.result import Ending, Result
from covenant.model.task import Task
from covenant.model.update import ArtifactUpdate, MessageUpdate, StatusUpdate


class Began(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="began"):
    """Generation 1: the task was accepted."""

    task: Task


class Started(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="started"):
    """Its first lease: from now on it is `working`, whoever holds it."""


class Continued(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="continued"):
    """Its sender said something: the next turn, or, while somebody works on it, what the next turn will be about."""

    message: MessageUpdate


class Ended(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="ended"):
    ending: Ending
    result: Result


Happening = Began | Started | StatusUpdate | ArtifactUpdate | MessageUpdate | Continued | Ended
"""A `StatusUpdate` whose state is not `working` has parked the task: it waits for its sender."""


class Step(msgspec.Struct, frozen=True, gc=False):
    generation: int
    ts_ms: int
    what: Happening
