"""Sealed delegation as an A2A extension: its vectors are read by the documents alone, and its daemons negotiate it."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc  # type: ignore[import-untyped]
import pytest
from a2a.types import a2a_pb2 as pb
from a2a.types.a2a_pb2_grpc import A2AServiceStub
from cryptography.exceptions import InvalidSignature, InvalidTag

from covenant.agents.api import Agent, Turn
from tests.conformance.sealed_reader import (
    Instance,
    check_bundle,
    check_document,
    check_hybrid,
    check_offer,
    check_proof,
    check_token,
)
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.independent_peer import without
from tests.e2e.peers.peer_daemons import Node, open_peer_daemons
from tests.places import short_folder
from tests.waits import BOUND_S

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
        both[step["to"]].check_receipt(data, step["receipt"], step.get("certificate"), step["atMs"])
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


@pytest.mark.parametrize("name", ["verify", "hybrid", "certified"])
def test_the_answer_to_a_challenge_is_signed_and_brings_a_token(name: str) -> None:
    (_, asked, query), (_, answered, response), *_ = opened(flow_of(name))
    check_hybrid(query["keys"], query.get("hybridPrekey"))
    assert (asked["typ"], answered["typ"]) == ("capability_query", "capability_response")
    assert (response["nonce"], response["audience"]) == (query["nonce"], asked["from"])
    key = response["keys"]["identityKey"]
    check_document(key, "capabilities", without(response, "signature"), response["signature"])
    check_token(response["token"], key, holder=asked["from"], offer=None, now_ms=asked["iat"])


@pytest.mark.parametrize("name", ["complete", "cancel", "ask", "certified"])
def test_an_offer_and_its_result_prove_each_other(name: str) -> None:
    steps = list(opened(flow_of(name)))
    (first, header, offer), (_, _, result) = next(each for each in steps if "offerId" in each[2]), steps[-1]
    both = sides()
    requester, provider = both[first["from"]], both[first["to"]]
    check_offer(offer, requester.keys["identityKey"], provider.id)
    check_token(offer["token"], provider.keys["identityKey"], holder=requester.id, offer=offer, now_ms=header["iat"])
    check_proof(offer, result, requester.id, provider.id)
    changed = copy.deepcopy(result)
    changed["result"] = "something else"
    with pytest.raises(AssertionError):
        check_proof(offer, changed, requester.id, provider.id)


@pytest.mark.parametrize("name", ["complete", "hybrid", "certified"])
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


CALLS = ("jsonrpc", "jsonrpc_stream", "rest", "rest_stream", "grpc", "grpc_stream")


async def answered(daemon: DaemonUnderTest, binding: str, agent: str, asked: str, token: str) -> str | None:
    """What a daemon says of extensions in the head of its answer."""
    name = f"m-{binding}-{agent}-{asked}"
    if binding.startswith("grpc"):
        request = pb.SendMessageRequest(
            tenant=agent, message=pb.Message(message_id=name, role=pb.ROLE_USER, parts=[pb.Part(text="hello")])
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{daemon.grpc_port}") as channel:
            stub = A2AServiceStub(channel)  # type: ignore[no-untyped-call]
            method = stub.SendStreamingMessage if binding == "grpc_stream" else stub.SendMessage
            head = [("authorization", f"Bearer {token}"), ("a2a-extensions", asked)]
            call = method(request, metadata=head, timeout=BOUND_S)
            found = dict(await call.initial_metadata())
            if binding == "grpc_stream":
                assert [event async for event in call], "it streams as if there were no extension"
            else:
                assert (await call).task.id
            told: str | None = found.get("a2a-extensions")
            return told
    streams = binding.endswith("_stream")
    params: dict[str, Any] = {"message": {"messageId": name, "role": "ROLE_USER", "parts": [{"text": "hello"}]}}
    if not streams:
        params["configuration"] = {"returnImmediately": True}
    path, body = f"/v1/a2a/agents/{agent}", dict[str, Any](params)
    if binding.startswith("rest"):
        path += "/message:stream" if streams else "/message:send"
    else:
        method_name = "SendStreamingMessage" if streams else "SendMessage"
        body = {"jsonrpc": "2.0", "id": 1, "method": method_name, "params": params}
    headers = {"A2A-Version": "1.0", "A2A-Extensions": asked}
    response = await daemon.ask("POST", path, json=body, headers=headers, token=token)
    assert response.status_code == 200, response.text
    return response.headers.get("a2a-extensions")


@pytest.mark.parametrize("binding", CALLS)
async def test_the_extension_is_negotiated_over_every_binding(tmp_path: Path, binding: str) -> None:
    async with open_daemon_under_test(
        tmp_path,
        *(speaker(name) for name in ("echo", "plain")),
        peers={"enabled": True, "profiles": ("echo",)},
        grpc={"enabled": True},
    ) as daemon:
        for agent, asked, told in (
            ("echo", URI, URI),
            ("echo", f"urn:other, {URI}", URI),
            ("echo", "urn:other", None),
            ("plain", URI, None),
        ):
            assert await answered(daemon, binding, agent, asked, daemon.token) == told, (agent, asked)


async def test_the_agents_of_other_tenants_declare_it_and_no_daemon_without_peers_does(tmp_path: Path) -> None:
    definition = {"id": "writer", "kind": "worker", "description": "Writes"}

    async def declared(daemon: DaemonUnderTest) -> list[dict[str, Any]]:
        token = await daemon.add_tenant("acme")
        added = await daemon.ask("POST", "/v1/agents", json=definition, token=token)
        assert added.status_code == 201, added.text
        card = (await daemon.ask("GET", "/v1/a2a/agents/writer", token=token)).json()
        extended = (await daemon.ask("GET", "/v1/a2a/agents/writer/extendedAgentCard", token=token)).json()
        found = [
            [each for each in each_card["capabilities"].get("extensions", ()) if each["uri"] == URI]
            for each_card in (card, extended)
        ]
        assert found[0] == found[1]
        assert (await daemon.ask("GET", "/v1/a2a/agents/writer")).status_code == 404, "nobody else sees it"
        return found[0]

    async with open_daemon_under_test(tmp_path / "on", peers={"enabled": True}) as daemon:
        (said,) = await declared(daemon)
        assert said["params"]["profile"] == "writer"
        assert await answered(daemon, "rest", "writer", URI, daemon.tokens["acme"]) == URI
    async with open_daemon_under_test(tmp_path / "off") as daemon:
        assert await declared(daemon) == []


def speaker(name: str) -> Agent:
    agent = Agent(name)

    @agent
    async def speak(turn: Turn) -> str:
        return f"echo {turn.text}"

    return agent


@pytest.mark.parametrize("method", ["GetTask", "SubscribeToTask"])
async def test_a_refusal_says_what_was_negotiated_over_every_binding(tmp_path: Path, method: str) -> None:
    async with open_daemon_under_test(
        tmp_path, speaker("echo"), peers={"enabled": True, "profiles": ("echo",)}, grpc={"enabled": True}
    ) as daemon:
        token, missing, path = daemon.token, str(uuid4()), "/v1/a2a/agents/echo"
        headers = {"A2A-Version": "1.0", "A2A-Extensions": URI}
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {"id": missing}}
        answers = [await daemon.ask("POST", path, json=call, headers=headers, token=token)]
        rest = f"{path}/tasks/{missing}" + (":subscribe" if method == "SubscribeToTask" else "")
        answers.append(await daemon.ask("GET", rest, headers=headers, token=token))
        for answer in answers:
            assert f"task {missing} was not found" in answer.text
            assert answer.headers.get("a2a-extensions") == URI
        async with grpc.aio.insecure_channel(f"127.0.0.1:{daemon.grpc_port}") as channel:
            stub = A2AServiceStub(channel)  # type: ignore[no-untyped-call]
            head = [("authorization", f"Bearer {token}"), ("a2a-extensions", URI)]
            asked = getattr(pb, f"{method}Request")(tenant="echo", id=missing)
            refused = getattr(stub, method)(asked, metadata=head, timeout=BOUND_S)
            assert dict(await refused.initial_metadata()).get("a2a-extensions") == URI
            assert await refused.code() is grpc.StatusCode.NOT_FOUND
