"""What a browser does of itself: keeps cookies, says where a request comes from, and goes where it is led."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx2

from covenant.agents.api import Agent
from covenant.model.task_event import StatusUpdate
from tests.daemon_under_test import NO_AUTHORITIES, DaemonUnderTest, open_daemon_under_test
from tests.waits import BOUND_S

OUR_PAGE = {"sec-fetch-site": "same-origin"}


@dataclass(slots=True)
class Browser:
    """One browser at one daemon. It does not follow redirects unless it is told to."""

    http: httpx2.AsyncClient

    async def get(self, path: str, **headers: str) -> httpx2.Response:
        return await self.http.get(path, headers={"sec-fetch-site": "none", "accept": "text/html", **headers})

    async def send(self, path: str, **fields: str) -> httpx2.Response:
        """Send a form of our own page."""
        return await self.send_from(OUR_PAGE, path, **fields)

    async def send_from(self, headers: dict[str, str], path: str, **fields: str) -> httpx2.Response:
        """Send a form from a page that the browser says this of."""
        return await self.http.post(path, data=fields, headers=headers)

    async def api(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        """As a script of our own page asks."""
        return await self.http.request(method, f"/ui/api/{path}", json=body, headers=OUR_PAGE)

    async def read(self, path: str) -> Any:
        answer = await self.api("GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def login(self, token: str) -> httpx2.Response:
        return await self.send("/ui/login", token=token)

    @property
    def secret(self) -> str:
        """Of the session that the browser has; empty without one."""
        return next((value for name, value in self.http.cookies.items() if "covenant_ui" in name), "")


@asynccontextmanager
async def open_browser(daemon: DaemonUnderTest, token: str | None = None) -> AsyncIterator[Browser]:
    """Logged in with the token, if one is given."""
    async with httpx2.AsyncClient(base_url=daemon.url, timeout=BOUND_S, trust_env=False, verify=NO_AUTHORITIES) as http:
        browser = Browser(http)
        if token is not None:
            answer = await browser.login(token)
            assert answer.status_code == 303, answer.text
        yield browser


@asynccontextmanager
async def open_pages(folder: Path, **chosen: Any) -> AsyncIterator[DaemonUnderTest]:
    async with open_daemon_under_test(folder / "home", **chosen) as daemon:
        yield daemon


async def new_viewer(daemon: DaemonUnderTest, display: str = "eve@test") -> str:
    """The token of an identity that may see the dashboard."""
    enrolled = await daemon.identities.enroll(daemon.operator, display, actions=("ui.view",))
    return enrolled.token


class ParsedPage(HTMLParser):
    """Elements with their attributes, and the text between them, as a browser reads them. One without `scripts` has
    also what is meant for those."""

    def __init__(self, html: str, *, scripts: bool = True) -> None:
        super().__init__()
        self.scripts = scripts
        self.left_out = False
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "noscript":
            self.left_out = self.scripts
        elif not self.left_out:
            self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.left_out = self.left_out and tag != "noscript"

    def handle_data(self, data: str) -> None:
        if not self.left_out:
            self.text += data

    def fields(self) -> dict[str, str]:
        """The inputs that are sent as they stand."""
        return {
            str(attributes.get("name")): attributes.get("value") or ""
            for name, attributes in self.elements
            if name == "input" and attributes.get("type") in ("hidden", "text")
        }


async def send_task(
    daemon: DaemonUnderTest, text: str, *, token: str | None = None, agent: str = "teller", wait: bool = True
) -> Any:
    """Send a message to an agent over A2A. Returns the task, as it is when it has ended or waits for its sender."""
    message = {"messageId": "m1", "role": "ROLE_USER", "parts": [{"text": text}]}
    params = {"message": message, "configuration": {"returnImmediately": not wait}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}
    headers = {"A2A-Version": "1.0"}
    answer = await daemon.ask("POST", f"/v1/a2a/agents/{agent}", token=token, json=body, headers=headers)
    return answer.json()["result"]["task"]


def asking_agent(agent_id: str = "teller") -> Agent:
    """Asks what colour before it does anything."""
    agent = Agent(agent_id)

    @agent
    async def answer(turn: Any) -> Any:
        if turn.text.startswith("paint"):
            return StatusUpdate("which <b>colour</b>?", state="input-required")
        return f"done in {turn.text}"

    return agent


@dataclass(slots=True)
class StuckTask:
    task_id: str
    lease_id: str
    worker: str
    """The token of whoever holds the lease."""


async def leave_stuck(daemon: DaemonUnderTest, intent: str = "do it") -> StuckTask:
    """A task that a worker has taken and does not go on with."""
    worker = await daemon.identities.enroll(daemon.operator, f"worker{len(intent)}@test")
    display = worker.identity.agent.display
    await daemon.identities.grant(daemon.operator, f"a2a.send.{display}", to=daemon.operator.agent.display)
    task = {"id": str(uuid.uuid4()), "recipient": {"display": display}, "intent_text": intent}
    await daemon.ask("POST", "/a2a/tasks", json=task)
    taken = (await daemon.ask("GET", "/a2a/tasks/next", token=worker.token)).json()
    return StuckTask(taken["task"]["id"], taken["lease"]["lease_id"], worker.token)
