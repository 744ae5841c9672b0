"""Secrets in what leaves a real daemon for a peer, in each mode: taken out, blocked, only reported, or left alone."""

import json
from collections.abc import Iterator
from typing import Any, Final
from uuid import uuid4

import msgspec
import pytest

from covenant.model.peers.delegation_messages import (
    DelegationCancel,
    DelegationOffer,
    DelegationReject,
    DelegationResult,
    StatusReport,
)
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.peer_daemons import Node, open_peer_daemons, until
from tests.e2e.peers.scripted_peer import ScriptedPeer
from tests.places import short_folder

# Not written in one piece, so that nobody's scanner takes them for real.
GITHUB: Final = "gh" + "p_" + "16C7e42F292c6912E7710c838347Ae178B4a"
ANTHROPIC: Final = "sk-" + "ant-" + "api03-Zx8Kq2Lw9Pv4Rt7Yb1Nc5Md3Fg6Hj0Ks8Qa2Ws4Ed6Rf8Tg0Yh2Uj4Ik6Ol8Pz0Xc2Vb4"
AWS: Final = "AK" + "IA" + "IOSFODNN7EXAMPLQ"
PEM: Final = "-----BEGIN " + "PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n-----END " + "PRIVATE KEY-----"
CANARIES: Final = (GITHUB, ANTHROPIC, AWS, PEM)
TASK: Final = f"clone with {GITHUB} and sign with {PEM}; max_token: 500"
PICKY: Final = f"""
picky = Agent("picky", input_modes=["text/{AWS}"])
picky(say)
"""
CONTEXT: Final = f"the model's key is {ANTHROPIC}, the bucket's is {AWS}"


@pytest.fixture(scope="module", params=["block", "warn", "off"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        yield made.node(str(request.param), AGENTS + PICKY, redaction=request.param)


def known(node: Node) -> ScriptedPeer:
    actor = ScriptedPeer(f"n{uuid4().hex[:8]}")
    actor.known_to(node)
    return actor


def told(node: Node, task_id: str) -> list[dict[str, Any]]:
    """What the sender was told of secrets in what it sent."""
    updates = node.task(task_id)["updates"]
    noted = [(each["body"] or {}).get("metadata", {}).get("covenant.redacted") for each in updates]
    return [finding for each in noted if each for finding in each]


def leaked(text: str) -> list[str]:
    return [each for each in CANARIES if each in text or json.dumps(each)[1:-1] in text]


def test_an_offer_leaves_without_its_secrets_and_the_sender_is_told_what_was_found_where(pair: Pair) -> None:
    with known(pair.alice) as actor:
        offered = pair.alice.delegate(TASK, "researcher", actor.name, context=CONTEXT)
        offer = actor.until(DelegationOffer)
        assert not leaked(msgspec.json.encode(offer).decode())
        assert offer.task.startswith("clone with [redacted:")
        assert offer.task.endswith("; max_token: 500")
        assert offer.context is not None
        assert offer.context.count("[redacted:") == 2
        found = until(lambda: told(pair.alice, offered), bool)
        assert {each["path"] for each in found} == {"/task", "/context"}
        assert all(set(each) == {"path", "kind", "count"} for each in found)
        assert not leaked(json.dumps(pair.alice.task(offered)["updates"]))
        assert pair.alice.delegation(offered)["delegation"]["redacted"] == 4
        pair.alice.post(f"/delegations/{offered}/cancel")


def test_a_result_and_its_conversation_leave_without_their_secrets_and_are_still_proven(pair: Pair) -> None:
    with known(pair.bob) as actor:
        actor.say(pair.bob, actor.offer(pair.bob, "echo", task=TASK))
        result = actor.until(DelegationResult)
    assert result.result is not None
    assert result.result.startswith("echo clone with [redacted:")
    assert result.result.endswith("; max_token: 500")
    assert result.transcript is not None
    assert not leaked(msgspec.json.encode(result).decode())
    (kept,) = pair.bob.delegations(peerId=actor.name)
    assert (kept["state"], kept["redacted"] > 0) == ("completed", True)


def test_values_in_data_are_searched_too_and_numbers_are_left_alone(pair: Pair) -> None:
    with known(pair.bob) as actor:
        actor.say(pair.bob, actor.offer(pair.bob, "leaker", task=GITHUB))
        result = actor.until(DelegationResult)
    said = msgspec.json.encode(result.parts).decode()
    assert "[redacted:" in said
    assert '"max_token":500' in said
    assert not leaked(said)


def test_values_in_what_an_agent_hands_on_are_searched_too(pair: Pair) -> None:
    with known(pair.alice) as actor:
        text = f"{actor.name}/researcher {ANTHROPIC}"
        message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}]}
        asked = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "SendMessage",
            "params": {"message": message, "configuration": {"returnImmediately": True}},
        }
        pair.alice.ask("POST", "/v1/a2a/agents/giver", asked)
        offer = actor.until(DelegationOffer)
        said = msgspec.json.encode(offer.parts).decode()
        assert "[redacted:" in said
        assert '"max_token":500' in said
        assert not leaked(msgspec.json.encode(offer).decode())
        pair.alice.post(f"/delegations/{offer.offer_id}/cancel")


