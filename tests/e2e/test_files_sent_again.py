"""The same request with the same file, uploaded anew or named by a URL that is old by now, is the same request."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from covenant import Agent, Conflict, Forbidden, ResourceLink, Task, TaskId, Turn
from covenant.ledger.machine.commands import Accept
from covenant.model.task import fingerprint
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.e2e.test_files import LARGE, SHA256, message, path_of, raw, upload
from tests.ledger_contract.fake_clock import FakeClock

LINK_MS = 3_600_000


def make_agents() -> tuple[Agent, ...]:
    sizes, twice = Agent("sizes"), Agent("twice")

    @sizes
    async def tell(turn: Turn) -> str:
        return str([sum([len(piece) async for piece in turn.open_file(part)]) for part in turn.parts])

    @twice
    async def ask(turn: Turn) -> Any:
        if turn.text == "end":
            return "done"
        return turn.need_input("and?")

    return sizes, twice


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def daemon(tmp_path: Path, clock: FakeClock) -> AsyncIterator[DaemonUnderTest]:
    agents = make_agents()
    settings: dict[str, Any] = {"a2a": {"message_bytes_max": 8_000_000}}
    async with open_daemon_under_test(tmp_path / "home", *agents, clock=clock, **settings) as made:
        yield made


async def tell(
    daemon: DaemonUnderTest, agent: str, key: str, *parts: dict[str, Any], task_id: str | None = None
) -> Any:
    """The task's id and generation-free state, or why the message is refused."""
    said = message(*parts)
    said["message"] |= {"messageId": str(uuid4())} | ({"taskId": task_id} if task_id else {})
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": said}
    headers = {"idempotency-key": key}
    answer = (await daemon.ask("POST", f"/v1/a2a/agents/{agent}", json=body, headers=headers)).json()
    if "error" in answer:
        return answer["error"]["message"]
    task = answer["result"]["task"]
    return task["id"], task["status"]["state"], len(task["history"])


async def test_a_file_that_is_uploaded_again_is_the_same_file_under_the_same_key(
    daemon: DaemonUnderTest, clock: FakeClock
) -> None:
    first = (await upload(daemon, LARGE))["url"]
    sent = await tell(daemon, "sizes", "k", {"url": first, "filename": "a.bin"})
    clock.advance(1_000)
    second = (await upload(daemon, LARGE))["url"]
    assert second != first
    assert await tell(daemon, "sizes", "k", {"url": second, "filename": "a.bin"}) == sent
    for other in (
        {"url": second, "filename": "b.bin"},
        {"url": second, "filename": "a.bin", "mediaType": "image/png"},
        {"url": (await upload(daemon, LARGE + b"!"))["url"], "filename": "a.bin"},
        {"url": f"urn:sha256:{SHA256}", "filename": "a.bin", "metadata": {"x": 1}},
    ):
        assert "Idempotency-Key was used" in await tell(daemon, "sizes", "k", other), other


async def test_a_request_finds_its_task_after_its_url_is_old(daemon: DaemonUnderTest, clock: FakeClock) -> None:
    url = (await upload(daemon, LARGE))["url"]
    sent = await tell(daemon, "sizes", "k", {"url": url})
    clock.advance(LINK_MS + 1)
    assert await tell(daemon, "sizes", "k", {"url": url}) == sent
    assert "Idempotency-Key was used" in await tell(daemon, "sizes", "k", {"url": url}, {"text": "more"})
    assert "has expired" in await tell(daemon, "sizes", "k2", {"url": url})
    assert (await daemon.ask("GET", path_of(url), token="")).json()["code"] == "link_expired"


async def test_a_message_with_a_file_is_said_once_under_its_key(daemon: DaemonUnderTest, clock: FakeClock) -> None:
    task_id, _, _ = await tell(daemon, "twice", "begin", {"text": "go"})
    url = (await upload(daemon, LARGE))["url"]
    said = await tell(daemon, "twice", "answer", {"url": url}, task_id=task_id)
    assert said[:2] == (task_id, "TASK_STATE_INPUT_REQUIRED")
    bytes_too = await tell(daemon, "twice", "bytes", raw(LARGE), task_id=task_id)
    clock.advance(LINK_MS + 1)
    fresh = (await upload(daemon, LARGE))["url"]

    async def check() -> None:
        for again in (url, fresh):
            repeated = await tell(daemon, "twice", "answer", {"url": again}, task_id=task_id)
            assert repeated[0] == task_id, repeated
            assert repeated[2] == told[2]
        assert (await tell(daemon, "twice", "bytes", raw(LARGE), task_id=task_id))[2] == told[2]

    told = bytes_too
    await check()
    assert "has expired" in await tell(daemon, "twice", "other", {"url": url}, task_id=task_id)
    assert "Idempotency-Key was used" in await tell(daemon, "twice", "answer", {"text": "no"}, task_id=task_id)
    told = await tell(daemon, "twice", "end", {"text": "end"}, task_id=task_id)
    assert told[1] == "TASK_STATE_COMPLETED"
    await check()


async def test_the_mailbox_knows_a_task_by_the_hashes_of_its_files(daemon: DaemonUnderTest, clock: FakeClock) -> None:
    me, mailbox = daemon.operator.agent, daemon.mailbox
    await daemon.identities.grant(daemon.operator, f"a2a.send.{me.display}")

    def task_with(url: str, task_id: str, name: str = "in.bin") -> Task:
        parts = (ResourceLink(url, name),)
        return Task(id=TaskId(task_id), sender=me, recipient=me, intent_text="look", parts=parts)

    one, former = str(uuid4()), str(uuid4())
    url = (await upload(daemon, LARGE))["url"]
    assert not (await mailbox.accept(daemon.operator, task_with(url, one))).duplicate
    # As an earlier version has accepted it, by a digest over the URL.
    before = task_with(url, former)
    await daemon.ledger.commit(Accept(task=before, digest=fingerprint(before)[0]))
    clock.advance(LINK_MS + 1)
    fresh = (await upload(daemon, LARGE))["url"]
    for again in (url, fresh):
        assert (await mailbox.accept(daemon.operator, task_with(again, one))).duplicate
    assert (await mailbox.accept(daemon.operator, before)).duplicate
    for refused in (task_with(fresh, one, "out.bin"), task_with(fresh, former)):
        with pytest.raises(Conflict):
            await mailbox.accept(daemon.operator, refused)
    with pytest.raises(Forbidden):
        await mailbox.accept(daemon.operator, task_with(url, str(uuid4())))
