"""What `/ui` sends to a browser: shells, files, headers; and whose requests it takes."""

import base64
import json
import re
from uuid import uuid4

import msgspec
import pytest

from covenant import Embedded, File, Resource, Task, TaskId
from covenant.dashboard.dashboard import TASK_PAGES
from covenant.dashboard.static_files import StaticFiles
from covenant.wire.mailbox import FindRequest
from tests.daemon_under_test import DaemonUnderTest
from tests.dashboard.browser import OUR_PAGE, Browser, new_viewer, open_browser

DIRECTIVES = {
    "default-src": "'none'",
    "script-src": "'self'",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
    "form-action": "'self'",
    "require-trusted-types-for": "'script'",
}


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/login", "/ui/code", "/ui/nothing", "/ui/api/session", "/ui/feed"])
async def test_every_answer_says_what_a_browser_may_do_with_it(daemon: DaemonUnderTest, path: str) -> None:
    async with open_browser(daemon) as browser:
        answer = await browser.get(path)
    policy = dict(each.strip().partition(" ")[::2] for each in answer.headers["content-security-policy"].split(";"))
    assert policy | DIRECTIVES == policy
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


async def test_shells_are_sent_to_everybody_and_revalidated_by_their_content(daemon: DaemonUnderTest) -> None:
    files = StaticFiles()
    assert "attention" in files.pages
    async with open_browser(daemon) as browser:
        for path, body in {
            "/ui/": files.pages["attention"].body,
            **{f"/ui/{name}{'/some-id' * (name in TASK_PAGES)}": page.body for name, page in files.pages.items()},
            **{f"/ui/static/{name}": file.body for name, file in files.assets.items()},
        }.items():
            answer = await browser.get(path)
            assert (answer.status_code, answer.content) == (200, body), path
            assert answer.headers["cache-control"] == "no-cache"
            again = await browser.get(path, **{"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert "content-length" not in again.headers, "it would be the length of the file"


async def test_pages_that_the_server_writes_name_the_icon_and_shells_lead_to_the_forms(daemon: DaemonUnderTest) -> None:
    async with open_browser(daemon) as browser:
        assert '<link rel="icon"' in (await browser.get("/ui/login")).text
    for name, page in StaticFiles().pages.items():
        (shown,) = re.findall(r"<noscript>.*?</noscript>", page.body.decode())
        assert '<a href="/ui/act">' in shown, name


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "HEAD"])
async def test_the_feed_is_read_and_nothing_else(operator: Browser, method: str) -> None:
    answer = await operator.http.request(method, "/ui/feed", headers=OUR_PAGE)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("br", False),
        ("", False),
    ],
)
async def test_text_is_compressed_for_browsers_that_take_it_so(
    daemon: DaemonUnderTest, accepted: str, packed: bool
) -> None:
    body = StaticFiles().assets["app.css"].body
    async with open_browser(daemon) as browser:
        answer = await browser.get("/ui/static/app.css", **{"accept-encoding": accepted})
        assert answer.headers.get("content-encoding") == ("gzip" if packed else None)
        assert answer.headers["vary"] == "accept-encoding"
        assert answer.content == body
        assert (int(answer.headers["content-length"]) < len(body) // 2) == packed
        tagged = {"accept-encoding": accepted, "if-none-match": answer.headers["etag"]}
        assert (await browser.get("/ui/static/app.css", **tagged)).status_code == 304
        other = {"accept-encoding": "" if packed else "gzip", "if-none-match": answer.headers["etag"]}
        assert (await browser.get("/ui/static/app.css", **other)).status_code == 200, "another form has another tag"


def test_a_shell_preloads_what_its_script_imports_and_the_scripts_stay_within_their_budget() -> None:
    files = StaticFiles()
    scripts = {name: file.body.decode() for name, file in files.assets.items() if name.endswith(".js")}
    imported = {name: set(re.findall(r'from "\./([a-z_]+\.js)"', text)) for name, text in scripts.items()}
    used = {"form.js"}
    for name, page in files.pages.items():
        text = page.body.decode()
        (first,) = re.findall(r'<script type="module" src="/ui/static/([a-z_]+\.js)">', text)
        wanted, ahead = set[str](), [first]
        while ahead:
            fresh = imported[ahead.pop()] - wanted
            wanted |= fresh
            ahead += fresh
        assert set(re.findall(r'rel="modulepreload" href="/ui/static/([a-z_]+\.js)"', text)) == wanted, name
        used |= {first} | wanted
    assert used == set(scripts), "no script that no page uses"
    assert len(scripts) <= 13
    assert sum(map(len, scripts.values())) <= 81_920


def test_each_filter_of_the_list_of_tasks_is_one_that_the_daemon_has() -> None:
    script = StaticFiles().assets["tasks.js"].body.decode()
    (listed,) = re.findall(r"const NAMES = \[(.*)\];", script)
    known = {each.name for each in msgspec.structs.fields(FindRequest)}
    assert set(re.findall(r'"(\w+)"', listed)) <= known


async def test_shells_and_scripts_name_no_other_origin_and_have_nothing_inline() -> None:
    files = StaticFiles()
    for name, file in {**files.pages, **files.assets}.items():
        text = file.body.decode()
        assert not re.search(r"""(?:src|href|action)\s*=\s*["']?(?:https?:)?//""", text), name
        assert not re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", text), name
    for name, page in files.pages.items():
        text = page.body.decode()
        assert not re.search(r"<script(?![^>]*\bsrc=)", text), name
        assert not re.search(r"\son\w+\s*=|\sstyle\s*=|<style", text), name


@pytest.mark.parametrize(
    "path",
    ["/ui/static/../dashboard.py", "/ui/static/%2e%2e/__init__.py", "/ui/static/", "/ui/static/..%2f__init__.py"],
)
async def test_nothing_but_the_packages_files_is_sent(daemon: DaemonUnderTest, path: str) -> None:
    raw = await daemon.http.get(daemon.url + path)
    assert raw.status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "cross-site", "origin": "OURS"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "https:OTHER"},
    ],
    ids=str,
)
async def test_what_changes_something_must_come_from_our_own_page(
    daemon: DaemonUnderTest, operator: Browser, headers: dict[str, str]
) -> None:
    other = daemon.url.removeprefix("http:")
    headers = {name: value.replace("OURS", daemon.url).replace("OTHER", other) for name, value in headers.items()}
    asked = await operator.http.post("/ui/api/login-codes", headers=headers)
    assert (asked.status_code, asked.json()["code"]) == (403, "cross_site")
    out = await operator.send_from(headers, "/ui/logout")
    assert out.status_code == 403
    entered = await operator.send_from(headers, "/ui/login", token=daemon.token)
    assert (entered.status_code, "set-cookie" in entered.headers) == (403, False)
    await operator.read("session")


