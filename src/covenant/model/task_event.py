"""Steps: the events of a task that its watchers see. One step is one generation, and one frame on a stream.

A reader that has every step from 1 on can build the task: `task_view` folds them. The ledger's own events also name
lease holders and audit rows; watchers do not see those.
"""

from __future__ import annotations

import enum
from typing import Any, Final, Literal

import msgspec

from covenant.model.clock_steps import STEADY, Ages
from covenant.model.content import Content
from covenant.model.question import QuestionKind
from covenant.model.task import Cause, Ending, Result, Task

PROGRESS: Final = "progress"
"""Key in the metadata of an update: the fraction of the work that is done, 0 to 1."""
HOLDER_LOST: Final = "covenant.holder_lost"
AWAITING_REPAIR: Final = "worker lost, awaiting repair"
"""Value in the metadata of a task whose worker was lost, and of the update that reports the loss."""
TEXT_ARTIFACT: Final = "%s-text-%d"
"""The id of the artifact that holds all text of a turn: the task's id, and the number of earlier turns."""
_encode = msgspec.json.Encoder().encode
WAITS_MAX: Final = 100
"""The most steps of a turn that wait at once."""
SIGNAL_CHARS_MAX: Final = 128
"""The longest name of a step or a signal."""
STEP_MARK: Final = "covenant.step"
"""Key in the metadata of a status that reports a step: the step's name."""


class StatusUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="status", omit_defaults=True):
    """A report of progress. A `state` that is an interrupted one parks the task."""

    text: str = ""
    state: str = "working"
    metadata: dict[str, Any] | None = None
    parts: tuple[Content, ...] = ()
    """The whole message, if it is more than `text`."""
    message_id: str | None = None


class ArtifactUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="artifact", omit_defaults=True):
    """A chunk of an artifact. `append` adds to this attempt's earlier chunks; otherwise the chunk replaces them."""

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


def weigh_message(message: MessageUpdate) -> int:
    return len(_encode(message))


Update = StatusUpdate | ArtifactUpdate | MessageUpdate
"""The updates that a holder may send to a door."""

StepKind = Literal["step", "sleep", "wait", "ask"]


class StepFailure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The exception that a step raised."""

    type: str
    """The name of the exception's class, after its module and a colon unless it is a built-in."""
    message: str = ""
    args: tuple[Any, ...] = ()
    attributes: dict[str, Any] = {}
    canceled: bool = False
    """The function stopped waiting for the step, and how far the step came is unknown."""
    attempt: int = 1
    asked: int = 0
    """How many steps the function had requested by then. If the ledger has a later one, the function went on."""


class StepUpdate(msgspec.Struct, frozen=True, tag_field="type", tag="step", omit_defaults=True):
    """A durable step of a turn: its result, or that it waits. Only the agent sees the result.

    `no` numbers the steps of a turn in the order in which the function requests them. While a step `waits`, `wait` says
    for what; another update with the same number reports the outcome.
    """

    name: str
    no: int
    turn: int = 1
    kind: StepKind = "step"
    result: Any = None
    wait: Wait | None = None
    timed_out: bool = False
    usage: dict[str, float] | None = None
    """Usage since the step before this one."""
    failure: StepFailure | None = None
    """The exception that the step raised instead of returning a result."""

    @property
    def waits(self) -> bool:
        return self.wait is not None


class Wait(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The condition that wakes a task that is parked during or before a turn: a time, a signal or an answer.

    The time is `for_ms` after `since_ms`, however the clock is set meanwhile; or `until_ms`, by the clock. A wait for a
    signal may have a time, too; then what comes first wakes the task. So does the first one that ends of several waits
    that a function began together.
    """

    since_ms: int
    for_ms: int | None = None
    until_ms: int | None = None
    signal: str | None = None
    step: int = 0
    """The number of the step that waits; 0: no step waits, and an attempt begins when the wait ends."""
    name: str = ""
    asks: QuestionKind | None = None
    """A person is asked, and the next message to the task is the answer."""
    question: str = ""
    """The digest of the question: the answer is valid for this question alone."""
    others: tuple[Wait, ...] = ()
    """Steps that wait at the same time. None of them asks a person or has `others`."""

    @property
    def all_waits(self) -> tuple[Wait, ...]:
        return (self, *self.others)

    def ends_at_ms(self, now_ms: int, ages: Ages = STEADY) -> int | None:
        """When the first of the waits ends without a signal, by the present clock; None: none of them has a time."""
        return self.first(now_ms, ages).own_end_ms(now_ms, ages)

    def first(self, now_ms: int, ages: Ages = STEADY) -> Wait:
        """The wait that ends first without a signal."""
        if not self.others:
            return self
        ends = ((each.own_end_ms(now_ms, ages), each) for each in self.all_waits)
        return min(((end_ms, each.step, each) for end_ms, each in ends if end_ms is not None), default=(0, 0, self))[2]

    def own_end_ms(self, now_ms: int, ages: Ages) -> int | None:
        if self.until_ms is not None or self.for_ms is None:
            return self.until_ms
        return self.for_ms + (ages.moment_ms(self.since_ms, now_ms) if ages.steps else self.since_ms)

    @property
    def kind(self) -> StepKind:
        if self.asks is not None:
            return "ask"
        return "sleep" if self.signal is None else "wait"


class Signal(msgspec.Struct, frozen=True, gc=False):
    """A named signal to a task. Two signals with the same `id` are one signal that was sent twice."""

    name: str
    id: str
    value: Any = None


def weigh_signal(signal: Signal) -> int:
    return len(_encode(signal))


TurnUpdate = Update | StepUpdate
"""The updates that a holder in this process may report."""


class Interruption(enum.StrEnum):
    """Why a task is parked: it waits, without a lease, for its next message."""

    INPUT_REQUIRED = "input-required"
    AUTH_REQUIRED = "auth-required"


WAITS_FOR_SENDER: Final = frozenset(Interruption)


class Began(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="began"):
    """Generation 1: the task was accepted."""

    task: Task


class Started(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="started"):
    """The task's first lease: from now on the task is `working`."""


class Continued(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="continued"):
    """A message from the task's sender. It begins the next turn, or waits for it while somebody works on the task."""

    message: MessageUpdate


class Ended(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="ended"):
    ending: Ending
    result: Result
    cause: Cause = Cause.RESULT


StepContent = Began | Started | StatusUpdate | ArtifactUpdate | MessageUpdate | StepUpdate | Continued | Ended
"""A `StatusUpdate` whose state is not `working` parks the task until its sender's next message."""


class Step(msgspec.Struct, frozen=True, gc=False):
    generation: int
    ts_ms: int
    what: StepContent
