"""Cards over HTTP: who sees which, in which form and under which URL, what caches may keep, and strangers' readers."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from a2a.client import A2ACardResolver
from a2a.client.errors import AgentCardResolutionError
from a2a.compat.v0_3.types import AgentCard as OldCard
from a2a.types import AgentCard as StrangersCard
from a2a.utils.signing import InvalidSignaturesError, create_signature_verifier
from google.protobuf.json_format import ParseDict
from jwt.api_jwk import PyJWK
from starlette.routing import Router

from covenant.daemon.keystore import admit_operator
from covenant.doors.a2a.cards import DESCRIBED, CardPages, PublishedAgent, extended_cards
from covenant.doors.http.bearer_auth import TenantAuth
from covenant.doors.http.host_names import BaseUrl
from covenant.doors.http.openapi import document
from covenant.doors.metrics import Meter
from covenant.exchange.a2a_service import A2ARequest
from covenant.exchange.access.identities import operator_agent
from covenant.exchange.access.principals import IdentityAuth, Principal
from covenant.exchange.access.tenants import Caller, TenantAccess, TenantLimiter
from covenant.exchange.cards import CardFeatures, Cards
from covenant.exchange.catalogue import Catalogue
from covenant.ledger.embedded.open import open_ledger
from covenant.model.agent_definition import read_agent_definition
from covenant.model.mcp_servers import Tool
from covenant.model.settings import Limits
from covenant.model.tenants import TenantLimits
from covenant.seal.cards import CardSigner
from covenant.seal.keys import new_private_key, new_token, token_hash
from covenant.wire.a2a.card_codec import v1_fields
from covenant.wire.a2a.dialects import V03, V1
from tests.doors.clients import Http, Reply
from tests.doors.doors_under_test import _listening
from tests.doors.http.server.server_under_test import AsgiDoor

WELL_KNOWN = "/.well-known/agent-card.json"
KEYS = "/.well-known/jwks.json"
CARD = "/v1/a2a/agents/summarizer/agent-card.json"


@dataclass(frozen=True, slots=True)
class Tenanted:
    """A tenant that calls."""

    caller: Caller
    http: Http


@dataclass(frozen=True, slots=True)
class CardsUnderTest:
    port: int
    catalogue: Catalogue
    cards: Cards
    tenancy: TenantAccess
    principal: Principal
    mine: Tenanted
    theirs: Tenanted
    operator: Http
    nobody: Http
    log: Any

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def add(self, to: Tenanted, **fields: Any) -> None:
        await self.catalogue.store(to.caller, read_agent_definition({"id": "summarizer", **fields}))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@asynccontextmanager
async def opened(
    folder: Path,
    *,
    base_url: BaseUrl | None = None,
    publishing: PublishedAgent | None = None,
    offer: CardFeatures | None = None,
    started_ms: int = 1_000,
) -> AsyncIterator[CardsUnderTest]:
    key, token = new_private_key(), new_token()
    operator = operator_agent("operator@test", key)
    ledger = await open_ledger(folder / "home", clock=now_ms, limits=Limits())
    try:
        await admit_operator(ledger, operator, token, lambda _: None)
        identity_auth = IdentityAuth(ledger, operator)
        tenancy = TenantAccess(ledger, operator, identity_auth)
        await tenancy.open()
        catalogue, cards = Catalogue(ledger, key), Cards(lambda: offer or CardFeatures(), CardSigner(key))
        pages = CardPages(
            cards,
            catalogue,
            TenantAuth(tenancy, TenantLimiter(now_ms)),
            Meter(),
            base_url=base_url or BaseUrl(),
            publishing=publishing or PublishedAgent(),
            started_ms=started_ms,
        )
        principal = Principal(operator, True, token_hash(token))
        async with _listening(AsgiDoor(Router(pages.routes(), redirect_slashes=False))) as port:

            async def tenant(name: str) -> Tenanted:
                minted = await tenancy.add(principal, name)
                caller = tenancy.recognise(minted.token)
                assert caller is not None
                return Tenanted(caller, Http(port, minted.token))

            yield CardsUnderTest(
                port,
                catalogue,
                cards,
                tenancy,
                principal,
                await tenant("mine"),
                await tenant("theirs"),
                Http(port, token),
                Http(port),
                ledger,
            )
    finally:
        await ledger.close()


@pytest.fixture
async def under_test(tmp_path: Path) -> AsyncIterator[CardsUnderTest]:
    async with opened(tmp_path) as made:
        yield made


async def test_everybody_is_told_how_to_authenticate_and_no_agent_is_named(under_test: CardsUnderTest) -> None:
    await under_test.add(under_test.mine)
    reply = await under_test.nobody.ask("GET", WELL_KNOWN)
    card = reply.json
    assert (reply.status, card["name"], card["version"]) == (200, "covenant", "stub")
    assert card["url"] == f"{under_test.base}/v1/a2a/agents/index"
    assert [(skill["id"], skill["tags"]) for skill in card["skills"]] == [("discover", ["discovery", "auth-required"])]
    assert b"summarizer" not in reply.body


async def test_the_url_that_the_stub_names_answers(under_test: CardsUnderTest) -> None:
    path = (await under_test.nobody.get(WELL_KNOWN))["url"].removeprefix(under_test.base)
    assert (await under_test.mine.http.get(path))["name"] == "index"
    assert (await under_test.nobody.ask("GET", path)).status == 401


async def test_the_url_above_the_agents_says_where_they_are(under_test: CardsUnderTest) -> None:
    for path in ("/v1/a2a", "/v1/a2a/"):
        reply = await under_test.nobody.ask("GET", path)
        assert (reply.status, reply.json["card"]) == (200, f"{under_test.base}/v1/a2a/agents/{{id}}/agent-card.json")


async def test_who_calls_at_the_url_above_the_agents_is_told_where_they_are_called(under_test: CardsUnderTest) -> None:
    call = {"jsonrpc": "2.0", "id": 7, "method": "SendMessage", "params": {}}
    assert (await under_test.nobody.ask("POST", "/v1/a2a", call)).status == 401
    for path in ("/v1/a2a", "/v1/a2a/"):
        reply = await under_test.mine.http.ask("POST", path, call)
        error = reply.json["error"]
        assert (reply.status, reply.json["id"], error["code"]) == (200, 7, -32004)
        assert f"{under_test.base}/v1/a2a/agents/{{id}}" in error["message"]
    assert (await under_test.mine.http.ask("POST", "/v1/a2a", ["no call"])).json["error"]["code"] == -32600


async def test_the_older_well_known_path_is_not_served(under_test: CardsUnderTest) -> None:
    assert (await under_test.nobody.ask("GET", "/.well-known/agent.json")).status == 404


async def test_an_agents_card_has_every_field_that_older_clients_read(under_test: CardsUnderTest) -> None:
    await under_test.add(
        under_test.mine, name="Summarizer", role="reader", goal="say what matters", capabilities=["/fetch"]
    )
    stored = under_test.catalogue.agent("mine", "summarizer")
    assert stored is not None
    card = await under_test.mine.http.get(CARD)
    expected = {
        "protocolVersion": "1.0",
        "name": "Summarizer",
        "description": "reader — say what matters",
        "url": f"{under_test.base}/v1/a2a/agents/summarizer",
        "version": str(stored.updated_at_ms),
        "defaultInputModes": ["text/plain"],
        "defaultOutputModes": ["text/plain", "application/json"],
        "security": [{"bearer": []}],
        "preferredTransport": "JSONRPC",
    }
    assert {name: card[name] for name in expected} == expected
    assert (
        card["capabilities"].items()
        >= {
            "streaming": True,
            "pushNotifications": False,
            "stateTransitionHistory": False,
        }.items()
    )
    assert card["securitySchemes"]["bearer"].items() >= {"type": "http", "scheme": "bearer"}.items()
    assert [skill["id"] for skill in card["skills"]] == ["chat", "fetch-url"]


@pytest.mark.parametrize("asked", ["header", "query"])
async def test_asked_in_1_0_a_card_is_clean(under_test: CardsUnderTest, asked: str) -> None:
    await under_test.add(under_test.mine)
    query, headers = ("?A2A-Version=1.0", {}) if asked == "query" else ("", {"A2A-Version": "1.0"})
    card = (await under_test.mine.http.ask("GET", CARD + query, headers=headers)).json
    assert [one["protocolBinding"] for one in card["supportedInterfaces"]] == ["JSONRPC", "HTTP+JSON"] * 2
    assert card.keys().isdisjoint({"url", "protocolVersion", "preferredTransport", "additionalInterfaces", "security"})
    ParseDict(card, StrangersCard())  # refuses every field that the specification does not have


async def test_the_masters_card_is_there_from_the_start(under_test: CardsUnderTest) -> None:
    card = await under_test.mine.http.get("/v1/a2a/agents/index/agent-card.json")
    assert (card["name"], card["version"]) == ("index", "index")


async def test_a_slash_at_the_end_makes_no_difference(under_test: CardsUnderTest) -> None:
    for http, path in ((under_test.nobody, WELL_KNOWN), (under_test.mine.http, "/v1/a2a/agents/index/agent-card.json")):
        assert (await http.get(path)) == (await http.get(f"{path}/"))


async def test_a_card_needs_a_token_of_a_tenant(under_test: CardsUnderTest) -> None:
    for http in (under_test.nobody, Http(under_test.port, "atr_" + "0" * 64), Http(under_test.port, "")):
        reply = await http.ask("GET", CARD)
        assert (reply.status, reply.json["code"]) == (401, "unauthenticated")
        assert reply.headers["www-authenticate"] == "Bearer"


async def test_a_card_of_another_tenants_agent_is_not_found_as_if_it_were_nowhere(under_test: CardsUnderTest) -> None:
    await under_test.add(under_test.mine)
    for http, path in (
        (under_test.theirs.http, CARD),
        (under_test.operator, CARD),
        (under_test.mine.http, CARD.replace("summ", "x")),
    ):
        reply = await http.ask("GET", path)
        name = path.split("/")[4]
        assert (reply.status, reply.json) == (
            404,
            {
                "error": f"no agent {name!r} for this tenant; "
                "`covenant agents list` and GET /v1/agents name those that there are",
                "code": "unknown_agent",
            },
        )
        assert "etag" not in reply.headers


async def test_agents_of_one_name_have_the_card_of_their_own_tenant(under_test: CardsUnderTest) -> None:
    await under_test.add(under_test.mine, role="mine")
    await under_test.add(under_test.theirs, role="theirs")
    for tenant, role in ((under_test.mine, "mine"), (under_test.theirs, "theirs"), (under_test.mine, "mine")):
        assert (await tenant.http.get(CARD))["description"] == role


async def test_a_disabled_tenant_gets_no_card(under_test: CardsUnderTest) -> None:
    await under_test.add(under_test.mine)
    await under_test.tenancy.change(under_test.principal, "mine", disabled=True)
    assert (await under_test.mine.http.ask("GET", CARD)).status == 401


async def test_other_methods_are_told_which_there_are(under_test: CardsUnderTest) -> None:
    for path in (WELL_KNOWN, CARD, KEYS):
        reply = await under_test.mine.http.ask("POST", path, b"{}")
        assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")
    reply = await under_test.mine.http.ask("DELETE", "/v1/a2a")
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD, POST")


async def test_whoever_has_a_card_is_told_so_and_not_told_it_again(under_test: CardsUnderTest) -> None:
    await under_test.add(under_test.mine)
    for http, path in ((under_test.nobody, WELL_KNOWN), (under_test.mine.http, CARD), (under_test.nobody, KEYS)):
        first = await http.ask("GET", path)
        for sent in (first.headers["etag"], f'"other", W/{first.headers["etag"]}', "*"):
            again = await http.ask("GET", path, headers={"If-None-Match": sent})
            assert (again.status, again.body) == (304, b"")
            kept = ("etag", "last-modified", "cache-control", "vary")
            assert {name: again.headers.get(name) for name in kept} == {name: first.headers.get(name) for name in kept}
        since = {"If-Modified-Since": first.headers["last-modified"]}
        assert (await http.ask("GET", path, headers=since)).status == 304
        assert (await http.ask("GET", path, headers={**since, "If-None-Match": '"other"'})).status == 200
        for wrong in ("yesterday", "Thu, 01 Jan 1970 00:00:00 GMT", ""):
            assert (await http.ask("GET", path, headers={"If-Modified-Since": wrong})).status == 200


async def test_a_changed_agent_has_another_tag(under_test: CardsUnderTest) -> None:
    await under_test.add(under_test.mine)
    first = await under_test.mine.http.ask("GET", CARD)
    await under_test.catalogue.replace(
        under_test.mine.caller, read_agent_definition({"id": "summarizer", "role": "new"})
    )
    second = await under_test.mine.http.ask("GET", CARD, headers={"If-None-Match": first.headers["etag"]})
    assert (second.status, second.json["description"]) == (200, "new")
    assert second.headers["etag"] != first.headers["etag"]


async def test_the_two_forms_have_tags_of_their_own(under_test: CardsUnderTest) -> None:
    one = await under_test.nobody.ask("GET", WELL_KNOWN)
    other = await under_test.nobody.ask("GET", WELL_KNOWN, headers={"A2A-Version": "1.0"})
    assert one.headers["etag"] != other.headers["etag"]


async def test_a_card_is_no_older_than_the_process_that_made_it(tmp_path: Path) -> None:
    started_ms = 4_000_000_000_000
    async with opened(tmp_path, started_ms=started_ms) as under_test:
        await under_test.add(under_test.mine)
        reply = await under_test.mine.http.ask("GET", CARD)
        assert reply.headers["last-modified"] == "Tue, 02 Oct 2096 07:06:40 GMT"


async def test_head_says_what_get_would_and_sends_nothing(under_test: CardsUnderTest) -> None:
    got, headed = [await under_test.nobody.ask(method, WELL_KNOWN) for method in ("GET", "HEAD")]
    assert (headed.status, headed.body) == (200, b"")
    assert headed.headers["content-length"] == str(len(got.body))
    assert headed.headers["etag"] == got.headers["etag"]


async def test_shared_caches_may_keep_what_is_public_and_nothing_else(under_test: CardsUnderTest) -> None:
    await under_test.add(under_test.mine)
    public, own = await under_test.nobody.ask("GET", WELL_KNOWN), await under_test.mine.http.ask("GET", CARD)
    assert (public.headers["cache-control"], own.headers["cache-control"]) == (
        "public, max-age=300",
        "private, max-age=300",
    )
    assert public.headers["vary"] == "A2A-Version, Host"
    assert own.headers["vary"] == "Authorization, A2A-Version, Host"
    assert (await under_test.nobody.ask("GET", CARD)).headers["cache-control"] == "no-store"


async def urls(under_test: CardsUnderTest, **headers: str) -> str:
    url: str = (await under_test.nobody.ask("GET", WELL_KNOWN, headers=headers)).json["url"]
    return url.removesuffix("/v1/a2a/agents/index")


async def test_a_public_base_url_is_what_cards_say_whatever_was_called(tmp_path: Path) -> None:
    async with opened(tmp_path, base_url=BaseUrl("https://agents.example/under//")) as under_test:
        await under_test.add(under_test.mine)
        assert await urls(under_test, Host="elsewhere") == "https://agents.example/under"
        card = await under_test.mine.http.get(CARD)
        assert card["url"] == "https://agents.example/under/v1/a2a/agents/summarizer"
        assert (await under_test.nobody.ask("GET", WELL_KNOWN)).headers["vary"] == "A2A-Version"


FORWARDED = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "agents.example"}


async def test_what_a_proxy_says_is_not_believed_unless_it_is_trusted(under_test: CardsUnderTest) -> None:
    assert await urls(under_test, **FORWARDED) == under_test.base


async def test_a_trusted_proxy_is_believed(tmp_path: Path) -> None:
    async with opened(tmp_path, base_url=BaseUrl(trusted=["127.0.0.0/8"])) as under_test:
        assert await urls(under_test, **FORWARDED) == "https://agents.example"
        assert await urls(under_test, **{**FORWARDED, "X-Forwarded-Proto": "https, http"}) == "http://agents.example"
        assert await urls(under_test) == under_test.base
        reply = await under_test.nobody.ask("GET", WELL_KNOWN)
        assert reply.headers["vary"] == "A2A-Version, Host, X-Forwarded-Host, X-Forwarded-Proto"


@pytest.mark.parametrize("host", ['evil"<script>', "a b", "x/y", "user@x", "[::1", ""])
async def test_a_name_that_is_none_does_not_get_into_a_card(tmp_path: Path, host: str) -> None:
    async with opened(tmp_path, base_url=BaseUrl(trusted=["127.0.0.1/32"])) as under_test:
        sent = {"Host": "127.0.0.1:1", "X-Forwarded-Host": host} if host else {"Host": " "}
        expected = {under_test.base, "http://127.0.0.1:1"} if not host else {under_test.base}
        assert await urls(under_test, **sent) in expected


async def test_the_published_agent_is_shown_to_everybody_in_both_forms(tmp_path: Path) -> None:
    async with opened(tmp_path, publishing=PublishedAgent("summarizer")) as under_test:
        reply = await under_test.nobody.ask("GET", WELL_KNOWN)
        assert (reply.status, reply.json["code"]) == (404, "unknown_agent")
        caller = under_test.tenancy.recognise(under_test.operator.token or "")
        assert caller is not None
        await under_test.catalogue.store(caller, read_agent_definition({"id": "summarizer"}))
        card = (await under_test.nobody.ask("GET", WELL_KNOWN, headers={"A2A-Version": "1.0"})).json
        ParseDict(card, StrangersCard())
        both = await under_test.nobody.get(WELL_KNOWN)
        assert both["url"] == card["supportedInterfaces"][0]["url"]
        assert v1_fields(both) == card
        assert card["supportedInterfaces"][0]["url"] == f"{under_test.base}/v1/a2a/agents/summarizer"
        assert card["securityRequirements"] == [{"schemes": {"bearer": {}}}]


async def test_a_published_agent_of_another_tenant_is_not_shown(tmp_path: Path) -> None:
    async with opened(tmp_path, publishing=PublishedAgent("summarizer")) as under_test:
        await under_test.add(under_test.mine)
        assert (await under_test.nobody.ask("GET", WELL_KNOWN)).status == 404


async def test_a_published_agent_that_is_open_says_that_no_token_is_needed(tmp_path: Path) -> None:
    async with opened(tmp_path, publishing=PublishedAgent("index", "loopback")) as under_test:
        reply = await under_test.nobody.ask("GET", WELL_KNOWN)
        assert "securityRequirements" not in reply.json
        assert reply.headers["cache-control"] == "private, max-age=300"
        far = await under_test.nobody.ask("GET", WELL_KNOWN, headers=FORWARDED)
        assert "securityRequirements" in far.json


async def test_the_own_card_of_an_open_agent_needs_no_token_either_and_those_of_others_do(tmp_path: Path) -> None:
    async with opened(tmp_path, publishing=PublishedAgent("index", "loopback")) as under_test:
        card = await under_test.nobody.get("/v1/a2a/agents/index/agent-card.json")
        assert "securityRequirements" not in card
        assert "securityRequirements" in await under_test.mine.http.get("/v1/a2a/agents/index/agent-card.json")
        await under_test.add(under_test.mine)
        for path, headers in ((CARD, {}), ("/v1/a2a/agents/index/agent-card.json", FORWARDED)):
            assert (await under_test.nobody.ask("GET", path, headers=headers)).status == 401
        assert (await Http(under_test.port, "wrong").ask("GET", "/v1/a2a/agents/index/agent-card.json")).status == 401


def resolver(under_test: CardsUnderTest, client: httpx.AsyncClient) -> A2ACardResolver:
    return A2ACardResolver(client, under_test.base)


async def checked(under_test: CardsUnderTest) -> Any:
    """The SDK's own verifier, with the keys that a card points to."""
    key_set = await under_test.nobody.get(KEYS)

    def key(kid: str | None, jku: str | None) -> PyJWK:
        assert jku == f"{under_test.base}{KEYS}"
        (found,) = [one for one in key_set["keys"] if one["kid"] == kid]
        return PyJWK(found)

    return create_signature_verifier(key, ["EdDSA"])