async def test_our_own_page_is_known_by_its_origin_where_the_browser_says_no_more(
    daemon: DaemonUnderTest, operator: Browser
) -> None:
    answer = await operator.http.post("/ui/api/login-codes", headers={"origin": daemon.url})
    assert answer.status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_another_sites_page_reads_nothing_with_the_browsers_cookie(operator: Browser, site: str) -> None:
    """A page at another port of this machine is of the same site: its requests have the cookie."""
    answer = await operator.http.get("/ui/api/a2a/queue", headers={"sec-fetch-site": site})
    assert (answer.status_code, answer.json()["code"]) == (403, "cross_site")


async def test_the_audit_is_filtered_read_on_and_exported_as_lines(daemon: DaemonUnderTest, operator: Browser) -> None:
    for number in range(5):
        await daemon.identities.enroll(daemon.operator, f"w{number}@test", actions=("ui.view",))
    async with open_browser(daemon) as stranger:
        await stranger.login("nonsense")
    whole = (await operator.read("audit/recent?limit=100"))["events"]
    granted = [row["id"] for row in whole if row["kind"]["type"] == "capability_granted"]
    found: list[str] = []
    below = ""
    while True:
        page = await operator.read(f"audit/recent?limit=2&type=capability_granted{below}")
        found = [*(row["id"] for row in page["events"]), *found]
        if page["next"] is None:
            break
        below = f"&below={page['next']}"
    assert found == granted
    assert len(found) >= 5
    assert (await operator.read("audit/recent?issuer=nobody"))["events"] == []
    times = [row["timestamp_ms"] for row in whole]
    before = (await operator.read(f"audit/recent?limit=100&before_ms={times[-1]}"))["events"]
    assert before == [row for row in whole if row["timestamp_ms"] < times[-1]]
    export = await operator.api("GET", "audit/export?type=authentication_failed")
    assert (export.status_code, export.headers["content-type"]) == (200, "application/x-ndjson")
    assert export.headers["content-disposition"] == 'attachment; filename="audit.jsonl"'
    assert [json.loads(line)["kind"]["transport"] for line in export.text.splitlines()] == ["ui"]
    lines = (await operator.api("GET", "audit/export")).text.splitlines()
    assert [json.loads(line)["id"] for line in reversed(lines)] == [row["id"] for row in whole]
    assert (await operator.api("GET", "audit/export?since_ms=soon")).status_code == 400
    async with open_browser(daemon, await new_viewer(daemon)) as viewer:
        assert (await viewer.api("GET", "audit/export")).status_code == 200
    async with open_browser(daemon, await daemon.add_tenant("acme")) as tenant:
        assert (await tenant.api("GET", "audit/export")).json()["code"] == "role_forbidden"


