"""Who gets in at `/ui`, as what, for how long, and how that ends."""

import hashlib
from pathlib import Path

import pytest

from covenant.dashboard.sessions import UiSession
from covenant.exchange.access.principals import CODE_MS, CODES_MAX
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.dashboard.browser import OUR_PAGE, Browser, ParsedPage, new_viewer, open_browser
from tests.ledger_contract.fake_clock import FakeClock

HOUR_MS = 3_600_000


async def test_the_operators_token_opens_a_session(daemon: DaemonUnderTest) -> None:
    async with open_browser(daemon) as browser:
        answer = await browser.send("/ui/login", token=daemon.token, next="/ui/tasks?state=queued")
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/tasks?state=queued")
        session = await browser.read("session")
        assert (session["role"], session["name"]) == ("operator", daemon.operator.agent.display)
        assert "repair" in session["can"]
        assert (session["url"], session["several"]) == (daemon.url, False)


async def test_the_cookie_is_for_this_daemons_pages_alone(daemon: DaemonUnderTest) -> None:
    async with open_browser(daemon) as browser:
        said = (await browser.login(daemon.token)).headers["set-cookie"]
    name, _, attributes = said.partition("=")
    assert name == f"covenant_ui_{daemon.port}"
    assert {part.strip() for part in attributes.split(";")[1:]} == {"Path=/ui", "HttpOnly", "SameSite=Strict"}


async def test_over_https_the_cookie_is_secure_and_bound_to_the_host(short_path: Path) -> None:
    http = {"public_base_url": "https://a2a.example"}
    async with open_daemon_under_test(short_path / "home", http=http) as daemon, open_browser(daemon) as browser:
        said, port = (await browser.login(daemon.token)).headers["set-cookie"], daemon.port
    name, _, attributes = said.partition("=")
    assert name == f"__Host-covenant_ui_{port}"
    assert {part.strip() for part in attributes.split(";")[1:]} == {"Path=/", "HttpOnly", "SameSite=Strict", "Secure"}


async def test_a_session_is_32_random_bytes_and_kept_as_their_hash(operator: Browser, daemon: DaemonUnderTest) -> None:
    secret = operator.secret
    assert len(secret) >= 43  # 32 bytes in base58
    held = sessions_of(daemon)
    assert list(held) == [hashlib.sha256(secret.encode()).hexdigest()]
    assert secret not in repr([getattr(each, name) for each in held.values() for name in UiSession.__slots__])


@pytest.mark.parametrize("token", ["", "nonsense", "x" * 3_000])
async def test_a_token_that_nobody_has_is_refused_and_audited(daemon: DaemonUnderTest, token: str) -> None:
    async with open_browser(daemon) as browser:
        answer = await browser.login(token)
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
        assert (await browser.api("GET", "session")).status_code == 401
    rows = [record.row for record in await daemon.daemon.base.storage.ledger.audit_recent(None, 10, None)]
    assert any('"authentication_failed"' in row and '"transport":"ui"' in row for row in rows)


async def test_an_identity_needs_the_grant_to_see_the_dashboard(daemon: DaemonUnderTest) -> None:
    bob = await daemon.identities.enroll(daemon.operator, "bob@test")
    async with open_browser(daemon) as browser:
        refused = await browser.login(bob.token)
        assert refused.status_code == 403
        assert "covenant capabilities grant ui.view --to bob@test" in refused.text
        await daemon.identities.grant(daemon.operator, "ui.view", to="bob@test")
        assert (await browser.login(bob.token)).status_code == 303
        assert (await browser.read("session"))["role"] == "viewer"


async def test_a_session_ends_with_the_viewers_grant(daemon: DaemonUnderTest) -> None:
    token = await new_viewer(daemon)
    async with open_browser(daemon, token) as browser:
        await browser.read("session")
        (grant,) = [each for each in await daemon.identities.grants(daemon.operator, 10) if each.action == "ui.view"]
        await daemon.identities.revoke_grant(daemon.operator, grant.signature_b58)
        assert (await browser.api("GET", "session")).status_code == 401


async def test_a_session_ends_when_its_token_is_revoked(daemon: DaemonUnderTest) -> None:
    token = await new_viewer(daemon)
    async with open_browser(daemon, token) as browser:
        await browser.read("session")
        await daemon.identities.revoke(daemon.operator, "eve@test")
        assert (await browser.api("GET", "session")).status_code == 401
        assert sessions_of(daemon) == {}


async def test_a_session_ends_when_its_token_is_rotated(daemon: DaemonUnderTest, operator: Browser) -> None:
    await daemon.identities.rotate(daemon.operator, None)
    assert (await operator.api("GET", "session")).status_code == 401


