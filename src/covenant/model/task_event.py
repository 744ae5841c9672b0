"""Steps: what happened to a task, as those who watch it see it. One step is one generation, and one frame on a stream.

A reader that has every step from 1 on knows the task: `folding` says how. The ledger's own events say more (who holds
a lease, what was audited); none of that is for a watcher.
"""

from __future__ import annotations

import enum
from typing import Any, Final, Literal

import msgspec

from covenant.model.clock_steps import STEADY, Ages
from covenant.model.content import Content
from covenant.model.question import QuestionKind
from covenant.model.task import Cause, Ending, Result, Task


class StatusUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="status", omit_defaults=True):
    """A word on progress. `state` parks the task when it names an interrupted state."""

    text: str = ""
    state: str = "working"
    metadata: dict[str, Any] | None = None
    parts: tuple[Content, ...] = ()
    """The message in full, where it is more than `text`."""
    message_id: str | None = None


PROGRESS: Final = "progress"
"""In the metadata of an update: how much is done, from 0 to 1."""
HOLDER_LOST: Final = "covenant.holder_lost"
AWAITING_REPAIR: Final = "worker lost, awaiting repair"
"""In the metadata of a task, and of the update that tells of it: whoever worked on it is gone."""


def text_artifact(task_id: str, turn: int) -> str:
    """The id of the artifact that is all text of a turn."""
    return f"{task_id}-text-{turn - 1}"


class ArtifactUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="artifact", omit_defaults=True):
    """A chunk of an artifact. `append` adds to what this attempt wrote before; otherwise it replaces."""

    artifact_id: str
    parts: tuple[Content, ...] = ()
    name: str | None = None
    description: str | None = None
    append: bool = False
    last_chunk: bool = False
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()


class MessageUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="message", omit_defaults=True):
    role: str = "agent"
    parts: tuple[Content, ...] = ()
    message_id: str | None = None
    metadata: dict[str, Any] | None = None
    extensions: tuple[str, ...] = ()
    reference_task_ids: tuple[str, ...] = ()


_encode = msgspec.json.Encoder().encode


def weigh_message(message: MessageUpdate) -> int:
    """How many bytes a message to a task has."""
    return len(_encode(message))


Update = StatusUpdate | ArtifactUpdate | MessageUpdate
"""What a holder may say at a door."""

StepKind = Literal["step", "sleep", "wait", "ask"]


class StepUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="step", omit_defaults=True):
    """A durable step of a turn: what it came to, or that it waits. Its result is for the agent alone.

    `no` counts the steps of a turn in the order in which the function asks for them. While it `waits`, `wait` says for
    what; what comes of that is told by another one with the same number.
    """

    name: str
    no: int
    turn: int = 1
    kind: StepKind = "step"
    result: Any = None
    wait: Wait | None = None
    timed_out: bool = False
    usage: dict[str, float] | None = None
    """What was used since the step before it."""

    @property
    def waits(self) -> bool:
        return self.wait is not None


class Wait(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What a parked task waits for in the middle of a turn, or before one: a moment, a signal, an answer, or either.

    A moment is `for_ms` after `since_ms`, however the clock is set meanwhile; or `until_ms`, by the clock.
    """

    since_ms: int
    for_ms: int | None = None
    until_ms: int | None = None
    signal: str | None = None
    step: int = 0
    """The number of the step that waits; 0: none does, and the attempt begins anew (or for the first time)."""
    name: str = ""
    asks: QuestionKind | None = None
    """A person is asked, and the next message to the task is the answer."""
    question: str = ""
    """The digest of what is asked: the answer holds for this alone."""

    def ends_at_ms(self, now_ms: int, ages: Ages = STEADY) -> int | None:
        """When it ends by itself, by the clock as it is now."""
        if self.until_ms is not None or self.for_ms is None:
            return self.until_ms
        return self.for_ms + (ages.moment_ms(self.since_ms, now_ms) if ages.steps else self.since_ms)

    @property
    def kind(self) -> StepKind:
        if self.asks is not None:
            return "ask"
        return "sleep" if self.signal is None else "wait"


SIGNAL_CHARS_MAX: Final = 128
"""Of the name of a step or a signal."""


class Signal(msgspec.Struct, frozen=True, gc=False):
    """What somebody told a task by name. `id` names this saying of it: the same again is the same signal."""

    name: str
    id: str
    value: Any = None


def weigh_signal(signal: Signal) -> int:
    return len(_encode(signal))


TurnUpdate = Update | StepUpdate
"""What a holder in this process may say."""
STEP_MARK: Final = "covenant.step"
"""In the metadata of a status that tells of a step: its name."""


class Interruption(enum.StrEnum):
    """Why a task is parked: it waits, without a lease, for its next message."""

    INPUT_REQUIRED = "input-required"
    AUTH_REQUIRED = "auth-required"


WAITS_FOR_SENDER: Final = frozenset(Interruption)


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
    cause: Cause = Cause.RESULT


StepContent = Began | Started | StatusUpdate | ArtifactUpdate | MessageUpdate | StepUpdate | Continued | Ended
"""A `StatusUpdate` whose state is not `working` has parked the task: it waits for its sender."""


class Step(msgspec.Struct, frozen=True, gc=False):
    generation: int
    ts_ms: int
    what: StepContent