async def test_operations_are_the_operator_apis_by_the_session(daemon: DaemonUnderTest, operator: Browser) -> None:
    assert (await operator.read("a2a/queue"))["kind"] == "a2a_queue"
    assert (await operator.read("v1/admin/tenants"))["tenants"][0]["name"] == "default"
    unknown = await operator.api("GET", "nothing/there")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_route")
    wrong = await operator.api("DELETE", "a2a/queue")
    assert wrong.status_code == 405
    peers = await operator.api("GET", "api/v1/a2a/peers")
    assert (peers.status_code, peers.json()["kind"], peers.json()["code"]) == (409, "error", "peers_off")
    bearer = await daemon.http.get("/ui/api/a2a/queue", headers={**OUR_PAGE, "authorization": f"Bearer {daemon.token}"})
    assert bearer.status_code == 401, "a token is no session"


async def test_a_file_of_a_task_is_a_download_for_those_who_see_the_task(
    daemon: DaemonUnderTest, operator: Browser
) -> None:
    stored = daemon.daemon.base.access.files
    task = Task(id=TaskId(str(uuid4())), sender=daemon.operator.agent, recipient=daemon.operator.agent, intent_text="x")
    await daemon.identities.grant(daemon.operator, f"a2a.send.{daemon.operator.agent.display}")
    data = base64.b64encode(b"bytes" * 100_000).decode()
    blocks = (Resource(Embedded("", blob=data), filename="five.bin"),)
    await daemon.mailbox.accept(daemon.operator, msgspec.structs.replace(task, parts=blocks))
    (file,) = (await daemon.mailbox.take(daemon.operator)).tasks[0].task.parts
    assert isinstance(file, File)
    place = f"files?task_id={task.id}&sha256={file.sha256}"
    found = await operator.api("GET", place)
    assert found.status_code == 303
    assert (await daemon.http.get(found.headers["location"])).content == b"bytes" * 100_000
    assert (await operator.api("GET", f"files?task_id={task.id}&sha256={'0' * 64}")).status_code == 404
    assert (await operator.api("GET", "files?task_id=x&sha256=y")).status_code == 400
    async with open_browser(daemon, await daemon.add_tenant("acme")) as tenant:
        assert (await tenant.api("GET", place)).status_code == 404
    async with open_browser(daemon) as nobody:
        assert (await nobody.api("GET", place)).status_code == 401
    assert stored.settings.inline_bytes_max < 500_000
