"""Cards over HTTP: a public one, one for each agent of the caller's tenant, and the keys to check them with.

The public card names no agent, unless one is published. All others are looked up within the caller's tenant.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.doors.a2a.admission import TRANSPORT, headers_of
from covenant.doors.a2a.http_bindings import content_refusal, reply_with_status
from covenant.doors.http.bearer_auth import TenantAuth, bearer_token, credential_of
from covenant.doors.http.endpoint import MethodRouter
from covenant.doors.http.host_names import AllowedOrigins, BaseUrl, forwarded, peer_address
from covenant.doors.http.openapi import DescribedRoute
from covenant.doors.http.request_body import read_body
from covenant.doors.http.responses import PROBLEM, Document, reply, reply_document, reply_refused
from covenant.doors.http.server.http_exchange import exchange_of
from covenant.doors.metrics import Meter
from covenant.doors.waits import CallerGoneError
from covenant.exchange.a2a_service import A2ARequest
from covenant.exchange.cards import A2A_PATH, AGENTS_PATH, KEYS_PATH, Anonymous, Cards, admits_anonymous
from covenant.exchange.catalogue import Catalogue
from covenant.model.agent_card import AgentCard
from covenant.model.agent_definition import CatalogueAgent
from covenant.model.errors import Conflict, Refusal
from covenant.model.settings import RootForm
from covenant.model.tenants import DEFAULT
from covenant.wire import jsonrpc
from covenant.wire.a2a.card_codec import CombinedCard, encode_card, encode_proto_card_v03, reads_v1
from covenant.wire.a2a.dialects import PROTO_V03, V1, Dialect
from covenant.wire.a2a.error_codes import Version

WELL_KNOWN_PATH: Final = "/.well-known/agent-card.json"
CARD_NAME: Final = "agent-card.json"
AGENT_PATH: Final = f"{AGENTS_PATH}/{{agent_id}}"
CARD_PATH: Final = f"{AGENT_PATH}/{CARD_NAME}"
AGENT_WELL_KNOWN_PATH: Final = f"{AGENT_PATH}{WELL_KNOWN_PATH}"
API_CARD_PATH: Final = "/api/agents/{agent_id}/agent-card"

CALL_BYTES_MAX: Final = 1024 * 1024
"""The largest call at the URL without an agent. It is read for its id, which the refusal repeats."""

Answer = Callable[[Scope], Awaitable[Document]]


class Overview(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The answer at the URL of the card that names no agent: where agents and cards are."""

    name: str = "covenant"
    protocol_versions: tuple[str, ...] = ("1.0", "0.3")
    agent: str
    card: str
    authentication: str = "Authorization: Bearer <token of a tenant>"


class KeySet(msgspec.Struct, frozen=True):
    keys: tuple[dict[str, str], ...]


DESCRIBED: Final = (
    DescribedRoute(
        "GET",
        WELL_KNOWN_PATH,
        "public_card",
        "How to authenticate, or the agent that is published; clean 1.0 with A2A-Version: 1.0",
        CombinedCard,
        token=False,
    ),
    DescribedRoute("GET", KEYS_PATH, "card_keys", "The keys that cards are signed with", KeySet, token=False),
    DescribedRoute("GET", A2A_PATH, "a2a_overview", "Where agents and their cards are", Overview, token=False),
    *(
        DescribedRoute(
            "GET", path, name, "The card of one of your agents; clean 1.0 with A2A-Version: 1.0", CombinedCard
        )
        for path, name in (
            (CARD_PATH, "agent_card"),
            (AGENT_WELL_KNOWN_PATH, "agent_card_well_known"),
            (AGENT_PATH, "agent_card_at_url"),
        )
    ),
    DescribedRoute(
        "GET", API_CARD_PATH, "agent_card_by_api", "The same card, at the path of older clients", CombinedCard
    ),
)


class PublishedAgent(NamedTuple):
    """The published agent, and which of its callers need no token."""

    agent_id: str = ""
    anonymous: Anonymous = "never"
    bind_addr: str = "127.0.0.1"
    origins: AllowedOrigins = AllowedOrigins(())

    def admits(self, agent: CatalogueAgent, scope: Scope) -> bool:
        """Whether this request needs no token: it is for the published agent, and its caller may be anonymous."""
        return (agent.tenant, agent.id) == (DEFAULT, self.agent_id) and self.open(scope)

    def open(self, scope: Scope) -> bool:
        """Whether this caller may use the published agent, if there is one, without a token."""
        return admits_anonymous(
            self.anonymous,
            bind_addr=self.bind_addr,
            peer=peer_address(scope),
            forwarded=forwarded(scope),
            foreign_page=self.origins.is_foreign_page(scope),
        )


