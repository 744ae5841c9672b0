"""An agent's card on the page of agents: as callers read it, with its signature checked."""

import json
from pathlib import Path

from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.dashboard.browser import Browser, asking_agent, new_viewer, open_browser


async def test_a_card_is_shown_as_callers_get_it_and_its_signature_holds(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", asking_agent()) as daemon:
        served = await daemon.ask("GET", "/v1/a2a/agents/teller/agent-card.json", headers={"A2A-Version": "1.0"})
        for token in (daemon.token, await new_viewer(daemon)):
            async with open_browser(daemon, token) as browser:
                found = await browser.read("agents/default/teller/card")
                assert (found["kind"], found["raw"]) == ("agent_card", served.text)
                assert found["card"] == json.loads(found["raw"])
                assert found["signature"]["state"] == "valid"
                assert found["signature"]["key_id"] in found["signature"]["detail"]


async def test_the_card_is_that_of_the_tenants_own_agent_and_spends_none_of_its_rate(short_path: Path) -> None:
    async with open_daemon_under_test(
        short_path / "home", a2a={"publish": "teller", "publish_anonymous": "always"}
    ) as daemon:
        await daemon.add_tenant("acme", asking_agent(), rate_per_min=2)
        async with open_browser(daemon, daemon.token) as browser:
            for _ in range(5):
                assert (await browser.read("agents/acme/teller/card"))["card"]["name"] == "teller"
            missing = await browser.api("GET", "agents/default/teller/card")
            assert missing.status_code == 404


async def test_a_tenant_and_a_stranger_see_no_card_here(daemon: DaemonUnderTest, operator: Browser) -> None:
    assert (await operator.api("GET", "agents/nobody/index/card")).status_code == 404
    async with open_browser(daemon, await daemon.add_tenant("acme")) as tenant:
        answer = await tenant.api("GET", "agents/default/index/card")
        assert (answer.status_code, answer.json()["code"]) == (403, "role_forbidden")
    async with open_browser(daemon) as stranger:
        assert (await stranger.api("GET", "agents/default/index/card")).status_code == 401