@pytest.mark.parametrize("version", [{}, {"A2A-Version": "1.0"}], ids=["as a client of 0.3", "as a client of 1.0"])
async def test_the_official_sdk_reads_and_verifies_every_card(tmp_path: Path, version: dict[str, str]) -> None:
    tools = (Tool("github", "corvid_github_list_prs", "Lists — prüft", tenants=("mine",)), Tool("github", "theirs"))
    async with (
        opened(tmp_path, offer=CardFeatures(tools=tools, grpc_port=8431)) as under_test,
        httpx.AsyncClient() as client,
    ):
        await under_test.add(under_test.mine, role="Zusammenfasser — kürzt", goal="“knapp” 🦊", extensions=["urn:x"])
        verifier = await checked(under_test)
        stub = await resolver(under_test, client).get_agent_card(
            http_kwargs={"headers": version}, signature_verifier=verifier
        )
        assert stub.version == "stub"
        card = await resolver(under_test, client).get_agent_card(
            CARD,
            http_kwargs={"headers": {**version, "Authorization": f"Bearer {under_test.mine.http.token}"}},
            signature_verifier=verifier,
        )
        assert card.description == "Zusammenfasser — kürzt — “knapp” 🦊"
        assert [skill.name for skill in card.skills] == ["chat", "GitHub List PRs"]
        assert card.security_schemes["bearer"].http_auth_security_scheme.scheme == "bearer"
        assert list(card.security_requirements[0].schemes) == ["bearer"]
        assert [(one.protocol_binding, one.protocol_version) for one in card.supported_interfaces] == [
            ("JSONRPC", "1.0"),
            ("HTTP+JSON", "1.0"),
            ("GRPC", "1.0"),
            ("JSONRPC", "0.3"),
            ("HTTP+JSON", "0.3"),
        ]
        card.name = "Somebody else"
        with pytest.raises(InvalidSignaturesError):
            verifier(card)


