"""What leaves for a peer: searched for secrets, in each mode, and no more of it than the settings allow."""

import asyncio
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from covenant.agents.api import Agent
from covenant.model.content import Json, Text
from covenant.model.peers.delegation import CANCELLED, COMPLETED, REJECTED, RUNNING
from covenant.model.peers.delegation_messages import (
    RESULT_CHARS_MAX,
    DelegationCancel,
    DelegationResult,
    StatusReport,
    TokenUsage,
)
from covenant.model.task_event import StatusUpdate
from covenant.model.task_view import TaskState
from covenant.peers.message_redaction import (
    ERROR_CHARS_MAX,
    MESSAGE_CHARS_MAX,
    REASON_CHARS_MAX,
    redact,
)
from covenant.seal.proofs import verify_evidence
from tests.matrices import first_of
from tests.peers.peers_under_test import PeerUnderTest, changed, said, two_peers, worker

SECRET = "ghp_" + "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8"
HONEST = "max_token: 500"


async def echo(turn: Any) -> Any:
    yield turn.status(f"I was given {turn.text}")
    yield turn.data({"given": turn.text})
    yield turn.text


async def leak(turn: Any) -> Any:
    yield turn.status(f"the key is {SECRET}")
    yield turn.data({"api_key": SECRET})
    yield f"here: {SECRET}; {HONEST}"


async def endless(_: Any) -> str:
    await asyncio.Event().wait()
    return "never"


async def everything(at: PeerUnderTest, task_id: Any) -> str:
    """All that an instance has of a task and of what was said about it, as text."""
    steps = msgspec.json.encode(await at.steps(task_id)).decode()
    return (
        steps
        + repr(await at.ledger.delegations())
        + repr([await at.ledger.peer_outbox(peer.id) for peer in at.ledger.peers()])
    )


async def test_secrets_in_an_offer_are_taken_out_and_the_sender_is_told_where(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(echo)) as (rita, paul):
        parts = (Text(f"use {SECRET}; {HONEST}"), Json({"token": SECRET}))
        task_id = await rita.delegate(paul, f"use {SECRET}; {HONEST}", parts=parts, context=f"and {SECRET}")
        view = await rita.ended(task_id)
        assert view.state is TaskState.COMPLETED
        assert HONEST in said(view)
        (work,) = await paul.works()
        assert SECRET not in await everything(paul, work.task_id)
        (found,) = await rita.noted(task_id, "covenant.redacted")
        assert {each["path"] for each in found} == {"/task", "/context", "/parts/0/value/token"}
        assert (await rita.delegation(task_id)).redacted == 3


async def test_an_offer_with_a_secret_is_not_made_where_that_is_the_setting(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(echo), ours=changed(redaction="block")) as (rita, paul):
        task_id = await rita.delegate(paul, f"use {SECRET}")
        view = await rita.ended(task_id)
        assert view.state is TaskState.FAILED
        assert said(view).startswith("secret_found")
        assert SECRET not in said(view)
        assert "/task" in said(view)
        assert await paul.works() == []


@pytest.mark.parametrize("mode", ["warn", "off"])
async def test_an_offer_leaves_as_it_is_where_that_is_the_setting(tmp_path: Path, mode: Any) -> None:
    ours = changed(redaction=mode)
    async with two_peers(tmp_path, worker(echo), ours=ours, theirs=changed(redaction="off")) as (rita, paul):
        task_id = await rita.delegate(paul, f"use {SECRET}")
        assert SECRET in said(await rita.ended(task_id))
        assert len(await rita.noted(task_id, "covenant.redacted")) == (mode == "warn")


async def test_secrets_in_status_result_and_transcript_are_taken_out_and_the_proof_holds(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(leak)) as (rita, paul):
        task_id = await rita.delegate(paul)
        view = await rita.ended(task_id)
        assert HONEST in said(view)
        assert SECRET not in await everything(rita, task_id)
        evidence = await rita.evidence(task_id)
        assert verify_evidence(msgspec.json.encode(evidence), provider=paul.id, requester=rita.id).holds
        assert (await paul.works())[0].redacted >= 3


async def test_a_result_with_a_secret_is_held_back_where_that_is_the_setting(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(leak), theirs=changed(redaction="block")) as (rita, paul):
        task_id = await rita.delegate(paul)
        view = await rita.ended(task_id)
        assert view.state is TaskState.FAILED
        assert said(view).startswith("secret_found")
        assert SECRET not in await everything(rita, task_id)
        texts = [step.what.text for step in await rita.steps(task_id) if isinstance(step.what, StatusUpdate)]
        assert not any("the key is" in text for text in texts)
        assert (await rita.delegation(task_id)).broken == ()
        assert len(await paul.works()) == 1


SAID = {
    "redact": "[redacted:github_token]",
    "block": None,
    "warn": SECRET,
    "off": SECRET,
}
"""What stands in the place of a secret; None: all of the words stay here."""


@pytest.mark.parametrize("mode", SAID)
async def test_why_something_is_cancelled_is_searched_too_and_it_is_cancelled_in_any_case(
    tmp_path: Path, mode: Any
) -> None:
    async with two_peers(tmp_path, worker(endless), ours=changed(redaction=mode), theirs=changed(redaction="off")) as (
        rita,
        paul,
    ):
        task_id = await rita.delegate(paul)
        await rita.stands(task_id, RUNNING)
        await rita.requester.cancel(task_id, f"I gave it {SECRET}")
        delegation = await rita.stands(task_id, CANCELLED)
        stands_there = SAID[mode]
        told = f"I gave it {stands_there}" if stands_there is not None else "cancelled by the peer"
        assert delegation.reason == f"canceled: {told}"
        assert delegation.redacted == (mode != "off")
        assert (await paul.works())[0].state is CANCELLED


