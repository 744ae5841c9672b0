"""Retries of a definition: which failures of programs and models begin a turn again, how often, and what they cost."""

import asyncio
from typing import Any

import pytest
from pydantic_ai.exceptions import ModelHTTPError

from covenant.agents.model.pydantic_agent import retry_reason
from covenant.agents.process_agent import ProcessAgent
from covenant.agents.retried_agent import RetriedAgent
from covenant.agents.runtime.job import Job
from covenant.model.agent_definition import Retries, RetryPauses, read_agent_definition
from covenant.model.errors import Invalid
from covenant.model.task_view import TaskState
from tests.agents.pool_under_test import HOUR_MS, PoolUnderTest, statuses, time_out, told
from tests.agents.runtime.steps_under_test import swept
from tests.agents.test_process_agent import program
from tests.waits import BOUND_S

FAST = RetryPauses(first=0.01, longest=0.02, jitter=0)
FAILS = {
    "exited": "if turn['attempt'] < 3: sys.exit(3)",
    "failed": "if turn['attempt'] < 3: say('error', message='no luck')",
}
SAID = {"exited": "the agent exited with status 3", "failed": "no luck"}
USED = "say('usage', usage={'tokens': 7}); turn = json.load(sys.stdin)\n"


def retried(body: ProcessAgent, **terms: Any) -> RetriedAgent:
    return RetriedAgent(body, Retries(backoff=FAST, **terms))


class FailsAndCleansUp:
    """Fails, and cleans up without end."""

    def __init__(self) -> None:
        self.cleaning = asyncio.Event()

    async def run(self, job: Job) -> None:
        job.fail("no luck", reason="failed")
        self.cleaning.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_stop_in_the_cleanup_of_a_failure_leaves_the_task_its_attempts(
    pool: PoolUnderTest, *, in_time: bool
) -> None:
    body = FailsAndCleansUp()
    pool.serve(RetriedAgent(body, Retries(backoff=FAST, retry_on=("failed",))), timeout_ms=HOUR_MS)
    task_id = await pool.send()
    await asyncio.wait_for(body.cleaning.wait(), BOUND_S)
    if in_time:
        await pool.cut_short()
        assert statuses(await pool.steps(task_id)) == ["no luck; attempt 2 begins in 0.01 s"]
    else:
        time_out(pool.workers)
        assert (await pool.ended(task_id)).state is TaskState.FAILED


@pytest.mark.parametrize("reason", FAILS)
async def test_a_program_that_fails_for_a_named_reason_is_begun_again(pool: PoolUnderTest, reason: str) -> None:
    body = program(f"{USED}{FAILS[reason]}\nsay('result', text=f\"attempt {{turn['attempt']}}\")")
    pool.serve(retried(body, retry_on=(reason,)))
    task_id = await pool.send()
    view = await swept(pool, task_id)
    assert (view.state, told(view)) == (TaskState.COMPLETED, "attempt 3")
    assert statuses(await pool.steps(task_id)) == [
        f"{SAID[reason]}; attempt 2 begins in 0.01 s",
        f"{SAID[reason]}; attempt 3 begins in 0.02 s",
    ]
    assert view.result is not None
    assert isinstance(view.result.metadata, dict)
    assert view.result.metadata["usage"]["tokens"] == 21, "failed attempts count"


@pytest.mark.parametrize(("reason", "named"), [("exited", "failed"), ("failed", "exited")])
async def test_a_failure_for_another_reason_fails_the_task(pool: PoolUnderTest, reason: str, named: Any) -> None:
    pool.serve(retried(program(f"{USED}{FAILS[reason]}"), retry_on=(named,)))
    task_id = await pool.send()
    view = await swept(pool, task_id)
    assert (view.state, told(view), statuses(await pool.steps(task_id))) == (TaskState.FAILED, SAID[reason], [])


async def test_the_last_attempt_fails_the_task(pool: PoolUnderTest) -> None:
    body = ProcessAgent(["/nowhere/at/all"], environment={})
    pool.serve(retried(body, retry_on=("not_started",), attempts=2))
    task_id = await pool.send()
    view = await swept(pool, task_id)
    assert (view.state, told(view)) == (TaskState.FAILED, "the agent could not be started")
    assert len(statuses(await pool.steps(task_id))) == 1


async def test_a_program_may_ask_for_a_further_attempt_and_has_no_more_than_others(pool: PoolUnderTest) -> None:
    pool.serve(retried(program("say('retry', after_s=0.01, text='closed; for ever')")))
    task_id = await pool.send()
    view = await swept(pool, task_id)
    assert (view.state, told(view)) == (TaskState.FAILED, "closed; for ever")
    assert len(statuses(await pool.steps(task_id))) == 2


@pytest.mark.parametrize(
    ("status", "reason"), [(429, "rate_limited"), (503, "overloaded"), (500, "provider_error"), (400, ""), (401, "")]
)
def test_a_failure_of_a_provider_is_one_word(status: int, reason: str) -> None:
    assert retry_reason(ModelHTTPError(status, "m")) == reason


MODEL: dict[str, Any] = {"id": "a", "kind": "model", "idempotent": True}


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({**MODEL, "retries": {"attempts": 0}}, "/retries/attempts"),
        ({**MODEL, "retries": {"attempts": 101}}, "/retries/attempts"),
        ({**MODEL, "retries": {"attempts": True}}, "/retries/attempts"),
        ({**MODEL, "retries": {"retry_on": ["OSError"]}}, "/retries/retry_on/"),
        ({**MODEL, "retries": {"backoff": {"first": -1}}}, "/retries/backoff/first"),
        ({**MODEL, "retries": {"backoff": {"longest": 1e9}}}, "/retries/backoff/longest"),
        ({**MODEL, "retries": {"pause": 1}}, "unknown key /retries/pause"),
        ({"id": "a", "retries": {"retry_on": ["exited"]}}, "/retries/retry_on: needs"),
        ({"id": "a", "kind": "worker", "retries": {}}, "/retries: an agent of the kind 'worker'"),
    ],
)
def test_retries_that_make_no_sense_are_refused_by_their_key(declared: dict[str, Any], said: str) -> None:
    with pytest.raises(Invalid) as refused:
        read_agent_definition(declared)
    assert refused.value.code == "invalid_agent"
    assert said in refused.value.message


def test_a_definition_with_retries_is_read() -> None:
    made = read_agent_definition({**MODEL, "retries": {"attempts": 5, "backoff": {"first": 2}, "retry_on": ["exited"]}})
    assert made.retries == Retries(attempts=5, backoff=RetryPauses(first=2.0), retry_on=("exited",))
