"""Make the pictures of the dashboard's main pages in docs/images, light and dark.

It starts two daemons with sample agents in a folder of its own, gives them work, kills one of them while it works, and
photographs its pages after the restart. It needs the system's chromium and requirements/browser.lock:

    make browser && .venv/bin/python scripts/screenshots.py [PAGE …]
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Page, sync_playwright

FOLDER: Final = Path(__file__).parents[1] / "docs" / "images"
COVENANT: Final = Path(sys.executable).with_name("covenant")
BYTES_MAX: Final = 150_000
VIEW: Final = {"width": 1280, "height": 800}
SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"

NEAR: Final = """
import asyncio
from covenant import Agent

writer = Agent("writer", description="Writes about what others know")
researcher = Agent("researcher", description="Finds facts and says where they are from", idempotent=True)
editor = Agent("editor", description="Asks back before it changes a text")
translator = Agent("translator", description="German, French and Italian")
crawler = Agent("crawler", description="Reads a site, page by page", concurrency=2)
ledger = Agent("reconciler", description="Compares invoices with the bank")


@writer
async def write(turn):
    yield "Looking for facts. "
    facts = await turn.call_all([("researcher", "What happened in October?"), ("researcher", "Who is affected?")])
    turn.spend(1840)
    await asyncio.sleep(0.4)
    review = await turn.call("reviewer", "Read this draft: " + facts[0].text)
    if turn.turn == 1 and "board" in turn.text:
        yield turn.need_input("Is this for the board, or for everybody? The reviewer says: " + review.text)
        return
    yield "The draft is ready. " + review.text


@researcher
async def research(turn):
    for piece in ("Two suppliers were late; ", "the line stood still for nine hours; ", "nobody was told."):
        await asyncio.sleep(0.2)
        turn.spend(190)
        yield piece


@editor
async def edit(turn):
    yield turn.need_input("Which of the two reports do you mean: the one of March, or the one of April?")


@translator
async def translate(turn):
    turn.spend(310)
    return "Die Lieferung verzögert sich um zwei Tage."


@crawler
async def crawl(turn):
    yield "12 of 340 pages"
    await asyncio.Event().wait()


@ledger
async def reconcile(turn):
    await asyncio.sleep(0.05)
    if int(turn.text.split()[2]) % 4 == 3:
        raise RuntimeError("the bank's statement has no such line")
    return "It agrees."
"""

FAR: Final = """
import asyncio
from covenant import Agent

reviewer = Agent("reviewer", description="Reads a draft as a stranger would")


@reviewer
async def review(turn):
    turn.spend(920)
    await asyncio.sleep(0.5)
    return "clear, but the third risk has no owner."
