"""The forms: what each does, for whom, and that what stands in them is text."""

import asyncio
import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from covenant.agents.api import Agent, Turn
from covenant.dashboard.dashboard import ACTS, VERBS
from covenant.dashboard.session_operations import TAKING_GETS
from covenant.dashboard.task_acts import BULK_TASKS_MAX
from covenant.doors.operator_api.operation_table import OPERATIONS
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.dashboard.browser import (
    OUR_PAGE,
    Browser,
    ParsedPage,
    asking_agent,
    leave_stuck,
    new_viewer,
    open_browser,
    send_task,
)


async def test_a_stuck_task_is_requeued_with_a_reason(daemon: DaemonUnderTest, operator: Browser) -> None:
    stuck = await leave_stuck(daemon)
    await daemon.identities.grant(daemon.operator, "a2a.repair.requeue", to=daemon.operator.agent.display)
    page = ParsedPage((await operator.get(f"/ui/act/repair?task={stuck.task_id}")).text)
    assert page.fields()["lease"] == stuck.lease_id, "the lease as it is seen is the guard"
    form = {"task": stuck.task_id, "lease": stuck.lease_id, "command": "requeue", "risk": "idempotent"}
    unsaid = await operator.send("/ui/act/repair", **form, reason="")
    assert (unsaid.status_code, "reason" in unsaid.text) == (400, True)
    done = await operator.send("/ui/act/repair", **form, reason="the worker is gone")
    assert (done.status_code, done.headers["location"]) == (303, f"/ui/task/{stuck.task_id}")
    assert (await operator.read(f"a2a/tasks/{stuck.task_id}/show"))["state"] == "queued"
    rows = (await operator.read("audit/recent?limit=50"))["events"]
    (repaired,) = [row for row in rows if row["kind"]["type"] == "a2a_repair_applied"]
    assert (repaired["issuer"]["display"], repaired["kind"]["reason"]) == ("operator@local", "the worker is gone")


async def test_a_repair_of_another_lease_than_was_seen_changes_nothing(
    daemon: DaemonUnderTest, operator: Browser
) -> None:
    stuck = await leave_stuck(daemon)
    await daemon.identities.grant(daemon.operator, "a2a.repair.requeue", to=daemon.operator.agent.display)
    form = {"task": stuck.task_id, "command": "requeue", "risk": "idempotent", "reason": "gone"}
    assert (await operator.send("/ui/act/repair", **form, lease=stuck.lease_id)).status_code == 303
    await daemon.ask("GET", "/a2a/tasks/next", token=stuck.worker)
    late = await operator.send("/ui/act/repair", **form, lease=stuck.lease_id)
    assert (late.status_code, "lease mismatch" in late.text) == (409, True)
    (lease,) = {*(await leases(operator, stuck.task_id))} - {stuck.lease_id}
    assert ParsedPage(late.text).fields()["lease"] == lease, "the lease that there is now is shown, and is the guard"
    assert (await operator.read(f"a2a/tasks/{stuck.task_id}/show"))["state"] == "in_flight"


async def leases(operator: Browser, task_id: str) -> list[str]:
    return [each["lease_id"] for each in (await operator.read(f"a2a/tasks/{task_id}/show"))["leases"]]


async def test_what_is_left_to_choose_is_said_in_the_forms_own_words(
    daemon: DaemonUnderTest, operator: Browser
) -> None:
    stuck = await leave_stuck(daemon)
    form = {"task": stuck.task_id, "lease": stuck.lease_id, "reason": "gone"}
    for path, given in (("/ui/act/repair", form), ("/ui/act/bulk", {"state": "in_flight", "reason": "gone"})):
        nothing = await operator.send(path, **given)
        assert (nothing.status_code, "choose what to do" in nothing.text) == (400, True)
        unsure = await operator.send(path, **given, command="requeue")
        assert (unsure.status_code, "choose: it may run twice without harm" in unsure.text) == (400, True)
        assert "operator_accepted" not in ParsedPage(unsure.text).text
    assert (await operator.read(f"a2a/tasks/{stuck.task_id}/show"))["state"] == "in_flight"


