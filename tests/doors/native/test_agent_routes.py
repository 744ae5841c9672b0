"""`/v1/agents` over HTTP: a tenant's own catalogue, and nobody else's."""

from pathlib import Path
from typing import Any

import pytest

from covenant.model.settings import TenantSettings
from covenant.model.tenants import TenantLimits
from tests.doors.clients import Http, Reply
from tests.doors.doors_under_test import DoorsUnderTest, open_doors

AGENTS = "/v1/agents"
WHERE = "the operator's is in operator.token in the daemon's home, a tenant's was shown when it was made"
UNKNOWN = {"error": f"missing or invalid bearer token; {WHERE}", "code": "unauthenticated"}


async def add(http: Http, **definition: Any) -> dict[str, Any]:
    reply = await http.ask("POST", AGENTS, definition)
    assert reply.status == 201, reply
    agent: dict[str, Any] = reply.json
    return agent


def ids(listed: dict[str, Any]) -> list[str]:
    assert listed["count"] == len(listed["agents"])
    return [agent["id"] for agent in listed["agents"]]


def check_refused(reply: Reply, status: int, code: str) -> str:
    assert (reply.status, reply.json["code"]) == (status, code), reply
    assert reply.headers["content-type"] == "application/json"
    error: str = reply.json["error"]
    return error


async def test_an_agent_is_added_listed_shown_replaced_and_removed(under_test: DoorsUnderTest) -> None:
    acme = await under_test.tenant("acme")
    assert ids(await acme.get(AGENTS)) == ["index"]
    agent = await add(acme, id="writer", kind="worker", goal="write", rules=["be kind"])
    assert (agent["source"], agent["kind"], agent["agent_def"]["rules"]) == ("stored", "worker", ["be kind"])
    await add(acme, id="another")
    assert ids(await acme.get(AGENTS)) == ["index", "writer", "another"]
    assert await acme.get(f"{AGENTS}/writer") == agent

    replaced = (await acme.ask("PATCH", f"{AGENTS}/writer", {"goal": "write well"})).json
    assert replaced["agent_def"] == {**agent["agent_def"], "goal": "write well", "rules": [], "kind": "model"}
    assert replaced["created_at_ms"] == agent["created_at_ms"]
    assert ids(await acme.get(AGENTS)) == ["index", "writer", "another"], "its age is what counts"

    removed = await acme.ask("DELETE", f"{AGENTS}/writer")
    assert (removed.status, removed.json) == (200, {"deleted": True})
    check_refused(await acme.ask("GET", f"{AGENTS}/writer"), 404, "unknown_agent")
    rows = [
        row["issuer"]["display"] for kind in ("agent_stored", "agent_removed") for row in await under_test.audit(kind)
    ]
    assert rows == ["client@acme"] * 4


async def test_what_was_read_can_be_sent_back(under_test: DoorsUnderTest) -> None:
    acme = await under_test.tenant("acme")
    agent = await add(acme, id="writer", advisor="m", skills=["s"])
    agent["agent_def"]["goal"] = "write"
    sent = await acme.ask("PATCH", f"{AGENTS}/writer", agent)
    assert sent.json["agent_def"] == agent["agent_def"]
    wrapped = {"agent_def": {**agent["agent_def"], "id": "copy"}}
    assert (await acme.ask("POST", AGENTS, wrapped)).json["agent_def"] == wrapped["agent_def"]
    refused = await acme.ask("POST", AGENTS, {**wrapped, "colour": 1})
    assert check_refused(refused, 400, "invalid_agent").startswith("unknown key /colour")


async def test_whoever_stores_what_nothing_acts_on_is_told_so(under_test: DoorsUnderTest) -> None:
    acme = await under_test.tenant("acme")
    assert (await add(acme, id="plain", advisor="m"))["ignored"] == []
    asking = {"intent": {"mode": "llm"}, "memory": {"auto_tag": True}, "event_types": ["push.*"]}
    assert (await add(acme, id="writer", **asking))["ignored"] == ["event_types", "memory", "intent"]