class CardPages:
    """`started_ms`: when the process started. No card is older, since cards depend on settings."""

    def __init__(
        self,
        cards: Cards,
        catalogue: Catalogue,
        auth: TenantAuth,
        meter: Meter,
        *,
        base_url: BaseUrl,
        publishing: PublishedAgent,
        root_form: RootForm = "both",
        started_ms: int,
    ) -> None:
        self._cards = cards
        self._catalogue = catalogue
        self._auth = auth
        self._meter = meter
        self._base_url = base_url
        self._publishing = publishing
        self._root_form = root_form
        self._started_ms = started_ms
        self._vary: Final = ("A2A-Version", *base_url.varies)

    def with_auth(self, auth: TenantAuth) -> CardPages:
        """The same pages with another authentication, and without a published agent."""
        return CardPages(
            self._cards,
            self._catalogue,
            auth,
            self._meter,
            base_url=self._base_url,
            publishing=PublishedAgent(),
            root_form=self._root_form,
            started_ms=self._started_ms,
        )

    def routes(self) -> list[BaseRoute]:
        pages: dict[str, Answer] = {
            WELL_KNOWN_PATH: self.public_card,
            KEYS_PATH: self.keys,
            A2A_PATH: self.overview,
            CARD_PATH: self.agent_card,
            AGENT_WELL_KNOWN_PATH: self.agent_card,
            AGENT_PATH: self.agent_card,
            API_CARD_PATH: self.agent_card,
        }
        served = {path: self._document_page(answer) for path, answer in pages.items()}
        served[A2A_PATH] = MethodRouter({**served[A2A_PATH].calls, "POST": self._answer_without_agent})
        return [
            Route(path + method_v03, page, name=path + method_v03)
            for path, page in served.items()
            for method_v03 in ("", "/")
        ]

    def agent_page(self) -> ASGIApp:
        """The card of the agent that the path names, for a door that has routes of its own."""
        return self._document_page(self.agent_card)

    async def public_card(self, scope: Scope) -> Document:
        base_url, agent_id = self._base_url.of(scope), self._publishing.agent_id
        clean = self._root_form == "1.0" or _wants_clean(scope)
        if not agent_id:
            return self._document(self._cards.stub(base_url), 0, clean=clean, public=True, varies=self._vary)
        agent = await self._catalogue.show(DEFAULT, agent_id, away=True)
        has_token = self._has_token(scope)
        card = self._cards.card(agent, base_url, token_needed=has_token or not self._publishing.admits(agent, scope))
        # If the card depends on its caller, shared caches must not keep it.
        public = not has_token and self._publishing.anonymous != "loopback"
        varies = self._vary if self._publishing.anonymous == "never" else ("Authorization", *self._vary)
        return self._document(card, agent.updated_at_ms, clean=clean, public=public, varies=varies)

    def _has_token(self, scope: Scope) -> bool:
        """Whether the caller has a token of the published agent's tenant."""
        credential = credential_of(scope)
        caller = self._auth.recognised(credential) if credential is not None else None
        return caller is not None and caller.tenant.name == DEFAULT

    async def agent_card(self, scope: Scope) -> Document:
        # From the path, not from the router's parameters, which a request that comes by the A2A door does not have.
        agent_id = scope["path"].partition("/agents/")[2].partition("/")[0]
        open_to_all = (
            bearer_token(scope) is None and self._publishing.agent_id == agent_id and self._publishing.open(scope)
        )
        tenant = DEFAULT if open_to_all else (await self._auth.enter(scope)).tenant.name
        agent = await self._catalogue.show(tenant, agent_id, away=True)
        card = self._cards.card(agent, self._base_url.of(scope), token_needed=not open_to_all)
        clean, varies = _wants_clean(scope), ("Authorization", *self._vary)
        return self._document(card, agent.updated_at_ms, clean=clean, public=False, varies=varies)

    async def keys(self, _: Scope) -> Document:
        body = msgspec.json.encode(self._cards.key_set())
        return Document(body, self._started_ms, public=True, content_type=b"application/jwk-set+json")

    async def overview(self, scope: Scope) -> Document:
        agents = f"{self._base_url.of(scope)}{AGENTS_PATH}/{{id}}"
        body = msgspec.json.encode(Overview(agent=agents, card=f"{agents}/{CARD_NAME}"))
        return Document(body, self._started_ms, public=True, varies=self._base_url.varies)

    async def _answer_without_agent(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers JSON-RPC at the URL that names no agent: an admitted caller is told where agents are called."""
        try:
            await self._auth.enter(scope)
            call_id = jsonrpc.decode_call(await read_body(scope, receive, CALL_BYTES_MAX)).id
        except jsonrpc.UnreadableCall as unreadable:
            problem = content_refusal(unreadable, headers_of(scope))
            call_id = unreadable.id
        except Refusal as refusal:
            self._meter.refused(TRANSPORT, refusal.code)
            reply_with_status(exchange_of(send), refusal)
            return
        except CallerGoneError:
            return
        else:
            agent_url = f"{self._base_url.of(scope)}{AGENTS_PATH}/{{id}}"
            problem = Conflict("unsupported_operation", f"no agent is at this URL; an agent is called at {agent_url}")
        self._meter.refused(TRANSPORT, problem.code)
        reply(exchange_of(send), 200, jsonrpc.encode_refusal(call_id, problem, Version.V1))

    def _document(
        self, card: AgentCard, modified_ms: int, *, clean: bool, public: bool, varies: tuple[str, ...]
    ) -> Document:
        body = encode_card(card, combined=not clean)
        return Document(body, max(modified_ms, self._started_ms), public=public, varies=varies)

    def _document_page(self, answer: Answer) -> MethodRouter:
        async def page(scope: Scope, _: Receive, send: Send) -> None:
            try:
                document = await answer(scope)
            except Refusal as refusal:
                self._meter.refused(TRANSPORT, refusal.code)
                reply_refused(exchange_of(send), PROBLEM, refusal)
            else:
                await reply_document(scope, exchange_of(send), document)

        return MethodRouter({"GET": page, "HEAD": page})


def _wants_clean(scope: Scope) -> bool:
    return reads_v1(headers_of(scope).version(scope))


def extended_cards(cards: Cards) -> Callable[[A2ARequest, Dialect, str], bytes]:
    """Makes the extended card for an authenticated caller, in its dialect."""

    def extended_card(ask: A2ARequest, dialect: Dialect, base_url: str) -> bytes:
        card = cards.extended_card(ask.caller, ask.agent, base_url)
        return encode_proto_card_v03(card) if dialect is PROTO_V03 else encode_card(card, combined=dialect is not V1)

    return extended_card