async def test_the_list_of_forms_leads_to_each_without_any_script(daemon: DaemonUnderTest, operator: Browser) -> None:
    stuck = await leave_stuck(daemon)
    page = ParsedPage((await operator.get("/ui/act")).text)
    targets = [str(given["action"]) for name, given in page.elements if name == "form" and given["method"] == "get"]
    assert targets == [f"/ui/act/{verb}" for verb in ACTS]
    assert (await operator.get(f"/ui/act/repair?task={stuck.task_id[:8]}")).status_code == 200
    assert (await operator.send("/ui/act", x="y")).status_code == 400
    async with open_browser(daemon, await new_viewer(daemon)) as viewer:
        assert "/ui/act/" not in (await viewer.get("/ui/act")).text
    async with open_browser(daemon, await daemon.add_tenant("acme")) as tenant:
        shown = (await tenant.get("/ui/act")).text
        assert [verb for verb in ACTS if f'action="/ui/act/{verb}"' in shown] == ["cancel", "answer"]
    async with open_browser(daemon) as nobody:
        assert (await nobody.get("/ui/act")).headers["location"] == "/ui/login?next=/ui/act"


async def test_a_repair_of_a_task_that_was_seen_without_a_lease_ends_none(
    daemon: DaemonUnderTest, operator: Browser
) -> None:
    stuck = await leave_stuck(daemon)
    for action in ("a2a.repair.requeue", "a2a.repair.force_error"):
        await daemon.identities.grant(daemon.operator, action, to=daemon.operator.agent.display)
    command = {"command": "requeue", "risk": "idempotent", "reason": "gone"}
    await operator.send("/ui/act/repair", task=stuck.task_id, lease=stuck.lease_id, **command)
    seen = ParsedPage((await operator.get(f"/ui/act/repair?task={stuck.task_id}")).text).fields()
    taken = (await daemon.ask("GET", "/a2a/tasks/next", token=stuck.worker)).json()
    late = {**seen, "command": "force_error", "message": "m", "reason": "it was queued when I looked"}
    refused = await operator.send("/ui/act/repair", **late)
    assert (refused.status_code, "had no lease" in refused.text) == (409, True)
    shown = await operator.read(f"a2a/tasks/{stuck.task_id}/show")
    assert (shown["state"], shown["leases"][-1]["outcome"]) == ("in_flight", None)
    again = ParsedPage(refused.text).fields()
    assert again["lease"] == taken["lease"]["lease_id"], "the lease that there is now is shown, and may be ended"
    assert (await operator.send("/ui/act/repair", **{**late, **again})).status_code == 303


async def test_a_missing_grant_is_given_without_losing_what_was_typed(
    daemon: DaemonUnderTest, operator: Browser
) -> None:
    stuck = await leave_stuck(daemon)
    typed = {"command": "force_error", "reason": f"{'long ' * 100}reason", "message": "it is <gone>"}
    form = {"task": stuck.task_id, "lease": stuck.lease_id, **typed}
    refused = await operator.send("/ui/act/repair", **form)
    assert (refused.status_code, 'name="offered"' in refused.text) == (403, True)
    given = await operator.send("/ui/act/repair", **form, offered="yes")
    assert (given.status_code, 'name="offered"' in given.text) == (200, False)
    page = ParsedPage(given.text)
    assert "now has the grant a2a.repair.force_error" in page.text
    assert (page.fields()["lease"], page.fields()["message"]) == (stuck.lease_id, "it is <gone>")
    assert typed["reason"] in page.text
    assert (await operator.read(f"a2a/tasks/{stuck.task_id}/show"))["state"] == "in_flight", "nothing else was done"
    assert (await operator.send("/ui/act/repair", **{**form, "reason": "r"})).status_code == 303
    assert (await operator.read(f"a2a/tasks/{stuck.task_id}/show"))["result"]["error_message"] == "it is <gone>"
    late = await operator.send("/ui/act/cancel", task=stuck.task_id, reason="r", plain="yes")
    assert "had ended before: it is failed" in late.text
    assert (await operator.send("/ui/act/cancel", task=stuck.task_id, offered="yes")).status_code == 400
    async with open_browser(daemon, await daemon.add_tenant("acme")) as tenant:
        assert (await tenant.send("/ui/act/repair", **form, offered="yes")).status_code == 403