def test_what_an_agent_says_of_its_progress_is_searched_too(pair: Pair) -> None:
    with known(pair.bob) as actor:
        actor.say(pair.bob, actor.offer(pair.bob, "held", task=AWS))
        report = actor.until(StatusReport, lambda it: it.message is not None)
        assert report.message is not None
        assert report.message.startswith("waiting for [redacted:")
        pair.daemons.touch(AWS)
        actor.until(DelegationResult)


def test_why_an_operator_cancels_is_searched_too(pair: Pair) -> None:
    with known(pair.alice) as actor:
        offered = pair.alice.delegate("look around", "researcher", actor.name)
        actor.until(DelegationOffer)
        pair.alice.post(f"/delegations/{offered}/cancel", {"reason": f"{GITHUB} was in it; max_token: 500"})
        cancel = actor.until(DelegationCancel)
        assert cancel.reason == "[redacted:github_token] was in it; max_token: 500"
        assert pair.alice.delegation(offered)["delegation"]["redacted"] == 1
    assert not leaked(pair.alice.log)


def test_between_two_daemons_the_requester_sees_that_something_was_taken_out(pair: Pair) -> None:
    offered = pair.alice.delegate(f"{GITHUB} max_token: 500", "echo", "bob")
    ended = pair.alice.ended(offered)
    assert ended["result"].startswith("echo [redacted:")
    assert ended["result"].endswith(" max_token: 500")
    assert (ended["delegation"]["redacted"], ended["delegation"]["proven"]) == (1, True)
    assert f"bob echo {GITHUB} max_token: 500" not in pair.daemons.lines("runs")


# In the other modes.


def test_what_becomes_of_an_offer_with_secrets_is_as_the_mode_says(node: Node) -> None:
    with known(node) as actor:
        offered = node.delegate(TASK, "researcher", actor.name, context=CONTEXT)
        if node.name == "block":
            ended = until(lambda: node.task(offered), lambda task: task["a2a_state"] == "failed")
            assert ended["result"]["metadata"]["code"] == "secret_found"
            assert not leaked(json.dumps(ended["updates"]))
            assert not [each for each in actor.heard if isinstance(each.message, DelegationOffer)]
            return
        offer = actor.until(DelegationOffer)
        assert (offer.task, offer.context) == (TASK, CONTEXT)
        assert node.delegation(offered)["delegation"]["redacted"] == (4 if node.name == "warn" else 0)
        assert bool(told(node, offered)) == (node.name == "warn")
        node.post(f"/delegations/{offered}/cancel")


def test_what_becomes_of_a_result_with_secrets_is_as_the_mode_says(node: Node) -> None:
    with known(node) as actor:
        actor.say(node, actor.offer(node, "echo", task=TASK))
        result = actor.until(DelegationResult)
    (kept,) = node.delegations(peerId=actor.name)
    if node.name == "block":
        assert (result.status, result.error_code, result.result) == ("failed", "secret_found", None)
        assert result.transcript is None
        assert not leaked(msgspec.json.encode(result).decode())
    else:
        assert result.result == f"echo {TASK}"
    assert (kept["redacted"] > 0) == (node.name != "off")


def test_what_becomes_of_the_reason_of_a_cancel_or_a_reject_is_as_the_mode_says(node: Node) -> None:
    with known(node) as actor:
        offered = node.delegate("look around", "researcher", actor.name)
        actor.until(DelegationOffer)
        node.post(f"/delegations/{offered}/cancel", {"reason": f"{AWS} was in it"})
        assert actor.until(DelegationCancel).reason == ("" if node.name == "block" else f"{AWS} was in it")
        actor.say(node, actor.offer(node, "picky"))
        reject = actor.until(DelegationReject)
        why = f"this agent takes text/{AWS}, not text/plain"
        assert (reject.code, reject.reason) == ("invalid", "" if node.name == "block" else why)
    found = [each["redacted"] for each in node.delegations(peerId=actor.name)]
    assert found == [int(node.name != "off")] * 2


def test_in_every_mode_what_only_looks_like_a_secret_stays_as_it_is(node: Node) -> None:
    task = "max_token: 500, keyboard: qwerty, id 0b0e3c52-4f6f-4b8e-8d0a-6a1f1d2c3b4a, " + "a1" * 32
    with known(node) as actor:
        actor.say(node, actor.offer(node, "echo", task=task))
        result = actor.until(DelegationResult)
    assert (result.status, result.result) == ("completed", f"echo {task}")
