"""The inspector, at somebody else's server and at what the address guard refuses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final

import pytest

from tests.browser.visitor import open_visitor
from tests.e2e.linked_daemons import LinkedDaemons
from tests.outbound.sdk_servers import sdk_server
from tests.waits import BOUND_S, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

pytestmark = pytest.mark.browser


BROKEN: Final = {"jsonrpc": "2.0", "id": 1, "result": {"task": {"id": "t", "status": {"state": "finished"}}}}


@contextmanager
def broken_server_port() -> Iterator[int]:
    """A server whose task is in a state that there is not."""

    class Broken(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps(BROKEN).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def sdk_server_port() -> Iterator[int]:
    """The official SDK's server, in a thread of its own."""
    ready, over = threading.Event(), threading.Event()
    ports: list[int] = []

    async def serve() -> None:
        async with sdk_server() as server:
            ports.append(server.port)
            ready.set()
            await asyncio.to_thread(over.wait, BOUND_S * 5)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(BOUND_S)
        yield ports[0]
    finally:
        over.set()
        thread.join()


def test_the_inspector_shows_each_frame_of_the_official_sdks_server(chromium: Browser, daemons: LinkedDaemons) -> None:
    with sdk_server_port() as port:
        one = daemons.start("a", "--outbound-allow", f"127.0.0.1:{port}")
        with open_visitor(chromium, one.daemon.url) as visitor:
            page = visitor.log_in(one.token, "/ui/inspector")
            page.fill("[name=url]", f"http://127.0.0.1:{port}/rpc")
            page.click("button[value=card]")
            page.wait_for_selector("#card >> text=The official SDK's server")
            page.fill("[name=text]", "hello there")
            page.click("button[value=send]")
            page.wait_for_selector("#said .agent")
            page.wait_for_selector("#frames [data-direction=out] >> nth=1")
            page.wait_for_selector("#frames [data-direction=in] >> nth=1")
            page.wait_for_selector("#said:has-text('hello there')")
            assert page.locator("#findings li").count() == 0, page.inner_text("#findings")


def test_what_is_typed_while_the_page_reads_the_agents_stays(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token)
        page.goto(f"{one.daemon.url}/ui/inspector?url=http://asked.example")
        until(lambda: page.input_value("[name=url]") == "http://asked.example")
        held: list[Route] = []

        def hold(route: Route) -> None:
            held.append(route)

        page.route("**/tenants/*/agents*", hold)
        with page.expect_request("**/tenants/*/agents*"):
            page.goto(f"{one.daemon.url}/ui/inspector")
        page.fill("[name=url]", "http://typed.example")
        until(lambda: page.input_value("[name=url]") and held)  # the page's request is seen before it is held
        for route in held:
            route.continue_()
        page.wait_for_selector("[name=target] option:nth-child(2)", state="attached")
        assert page.input_value("[name=url]") == "http://typed.example"


def test_the_inspector_goes_nowhere_the_address_guard_refuses(chromium: Browser, daemons: LinkedDaemons) -> None:
    with sdk_server_port() as port:
        one = daemons.start("a")
        with open_visitor(chromium, one.daemon.url) as visitor:
            page = visitor.log_in(one.token, "/ui/inspector")
            page.fill("[name=url]", f"http://127.0.0.1:{port}/rpc")
            with page.expect_response("**/ui/api/a2a/inspect") as answered:
                page.click("button[value=card]")
            assert answered.value.json()["code"] == "address_refused"
            page.wait_for_selector(".refused >> text=outbound.allow")
            assert page.locator("#frames [data-direction=in]").count() == 0


def test_our_own_agent_is_asked_and_answered_and_its_task_is_read(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    with open_visitor(chromium, one.daemon.url) as visitor:
        page = visitor.log_in(one.token, "/ui/inspector?tenant=default&agent=relay")
        page.wait_for_selector("nav >> text=Inspector")
        page.fill("[name=text]", "<img src=x onerror=alert(1)>")
        page.check("[name=stream]")
        page.click("button[value=send]")
        page.wait_for_selector("#said .agent")
        page.wait_for_selector("#said:has-text('<img src=x onerror=alert(1)>')")
        assert page.locator("#findings li").count() == 0, page.inner_text("#findings")
        page.click("button[value=get]")
        page.wait_for_selector("#frames [data-direction=out] >> nth=1")
        page.click("summary >> text=Parts and headers")
        page.fill("[name=parts]", "no JSON")
        page.click("button[value=send]")
        page.wait_for_selector(".refused >> text=no JSON")
        page.fill("[name=parts]", "")
        page.fill("[name=headers]", "X-One: 1\n\nno colon here")
        page.click("button[value=send]")
        page.wait_for_selector(".refused >> text=this line has no colon: no colon here")


def test_what_breaks_the_specification_is_marked_at_its_frame(chromium: Browser, daemons: LinkedDaemons) -> None:
    with broken_server_port() as port:
        one = daemons.start("a", "--outbound-allow", f"127.0.0.1:{port}")
        with open_visitor(chromium, one.daemon.url) as visitor:
            page = visitor.log_in(one.token, "/ui/inspector")
            page.fill("[name=url]", f"http://127.0.0.1:{port}/")
            page.fill("[name=text]", "hello")
            page.click("button[value=send]")
            page.wait_for_selector("#findings li >> text=TaskStatus.state")
            page.wait_for_selector("#frames .finding >> text=TaskStatus.state")
