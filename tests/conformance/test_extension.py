"""Sealed delegation as an A2A extension: its vectors are read by the documents alone, and its daemons negotiate it."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature, InvalidTag

from tests.conformance.sealed_reader import (
    Instance,
    check_bundle,
    check_document,
    check_hybrid,
    check_offer,
    check_proof,
    check_token,
)
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.independent_peer import without
from tests.e2e.peers.peer_daemons import Node, open_peer_daemons
from tests.places import short_folder

DOCS = Path(__file__).parents[2] / "docs"
VECTORS = json.loads((DOCS / "formats" / "extension-vectors.json").read_text())
URI = VECTORS["uri"]


def sides() -> dict[str, Instance]:
    return {name: Instance(shown) for name, shown in VECTORS["instances"].items()}


def opened(flow: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Each step with its header and message."""
    both = sides()
    known = {each.id: each.key for each in both.values()}
    for step in flow["steps"]:
        data = step["bytes"].encode()
        assert json.loads(data) == step["envelope"]
        header, body = both[step["to"]].open(data, known=known, now_ms=step["atMs"])
        assert (header["from"], body.decode()) == (both[step["from"]].id, step["body"])
        assert both[step["to"]].receipt(data) == step["receipt"]
        yield step, header, json.loads(body)


def flow_of(name: str) -> dict[str, Any]:
    return next(flow for flow in VECTORS["flows"] if flow["name"] == name)


def test_both_introductions_prove_their_keys() -> None:
    for name, side in sides().items():
        assert check_bundle(side.keys, VECTORS["flows"][0]["steps"][0]["atMs"]) == side.key
        check_hybrid(side.keys, side.hybrid)
        assert VECTORS["instances"][name]["introduction"]["name"] == name


@pytest.mark.parametrize("name", [flow["name"] for flow in VECTORS["flows"]])
def test_every_envelope_of_every_flow_is_opened_and_numbered_in_order(name: str) -> None:
    said: dict[str, int] = {}
    for step, header, _ in opened(flow_of(name)):
        if "seq" in header:
            said[step["from"]] = said.get(step["from"], 0) + 1
            assert header["seq"] == said[step["from"]]


@pytest.mark.parametrize("name", ["verify", "hybrid"])
def test_the_answer_to_a_challenge_is_signed_and_brings_a_token(name: str) -> None:
    (_, asked, query), (_, answered, response), *_ = opened(flow_of(name))
    check_hybrid(query["keys"], query.get("hybridPrekey"))
    assert (asked["typ"], answered["typ"]) == ("capability_query", "capability_response")
    assert (response["nonce"], response["audience"]) == (query["nonce"], asked["from"])
    key = response["keys"]["identityKey"]
    check_document(key, "capabilities", without(response, "signature"), response["signature"])
    check_token(response["token"], key, holder=asked["from"], offer=None, now_ms=asked["iat"])


@pytest.mark.parametrize("name", ["complete", "cancel", "ask"])
def test_an_offer_and_its_result_prove_each_other(name: str) -> None:
    steps = list(opened(flow_of(name)))
    (_, header, offer), (_, _, result) = steps[0], steps[-1]
    both = sides()
    requester, provider = both["requester"], both["provider"]
    check_offer(offer, requester.keys["identityKey"], provider.id)
    check_token(offer["token"], provider.keys["identityKey"], holder=requester.id, offer=offer, now_ms=header["iat"])
    check_proof(offer, result, requester.id, provider.id)
    changed = copy.deepcopy(result)
    changed["result"] = "something else"
    with pytest.raises(AssertionError):
        check_proof(offer, changed, requester.id, provider.id)


@pytest.mark.parametrize("name", ["complete", "hybrid"])
def test_the_reader_refuses_what_was_changed_on_the_way(name: str) -> None:
    both = sides()
    known = {each.id: each.key for each in both.values()}
    step = flow_of(name)["steps"][0]
    for part in ("protected", "ciphertext", "signature"):
        envelope = dict(step["envelope"])
        envelope[part] = ("B" if envelope[part][0] == "A" else "A") + envelope[part][1:]
        with pytest.raises((AssertionError, InvalidSignature, InvalidTag, ValueError)):
            both[step["to"]].open(json.dumps(envelope).encode(), known=known, now_ms=step["atMs"])


def test_the_page_names_the_uri_and_every_flow() -> None:
    page = (DOCS / "extension.md").read_text()
    assert URI in page
    for flow in VECTORS["flows"]:
        assert f"`{flow['name']}`" in page, flow["name"]


def _declared(node: Node, agent: str) -> dict[str, Any] | None:
    card = node.get(f"/v1/a2a/agents/{agent}")
    return next((each for each in card["capabilities"].get("extensions", ()) if each["uri"] == URI), None)


def test_a_daemon_declares_the_extension_and_says_when_it_is_active() -> None:
    with short_folder() as folder, open_peer_daemons(folder) as daemons:
        bob = daemons.node("bob", AGENTS, profiles="echo")
        said = _declared(bob, "echo")
        assert said is not None
        assert (said.get("required", False), said["params"]["profile"]) == (False, "echo")
        assert said["params"]["receive"] == f"{bob.url}/api/v1/a2a/receive"
        assert {2, 3} <= set(said["params"]["versions"])
        assert _declared(bob, "held") is None
        for agent, asked, told in (
            ("echo", URI, URI),
            ("echo", f"urn:other, {URI}", URI),
            ("echo", "urn:other", None),
            ("held", URI, None),
        ):
            message = {"messageId": f"m-{agent}-{asked}", "role": "ROLE_USER", "parts": [{"text": "no-gate"}]}
            call = {
                "jsonrpc": "2.0",
                "id": 1,
                "method": "SendMessage",
                "params": {"message": message, "configuration": {"returnImmediately": True}},
            }
            answer = bob.call("POST", f"/v1/a2a/agents/{agent}", call, headers={"A2A-Extensions": asked})
            assert (answer.status, answer.headers.get("a2a-extensions")) == (200, told), (agent, asked, answer)