async def test_a_tenants_session_ends_when_it_is_rotated_or_disabled(daemon: DaemonUnderTest) -> None:
    token = await daemon.add_tenant("acme")
    async with open_browser(daemon, token) as browser:
        assert (await browser.read("session"))["tenant"] == "acme"
        rotated = await daemon.tenants.rotate(daemon.operator, "acme")
        assert (await browser.api("GET", "session")).status_code == 401
    async with open_browser(daemon, rotated.token) as browser:
        await browser.read("session")
        await daemon.tenants.change(daemon.operator, "acme", disabled=True)
        assert (await browser.api("GET", "session")).status_code == 401


async def test_a_session_ends_by_logging_out_and_with_the_next_login(daemon: DaemonUnderTest) -> None:
    async with open_browser(daemon, daemon.token) as browser:
        first = browser.secret
        await browser.login(daemon.token)
        assert browser.secret != first
        assert len(sessions_of(daemon)) == 1
        answer = await browser.send("/ui/logout")
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login")
        assert sessions_of(daemon) == {}
        assert (await browser.api("GET", "session")).status_code == 401


async def test_a_session_ends_with_the_process(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home") as daemon, open_browser(daemon, daemon.token) as browser:
        secret, port = browser.secret, daemon.port
    async with open_daemon_under_test(short_path / "home", http={"port": port}) as daemon:
        headers = {**OUR_PAGE, "cookie": f"covenant_ui_{port}={secret}"}
        answer = await daemon.http.get("/ui/api/session", headers=headers)
        assert answer.status_code == 401


async def test_a_session_lasts_an_hour_without_a_request_and_half_a_day_at_most(short_path: Path) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(short_path / "home", clock=clock) as daemon:
        async with open_browser(daemon, daemon.token) as browser:
            clock.advance(HOUR_MS - 1)
            assert (await browser.read("session"))["expires_in_ms"] == HOUR_MS
            clock.advance(HOUR_MS)
            assert (await browser.api("GET", "session")).status_code == 401
        async with open_browser(daemon, daemon.token) as browser:
            for _ in range(23):
                clock.advance(HOUR_MS // 2)
                await browser.read("session")
            clock.advance(HOUR_MS // 2)
            assert (await browser.api("GET", "session")).status_code == 401


async def test_what_a_page_reads_by_itself_keeps_no_session_open(short_path: Path) -> None:
    clock = FakeClock()
    async with (
        open_daemon_under_test(short_path / "home", clock=clock) as daemon,
        open_browser(daemon, daemon.token) as browser,
    ):
        clock.advance(HOUR_MS - 1)
        by_itself = {**OUR_PAGE, "covenant-reload": "1"}
        assert (await browser.http.get("/ui/api/session", headers=by_itself)).json()["expires_in_ms"] == 1
        async with browser.http.stream("GET", "/ui/feed", headers=OUR_PAGE) as feed:
            assert feed.status_code == 200
        clock.advance(1)
        assert (await browser.api("GET", "session")).status_code == 401


async def test_a_code_is_sent_by_a_click_where_somebody_may_have_led_the_person_to_it(daemon: DaemonUnderTest) -> None:
    async def asks(browser: Browser, **headers: str) -> bool:
        page = ParsedPage((await browser.get("/ui/code", **headers)).text)
        (form,) = [
            attributes for name, attributes in page.elements if name == "form" and attributes.get("name") == "code"
        ]
        assert ("it may belong to somebody else" in page.text) == ("data-ask" in form)
        return "data-ask" in form

    async with open_browser(daemon) as browser:
        assert not await asks(browser)
        for site in ("cross-site", "same-site"):
            assert await asks(browser, **{"sec-fetch-site": site})
        assert await asks(browser, referer="http://elsewhere.example/")
        await browser.login(daemon.token)
        assert await asks(browser), "a session would be replaced"


async def test_a_secret_that_somebody_else_chose_opens_nothing(daemon: DaemonUnderTest) -> None:
    """Fixation: the browser comes with a secret that an attacker gave it."""
    planted = "attacker-knows-this-one"
    async with open_browser(daemon) as browser:
        browser.http.cookies.set(f"covenant_ui_{daemon.port}", planted, path="/ui")
        answer = await browser.login(daemon.token)
        assert planted not in answer.headers["set-cookie"], "the secret is a new one"
        assert hashlib.sha256(planted.encode()).hexdigest() not in sessions_of(daemon)
    async with open_browser(daemon) as attacker:
        attacker.http.cookies.set(f"covenant_ui_{daemon.port}", planted, path="/ui")
        assert (await attacker.api("GET", "session")).status_code == 401


async def test_the_count_of_sessions_is_bounded(short_path: Path) -> None:
    clock = FakeClock()
    async with (
        open_daemon_under_test(short_path / "home", clock=clock, ui={"sessions_max": 3}) as daemon,
        open_browser(daemon, daemon.token) as first,
        open_browser(daemon, daemon.token) as second,
    ):
        clock.advance(10)
        await first.read("session")
        for _ in range(2):
            clock.advance(10)
            async with open_browser(daemon, daemon.token):
                pass
        assert len(sessions_of(daemon)) == 3
        await first.read("session")
        assert (await second.api("GET", "session")).status_code == 401, "the longest idle one is ended"


async def test_a_code_is_traded_for_a_session_once(daemon: DaemonUnderTest) -> None:
    made = (await daemon.ask("POST", "/login-codes")).json()
    assert made["url"] == f"{daemon.url}/ui/code#{made['code']}"
    async with open_browser(daemon) as browser, open_browser(daemon) as other:
        answer = await browser.send("/ui/code", code=made["code"])
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/")
        assert (await browser.read("session"))["role"] == "operator"
        again = await other.send("/ui/code", code=made["code"])
        assert again.status_code == 401
        assert other.secret == ""


async def test_a_code_lasts_a_minute_and_ends_with_its_token(short_path: Path) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(short_path / "home", clock=clock) as daemon, open_browser(daemon) as browser:
        late = (await daemon.ask("POST", "/login-codes")).json()
        clock.advance(CODE_MS)
        assert (await browser.send("/ui/code", code=late["code"])).status_code == 401
        token = await new_viewer(daemon)
        theirs = (await daemon.ask("POST", "/login-codes", token=token)).json()
        await daemon.identities.revoke(daemon.operator, "eve@test")
        assert (await browser.send("/ui/code", code=theirs["code"])).status_code == 401


async def test_a_code_is_for_those_who_may_see_the_dashboard_and_unused_ones_are_bounded(
    daemon: DaemonUnderTest,
) -> None:
    bob = await daemon.identities.enroll(daemon.operator, "bob@test")
    assert (await daemon.ask("POST", "/login-codes", token=bob.token)).json()["code"] == "ui_not_granted"
    for _ in range(CODES_MAX):
        assert (await daemon.ask("POST", "/login-codes")).status_code == 200
    assert (await daemon.ask("POST", "/login-codes")).json()["code"] == "too_many_codes"


async def test_the_dashboard_is_off_beyond_loopback_unless_it_is_switched_on(short_path: Path) -> None:
    anywhere = {"bind_addr": "0.0.0.0"}
    async with open_daemon_under_test(short_path / "a", http=anywhere) as daemon:
        assert (await daemon.http.get(f"http://127.0.0.1:{daemon.port}/ui/login")).status_code == 404
        first = await daemon.http.get(f"http://127.0.0.1:{daemon.port}/", headers={"accept": "text/html"})
        assert "dashboard" not in first.json()["links"]
        refused = await daemon.http.post(
            f"http://127.0.0.1:{daemon.port}/login-codes", headers={"authorization": f"Bearer {daemon.token}"}
        )
        assert refused.json()["code"] == "ui_off"
    async with open_daemon_under_test(short_path / "b", http=anywhere, ui={"enabled": "on"}) as daemon:
        assert (await daemon.http.get(f"http://127.0.0.1:{daemon.port}/ui/login")).status_code == 200
    async with open_daemon_under_test(short_path / "c", ui={"enabled": "off"}) as daemon:
        assert (await daemon.http.get("/ui/login")).status_code == 404


async def test_the_first_page_leads_a_browser_to_the_dashboard_and_others_to_links(daemon: DaemonUnderTest) -> None:
    browser = await daemon.http.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (browser.status_code, browser.headers["location"]) == (303, "/ui/")
    other = await daemon.http.get("/")
    assert (other.status_code, other.json()["links"]["dashboard"]) == (200, "/ui/")


@pytest.mark.parametrize(
    "to",
    [
        "https://evil.example/",
        "//evil.example",
        "/ui/../../x\r\nset-cookie: a=b",
        "/ui/../a2a/tasks",
        "/ui/%2e%2E/a2a/tasks",
        "/ui/.%2e/a2a/tasks",
        "/ui/x/..",
        "/other",
        "/ui/\\evil",
        "",
    ],
)
async def test_a_login_leads_nowhere_else(daemon: DaemonUnderTest, to: str) -> None:
    async with open_browser(daemon) as browser:
        answer = await browser.send("/ui/login", token=daemon.token, next=to)
        assert answer.headers["location"] == "/ui/"


def sessions_of(daemon: DaemonUnderTest) -> dict[str, UiSession]:
    dashboard = daemon.daemon.doors.dashboard
    assert dashboard is not None
    return dashboard.sessions.open