"""


class SampleDaemon:
    def __init__(self, home: Path, agents: str, others: dict[str, Any]) -> None:
        """`others`: agents elsewhere, by the names under which this one calls them."""
        self.home, self._file = home, home.with_suffix(".py")
        home.mkdir(mode=0o700)
        (home / "a2a_agents.json").write_text(json.dumps({"agents": others}), encoding="utf-8")
        self._file.write_text(agents, encoding="utf-8")
        self.start()

    def start(self) -> None:
        words = [str(COVENANT), "serve", str(self._file), "--home", str(self.home), "--http-port", "0"]
        words += ["--delegation-cooldown-ms", "0"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[3]

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait()

    @property
    def token(self) -> str:
        return (self.home / "operator.token").read_text(encoding="utf-8").strip()

    def run(self, *words: str) -> dict[str, Any]:
        done = subprocess.run([COVENANT, "--home", self.home, *words, "--json"], capture_output=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def send(self, agent: str, text: str, *, wait: bool = False) -> str:
        """The id of the task."""
        message = {"messageId": text[:40], "role": "ROLE_USER", "parts": [{"text": text}]}
        params = {"message": message, "configuration": {"returnImmediately": not wait}}
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": params}).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json", "A2A-Version": "1.0"}
        request = urllib.request.Request(f"{self.url}/v1/a2a/agents/{agent}", body, headers)  # noqa: S310  (our own)
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            found: str = json.load(answer)["result"]["task"]["id"]
        return found


def give_work(near: SampleDaemon) -> str:
    """Tasks in every state; the one that its page is shown of."""
    for number in range(24):
        near.send("reconciler", f"Reconcile invoice {2200 + number} with the bank's statement of October", wait=True)
    for site in ("supplier.example", "docs.example"):
        near.send("crawler", f"Read all of {site} and list what changed since last week")
    time.sleep(1)
    near.stop(signal.SIGKILL)
    near.start()
    shown = near.send("writer", "Write a note for the board about the late delivery, with the three risks", wait=True)
    near.send("writer", "Write a short note to the supplier about the late delivery", wait=True)
    near.send("editor", "Shorten the report to one page", wait=True)
    for language in ("German", "French", "Italian"):
        near.send("translator", f"Translate the release notes into {language}", wait=True)
    for site in ("news.example", "shop.example", "wiki.example", "status.example"):
        near.send("crawler", f"Read all of {site} and list what changed since last week")
    return shown


def photograph(page: Page, name: str) -> None:
    page.wait_for_selector(".live[data-state=live]")
    page.wait_for_timeout(600)
    page.evaluate("scrollTo(0, 0)")
    target = FOLDER / f"dashboard-{name}.png"
    target.write_bytes(packed(page.screenshot()))
    if (size := target.stat().st_size) > BYTES_MAX:
        sys.exit(f"{target.name} has {size} bytes; at most {BYTES_MAX} are wanted")
    print(f"{target.name}: {size:,} bytes")


def packed(png: bytes) -> bytes:
    """The same picture, compressed as far as zlib can."""
    at, pixels, before, after = len(SIGNATURE), b"", b"", b""
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        kind, chunk = png[at + 4 : at + 8], png[at : at + 12 + size]
        if kind == b"IDAT":
            pixels += png[at + 8 : at + 8 + size]
        elif pixels:
            after += chunk
        else:
            before += chunk
        at += len(chunk)
    body = b"IDAT" + zlib.compress(zlib.decompress(pixels), 9)
    return SIGNATURE + before + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + after


def inspect(page: Page) -> None:
    page.select_option("[name=target]", "default/translator")
    page.fill("[name=text]", "Translate: the delivery is two days late")
    page.click("button[value=send]")
    page.wait_for_selector("#said .agent")


def take(near: SampleDaemon, task: str, wanted: list[str]) -> None:
    nothing: Callable[[Page], None] = lambda _: None  # noqa: E731
    pages: dict[str, tuple[str, Callable[[Page], None]]] = {
        "attention": ("/ui/", nothing),
        "tasks": ("/ui/tasks", nothing),
        "task": (f"/ui/task/{task}", nothing),
        "tree": (f"/ui/tree/{task}", lambda page: page.click("#open-all")),
        "agents": ("/ui/agents/default/writer", nothing),
        "inspector": ("/ui/inspector", inspect),
    }
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport=VIEW, color_scheme=scheme)
            page = context.new_page()
            page.goto(near.run("ui")["url"])
            page.wait_for_url("**/ui/")
            for name in wanted or pages:
                path, prepare = pages[name]
                page.goto(f"{near.url}{path}")
                prepare(page)
                photograph(page, f"{name}-{scheme}")
            context.close()
        browser.close()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        far = SampleDaemon(Path(made) / "far", FAR, {})
        reviewer = {"url": f"{far.url}/v1/a2a/agents/reviewer", "auth": {"type": "bearer", "token": far.token}}
        near = SampleDaemon(Path(made) / "near", NEAR, {"reviewer": reviewer})
        try:
            take(near, give_work(near), sys.argv[1:])
        finally:
            near.stop()
            far.stop()


if __name__ == "__main__":
    main()
