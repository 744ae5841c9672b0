"""The page of peers, and the form that trusts one: what two operators compare is the same at both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.visitor import open_visitor
from tests.e2e.linked_daemons import LinkedDaemon, LinkedDaemons, until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser


def trust(here: LinkedDaemon, there: LinkedDaemon) -> str:
    level: str = here.daemon.json("peers", "show", there.name)["peer"]["trustLevel"]
    return level


def meet(daemons: LinkedDaemons) -> tuple[LinkedDaemon, LinkedDaemon]:
    """Two peers that have verified each other."""
    for name in "ab":
        home = daemons.folder / name
        home.mkdir(mode=0o700)
        (home / "settings.toml").write_text("[peers]\nenabled = true\n")
    a, b = daemons.start("a"), daemons.start("b")
    a.daemon.json("peers", "add", b.daemon.url, "--name", "b")
    b.daemon.json("peers", "add", a.daemon.url, "--name", "a")
    until(lambda: (trust(a, b), trust(b, a)), lambda levels: levels == ("verified", "verified"))
    return a, b


def test_the_fingerprint_that_a_peer_reads_out_is_the_one_that_the_form_of_trust_shows(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    a, b = meet(daemons)
    with open_visitor(chromium, b.daemon.url) as there:
        page = there.log_in(b.token, "/ui/peers")
        finger = page.locator("#ours .finger")
        until(finger.inner_text, bool)
        read_out = finger.inner_text()
    with open_visitor(chromium, a.daemon.url) as here:
        page = here.log_in(a.token, "/ui/act/trust?peer=b")
        compared = page.locator("dt:has-text('Fingerprint') + dd").inner_text()
    assert compared == read_out
    assert read_out.replace(" ", "") == b.daemon.json("peers", "list")["id"]


def test_a_delegation_that_ran_out_of_time_looks_ended_and_its_proof_is_saved_by_a_click(
    chromium: Browser, daemons: LinkedDaemons, tmp_path: Path
) -> None:
    a, _ = meet(daemons)
    a.daemon.json("peers", "delegate", "echo", "hello", "--peer", "b")
    a.daemon.run("peers", "delegate", "slow", "for ever", "--peer", "b", "--timeout-ms", "200")
    with open_visitor(chromium, a.daemon.url) as visitor:
        page = visitor.log_in(a.token, "/ui/peers")
        late = page.locator("#delegations .state:has-text('Timeout')")
        until(lambda: late.get_attribute("data-tone"), lambda tone: tone == "bad")
        with page.expect_download() as saved:
            page.click("#delegations tr:has-text('echo') a:has-text('Proof')")
        saved.value.save_as(tmp_path / "proof.json")
    assert json.loads((tmp_path / "proof.json").read_text())["kind"]
    assert a.daemon.run("peers", "verify-proof", str(tmp_path / "proof.json")).code == 0


def test_the_tree_the_timeline_and_the_task_name_the_peer_and_the_called_agent(
    chromium: Browser, daemons: LinkedDaemons
) -> None:
    a, b = meet(daemons)
    parent = a.send("relay", "b/echo hello")["id"]
    (child,) = [each["task_id"] for each in a.daemon.json("a2a", "list", "--parent", parent)["tasks"]]
    with open_visitor(chromium, a.daemon.url) as visitor:
        page = visitor.log_in(a.token, f"/ui/tree/{parent}")
        provider = page.locator("#rows a[href^='/ui/peers/']")
        assert provider.inner_text() == "b"
        assert provider.get_attribute("title") == b.daemon.json("peers", "list")["id"]
        page.goto(f"{a.daemon.url}/ui/task/{parent}")
        assert page.locator(f"#fall a[href='/ui/task/{child}']").inner_text() == "echo · b"
        page.goto(f"{a.daemon.url}/ui/task/{child}")
        agent = page.locator(".facts.wide dd[data-slot=agent]")
        agent.locator("svg[aria-label='elsewhere']").wait_for()
        assert agent.inner_text() == "echo"
    token = a.daemon.json("tenants", "rotate", "default")["token"]
    with open_visitor(chromium, a.daemon.url) as visitor:
        page = visitor.log_in(token, f"/ui/tree/{parent}")
        provider = page.locator("#rows a[href^='/ui/peers/']")
        assert provider.inner_text() == b.daemon.json("peers", "list")["id"][:8], "a tenant is not told the name"