async def test_the_official_sdk_of_0_3_reads_the_card(under_test: CardsUnderTest) -> None:
    await under_test.add(under_test.mine, role="reader")
    card = OldCard.model_validate(await under_test.mine.http.get(CARD))
    assert (card.protocol_version, card.preferred_transport) == ("1.0", "JSONRPC")
    assert card.url == f"{under_test.base}/v1/a2a/agents/summarizer"
    assert card.security == [{"bearer": []}]
    assert card.security_schemes is not None
    assert card.security_schemes["bearer"].root.model_dump(include={"type", "scheme"}) == {
        "type": "http",
        "scheme": "bearer",
    }
    assert [(one.transport, one.url) for one in card.additional_interfaces or ()] == [
        ("JSONRPC", card.url),
        ("HTTP+JSON", card.url),
    ]


async def test_a_stranger_without_a_token_is_refused_by_the_sdk_too(under_test: CardsUnderTest) -> None:
    async with httpx.AsyncClient() as client:
        with pytest.raises(AgentCardResolutionError):
            await resolver(under_test, client).get_agent_card(CARD)


async def test_the_extended_card_is_told_in_the_callers_dialect(under_test: CardsUnderTest) -> None:
    await under_test.tenancy.change(under_test.principal, "mine", limits=TenantLimits(concurrency=3))
    caller = under_test.tenancy.recognise(under_test.mine.http.token or "")
    assert caller is not None
    await under_test.add(under_test.mine)
    agent = under_test.catalogue.agent("mine", "summarizer")
    assert agent is not None
    extended_card = extended_cards(under_test.cards)
    ask = A2ARequest(caller=caller, agent=agent)
    clean, both = (json.loads(extended_card(ask, dialect, under_test.base)) for dialect in (V1, V03))
    card = ParseDict(clean, StrangersCard())
    (await checked(under_test))(card)
    assert card.capabilities.extensions[0].params["concurrency"] == 3
    assert (both["url"], both["supportsAuthenticatedExtendedCard"]) == (
        f"{under_test.base}/v1/a2a/agents/summarizer",
        True,
    )


async def test_the_openapi_document_describes_each_page(under_test: CardsUnderTest) -> None:
    described = document((), (), "0", DESCRIBED)
    await under_test.add(under_test.mine)
    for path, methods in described["paths"].items():
        assert methods.keys() == {"get"}
        http = under_test.mine.http if methods["get"]["security"] else under_test.nobody
        answered = await http.get(path.format(agent_id="summarizer"))
        (content,) = methods["get"]["responses"]["200"]["content"].values()
        schema = described["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        assert set(schema["required"]) <= answered.keys() <= schema["properties"].keys()


async def test_many_ask_at_once_and_all_get_the_same_card(under_test: CardsUnderTest) -> None:
    await under_test.add(under_test.mine)
    replies: list[Reply] = await asyncio.gather(*(under_test.mine.http.ask("GET", CARD) for _ in range(20)))
    assert len({(reply.status, reply.body) for reply in replies}) == 1
