"""The records of a job, where the ledger does not say whether it has written one."""

import asyncio
from typing import Any

import pytest

from covenant.agents.runtime.job_buffer import JobBuffer, JobServices
from covenant.ledger.machine.commands import Accept, Advance, Starter
from covenant.model.content import Text
from covenant.model.errors import OUTCOME_UNKNOWN, Unavailable
from covenant.model.settings import A2aSettings
from covenant.model.task import fingerprint
from covenant.model.task_event import ArtifactUpdate, StepUpdate
from covenant.model.tracing import OFF
from tests.agents.pool_under_test import a_ledger
from tests.ledger_contract.samples import make_task, task_id
from tests.waits import BOUND_S

SAID = ArtifactUpdate("answer", (Text("a "),), append=True)


@pytest.mark.parametrize("written", [False, True])
async def test_output_in_doubt_is_not_taken_for_the_same_output_of_the_record_before_it(
    monkeypatch: pytest.MonkeyPatch, *, written: bool
) -> None:
    """The record before it was sent, and not acknowledged yet, when this one was sent."""
    async with a_ledger(None) as ledger:
        task = make_task()
        starter = Starter(task.recipient, ledger.node, ledger.boot)
        leased = (await ledger.commit(Accept(task=task, digest=fingerprint(task)[0], starter=starter))).leased
        assert leased is not None
        services = JobServices(ledger, asyncio.get_running_loop(), A2aSettings(), lambda _: None, None, OFF)
        writer = JobBuffer(services, leased, task.recipient)
        commit, sent, calls = ledger.commit, asyncio.Event(), list[Advance]()

        async def commit_in_doubt(command: Any) -> Any:
            if not isinstance(command, Advance):
                return await commit(command)
            calls.append(command)
            if len(calls) == 1:
                answer = await commit(command)
                await sent.wait()
                return answer
            if len(calls) == 2:
                sent.set()
                await first
                if written:
                    await commit(command)
                raise Unavailable(OUTCOME_UNKNOWN, "the connection is lost", retry_after_ms=1)
            return await commit(command)

        monkeypatch.setattr(ledger, "commit", commit_in_doubt)
        first = asyncio.create_task(writer.write_record((SAID, StepUpdate("say", 1, 1, "step"))))
        second = asyncio.create_task(writer.write_record((SAID,)))
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(first, second)
        steps = [step.what for step in await ledger.steps(task_id(1), 0, 100)]
        assert [type(each) for each in steps[2:]] == [ArtifactUpdate, StepUpdate, ArtifactUpdate]
        assert len(calls) == (2 if written else 3)
