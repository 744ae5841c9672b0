"""The inspector: any agent, ours or elsewhere, with every frame and what breaks the specification."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.api import Agent
from covenant.outbound.remote.inspector import INSPECTIONS_MAX
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.dashboard.browser import Browser, asking_agent, new_viewer, open_browser
from tests.outbound.http_servers import HERE, always, http_server, redirect, reply, silence
from tests.outbound.sdk_servers import GRPC_03, GRPC_1, JSONRPC_03, JSONRPC_1, REST_03, REST_1, sdk_server
from tests.waits import until

SECRET = "Bearer s3cret-w0rd-0f-the-operator"


@asynccontextmanager
async def open_inspector(folder: Path, *agents: Agent, **chosen: Any) -> AsyncIterator[tuple[DaemonUnderTest, Browser]]:
    chosen.setdefault("outbound", {"allow": (HERE,)})
    async with (
        open_daemon_under_test(folder / "home", *agents, **chosen) as daemon,
        open_browser(daemon, daemon.token) as browser,
    ):
        yield daemon, browser


async def inspect(browser: Browser, **asked: Any) -> Any:
    answer = await browser.api("POST", "a2a/inspect", asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def directions(found: Any) -> str:
    return " ".join(frame["direction"] for frame in found["frames"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("binding", "dialect"),
    [("jsonrpc", "1.0"), ("rest", "1.0"), ("grpc", "1.0"), ("jsonrpc", "0.3"), ("rest", "0.3"), ("grpc", "0.3")],
)
async def test_our_own_agent_is_called_through_its_door_in_every_way(
    short_path: Path, binding: str, dialect: str, stream: bool
) -> None:
    served = {"grpc": {"enabled": True}, "a2a": {"publish": "teller"}}
    async with open_inspector(short_path, asking_agent(), **served) as (_, browser):
        asked = {"tenant": "default", "agent": "teller", "binding": binding, "dialect": dialect, "stream": stream}
        found = await inspect(browser, text="paint it", **asked)
        assert found["ok"], found["error"]
        assert [(turn["role"], turn["text"]) for turn in found["conversation"]] == [
            ("user", "paint it"),
            ("agent", "which <b>colour</b>?"),
        ]
        last = found["conversation"][-1]
        assert last["state"] == "input-required"
        assert found["findings"] == []
        assert directions(found).startswith("out in")
        found = await inspect(browser, text="blue", task_id=last["task_id"], interface=found["interface"], **asked)
        assert found["conversation"][-1]["text"] == "done in blue"
        assert found["findings"] == []


async def test_a_task_is_read_and_canceled_and_a_key_is_sent_along(short_path: Path) -> None:
    async with open_inspector(short_path, asking_agent()) as (_, browser):
        first = await inspect(browser, agent="teller", text="paint it", key="k1")
        again = await inspect(browser, agent="teller", text="paint it", key="k1")
        task_id = first["conversation"][-1]["task_id"]
        assert again["conversation"][-1]["task_id"] == task_id
        assert first["frames"][0]["headers"]["idempotency-key"] == "k1"
        got = await inspect(browser, agent="teller", method="get", task_id=task_id)
        assert (got["conversation"][-1]["state"], got["findings"]) == ("input-required", [])
        canceled = await inspect(browser, agent="teller", method="cancel", task_id=task_id)
        assert (canceled["conversation"][-1]["state"], canceled["findings"]) == ("canceled", [])


async def test_an_agent_of_a_tenant_is_called_in_the_tenants_place_without_its_token(short_path: Path) -> None:
    async with open_inspector(short_path) as (daemon, browser):
        await daemon.add_tenant("acme", asking_agent())
        found = await inspect(browser, tenant="acme", agent="teller", text="green")
        assert found["conversation"][-1]["text"] == "done in green"
        assert "authorization" not in found["frames"][0]["headers"]
        shown = await browser.read(f"a2a/tasks/{found['conversation'][-1]['task_id']}/show")
        assert shown["task"]["tenant"] == "acme"
        # There is no such agent where the operator's own token leads.
        assert not (await inspect(browser, tenant="default", agent="teller", text="green"))["ok"]
        await daemon.tenants.change(daemon.operator, "acme", disabled=True)
        refused = await browser.api("POST", "a2a/inspect", {"tenant": "acme", "agent": "teller", "text": "x"})
        assert refused.json()["code"] == "tenant_disabled"


async def test_a_token_that_is_typed_is_judged_as_that_of_any_client(short_path: Path) -> None:
    async with open_inspector(short_path, asking_agent()) as (daemon, browser):
        found = await inspect(browser, agent="teller", text="x", headers={"Authorization": SECRET})
        assert not found["ok"]
        assert found["frames"][-1]["status"] == 401
        assert "s3cret" not in json.dumps(found)
        token = await daemon.add_tenant("acme")
        headers = {"Authorization": f"Bearer {token}"}
        card = await inspect(browser, agent="teller", method="card", headers=headers)
        assert not card["ok"], "the tenant has no such agent"
        assert token not in json.dumps(card)


async def test_a_published_agent_is_called_as_the_operator_and_not_as_a_stranger(short_path: Path) -> None:
    published = {"publish": "teller", "publish_anonymous": "loopback"}
    async with open_inspector(short_path, asking_agent(), a2a=published) as (_, browser):
        found = await inspect(browser, agent="teller", text="x")
        shown = await browser.read(f"a2a/tasks/{found['conversation'][-1]['task_id']}/show")
        assert "anonymous" not in json.dumps(shown["task"]["sender"])


async def test_our_own_card_is_read_with_its_signature(short_path: Path) -> None:
    async with open_inspector(short_path, asking_agent()) as (_, browser):
        found = await inspect(browser, agent="teller", method="card")
        assert (found["ok"], found["card"]["name"], found["findings"]) == (True, "teller", [])
        assert found["signature"]["state"] == "valid"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("interface", "binding", "dialect"),
    [
        (JSONRPC_1, "jsonrpc", "1.0"),
        (REST_1, "rest", "1.0"),
        (GRPC_1, "grpc", "1.0"),
        (JSONRPC_03, "jsonrpc", "0.3"),
        (REST_03, "rest", "0.3"),
        (GRPC_03, "grpc", "0.3"),
    ],
)
async def test_the_official_sdks_server_breaks_nothing(
    short_path: Path, interface: tuple[str, str, str], binding: str, dialect: str, stream: bool
) -> None:
    async with sdk_server(interface) as server, open_inspector(short_path) as (_, browser):
        asked = {"url": server.url("/"), "binding": binding, "dialect": dialect, "stream": stream}
        found = await inspect(browser, text="words", **asked)
        assert found["ok"], found["error"]
        assert found["conversation"][-1]["text"] == "word0 word1 word2 word3 word4 "
        assert found["findings"] == []
        asking = await inspect(browser, text="ask", **asked)
        last = asking["conversation"][-1]
        assert (last["state"], last["text"]) == ("input-required", "which one?")
        more = {**asked, "interface": asking["interface"], "task_id": last["task_id"], "context_id": last["context_id"]}
        answered = await inspect(browser, text="this one", **more)
        assert answered["conversation"][-1]["text"] == "echo: this one"
        # Over gRPC, the card also says which agent at the interface is meant.
        assert directions(answered).count("out") == (2 if binding == "grpc" else 1), "the card is not read again"


async def test_over_grpc_a_tenants_agent_is_called_in_its_place_and_refusals_are_frames(short_path: Path) -> None:
    async with open_inspector(short_path, asking_agent(), grpc={"enabled": True}) as (daemon, browser):
        token = await daemon.add_tenant("acme", asking_agent())
        asked = {"tenant": "acme", "agent": "teller", "binding": "grpc"}
        found = await inspect(browser, text="green", key="k1", **asked)
        assert found["conversation"][-1]["text"] == "done in green"
        request, answer, message = found["frames"]
        assert request["what"] == "gRPC /lf.a2a.v1.A2AService/SendMessage"
        assert request["headers"]["idempotency-key"] == "k1"
        assert "authorization" not in request["headers"]
        assert (answer["what"], message["what"]) == ("answer", "message")
        task_id = found["conversation"][-1]["task_id"]
        shown = await browser.read(f"a2a/tasks/{task_id}/show")
        assert shown["task"]["tenant"] == "acme"
        assert (await inspect(browser, method="get", task_id=task_id, **asked))["ok"]
        late = await inspect(browser, method="cancel", task_id=task_id, **asked)
        assert late["frames"][-1]["what"] == "refused: 9 FAILED_PRECONDITION"
        unknown = await inspect(browser, method="get", task_id=task_id, **{**asked, "tenant": "default"})
        assert (unknown["ok"], unknown["frames"][-1]["what"]) == (False, "refused: 5 NOT_FOUND")
        typed = await inspect(browser, text="x", headers={"Authorization": SECRET}, **asked)
        assert typed["frames"][-1]["what"] == "refused: 16 UNAUTHENTICATED"
        assert "s3cret" not in json.dumps(typed)
        own = await inspect(browser, text="red", headers={"Authorization": f"Bearer {token}"}, **asked)
        assert own["conversation"][-1]["text"] == "done in red"
        assert token not in json.dumps(own)


async def test_grpc_is_inspected_as_far_as_it_is_served_and_through_the_guard(short_path: Path) -> None:
    async with open_inspector(short_path, asking_agent(), outbound={}) as (_, browser):
        for asked, code in (
            ({"agent": "teller"}, "grpc_off"),
            ({"url": "http://127.0.0.1:8422"}, "address_refused"),
            ({"url": "http://localhost:8422/", "interface": "http://localhost:8422/"}, "address_refused"),
            ({"url": "grpc://h:8422"}, "bad_url"),
        ):
            answer = await browser.api("POST", "a2a/inspect", {**asked, "text": "x", "binding": "grpc"})
            assert answer.json()["code"] == code, answer.text
    async with open_inspector(short_path / "b", asking_agent(), grpc={"enabled": True}) as (_, browser):
        old = {"agent": "teller", "text": "x", "binding": "grpc", "dialect": "0.3"}
        assert (await browser.api("POST", "a2a/inspect", old)).json()["code"] == "not_published"


async def test_a_private_address_is_refused_and_nothing_is_sent(short_path: Path) -> None:
    async with http_server(always(reply())) as served, open_inspector(short_path, outbound={}) as (_, browser):
        for url in (served.url(), f"http://localhost:{served.port}/", "http://169.254.169.254/latest", "http://[::1]/"):
            for method in ("card", "send"):
                answer = await browser.api("POST", "a2a/inspect", {"url": url, "method": method, "text": "x"})
                assert (answer.status_code, answer.json()["code"]) == (400, "address_refused"), url
        assert served.connections == 0
        rows = [row["kind"] for row in (await browser.read("audit/recent?limit=50"))["events"]]
        noted = [row for row in rows if row["type"] == "agent_inspected"]
        assert len(noted) == 8
        assert noted[0].keys() >= {"method", "host"}


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "gopher://h/", "http://u:p@h/", "http://h:22/", "no url", "http://h\\@x/"]
)
async def test_what_is_no_url_that_is_called_is_refused(short_path: Path, url: str) -> None:
    async with open_inspector(short_path) as (_, browser):
        answer = await browser.api("POST", "a2a/inspect", {"url": url, "interface": url, "text": "x"})
        assert answer.status_code == 400, answer.text


async def test_a_redirect_to_a_private_address_is_refused(short_path: Path) -> None:
    async with http_server(redirect("http://10.1.2.3/")) as served, open_inspector(short_path) as (_, browser):
        asked = {"url": served.url("/card.json"), "method": "card"}
        answer = await browser.api("POST", "a2a/inspect", asked)
        assert (answer.status_code, answer.json()["code"]) == (400, "address_refused")
        assert len(served.requests) == 1


async def test_a_typed_secret_follows_no_redirect_and_no_card_to_another_origin(short_path: Path) -> None:
    card: dict[str, Any] = {"name": "n", "version": "1", "supportedInterfaces": []}
    async with http_server(always(reply(404))) as other:
        interface = {"url": other.url("/rpc"), "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}
        card["supportedInterfaces"].append(interface)
        here = always(reply(200, json.dumps(card).encode(), content_type="application/json"))
        async with (
            http_server(redirect(other.url("/moved"))) as moved,
            http_server(here) as served,
            open_inspector(short_path) as (_, browser),
        ):
            headers = {"Authorization": SECRET, "X-Key": "another-s3cret"}
            await inspect(browser, url=moved.url("/card.json"), method="card", headers=headers)
            found = await inspect(browser, url=served.url("/card.json"), text="x", headers=headers)
            assert found["interface"] == other.url("/rpc")
        assert [request.target for request in other.requests] == ["/moved", "/rpc"]
        for request in other.requests:
            assert "s3cret" not in json.dumps(request.headers)
        assert served.requests[0].headers["authorization"] == SECRET


@pytest.mark.parametrize(
    "name", ["Host", "Content-Length", "Transfer-Encoding", "Connection", "Upgrade", "TE", "bad name", "X\n"]
)
async def test_headers_that_frame_a_request_are_not_for_the_operator(short_path: Path, name: str) -> None:
    async with http_server(always(reply(404))) as served, open_inspector(short_path) as (_, browser):
        asked = {"url": served.url(), "interface": served.url(), "text": "x", "headers": {name: "1"}}
        answer = await browser.api("POST", "a2a/inspect", asked)
        assert (answer.status_code, answer.json()["code"]) == (400, "bad_header")
        assert not served.requests


async def test_no_secret_of_ours_goes_along(short_path: Path) -> None:
    async with http_server(always(reply(404))) as served, open_inspector(short_path) as (daemon, browser):
        await inspect(browser, url=served.url(), interface=served.url(), text="x")
        (request,) = served.requests
        assert "cookie" not in request.headers
        assert "authorization" not in request.headers
        assert daemon.token not in json.dumps(request.headers)


async def test_a_secret_that_the_agent_repeats_is_hidden_in_its_frames(short_path: Path) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "error": {"code": -32000, "message": f"you said {SECRET}"}}).encode()
    echo = always(reply(200, body, content_type="application/json", set_cookie="sid=abc", x_seen=SECRET))
    async with http_server(echo) as served, open_inspector(short_path) as (_, browser):
        found = await inspect(
            browser, url=served.url(), interface=served.url(), text="x", headers={"Authorization": SECRET}
        )
        frames = json.dumps(found["frames"])
        assert "s3cret" not in frames
        assert "sid=abc" not in frames
        assert served.requests[0].headers["authorization"] == SECRET


async def test_an_answer_without_end_and_one_that_is_too_large_are_cut(short_path: Path) -> None:
    event = b'data: {"jsonrpc":"2.0","id":1,"result":{"artifactUpdate":{}}}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    async with (
        http_server(always(head + event * 1_000)) as many,
        http_server(always(reply(200, b"x" * 2_000_000, content_type="application/json"))) as large,
        open_inspector(short_path) as (_, browser),
    ):
        found = await inspect(browser, url=many.url(), interface=many.url(), text="x", stream=True)
        assert len(found["frames"]) <= 200
        found = await inspect(browser, url=large.url(), interface=large.url(), text="x")
        assert not found["ok"]
        assert "bytes" in found["error"]


async def test_only_the_operator_inspects(short_path: Path) -> None:
    async with open_inspector(short_path, asking_agent()) as (daemon, browser):
        assert "inspect" in (await browser.read("session"))["can"]
        asked = {"agent": "teller", "text": "x"}
        for token in (await new_viewer(daemon), await daemon.add_tenant("acme")):
            async with open_browser(daemon, token) as other:
                assert "inspect" not in (await other.read("session"))["can"]
                answer = await other.api("POST", "a2a/inspect", asked)
                assert (answer.status_code, answer.json()["code"]) == (403, "role_forbidden")
        worker = await daemon.identities.enroll(daemon.operator, "worker@test")
        answer = await daemon.ask("POST", "/a2a/inspect", token=worker.token, json=asked)
        assert answer.status_code == 403


@pytest.mark.parametrize(
    "asked",
    [
        {"text": "x"},
        {"url": "http://h/", "agent": "a", "text": "x"},
        {"agent": "a"},
        {"agent": "a", "parts": []},
        {"agent": "a", "parts": [{"text": "x", "data": 1}]},
        {"agent": "a", "parts": "x"},
        {"agent": "a", "method": "get"},
        {"agent": "a", "text": "x", "binding": "soap"},
        {"agent": "a", "text": "x", "headers": {f"h{at}": "v" for at in range(40)}},
        {"agent": "a", "text": "x", "header": {}},
        {"agent": 7, "text": "x"},
    ],
)
async def test_a_request_that_makes_no_sense_is_refused(short_path: Path, asked: Any) -> None:
    async with open_inspector(short_path) as (_, browser):
        answer = await browser.api("POST", "a2a/inspect", asked)
        assert answer.status_code == 400, answer.text


async def test_parts_are_sent_as_they_were_written(short_path: Path) -> None:
    async with http_server(always(reply(404))) as served, open_inspector(short_path) as (_, browser):
        parts = [
            {"text": "see"},
            {"data": {"n": 1}},
            {"url": "https://h/f", "mediaType": "text/plain", "filename": "f"},
        ]
        await inspect(browser, url=served.url(), interface=served.url(), parts=parts)
        sent = json.loads(served.requests[0].body)
        assert sent["params"]["message"]["parts"] == parts


async def test_no_more_inspections_run_at_once_than_may(short_path: Path) -> None:
    async with http_server(silence) as served, open_inspector(short_path) as (_, browser):
        asked = {"url": served.url(), "interface": served.url(), "text": "x"}
        waiting = [asyncio.create_task(browser.api("POST", "a2a/inspect", asked)) for _ in range(INSPECTIONS_MAX)]
        await asyncio.to_thread(until, lambda: served.connections == INSPECTIONS_MAX)
        answer = await browser.api("POST", "a2a/inspect", asked)
        assert (answer.status_code, answer.json()["code"]) == (429, "inspection_limit")
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("body", [b"[" * 900 + b"]" * 900, b'{"a":' * 400 + b"7" + b"}" * 400, b"\xff" * 100, b"null"])
async def test_hostile_answers_are_shown_and_named(short_path: Path, body: bytes) -> None:
    answer = always(reply(200, body, content_type="application/json"))
    async with http_server(answer) as served, open_inspector(short_path) as (_, browser):
        for binding in ("jsonrpc", "rest"):
            found = await inspect(browser, url=served.url(), interface=served.url(), text="x", binding=binding)
            assert not found["ok"]
            assert found["findings"], found
