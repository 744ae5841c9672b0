"""Where a task is done: the task's own field says so, and of old tasks the request metadata that the daemon wrote."""

from pathlib import Path

import pytest

from covenant.daemon.environment import now_ms
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.commands import Accept
from covenant.model.ids import AgentId
from covenant.model.task import (
    DELEGATION,
    MAILBOX,
    NATIVE,
    PEER_RECIPIENT,
    REMOTE,
    SIMPLE,
    URL_RECIPIENT,
    Target,
    Task,
    fingerprint,
    target_of,
)
from tests.ledger_contract.samples import BOB, make_task, task_id

OLD = {REMOTE: {"name": "weather", "url": "https://weather.example/", "timeout_ms": 5}}
TARGET = Target(name="weather", url="https://weather.example/")


def sent_to(name: str) -> AgentId:
    return AgentId(f"{name}@default", BOB.pubkey)


@pytest.mark.parametrize("origin", ["a2a", NATIVE, SIMPLE, MAILBOX, "peer"])
def test_what_a_client_wrote_into_metadata_is_no_target(origin: str) -> None:
    assert target_of(make_task(1, origin=origin, request_metadata=OLD, metadata=OLD)) is None


async def test_tasks_that_the_daemon_sent_elsewhere_before_there_was_a_field_go_where_they_were_sent(
    tmp_path: Path,
) -> None:
    peer = {REMOTE: {"peer": "friday_peer", "profile": "coder", "budget": 5, "context": "more"}}
    old = [
        make_task(1, origin=DELEGATION, parent=task_id(9), request_metadata=OLD),
        make_task(2, origin="mcp", recipient=sent_to(URL_RECIPIENT), request_metadata=OLD),
        make_task(3, origin=NATIVE, recipient=sent_to(PEER_RECIPIENT), request_metadata=peer),
        make_task(4, origin=DELEGATION, parent=task_id(9), request_metadata={REMOTE: "nonsense"}),
        make_task(5, origin=DELEGATION, parent=task_id(9), target=TARGET),
    ]
    ledger = await open_ledger(tmp_path, clock=now_ms)
    for task in (make_task(9), *old):
        await ledger.commit(Accept(task=task, digest=fingerprint(task)[0]))
    await ledger.close()
    ledger = await open_ledger(tmp_path, clock=now_ms)
    kept: list[Task] = []
    for number in range(1, 6):
        entry = await ledger.entry(task_id(number))
        assert entry is not None
        kept.append(entry.task)
    await ledger.close()
    of_peer = Target(peer="friday_peer", profile="coder", budget=5, context="more")
    assert [target_of(task) for task in kept] == [TARGET, TARGET, of_peer, None, TARGET]
