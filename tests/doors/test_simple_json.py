"""The simple door's JSON: what is read, and how a task is told in four states and in text."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.doors.simple import CODES, A2ATask, A2ATaskSendRequest, decode_send, task_of
from covenant.model.content import Audio, Json, ResourceLink, Text
from covenant.model.errors import Invalid, Refusal
from covenant.model.task import Cause, Ending, Result, error_result
from covenant.model.task_event import (
    ArtifactUpdate,
    Began,
    Continued,
    Ended,
    MessageUpdate,
    Started,
    StatusUpdate,
    Step,
    StepContent,
)
from covenant.model.task_view import TaskState, fold
from tests.ledger_contract.samples import make_task, task_id

ID = task_id(1)
TASK = make_task(1, intent_text="ask", context_id="c")


def shown(*happenings: StepContent) -> A2ATask:
    view = fold(Step(number, 1_000 * number, what) for number, what in enumerate((Began(TASK), *happenings), 1))
    assert view is not None
    return task_of(view)


def said(*happenings: StepContent) -> list[tuple[str, str]]:
    return [(each.role, "|".join(part.text for part in each.parts)) for each in shown(*happenings).messages]


@pytest.mark.parametrize(
    ("happenings", "state"),
    [
        ((), "submitted"),
        ((Started(),), "working"),
        ((Started(), StatusUpdate("?", TaskState.INPUT_REQUIRED.value)), "working"),
        ((Started(), StatusUpdate("?", TaskState.AUTH_REQUIRED.value)), "working"),
        ((Started(), Ended(Ending.COMPLETED, Result.ok(ID, "yes"))), "completed"),
        ((Started(), Ended(Ending.FAILED, error_result(ID, "no"))), "failed"),
        ((Started(), Ended(Ending.CANCELED, error_result(ID, "no"))), "failed"),
        ((Ended(Ending.REJECTED, error_result(ID, "no")),), "failed"),
    ],
)
def test_eight_states_are_told_as_four(happenings: tuple[StepContent, ...], state: str) -> None:
    assert shown(*happenings).state == state


def test_times_are_those_of_the_first_and_the_last_step() -> None:
    task = shown(Started())
    assert (task.created_at, task.updated_at) == ("1970-01-01T00:00:01.000Z", "1970-01-01T00:00:02.000Z")
    assert task.session_id == "c"


def chunk(text: str, turn: int = 0, *, append: bool = False) -> ArtifactUpdate:
    return ArtifactUpdate(f"{ID}-text-{turn}", (Text(text),), append=append)


def test_what_is_said_stands_in_its_turn_and_once() -> None:
    asked = ("user", "ask")
    assert said(Started(), chunk("a"), chunk("b", append=True)) == [asked, ("agent", "ab")]
    first = (Started(), chunk("a"), chunk("b", append=True))
    assert said(*first, Ended(Ending.COMPLETED, Result.ok(ID, "ab"))) == [asked, ("agent", "ab")]
    assert said(*first, Ended(Ending.COMPLETED, Result.ok(ID, "sum"))) == [asked, ("agent", "ab"), ("agent", "sum")]
    assert said(*first, Ended(Ending.FAILED, error_result(ID, "no"))) == [asked, ("agent", "ab"), ("agent", "no")]
    turns = (
        *first,
        StatusUpdate("which?", TaskState.INPUT_REQUIRED.value),
        Continued(MessageUpdate(role="user", parts=(Text("this"),))),
        chunk("c", 1),
    )
    assert said(*turns) == [asked, ("agent", "ab"), ("agent", "which?"), ("user", "this"), ("agent", "c")]


def test_only_text_is_told_and_what_is_no_text_as_text_where_it_can_be() -> None:
    parts = (Json({"a": 1}), ResourceLink("https://example.com/x"), Audio("AA==", "audio/wav"), Text("t"))
    assert said(MessageUpdate(parts=parts)) == [("user", "ask"), ("agent", '{"a":1}|https://example.com/x|t')]
    assert said(MessageUpdate(parts=(Audio("AA==", "audio/wav"),))) == [("user", "ask")]


def test_a_task_whose_deadline_passed_has_timed_out_and_an_agent_may_still_say_that_word() -> None:
    assert said(Ended(Ending.FAILED, error_result(ID, "deadline_exceeded"), Cause.DEADLINE))[-1] == (
        "agent",
        "Task timed out",
    )
    assert said(MessageUpdate(parts=(Text("deadline_exceeded"),)))[-1] == ("agent", "deadline_exceeded")


def test_every_refusal_has_a_code_here() -> None:
    # A refusal that a door or its server defines is told by itself, and never comes from the exchange.
    reach = [kind for kind in Refusal.__subclasses__() if not kind.__module__.startswith("covenant.doors.")]
    assert {Refusal.status, *(kind.status for kind in reach)} <= CODES.keys()


@given(st.binary(max_size=200))
def test_whatever_comes_is_read_or_refused(body: bytes) -> None:
    with suppress(Invalid):
        assert isinstance(decode_send(body), A2ATaskSendRequest)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(["params", "message", "skill", "timeoutMs", "depth", "sourceAgent", "method", "other"])


@given(st.dictionaries(fields, json_values))
def test_whatever_is_asked_is_read_or_refused(body: dict[str, object]) -> None:
    with suppress(Invalid):
        assert isinstance(decode_send(msgspec.json.encode(body)), A2ATaskSendRequest)