async def test_an_id_that_is_taken_shows_who_has_it(under_test: DoorsUnderTest) -> None:
    acme = await under_test.tenant("acme")
    agent = await add(acme, id="writer")
    reply = await acme.ask("POST", AGENTS, {"id": "writer", "goal": "other"})
    check_refused(reply, 409, "agent_exists")
    assert reply.json["existing"] == agent


@pytest.mark.parametrize("method", ["GET", "PATCH", "DELETE"])
async def test_another_tenants_agent_is_as_unknown_as_none(under_test: DoorsUnderTest, method: str) -> None:
    acme, other = await under_test.tenant("acme"), await under_test.tenant("other")
    await add(acme, id="writer", goal="secret")
    for strange in (other, Http(under_test.port, under_test.operator.token)):
        foreign = await strange.ask(method, f"{AGENTS}/writer", b"{}")
        nowhere = await strange.ask(method, f"{AGENTS}/wr1ter", b"{}")
        check_refused(foreign, 404, "unknown_agent")
        assert foreign.body.replace(b"writer", b"") == nowhere.body.replace(b"wr1ter", b"")
        assert ids(await strange.get(AGENTS)) == ["index"]
    await add(other, id="writer", goal="its own")
    assert (await acme.get(f"{AGENTS}/writer"))["agent_def"]["goal"] == "secret"


async def test_every_bad_token_gets_the_same_answer(under_test: DoorsUnderTest) -> None:
    acme, disabled = await under_test.tenant("acme"), await under_test.tenant("disabled")
    rotated = await under_test.tenant("rotated")
    await under_test.tenancy.change(under_test.principal, "disabled", disabled=True)
    await under_test.tenancy.rotate(under_test.principal, "rotated")
    bob = await under_test.enroll("bob@test")
    bad: list[dict[str, str]] = [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {acme.token}"},
        {"Authorization": "Bearer atr_nobody"},
        *({"Authorization": f"Bearer {token}"} for token in (bob.token, disabled.token, rotated.token)),
    ]
    for headers in bad:
        for method, target in (("GET", AGENTS), ("POST", AGENTS), ("DELETE", f"{AGENTS}/index")):
            reply = await Http(under_test.port).ask(method, target, b"{}", headers)
            assert (reply.status, reply.json, reply.headers["www-authenticate"]) == (401, UNKNOWN, "Bearer")
    assert await under_test.audit("authentication_failed")
    await under_test.tenancy.change(under_test.principal, "disabled", disabled=False)
    assert ids(await disabled.get(AGENTS)) == ["index"]


async def test_the_master_agent_is_there_for_all_and_for_nobody_to_change(under_test: DoorsUnderTest) -> None:
    acme = await under_test.tenant("acme")
    index = await acme.get(f"{AGENTS}/index")
    assert (index["role"], index["source"]) == ("orchestrator", "builtin")
    check_refused(await acme.ask("PATCH", f"{AGENTS}/index", index), 409, "agent_immutable")
    check_refused(await acme.ask("DELETE", f"{AGENTS}/index"), 409, "agent_immutable")
    assert "/id" in check_refused(await acme.ask("POST", AGENTS, {"id": "index"}), 400, "invalid_agent")
    assert await acme.get(f"{AGENTS}/index") == index


