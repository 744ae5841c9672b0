"""Who may do what: every operation on every binding in every role, and no answer that tells of what is another's."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
import pytest_asyncio

from covenant.model.tenants import DEFAULT
from tests.conformance.a2a.bindings import Ask, Binding, Refused, words
from tests.conformance.a2a.http_bindings import Rpc
from tests.conformance.a2a.server_under_test import NEIGHBOUR, ServerUnderTest, unique

pytestmark = pytest.mark.asyncio(loop_scope="module")

UNKNOWN: Final = "00000000-0000-4000-8000-000000000000"
OPERATIONS: Final = (
    *("continue", "continue.stream", "get", "list", "cancel", "subscribe", "card"),
    *("push.create", "push.get", "push.list", "push.delete"),
)
ABOUT_A_TASK: Final = tuple(name for name in OPERATIONS if name not in ("list", "card"))
REFUSED: Final = "PUSH_NOTIFICATION_NOT_SUPPORTED"


@dataclass(frozen=True)
class Roles:
    """Who knocks. The task is the neighbour's, at an agent that is called alike in every tenant."""

    task: str
    tokens: dict[str, str | None]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def roles(under_test: ServerUnderTest) -> AsyncIterator[Roles]:
    a2a, operator = under_test.a2a, under_test.a2a.operator
    actor = a2a.catalogue.agent(DEFAULT, "actor")
    assert actor is not None
    minted = {}
    for name in ("stranger", "disabled", "rotated"):
        minted[name] = (await a2a.tenancy.add(operator, unique(name))).tenant.name, ""
    tokens: dict[str, str | None] = {}
    for role, (tenant, _) in minted.items():
        a2a.catalogue.add_resident(tenant, actor.definition, "code")
        tokens[role] = (await a2a.tenancy.rotate(operator, tenant)).token
    await a2a.tenancy.rotate(operator, minted["rotated"][0])
    await a2a.tenancy.change(operator, minted["disabled"][0], disabled=True)
    tokens |= {"mine": under_test.neighbour, "operator": a2a.token, "nobody": None, "unknown": "atr_" + "0" * 64}
    yield Roles("", tokens)


async def parked(under_test: ServerUnderTest, kind: type[Binding], agent: str = "actor", token: str | None = "") -> str:
    """A task that waits, so that everything can be asked about it."""
    token = under_test.neighbour if token == "" else token
    return (await under_test.client(kind, agent, token).task("ask")).id


async def attempt(client: Binding, operation: str, task_id: str) -> str:
    """What comes of it, in a word."""
    try:
        match operation.split("."):
            case ["continue"]:
                await client.task(words("go on", task=task_id))
            case ["continue", "stream"]:
                await client.streamed(words("go on", task=task_id))
            case ["list"]:
                page = await client.page(pageSize=100)
                return "listed" if task_id in {task.id for task in page.tasks} else "not listed"
            case ["subscribe"]:
                async with client.subscribe(task_id) as frames:
                    await anext(frames)
            case ["push", verb]:
                await client.push(verb, task_id)
            case ["card"]:
                await client.card()
            case [verb]:
                await getattr(client, verb)(task_id)
            case _:
                raise AssertionError(operation)
    except Refused as refused:
        return refused.name
    return "done"


def expected(operation: str, role: str) -> str:
    if role in ("disabled", "rotated", "nobody", "unknown"):
        return "UNAUTHENTICATED"
    if operation.startswith("push"):
        # Nobody has any here, and everybody is told the same.
        return REFUSED
    if operation == "card":
        return "done"
    if operation == "list":
        return "listed" if role == "mine" else "not listed"
    return "done" if role == "mine" else "TASK_NOT_FOUND"


@pytest.mark.parametrize("role", ["mine", "stranger", "operator", "disabled", "rotated", "nobody", "unknown"])
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_tenants_task_is_there_for_the_tenant_alone(
    binding: type[Binding], under_test: ServerUnderTest, roles: Roles, operation: str, role: str
) -> None:
    task_id = await parked(under_test, binding)
    client = under_test.client(binding, "actor", roles.tokens[role])
    assert await attempt(client, operation, task_id) == expected(operation, role)
    mine = under_test.client(binding, "actor", under_test.neighbour)
    changed = role == "mine" and operation in ("continue", "continue.stream", "cancel")
    assert ((await mine.get(task_id)).state == "input-required") == (not changed)


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_task_is_there_only_at_its_own_agent(
    binding: type[Binding], under_test: ServerUnderTest, operation: str
) -> None:
    task_id = await parked(under_test, binding)
    client = under_test.client(binding, "other", under_test.neighbour)
    assert await attempt(client, operation, task_id) == expected(operation, "stranger")


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_who_has_no_token_sees_at_an_open_agent_what_was_sent_without_one(
    binding: type[Binding], under_test: ServerUnderTest, operation: str
) -> None:
    known, own = (
        await parked(under_test, binding, "open", under_test.a2a.token),
        await parked(under_test, binding, "open", None),
    )
    client = under_test.client(binding, "open", None)
    token_needed = {"list": "UNAUTHENTICATED", "card": "UNSUPPORTED_OPERATION"}.get(operation)
    assert await attempt(client, operation, known) == (token_needed or expected(operation, "stranger"))
    assert await attempt(client, operation, own) == (token_needed or expected(operation, "mine"))
    # Another tenant's agent of that name is not open.
    with pytest.raises(Refused, match="UNAUTHENTICATED"):
        await under_test.client(binding, "actor", None).page()