@pytest.mark.parametrize("mode", SAID)
async def test_why_something_is_rejected_is_searched_too(tmp_path: Path, mode: Any) -> None:
    picky = Agent("worker", input_modes=[f"text/x; {SECRET}"])
    picky(echo)
    async with two_peers(tmp_path, picky, theirs=changed(redaction=mode)) as (rita, paul):
        task_id = await rita.delegate(paul)
        await rita.ended(task_id)
        stands_there = SAID[mode]
        told = f"this agent takes text/x; {stands_there}, not text/plain" if stands_there is not None else ""
        assert ((await rita.delegation(task_id)).state, (await rita.delegation(task_id)).reason) == (REJECTED, told)
        (work,) = await paul.works()
        assert (work.reason, work.redacted) == (told, mode != "off")


@pytest.mark.parametrize("before", range(440, 500, 10))
def test_a_reason_is_not_cut_in_the_middle_of_a_secret_before_anybody_looks(before: int) -> None:
    cancel = DelegationCancel(offer_id=str(uuid4()), reason=f"{'x ' * (before // 2)}{SECRET} and more" + " y" * 300)
    cleared = redact(cancel, "redact")
    assert (cleared.found, SECRET[:8] in cleared.message.reason) == (1, False)
    assert len(cleared.message.reason) == REASON_CHARS_MAX
    assert len(redact(cancel, "off").message.reason) == REASON_CHARS_MAX


def across(limit: int, part: int) -> str:
    """A text with a secret of which a part stands before this limit."""
    return f"{'x ' * ((limit - part) // 2)}{SECRET} and more{' y' * 300}"


def result_of(**words: Any) -> DelegationResult:
    return DelegationResult(
        offer_id=str(uuid4()),
        delegation_id=str(uuid4()),
        profile="worker",
        status="completed",
        token_usage=TokenUsage(),
        duration_ms=1,
        **words,
    )


@pytest.mark.parametrize("part", first_of(range(4, 40, 6), 2))
def test_no_words_are_cut_in_the_middle_of_a_secret_before_anybody_looks(part: int) -> None:
    told = across(MESSAGE_CHARS_MAX, part)
    report = StatusReport(
        offer_id=str(uuid4()),
        delegation_id=str(uuid4()),
        seq=1,
        status="running",
        message=told,
        token_usage=TokenUsage(),
    )
    cleared = redact(report, "redact")
    assert cleared.message.message is not None
    assert (cleared.found, SECRET[:4] in cleared.message.message) == (1, False)
    assert len(redact(report, "off").message.message or "") == MESSAGE_CHARS_MAX
    assert len(redact(report, "warn").message.message or "") == MESSAGE_CHARS_MAX
    assert redact(report, "block").message.message is None
    failed = result_of(error=across(ERROR_CHARS_MAX, part), result=across(RESULT_CHARS_MAX, part))
    held = redact(failed, "redact")
    assert (held.found, SECRET[:4] in f"{held.message.error}{held.message.result}") == (2, False)
    for mode in ("warn", "off"):
        left = redact(failed, mode).message
        assert (len(left.error or ""), len(left.result or "")) == (ERROR_CHARS_MAX, RESULT_CHARS_MAX)


@pytest.mark.parametrize("part", [4, 16, 30])
async def test_a_status_that_is_too_long_leaves_without_half_a_secret(tmp_path: Path, part: int) -> None:
    go_on = asyncio.Event()

    async def verbose(turn: Any) -> Any:
        yield turn.status(across(MESSAGE_CHARS_MAX, part))
        await go_on.wait()
        yield "done"

    async with two_peers(tmp_path, worker(verbose)) as (rita, paul):
        task_id = await rita.delegate(paul)
        await rita.until_delegation(task_id, lambda it: it.message is not None)
        delegation = await rita.delegation(task_id)
        assert delegation.message is not None
        assert SECRET[:4] not in delegation.message
        assert delegation.message.startswith("x x ")
        go_on.set()
        assert said(await rita.ended(task_id)) == "done"


async def test_the_conversation_stays_where_it_was_held_where_that_is_the_setting(tmp_path: Path) -> None:
    async with two_peers(tmp_path, worker(echo), theirs=changed(transcripts="root")) as (rita, paul):
        task_id = await rita.delegate(paul, "hello")
        assert said(await rita.ended(task_id)) == "hello"
        evidence = await rita.evidence(task_id)
        assert evidence["transcript"] is None
        assert evidence["proof"]["entries"] == 4
        report = verify_evidence(msgspec.json.encode(evidence), provider=paul.id, requester=rita.id)
        assert report.holds
        assert report.unchecked == ("transcript",)
        assert (await rita.delegation(task_id)).state is COMPLETED


async def test_a_result_that_is_too_large_leaves_out_its_transcript_and_then_its_last_parts(tmp_path: Path) -> None:
    async def much(turn: Any) -> Any:
        for number in range(5):
            yield turn.file(f"{number}.bin", bytes(1_500_000))
        yield "done"

    async with two_peers(tmp_path, worker(much)) as (rita, paul):
        task_id = await rita.delegate(paul)
        view = await rita.ended(task_id)
        assert (view.state, said(view)) == (TaskState.COMPLETED, "done")
        assert view.partial
        assert [artifact.name for artifact in view.artifacts] == ["0.bin", "1.bin", "2.bin", "3.bin"]
        delegation = await rita.delegation(task_id)
        assert delegation.code == "result_too_large"
        assert delegation.broken == ()
        assert (await paul.works())[0].state is COMPLETED
