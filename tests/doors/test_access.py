"""Who may do what, over both doors, with keys and grants as the registry makes them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import pytest

import covenant.seal
from covenant.agents.api import Agent, Turn
from covenant.model.ids import AgentId, PublicKey, base58
from covenant.seal.keys import verify_grant
from tests.daemon_under_test import open_daemon_under_test
from tests.doors.clients import Http
from tests.doors.doors_under_test import DoorsUnderTest, EnrolledCaller, new_task, now_ms
from tests.doors.operator_api.test_operations import leased_task, result_of
from tests.doors.speakers import Speaker
from tests.doors.test_bad_input import refused

KEY = PublicKey(base58(b"one and the same key, 32 bytes  "))
SEAL = str(Path(covenant.seal.__file__).parent)
READS = {"open", "open_code", "read", "readv", "pread", "preadv", "stat", "scandir", "listdir"}


async def enroll_key(under_test: DoorsUnderTest, speaker: Speaker, display: str, *actions: str) -> EnrolledCaller:
    """Whoever holds the one key, under this name."""
    asked = {"display": display, "pubkey": KEY, "actions": list(actions)}
    token = (await speaker.ask(under_test.operator, "enroll_identity", **asked))["token_b58"]
    return EnrolledCaller(AgentId(display, KEY), token, Http(under_test.port, token))


@pytest.mark.parametrize("to", [None, "bob@test", "alice@test", "operator@test"])
async def test_nobody_but_the_operator_makes_a_grant_for_itself_or_another(
    under_test: DoorsUnderTest, speaker: Speaker, to: str | None
) -> None:
    alice, bob = await under_test.pair()
    await under_test.grant("a2a.compact", bob)
    before = await under_test.ledger.grants()
    named = {} if to is None else {"to": to}
    for action in ("a2a.send.bob@test", "a2a.compact"):
        await refused(speaker, bob, "grant_capability", "operator_required", 403, action=action, **named)
    asked = {"display": "eve@test", "actions": ["a2a.send.alice@test"]}
    await refused(speaker, bob, "enroll_identity", "operator_required", 403, **asked)
    assert await under_test.ledger.grants() == before
    rows = [row["kind"] for row in await under_test.audit("operator_required")]
    assert sorted(row["action"] or "" for row in rows) == ["", "a2a.compact", "a2a.send.bob@test"]
    await refused(speaker, alice, "send_a2a_task", "capability_missing", 403, task=new_task(alice))


async def test_equal_grants_have_two_handles_and_each_is_revoked_alone(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    _, bob = await under_test.pair()
    carol = await under_test.enroll("carol@test")
    equal = {
        "action": "a2a.send.bob@test",
        "to": "carol@test",
        "scope": {"version": 1, "peer_pubkey_b58": bob.agent.pubkey},
        "expires_at": now_ms() + 600_000,
    }
    granted = [await speaker.ask(under_test.operator, "grant_capability", **equal) for _ in range(2)]
    handles = [grant.pop("signature_b58") for grant in granted]
    assert granted[0] == granted[1]
    assert handles[0] != handles[1]
    await speaker.ask(under_test.operator, "revoke_capability", signature_b58=handles[0])
    await speaker.ask(carol, "send_a2a_task", task=new_task(bob))
    await speaker.ask(under_test.operator, "revoke_capability", signature_b58=handles[1])
    await refused(speaker, carol, "send_a2a_task", "capability_missing", 403, task=new_task(bob))
    again = await speaker.ask(under_test.operator, "grant_capability", **equal)
    assert again["signature_b58"] not in handles
    await speaker.ask(carol, "send_a2a_task", task=new_task(bob))


async def test_equal_grants_of_one_moment_have_handles_of_their_own(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    asked = {"display": "carol@test", "actions": ["a2a.send.bob@test"] * 50}
    granted = (await speaker.ask(under_test.operator, "enroll_identity", **asked))["granted"]
    assert len({grant["signature_b58"] for grant in granted}) == 50


async def test_the_newest_grants_come_first_also_those_of_one_millisecond(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    actions = [f"a2a.send.agent-{number}@test" for number in range(20)]
    carol = await under_test.enroll("carol@test", *actions)
    await under_test.enroll("dave@test", "a2a.compact")
    for limit in (1, 5, 20):
        listed = (await speaker.ask(carol, "recent_capabilities", limit=limit))["capabilities"]
        assert [each["action"] for each in listed] == actions[::-1][:limit]


async def test_a_key_keeps_its_tasks_and_results_under_another_name(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    before = await enroll_key(under_test, speaker, "before@test", "a2a.send.bob@test")
    for action in ("a2a.send.before@test", "a2a.respond.before@test"):
        await under_test.grant(action, alice if "send" in action else bob)
    theirs, _ = await leased_task(speaker, before, bob)
    await speaker.ask(bob, "post_a2a_result", result=result_of(theirs))
    await speaker.ask(alice, "send_a2a_task", task=new_task(before, "under the old name"))

    await speaker.ask(under_test.operator, "revoke_identity", identity="before@test")
    after = await enroll_key(under_test, speaker, "after@test", "a2a.respond.alice@test", "a2a.repair.requeue")
    seen = await speaker.ask(after, "a2a_queue")
    assert [entry["task"]["intent_text"] for entry in seen["tasks"]] == ["under the old name"]
    assert [result["task_id"] for result in seen["results"]] == [theirs["id"]]
    taken = await speaker.ask(after, "try_recv_a2a_task")
    assert taken["task"]["recipient"] == before.wire
    requeue = {"action": "requeue", "duplicate_risk": "operator_accepted", "lease_id": taken["lease"]["lease_id"]}
    request = {"task_id": taken["task"]["id"], "reason": "a new name", "command": requeue}
    assert (await speaker.ask(after, "repair_a2a_task", request=request))["outcome"]["state"] == "queued"
    lease_id = (await speaker.ask(after, "try_recv_a2a_task"))["lease"]["lease_id"]
    await speaker.ask(after, "post_a2a_result", result={**result_of(taken["task"]), "lease_id": lease_id})
    assert (await speaker.ask(after, "try_recv_a2a_result"))["result"] == result_of(theirs)
    assert (await speaker.ask(alice, "try_recv_a2a_result"))["result"] == result_of(taken["task"])


async def test_a_name_or_a_key_that_belongs_to_another_is_refused_as_recipient(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    await speaker.ask(under_test.operator, "grant_capability", action=f"a2a.send.{bob.agent.pubkey}", to="alice@test")
    for wrong in ({"pubkey": KEY}, {"pubkey": alice.agent.pubkey}, {"display": "bert@test"}, {"display": "alice@test"}):
        task = {**new_task(bob), "recipient": {**bob.wire, **wrong}}
        await refused(speaker, alice, "send_a2a_task", "recipient_mismatch", 400, task=task)
    assert (await speaker.ask(bob, "try_recv_a2a_task"))["task"] is None


async def test_who_may_not_send_to_somebody_hears_the_same_whether_there_is_somebody(
    under_test: DoorsUnderTest, speaker: Speaker
) -> None:
    alice, bob = await under_test.pair()
    carol = await enroll_key(under_test, speaker, "carol@test")
    heard: set[tuple[str, int, str]] = set()
    recipients = [
        carol.wire,
        {"display": "carol@test", "pubkey": KEY},
        {"display": "carol@test", "pubkey": alice.agent.pubkey},
        {"display": "dora2@test", "pubkey": KEY},
        {"display": "carol@test"},
        {"display": "dora2@test"},
        {"display": "dora2@test", "pubkey": carol.agent.pubkey},
    ]
    for recipient in recipients:
        task = {**new_task(bob), "recipient": recipient}
        refusal = await refused(speaker, alice, "send_a2a_task", "capability_missing", 403, task=task)
        heard.add(("capability_missing", 403, refusal.replace(recipient["display"], "NAME")))
    assert len(heard) == 1
    # Who may send to a key is not told whose name another one is, either.
    await speaker.ask(under_test.operator, "grant_capability", action=f"a2a.send.{bob.agent.pubkey}", to="alice@test")
    told = set()
    for display in ("carol@test", "dora2@test"):
        task = {**new_task(bob), "recipient": {"display": display, "pubkey": bob.agent.pubkey}}
        told.add(await refused(speaker, alice, "send_a2a_task", "recipient_mismatch", 400, task=task))
    assert len(told) == 1
    assert not any(word in each for each in told for word in (carol.agent.pubkey, bob.agent.pubkey, "carol", "bob"))


@contextmanager
def watched() -> Iterator[set[str]]:
    """What this thread reads of files, and calls of keys and signatures, meanwhile."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, called: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SEAL):
            found.add(frame.f_code.co_name)
        elif event == "c_call" and called.__name__ in READS and called.__module__ in ("posix", "io", "_io"):
            found.add(called.__name__)

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