@pytest.mark.parametrize("kind", ["process", "remote", "peer", "function"])
async def test_a_tenant_stores_nothing_that_runs_or_calls_from_here(under_test: DoorsUnderTest, kind: str) -> None:
    acme = await under_test.tenant("acme")
    definition = {"id": "a", "kind": kind, **({"command": ["true"]} if kind == "process" else {})}
    reply = await acme.ask("POST", AGENTS, definition)
    refusal = (400, "invalid_agent") if kind == "function" else (403, "kind_not_allowed")
    assert check_refused(reply, *refusal).startswith("/kind: ")
    await add(acme, id="a")
    check_refused(await acme.ask("PATCH", f"{AGENTS}/a", definition), *refusal)
    if kind != "function":
        await add(Http(under_test.port, under_test.operator.token), **definition)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"", "invalid_json", ""),
        (b"{", "invalid_json", ""),
        (b"\xff", "invalid_json", ""),
        (b"[]", "invalid_request", "object"),
        (b"{}", "invalid_agent", "/id: must be given"),
        (b'{"id":"a","colour":"red"}', "invalid_agent", "unknown key /colour"),
        (b'{"id":"a","advisor":{"model":"m","mode":"x"}}', "invalid_agent", "/advisor/mode: "),
        (b'{"agent_def":[]}', "invalid_agent", "/agent_def: "),
        (b'{"agent_def":{"id":"a","colour":1}}', "invalid_agent", "unknown key /colour"),
        (b'{"id":' + b"[" * 100 + b"]" * 100 + b"}", "invalid_json", "nested"),
    ],
)
async def test_bad_bodies_are_refused_with_a_pointer(
    under_test: DoorsUnderTest, body: bytes, code: str, said: str
) -> None:
    acme = await under_test.tenant("acme")
    assert said in check_refused(await acme.ask("POST", AGENTS, body), 400, code)
    assert ids(await acme.get(AGENTS)) == ["index"]


async def test_the_path_and_the_body_name_the_same_agent(under_test: DoorsUnderTest) -> None:
    acme = await under_test.tenant("acme")
    await add(acme, id="writer")
    refused = await acme.ask("PATCH", f"{AGENTS}/writer", {"id": "reader"})
    assert check_refused(refused, 400, "invalid_agent").startswith("/id: ")


async def test_bodies_are_bounded_and_other_methods_are_told_so(under_test: DoorsUnderTest) -> None:
    acme = await under_test.tenant("acme")
    check_refused(await acme.ask("POST", AGENTS, b" " * (1024 * 1024 + 1)), 413, "body_too_large")
    reply = await acme.ask("PUT", f"{AGENTS}/index")
    check_refused(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "GET, PATCH, DELETE"
    check_refused(await acme.ask("GET", "/v1/nothing"), 404, "unknown_route")


async def test_over_its_rate_a_tenant_is_told_when_to_come_back(under_test: DoorsUnderTest) -> None:
    acme = await under_test.tenant("acme", rate_per_min=1, burst=2)
    other = await under_test.tenant("other")
    for _ in range(2):
        await acme.get(AGENTS)
    reply = await acme.ask("GET", AGENTS)
    check_refused(reply, 429, "rate_limit")
    seconds = reply.json["retry_after_seconds"]
    assert reply.json == {
        "error": "rate limit exceeded",
        "code": "rate_limit",
        "reason": "rate_limit",
        "retry_after_seconds": seconds,
    }
    assert 1 <= seconds <= 60
    assert reply.headers["retry-after"] == str(seconds)
    await other.get(AGENTS)
    await under_test.tenancy.change(under_test.principal, "acme", limits=TenantLimits())
    await acme.get(AGENTS)


async def test_the_settings_limit_those_who_have_no_limits_of_their_own(short_path: Path) -> None:
    async with open_doors(short_path, tenant_limits=TenantSettings(rate_per_min=1)) as under_test:
        acme = await under_test.tenant("acme")
        await acme.get(AGENTS)
        check_refused(await acme.ask("GET", AGENTS), 429, "rate_limit")


async def test_a_bad_token_costs_no_tenants_rate(under_test: DoorsUnderTest) -> None:
    acme = await under_test.tenant("acme", rate_per_min=1)
    for _ in range(3):
        assert (await Http(under_test.port, "atr_nobody").ask("GET", AGENTS)).status == 401
    await acme.get(AGENTS)
