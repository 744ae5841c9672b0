"""The gate before the journal: a refused value refuses its command, and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from covenant.ledger.machine.commands import Report
from covenant.model.content import Json, Text
from covenant.model.errors import WrongType
from covenant.model.task_event import StatusUpdate
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.embedded_engine import EmbeddedEngine
from tests.ledger_contract.samples import BOB, make_task, ok, task_id


@pytest.mark.parametrize(
    ("update", "field"),
    [
        (StatusUpdate(5), "task_updated.update.text"),  # type: ignore[arg-type]
        (StatusUpdate("x", metadata={"a": float("nan")}), "task_updated.update.metadata.a"),
        (StatusUpdate("x", parts=(Text(b"x"),)), "task_updated.update.parts[0].text"),  # type: ignore[arg-type]
        (StatusUpdate("x", parts=(Json({"a": [object()]}),)), "task_updated.update.parts[0].value.a[0]"),
        (StatusUpdate("\ud800"), "task_updated.update.text"),
    ],
    ids=["number", "nan", "bytes", "object", "surrogate"],
)
async def test_a_value_that_would_not_be_read_back_refuses_its_command_alone(
    tmp_path: Path, update: Any, field: str
) -> None:
    engine = EmbeddedEngine(tmp_path)
    driver = LedgerDriver(await engine.open(), engine.clock)
    leased = await driver.taken(make_task(1))
    before = await driver.entry(task_id(1))
    with pytest.raises(WrongType) as refused:
        await driver.ledger.commit(
            Report(task_id=task_id(1), holder=BOB, lease_id=leased.lease.lease_id, update=update)
        )
    assert (refused.value.field, refused.value.code) == (field, "invalid_value")
    assert await driver.entry(task_id(1)) == before
    await driver.report(leased, "on it")
    driver = LedgerDriver(await engine.close_and_reopen(driver.ledger), engine.clock)
    await driver.finish(leased, ok(task_id(1)))
    await engine.close()


async def test_what_a_caller_does_to_its_values_afterwards_reaches_nobody(tmp_path: Path) -> None:
    engine = EmbeddedEngine(tmp_path)
    driver = LedgerDriver(await engine.open(), engine.clock)
    value: dict[str, Any] = {"a": 1}
    await driver.send(make_task(1, parts=(Json(value),)))
    value["b"] = object()
    await driver.ledger.compact()
    (leased,) = await driver.take()
    assert leased.task.parts == (Json({"a": 1}),)
    driver = LedgerDriver(await engine.close_and_reopen(driver.ledger), engine.clock)
    assert (await driver.entry(task_id(1))).task.parts == (Json({"a": 1}),)
    await engine.close()