async def test_what_was_typed_comes_back_whole_or_is_refused_in_words(
    daemon: DaemonUnderTest, operator: Browser
) -> None:
    stuck = await leave_stuck(daemon)
    typed = "A" * 30_000 + "END"
    refused = await operator.send("/ui/act/answer", task=stuck.task_id, text=typed)
    assert (refused.status_code, typed in ParsedPage(refused.text).text) == (409, True)
    assert "does not wait for its sender" in refused.text
    more = await operator.send("/ui/act/answer", task=stuck.task_id, text="A" * 300_000)
    assert (more.status_code, "262144" in ParsedPage(more.text).text) == (413, True)


async def test_a_short_id_leads_to_the_page_of_the_whole_id(daemon: DaemonUnderTest, operator: Browser) -> None:
    stuck = await leave_stuck(daemon)
    await daemon.identities.grant(daemon.operator, "a2a.repair.requeue", to=daemon.operator.agent.display)
    short = stuck.task_id[:8]
    seen = ParsedPage((await operator.get(f"/ui/act/repair?task={short}")).text).fields()
    assert seen["task"] == stuck.task_id
    form = {"task": short, "lease": stuck.lease_id, "command": "requeue", "risk": "idempotent", "reason": "gone"}
    for verb, given in (("repair", form), ("cancel", {"task": short, "reason": "r"})):
        done = await operator.send(f"/ui/act/{verb}", **given)
        assert (done.status_code, done.headers["location"]) == (303, f"/ui/task/{stuck.task_id}")


async def test_an_act_without_scripts_ends_on_a_page_that_says_what_was_done(
    daemon: DaemonUnderTest, operator: Browser
) -> None:
    stuck = await leave_stuck(daemon)
    await daemon.identities.grant(daemon.operator, "a2a.repair.requeue", to=daemon.operator.agent.display)
    plain = ParsedPage((await operator.get(f"/ui/act/repair?task={stuck.task_id}")).text, scripts=False).fields()
    done = await operator.send("/ui/act/repair", **plain, command="requeue", risk="idempotent", reason="gone")
    assert (done.status_code, f"Task {stuck.task_id} is repaired: it is queued now." in done.text) == (200, True)
    links = [attributes.get("href") for name, attributes in ParsedPage(done.text).elements if name == "a"]
    assert {"/ui/act", f"/ui/task/{stuck.task_id}"} <= {*links}
    canceled = await operator.send("/ui/act/cancel", task=stuck.task_id, reason="r", plain="yes")
    assert (canceled.status_code, f"Task {stuck.task_id} is canceled." in canceled.text) == (200, True)
    back = {"action": "a2a.repair.force_error", "to": "operator@local", "next": "/ui/act/bulk?state=parked"}
    led = await operator.send("/ui/act/grant", **back, plain="yes")
    assert (led.status_code, led.headers["location"]) == (303, back["next"]), "a form works without scripts"


async def test_pages_that_refuse_have_the_links_of_the_others(daemon: DaemonUnderTest, operator: Browser) -> None:
    for path in ("/ui/act/nonsense", f"/ui/act/cancel?task={uuid.uuid4()}", "/ui/nonsense"):
        refused = await operator.get(path)
        assert (refused.status_code, 'href="/ui/act"' in refused.text) == (404, True), path
    async with open_browser(daemon) as nobody:
        assert 'href="/ui/act"' not in (await nobody.get("/ui/nonsense")).text


