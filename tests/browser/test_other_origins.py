"""A page of another origin, in the same browser: it cannot frame ours, read with its session, or act by it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from tests.browser.visitor import BOUND_MS, open_visitor
from tests.e2e.linked_daemons import LinkedDaemons

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


@contextmanager
def open_site(html: str) -> Iterator[str]:
    """A site at another port of this machine: another origin of the same site, whose requests have our cookie."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_page_that_frames_ours_shows_nothing_of_it(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    task = one.send("slow", "a word that nobody else may see", wait=False)
    paths = ("/ui/", f"/ui/task/{task['id']}", "/ui/login", f"/ui/act/cancel?task={task['id']}", "/ui/static/app.js")
    frames = "".join(f'<iframe src="{one.daemon.url}{path}"></iframe>' for path in paths)
    with open_site(f"<title>theirs</title>{frames}") as theirs, open_visitor(chromium, one.daemon.url) as visitor:
        visitor.log_in(one.token)
        refused: list[str] = []
        page = visitor.context.new_page()
        page.on("console", lambda message: refused.append(message.text))
        page.goto(theirs)
        page.wait_for_function("document.readyState === 'complete'", timeout=BOUND_MS)
        inside = [frame for frame in page.frames if frame != page.main_frame]
        assert len(inside) == len(paths)
        for frame in inside:
            assert "Covenant" not in frame.content()
            assert "nobody else may see" not in frame.content()
            assert frame.locator("form, button, nav").count() == 0
        assert sum("frame-ancestors" in words for words in refused) == len(paths)


def test_a_page_elsewhere_neither_reads_nor_acts_with_the_browsers_session(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    task = one.send("slow", "x", wait=False)
    fields = f'<input name="task" value="{task["id"]}"><input name="reason" value="theirs">'
    form = f'<form id="f" method="post" action="{one.daemon.url}/ui/act/cancel">{fields}</form>'
    with open_site(form) as theirs, open_visitor(chromium, one.daemon.url) as visitor:
        visitor.log_in(one.token, f"/ui/task/{task['id']}")
        page = visitor.context.new_page()
        page.goto(theirs)
        read = """async ([url, mode]) => {
          try { return (await (await fetch(url, { credentials: "include", mode })).text()).length; } catch { return 0; }
        }"""
        for path in ("/ui/api/a2a/tasks", "/ui/api/session", "/ui/feed"):
            for mode in ("cors", "no-cors"):
                assert page.evaluate(read, [f"{one.daemon.url}{path}", mode]) == 0
        page.evaluate("document.forms.f.submit()")
        page.wait_for_url(f"{one.daemon.url}/**")
        assert "another site's page" in page.inner_text("body")
        assert one.daemon.json("a2a", "show", task["id"])["state"] == "in_flight"


def test_a_session_that_somebody_planted_is_not_the_one_that_a_login_gives(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    one = daemons.start("a")
    planted = "A" * 43
    with open_visitor(chromium, one.daemon.url) as visitor:
        place = urlsplit(one.daemon.url)
        name = f"covenant_ui_{place.port}"
        visitor.context.add_cookies([{"name": name, "value": planted, "domain": place.hostname, "path": "/ui"}])
        visitor.log_in(one.token)
        first = {cookie["value"] for cookie in visitor.context.cookies(f"{one.daemon.url}/ui/")}
        assert planted not in first
        page = visitor.go("/ui/login")
        page.fill("input[name=token]", one.token)
        page.click("main button[type=submit]")
        page.wait_for_url("**/ui/")
        second = {cookie["value"] for cookie in visitor.context.cookies(f"{one.daemon.url}/ui/")}
        assert not first & second, "a login is a new session"


def test_a_link_from_elsewhere_to_the_page_of_a_task_takes_nothing(chromium: Browser, daemons: LinkedDaemons) -> None:
    one = daemons.start("a")
    escapes = ("..%2Fresults%2Fnext%3Fcount%3D100%23", "next%23", "next%3F", "%zz", "%252e%252e%252fresults%252fnext")
    paths = [f"/ui/{page}/{escape}" for page in ("task", "tree") for escape in escapes]
    links = "".join(f'<a href="{one.daemon.url}{path}">see</a>' for path in paths)
    with open_site(links) as theirs, open_visitor(chromium, one.daemon.url) as visitor:
        visitor.log_in(one.token)
        page = visitor.tab()
        for number in range(len(paths)):
            page.goto(theirs)
            page.locator("a").nth(number).click()
            page.wait_for_selector("#refused")
        visitor.asked[:] = [url for url in visitor.asked if not url.startswith(theirs)]
        taken = [url for url in visitor.asked if "/api/" in url and urlsplit(url).path.endswith("/next")]
        assert taken == []
        assert page.evaluate("fetch('/ui/api/a2a/results/next').then((answer) => answer.status)") == 403
