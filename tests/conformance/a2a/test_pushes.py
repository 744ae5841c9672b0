"""Push configurations, where they are switched on: made, read, listed and deleted the same way on every binding."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.conformance.a2a.bindings import Binding, Refused
from tests.conformance.a2a.server_under_test import ServerUnderTest, open_server, unique

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def under_test(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerUnderTest]:
    async with open_server(tmp_path_factory.mktemp("pushing"), push_notifications=True) as opened:
        yield opened


def ids(listed: object) -> set[str]:
    found = listed["configs"] if isinstance(listed, dict) else listed
    assert isinstance(found, list)
    return {each.get("pushNotificationConfig", each)["id"] for each in found}


async def test_a_configuration_is_kept_told_listed_and_deleted(me: Binding) -> None:
    task = await me.task("ask")
    made = await me.push("create", task.id, "p-1")
    assert made == await me.push("get", task.id, "p-1")
    await me.push("create", task.id, "p-2")
    assert ids(await me.push("list", task.id)) == {"p-1", "p-2"}
    for _ in range(2):
        # Deleting again changes nothing.
        await me.push("delete", task.id, "p-1")
        assert ids(await me.push("list", task.id)) == {"p-2"}
    with pytest.raises(Refused, match="TASK_NOT_FOUND"):
        await me.push("get", task.id, "p-1")


async def test_a_configuration_of_anothers_task_can_be_neither_made_nor_found(
    me: Binding, under_test: ServerUnderTest
) -> None:
    task = await me.task("ask")
    await me.push("create", task.id)
    for other in (me.with_(token=under_test.neighbour), me.with_(agent="other")):
        for verb in ("create", "get", "list", "delete"):
            answers = []
            for task_id in (task.id, unique()):
                with pytest.raises(Refused) as refused:
                    await other.push(verb, task_id)
                answers.append((refused.value.name, refused.value.message.replace(task_id, "ID")))
            assert answers[0] == answers[1]
            assert answers[0][0] == "TASK_NOT_FOUND"
    assert ids(await me.push("list", task.id)) == {"p-1"}