async def test_a_task_that_waits_is_answered_and_goes_on(short_path: Path) -> None:
    async with (
        open_daemon_under_test(short_path / "home", asking_agent()) as daemon,
        open_browser(daemon, daemon.token) as browser,
    ):
        task = await send_task(daemon, "paint it")
        page = ParsedPage((await browser.get(f"/ui/act/answer?task={task['id']}")).text)
        assert "which <b>colour</b>?" in page.text
        with daemon.daemon.base.storage.ledger.watch(task["id"]) as watch:
            done = await browser.send("/ui/act/answer", task=task["id"], text="red")
            assert (done.status_code, done.headers["location"]) == (303, f"/ui/task/{task['id']}")
            while (await browser.read(f"a2a/tasks/{task['id']}/show"))["result"] is None:
                await watch.next(60)
        again = await browser.send("/ui/act/answer", task=task["id"], text="blue")
        assert again.status_code in {404, 409}


@pytest.mark.parametrize(("decision", "words", "told"), [("yes", "", "approved=True"), ("no", "too much", "too much")])
async def test_an_approval_is_decided_without_scripts(short_path: Path, decision: str, words: str, told: str) -> None:
    agent = Agent("teller")

    @agent
    async def ask(turn: Turn) -> str:
        decided = await turn.approve("Pay ten?")
        return f"approved={bool(decided)} {decided.reason}"

    async with (
        open_daemon_under_test(short_path / "home", agent) as daemon,
        open_browser(daemon, daemon.token) as browser,
    ):
        task = await send_task(daemon, "pay")
        page = ParsedPage((await browser.get(f"/ui/act/answer?task={task['id']}")).text)
        assert "The task waits for an approval." in page.text
        assert page.fields()["question"] == "1-1"
        with daemon.daemon.base.storage.ledger.watch(task["id"]) as watch:
            done = await browser.send("/ui/act/answer", task=task["id"], question="1-1", decision=decision, text=words)
            assert done.status_code == 303
            while (shown := await browser.read(f"a2a/tasks/{task['id']}/show"))["result"] is None:
                await watch.next(60)
        assert told in str(shown["result"])
        late = ParsedPage((await browser.get(f"/ui/act/cancel?task={task['id']}")).text)
        assert "The task has ended already: it is completed." in late.text


async def test_a_task_is_canceled_with_a_reason(daemon: DaemonUnderTest, operator: Browser) -> None:
    stuck = await leave_stuck(daemon)
    assert (await operator.send("/ui/act/cancel", task=stuck.task_id, reason="")).status_code == 400
    assert (await operator.send("/ui/act/cancel", task=stuck.task_id, reason="not needed")).status_code == 303
    assert (await operator.read(f"a2a/tasks/{stuck.task_id}/show"))["a2a_state"] == "canceled"


async def test_many_tasks_are_repaired_after_a_dry_run(daemon: DaemonUnderTest, operator: Browser) -> None:
    stuck = await leave_stuck(daemon)
    await daemon.identities.grant(daemon.operator, "a2a.repair.requeue", to=daemon.operator.agent.display)
    form = {"state": "in_flight", "command": "requeue", "risk": "idempotent", "reason": "they are gone"}
    dry = await operator.send("/ui/act/bulk", **form)
    page = ParsedPage(dry.text)
    assert (dry.status_code, stuck.task_id in page.text) == (200, True)
    assert (await operator.read(f"a2a/tasks/{stuck.task_id}/show"))["state"] == "in_flight"
    done = await operator.send("/ui/act/bulk", **page.fields())
    assert "1 of 1 done" in ParsedPage(done.text).text
    assert (await operator.read(f"a2a/tasks/{stuck.task_id}/show"))["state"] == "queued"


@pytest.mark.parametrize("number", ["abc", "-1", "9" * 40, "1.5", "\u00b2"])
async def test_a_wrong_number_is_told_in_words(operator: Browser, number: str) -> None:
    answer = await operator.send("/ui/act/bulk", attempt_min=number, command="cancel", reason="r")
    assert answer.status_code == 400
    assert "attempt min must be a whole number" in ParsedPage(answer.text).text


@pytest.mark.parametrize("path", ["/ui/task", "/ui/task/", "/ui/tree"])
async def test_an_address_without_a_task_says_so(operator: Browser, path: str) -> None:
    answer = await operator.get(path)
    assert answer.status_code == 404
    page = ParsedPage(answer.text)
    assert "names no task" in page.text
    assert any(attributes.get("href") == "/ui/tasks" for _, attributes in page.elements)


