"""A requester that has another identity while its work is done: it is reported to, asked, and told the result."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from covenant.ledger.machine.peer_commands import SucceedPeer
from covenant.model.peers.instance import InstanceId
from covenant.peers import message_redaction
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.peers.provider import result_builder, task_reporter
from covenant.seal.keys import new_private_key
from tests.ledger_contract.samples import OPERATOR
from tests.peers.peers_under_test import PeerUnderTest, peer_under_test, worker
from tests.waits import BOUND_S


@asynccontextmanager
async def at_work(home: Path, work: Callable[..., Any]) -> AsyncIterator[tuple[InstanceId, PeerUnderTest]]:
    """Paul works for somebody, to whom nothing is delivered any more."""
    async with peer_under_test(home / "paul", worker(work)) as paul:
        async with peer_under_test(home / "rita") as rita:
            await rita.knows(paul)
            await paul.knows(rita)
            await rita.delegate(paul)
            await paul.until_works(lambda works: works and works[0].sent_seq > 0)
        yield rita.id, paul


async def succeed(paul: PeerUnderTest, old: InstanceId) -> InstanceId:
    """Paul hears that the requester has another identity."""
    keys = InstanceKeys(new_private_key(), (), lambda _: None).bundle(paul.clock())
    return (await paul.ledger.commit(SucceedPeer(by=OPERATOR, old=old, keys_shown=keys, vouched=True, former=()))).id


@pytest.mark.parametrize("moment", ["report", "result"])
async def test_an_identity_that_changes_while_a_message_is_made_loses_neither_report_nor_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    go, loop = asyncio.Event(), asyncio.get_running_loop()
    redact, build = message_redaction.redact_aside, result_builder.build_result
    found: list[InstanceId] = []

    async def work(turn: Any) -> str:
        await go.wait()
        return "done"

    async with at_work(tmp_path, work) as (old, paul):

        async def redact_late(message: Any, *given: Any) -> Any:
            if not found:
                found.append(await succeed(paul, old))
            return await redact(message, *given)

        def build_late(*given: Any) -> Any:
            if not found:
                found.append(asyncio.run_coroutine_threadsafe(succeed(paul, old), loop).result(BOUND_S))
            return build(*given)

        if moment == "report":
            monkeypatch.setattr(task_reporter, "redact_aside", redact_late)
            await paul.until(lambda: found)
        else:
            monkeypatch.setattr(task_reporter, "HEAVY_CHARS", 0)
            monkeypatch.setattr(task_reporter, "build_result", build_late)
        go.set()
        await paul.until_works(lambda works: works[0].ended)
        (done,) = await paul.works()
        assert (done.peer, done.state) == (found[0], "completed")
        assert (await paul.ledger.peer_outbox(found[0]))[-1].typ == "delegation_result"


async def test_a_requester_with_another_identity_is_asked(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def ask(turn: Any) -> Any:
        await go.wait()
        yield turn.need_input("which colour?")

    async with at_work(tmp_path, ask) as (old, paul):
        new = await succeed(paul, old)
        go.set()
        asked: list[str] = []

        async def look() -> bool:
            asked[:] = [each.typ for each in await paul.ledger.peer_outbox(new) if b"which colour?" in bytes(each.body)]
            return bool(asked)

        await paul.until(look)
        assert asked == ["delegation_status"]