async def test_a_web_page_from_elsewhere_cannot_use_an_open_agent_through_a_browser_on_this_machine(
    binding: type[Binding], under_test: ServerUnderTest
) -> None:
    """A browser sends a page's form without asking first, from this machine's own address."""
    client = under_test.client(binding, "open", None)
    page = client.saying(origin="https://evil.example")
    body = client.envelope("send", client.params_send(Ask(message=words("done by a page"))))
    known = under_test.client(binding, "open", under_test.a2a.token)
    before = (await known.page()).total
    reply = await page.raw(body, content_type="text/plain")
    assert reply.status_code == 401
    assert (await known.page()).total == before
    own = client.saying(origin=client.base_url)
    assert (await own.raw(body)).status_code == 200


def params(client: Binding, operation: str, task_id: str) -> tuple[str, dict[str, Any]]:
    match operation.split("."):
        case ["continue", *stream]:
            return "stream" if stream else "send", client.params_send(Ask(message=words("go on", task=task_id)))
        case ["push", verb]:
            return operation, client.params_push(verb, task_id, "p-1", "https://example.com/")
        case _:
            return operation, {"id": task_id}


@pytest.mark.parametrize("operation", ABOUT_A_TASK)
async def test_what_is_anothers_is_answered_byte_for_byte_as_what_does_not_exist(
    binding: type[Binding], under_test: ServerUnderTest, roles: Roles, operation: str
) -> None:
    task_id = await parked(under_test, binding)
    for client in (
        under_test.client(binding, "actor", roles.tokens["stranger"]),
        under_test.client(binding, "actor", under_test.a2a.token),
        under_test.client(binding, "other", under_test.neighbour),
        under_test.client(binding, "open", None),
    ):
        foreign = await client.bytes_of(*params(client, operation, task_id))
        unknown = await client.bytes_of(*params(client, operation, UNKNOWN))
        assert (foreign[0], foreign[1].replace(task_id.encode(), UNKNOWN.encode())) == unknown


async def test_an_agent_of_another_tenant_is_answered_as_one_that_does_not_exist(
    binding: type[Binding], under_test: ServerUnderTest, roles: Roles
) -> None:
    catalogue = under_test.a2a.catalogue
    actor = catalogue.agent(NEIGHBOUR, "actor")
    assert actor is not None
    secret = unique("agent")
    catalogue.add_resident(NEIGHBOUR, type(actor.definition)(id=secret, kind="function"), "code")
    for operation in (*OPERATIONS, "send", "stream"):
        answers = []
        for agent in (secret, "agent-" + "0" * (len(secret) - 6)):
            client = under_test.client(binding, agent, roles.tokens["stranger"])
            place, asked = params(client, "continue" if operation in ("send", "stream") else operation, UNKNOWN)
            status, body = await client.bytes_of(operation if operation in ("send", "stream") else place, asked)
            answers.append((status, body.replace(agent.encode(), b"AGENT")))
        assert answers[0] == answers[1]
        assert b"-32001" in answers[0][1] if issubclass(binding, Rpc) else answers[0][0] == 404


async def test_every_token_that_is_not_good_gets_one_and_the_same_answer(
    binding: type[Binding], under_test: ServerUnderTest, roles: Roles
) -> None:
    answers = set()
    bad: list[str | None] = [roles.tokens[role] for role in ("disabled", "rotated", "nobody", "unknown")]
    for token in (*bad, "x" * 10_000):
        client = under_test.client(binding, "actor", None)
        client = client if token is None else client.saying(authorization=f"Bearer {token}")
        for said in (client, client.with_(agent="nobody")):
            reply = await said.ask("get", {"id": UNKNOWN})
            assert reply.headers["www-authenticate"] == "Bearer"
            answers.add((reply.status_code, reply.content))
    ((status, _),) = answers
    assert status == 401
    basic = under_test.client(binding, "actor", None).saying(authorization="Basic dXNlcjpwYXNz")
    assert (await basic.ask("get", {"id": UNKNOWN})).status_code == 401
    open_agent = under_test.client(binding, "open", None).saying(authorization="Bearer wrong")
    assert (await open_agent.ask("get", {"id": UNKNOWN})).status_code == 401


async def test_a_tenant_over_its_limits_is_told_when_to_come_back(
    binding: type[Binding], under_test: ServerUnderTest
) -> None:
    a2a, name = under_test.a2a, unique("tenant")
    minted = await a2a.tenancy.add(a2a.operator, name)
    await a2a.tenancy.change(a2a.operator, name, limits=type(minted.tenant.limits)(rate_per_min=2, burst=2))
    actor = a2a.catalogue.agent(DEFAULT, "actor")
    assert actor is not None
    a2a.catalogue.add_resident(name, actor.definition, "code")
    client = under_test.client(binding, "actor", minted.token)
    await asyncio.gather(client.page(), client.page())
    reply = await client.ask("list", {})
    assert reply.status_code == 429
    assert 1 <= int(reply.headers["retry-after"]) <= 30
    with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
        client.read(reply)
    # Others are not in its way.
    assert (await under_test.client(binding).ask("list", {})).status_code == 200