async def test_a_repair_of_many_says_how_many_match_and_that_more_are_left(
    daemon: DaemonUnderTest, operator: Browser
) -> None:
    stuck = await leave_stuck(daemon)
    recipient = (await operator.read(f"a2a/tasks/{stuck.task_id}/show"))["task"]["recipient"]
    for number in range(BULK_TASKS_MAX + 4):
        task = {"id": str(uuid.uuid4()), "recipient": recipient, "intent_text": f"bulk {number}"}
        await daemon.ask("POST", "/a2a/tasks", json=task)
    form = {"state": "queued", "command": "cancel", "reason": "not needed"}
    dry = ParsedPage((await operator.send("/ui/act/bulk", **form)).text)
    assert f"{BULK_TASKS_MAX + 4} tasks match. The first {BULK_TASKS_MAX} are listed and done at once" in dry.text
    assert f"Apply to {BULK_TASKS_MAX} tasks" in dry.text
    assert len([name for name, _ in dry.elements if name == "tr"]) == BULK_TASKS_MAX + 1
    done = ParsedPage((await operator.send("/ui/act/bulk", **dry.fields())).text)
    assert f"{BULK_TASKS_MAX} of {BULK_TASKS_MAX} done. More tasks match" in done.text
    rest = ParsedPage((await operator.send("/ui/act/bulk", **done.fields())).text)
    assert "4 tasks match, and 4 would change" in rest.text
    await operator.send("/ui/act/bulk", **rest.fields())
    for nothing in (form, {**form, "state": "in_flight", "command": "requeue", "risk": "idempotent", "key": "none"}):
        none = ParsedPage((await operator.send("/ui/act/bulk", **nothing)).text)
        assert "0 tasks match, and 0 would change" in none.text
        assert "Apply" not in none.text


async def test_tenants_are_rotated_disabled_and_enabled(daemon: DaemonUnderTest, operator: Browser) -> None:
    old = await daemon.add_tenant("acme")
    shown = await operator.send("/ui/act/tenant", name="acme", do="rotate")
    assert (shown.status_code, shown.headers["cache-control"]) == (200, "no-store")
    (token,) = re.findall(r"atr_[0-9a-f]{64}", ParsedPage(shown.text).text)
    assert daemon.tenants.recognise(old) is None
    assert daemon.tenants.recognise(token) is not None
    assert (await operator.send("/ui/act/tenant", name="acme", do="disable")).status_code == 303
    assert daemon.tenants.recognise(token) is None
    assert (await operator.send("/ui/act/tenant", name="acme", do="enable")).status_code == 303
    assert daemon.tenants.recognise(token) is not None
    assert (await operator.send("/ui/act/tenant", name="acme", do="sell")).status_code == 400


async def test_an_identity_and_a_grant_are_revoked(daemon: DaemonUnderTest, operator: Browser) -> None:
    token = await new_viewer(daemon)
    (grant,) = [each for each in await daemon.identities.grants(daemon.operator, 10) if each.action == "ui.view"]
    assert (await operator.send("/ui/act/revoke", grant=grant.signature_b58)).status_code == 303
    assert (await daemon.ask("POST", "/login-codes", token=token)).status_code == 403
    assert (await operator.send("/ui/act/revoke", identity="eve@test")).status_code == 303
    assert (await daemon.ask("POST", "/login-codes", token=token)).status_code == 401
    assert (await operator.send("/ui/act/revoke")).status_code == 400


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</textarea></form><form action=//evil>",
    "\u202egnp.exe",
    "x" * 1_000_000,
]