async def test_a_capability_check_reads_no_file_and_verifies_no_signature(under_test: DoorsUnderTest) -> None:
    alice, bob = await under_test.pair()
    for number in range(20):
        await under_test.grant("a2a.send.bob@test", alice, task_id=f"another {number}")
    with watched() as found:
        await alice.http.post("/a2a/tasks", new_task(bob))
    assert found == {"token_hash"}
    (row,) = await under_test.audit("capability_check")
    assert row["kind"]["passed"] is True


async def test_a_check_that_read_a_file_or_verified_a_signature_would_be_seen(under_test: DoorsUnderTest) -> None:
    await under_test.pair()
    grant = (await under_test.ledger.grants())[0]
    with watched() as found:
        assert verify_grant(grant)
        Path(__file__).read_bytes()
    assert {"verify_grant", "open"} <= found


@pytest.mark.parametrize("lists", [False, True], ids=["refused", "allowed"])
async def test_whoever_has_no_token_lists_what_was_sent_without_one_only_if_a_setting_says_so(
    tmp_path: Path, *, lists: bool
) -> None:
    open_agent = Agent("open")

    @open_agent
    async def answer(turn: Turn) -> str:
        return turn.text

    published = {"publish": "open", "publish_anonymous": "loopback", "anonymous_lists": lists}
    async with open_daemon_under_test(tmp_path, open_agent, a2a=published) as daemon:

        async def ask(path: str, token: str | None, said: dict[str, Any] | None = None) -> httpx2.Response:
            method = "GET" if said is None else "POST"
            headers = {"A2A-Version": "1.0"}
            return await daemon.ask(method, f"/v1/a2a/agents/open/{path}", json=said, headers=headers, token=token)

        sent = {}
        for name, token in (("known", None), ("stranger", "")):
            message = {"messageId": name, "role": "ROLE_USER", "parts": [{"text": name}]}
            sent[name] = (await ask("message:send", token, {"message": message})).json()["task"]["id"]
        listed = await ask("tasks", "")
        if lists:
            assert [task["id"] for task in listed.json()["tasks"]] == [sent["stranger"]]
        else:
            assert listed.status_code == 401
        assert {task["id"] for task in (await ask("tasks", None)).json()["tasks"]} == set(sent.values())
