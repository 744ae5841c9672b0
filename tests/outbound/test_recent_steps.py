"""The newest steps of pushed tasks: whole or not at all, and no more of them than there is room for."""

from covenant.model.task_event import Began, StatusUpdate, Step
from covenant.outbound.recent_steps import STEPS_MAX, RecentSteps
from tests.ledger_contract.samples import make_task, task_id


def step(generation: int, text: str = "on it") -> Step:
    return Step(generation, 0, StatusUpdate(text=text))


def test_steps_are_told_from_any_generation_that_is_there() -> None:
    recent = RecentSteps()
    task = make_task(1)
    recent.add(task_id(1), first := Step(1, 0, Began(task)))
    recent.add(task_id(1), second := step(2))
    assert recent.after(task_id(1), 0, 10) == (first, second)
    assert recent.after(task_id(1), 0, 1) == (first,)
    assert recent.after(task_id(1), 1, 10) == (second,)
    assert recent.after(task_id(1), 2, 10) == (), "nothing is newer"
    assert recent.after(task_id(2), 0, 10) is None, "an unknown task is read from the archive"
    assert recent.task(task_id(1)) == task


def test_what_came_before_is_not_known() -> None:
    recent = RecentSteps()
    recent.add(task_id(1), step(4))
    assert recent.after(task_id(1), 2, 10) is None
    assert recent.after(task_id(1), 3, 10) == (step(4),)


def test_a_gap_begins_anew() -> None:
    recent = RecentSteps()
    recent.add(task_id(1), step(1))
    recent.add(task_id(1), step(3))
    assert recent.after(task_id(1), 0, 10) is None
    assert recent.after(task_id(1), 2, 10) == (step(3),)


def test_one_task_keeps_so_many_steps_and_no_more() -> None:
    recent = RecentSteps()
    for generation in range(1, STEPS_MAX + 2):
        recent.add(task_id(1), step(generation))
    assert recent.after(task_id(1), 0, STEPS_MAX * 2) is None
    assert len(recent.after(task_id(1), 1, STEPS_MAX * 2) or ()) == STEPS_MAX


def test_the_task_that_moved_longest_ago_is_forgotten_first() -> None:
    recent = RecentSteps(bytes_max=3_000)
    recent.add(task_id(1), step(1, "a" * 1_000))
    recent.add(task_id(2), step(1, "b" * 1_000))
    recent.add(task_id(1), step(2, "c"))
    recent.add(task_id(3), step(1, "d" * 1_000))
    assert recent.after(task_id(2), 0, 1) is None
    assert recent.after(task_id(1), 0, 1) is not None
    recent.add(task_id(4), step(1, "e" * 5_000))
    assert [recent.after(task_id(number), 0, 1) for number in (1, 2, 3, 4)] == [None] * 4
    recent.add(task_id(5), step(1))
    assert recent.after(task_id(5), 0, 1) == (step(1),), "what was forgotten takes no room"