@pytest.mark.parametrize("words", HOSTILE, ids=["script", "attribute", "form", "bidi", "megabyte"])
async def test_what_others_wrote_is_text_in_a_form(daemon: DaemonUnderTest, operator: Browser, words: str) -> None:
    stuck = await leave_stuck(daemon, words)
    for path in (f"/ui/act/repair?task={stuck.task_id}", f"/ui/act/cancel?task={stuck.task_id}"):
        plain = ParsedPage((await operator.get(path)).text)
        names = {name for name, _ in plain.elements}
        assert names <= {
            *("html", "head", "meta", "title", "link", "script", "body", "header", "a", "span", "form", "button"),
            *("main", "h1", "p", "dl", "dt", "dd", "fieldset", "legend", "label", "input", "textarea", "div"),
        }
        assert [attributes.get("src") for name, attributes in plain.elements if name == "script"] == [
            "/ui/static/form.js"
        ]
        assert all(not key.startswith("on") for _, attributes in plain.elements for key in attributes)
        assert words[:300].replace("\u202e", "⟨U+202E⟩") in plain.text
        assert "\u202e" not in plain.text
    refused = await operator.send("/ui/act/cancel", task=stuck.task_id, reason="", next=words[:1_000])
    assert "<script>alert" not in refused.text
    assert len(refused.text) < 60_000


async def test_a_form_without_a_session_leads_to_the_login_and_back(daemon: DaemonUnderTest) -> None:
    async with open_browser(daemon) as browser:
        asked = "/ui/act/cancel?task=11111111-1111-4111-8111-111111111111"
        led = await browser.get(asked)
        assert led.status_code == 303
        login = await browser.get(led.headers["location"])
        assert ParsedPage(login.text).fields()["next"] == asked
        assert (await browser.send("/ui/act/cancel", task="x", reason="r")).status_code == 401


ROLES = ("operator", "viewer", "tenant")
TENANTS_ACTS = {"cancel", "answer"}
TENANTS_OPERATIONS = {
    "show_a2a_task",
    "a2a_tree",
    "cancel_a2a_task",
    "answer_a2a_task",
    "signal_a2a_task",
    "find_a2a_tasks",
    "count_a2a_tasks",
    "a2a_task_log",
}


async def token_of(daemon: DaemonUnderTest, role: str) -> str:
    if role == "operator":
        return daemon.token
    return await new_viewer(daemon) if role == "viewer" else await daemon.add_tenant("acme")


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_has_the_forms_it_may_use_and_no_others(daemon: DaemonUnderTest, role: str) -> None:
    async with open_browser(daemon, await token_of(daemon, role)) as browser:
        allowed = {"operator": set(VERBS), "viewer": set(), "tenant": TENANTS_ACTS}[role]
        assert set((await browser.read("session"))["can"]) == allowed
        for verb in ACTS:
            for answer in (await browser.get(f"/ui/act/{verb}"), await browser.send(f"/ui/act/{verb}")):
                assert (answer.status_code == 403) == (verb not in allowed), (verb, answer.text)


def changes(kind: str) -> bool:
    """Whether an operation changes something, or takes something."""
    return not kind.startswith(("show_", "list_", "recent_", "find_", "count_")) and kind not in READING


READING = {
    *(
        "a2a_queue",
        "a2a_task_log",
        "a2a_task_frames",
        "a2a_tree",
        "a2a_pushes",
        "verify_audit_integrity",
        "peer_capabilities",
        "peer_usage",
        "peer_config",
    ),
    *("delegation_tree", "delegation_proof"),
}


@pytest.mark.parametrize("role", ["viewer", "tenant"])
async def test_each_role_has_the_operations_it_may_use_and_no_others(daemon: DaemonUnderTest, role: str) -> None:
    async with open_browser(daemon, await token_of(daemon, role)) as browser:
        for operation in OPERATIONS:
            path = operation.path
            for name in ("task_id", "peer_id", "delegation_id", "name", "tenant", "agent_id"):
                path = path.replace(f"{{{name}}}", "default" if name in {"name", "tenant"} else "x")
            answer = await browser.api(operation.method, path.removeprefix("/"), {} if operation.in_body else None)
            refused = answer.status_code == 403 and answer.json()["code"] == "role_forbidden"
            expected = changes(operation.kind) if role == "viewer" else operation.kind not in TENANTS_OPERATIONS
            assert refused == expected, (operation.kind, answer.text)


