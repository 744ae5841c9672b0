"""The gate before the journal: a refused value refuses its command, and nothing else."""

from pathlib import Path
from typing import Any

import pytest

from covenant.ledger.machine.commands import Report
from covenant.model.content import Json, Text
from covenant.model.errors import WrongType
from covenant.model.update import StatusUpdate
from covenant.testing.cast import BOB, make_task, ok, task_id
from covenant.testing.desk import Desk
from covenant.testing.log import LogEngine


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
    engine = LogEngine(tmp_path)
    desk = Desk(await engine.open(), engine.clock)
    leased = await desk.taken(make_task(1))
    before = await desk.entry(task_id(1))
    with pytest.raises(WrongType) as refused:
        await desk.ledger.commit(Report(task_id=task_id(1), holder=BOB, lease_id=leased.lease.lease_id, update=update))
    assert (refused.value.field, refused.value.code) == (field, "invalid_value")
    assert await desk.entry(task_id(1)) == before
    await desk.report(leased, "on it")
    desk = Desk(await engine.close_and_reopen(desk.ledger), engine.clock)
    await desk.finish(leased, ok(task_id(1)))
    await engine.close()


async def test_what_a_caller_does_to_its_values_afterwards_reaches_nobody(tmp_path: Path) -> None:
    engine = LogEngine(tmp_path)
    desk = Desk(await engine.open(), engine.clock)
    value: dict[str, Any] = {"a": 1}
    await desk.send(make_task(1, parts=(Json(value),)))
    value["b"] = object()
    await desk.ledger.compact()
    (leased,) = await desk.take()
    assert leased.task.parts == (Json({"a": 1}),)
    desk = Desk(await engine.close_and_reopen(desk.ledger), engine.clock)
    assert (await desk.entry(task_id(1))).task.parts == (Json({"a": 1}),)
    await engine.close()