async def test_no_session_takes_anything_by_a_get(daemon: DaemonUnderTest, operator: Browser) -> None:
    worker = await daemon.identities.enroll(daemon.operator, "w@test")
    me = daemon.operator.agent.display
    await daemon.identities.grant(daemon.operator, f"a2a.send.{me}", to=worker.identity.agent.display)
    task = {"id": "11111111-1111-4111-8111-111111111111", "recipient": {"display": me}, "intent_text": "x"}
    await daemon.ask("POST", "/a2a/tasks", json=task, token=worker.token)
    for path in ("a2a/tasks/next", "a2a/results/next?count=100"):
        answer = await operator.api("GET", path)
        assert (answer.status_code, answer.json()["code"]) == (403, "role_forbidden")
    assert (await operator.read(f"a2a/tasks/{task['id']}/show"))["state"] == "queued"
    looks = {operation.kind for operation in OPERATIONS if operation.method == "GET"} - TAKING_GETS
    assert {kind for kind in looks if changes(kind)} == {"tenant_removal", "tenant_traces", "drain_status"}


async def test_a_tenant_sees_cancels_and_answers_its_own_tasks_and_detects_no_others(short_path: Path) -> None:
    async with open_daemon_under_test(short_path / "home", asking_agent()) as daemon:
        token = await daemon.add_tenant("acme", asking_agent())
        own, other = await send_task(daemon, "paint", token=token), await send_task(daemon, "paint")
        async with open_browser(daemon, token) as browser:
            assert [each["task_id"] for each in (await browser.read("a2a/tasks"))["tasks"]] == [own["id"]]
            assert (await browser.read("a2a/tasks?tenant=default"))["tasks"] == []
            assert (await browser.read("a2a/tasks/counts"))["lanes"]["parked"] == 1
            shown = await browser.read(f"a2a/tasks/{own['id']}/show")
            assert shown["task"]["id"] == own["id"]
            absent = "11111111-1111-4111-8111-111111111111"
            refusals: list[Any] = []
            for task_id in (other["id"], absent):
                answers = [
                    await browser.api("GET", f"a2a/tasks/{task_id}/show"),
                    await browser.api("GET", f"a2a/tasks/{task_id}/tree"),
                    await browser.api("POST", f"a2a/tasks/{task_id}/cancel", {"reason": "r"}),
                    await browser.api("POST", f"a2a/tasks/{task_id}/answer", {"text": "t"}),
                    await browser.send("/ui/act/cancel", task=task_id, reason="r"),
                ]
                refusals += [(answer.status_code, answer.text.replace(task_id, "ID")) for answer in answers]
            assert refusals[:5] == refusals[5:], "another's task and none at all look the same"
            assert {status for status, _ in refusals} == {404}
            assert (await browser.send("/ui/act/answer", task=own["id"], text="red")).status_code == 303
        async with open_browser(daemon, daemon.token) as browser:
            assert (await browser.read(f"a2a/tasks/{other['id']}/show"))["state"] == "parked"


@pytest.mark.parametrize("path", ["/ui/api/a2a/tasks/{}/cancel", "/ui/act/cancel"])
async def test_a_session_that_ends_before_the_body_has_come_does_nothing(short_path: Path, path: str) -> None:
    async with open_daemon_under_test(short_path / "home", asking_agent()) as daemon:
        token = await daemon.add_tenant("acme", asking_agent())
        task_id = (await send_task(daemon, "paint", token=token))["id"]
        async with open_browser(daemon, token) as browser:
            cookie = "; ".join(f"{name}={value}" for name, value in browser.http.cookies.items())
        kind = "application/json" if "{}" in path else "application/x-www-form-urlencoded"
        body = b'{"reason": "late"}' if "{}" in path else f"task={task_id}&reason=late".encode()
        sent = {"Host": f"127.0.0.1:{daemon.port}", "Cookie": cookie, **OUR_PAGE, "Content-Type": kind}
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
        writer.write(f"POST {path.format(task_id)} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n".encode())
        writer.write(b"Connection: close\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await daemon.tenants.rotate(daemon.operator, "acme")
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        shown = (await daemon.ask("GET", f"/a2a/tasks/{task_id}/show")).json()
        assert shown["result"] is None, "the task was canceled"
