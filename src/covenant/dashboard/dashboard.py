"""Everything under `/ui`: routes a request to its page, file, operation or form.

Everybody may read the page shells and static files, which hold no data. All else needs a session. A request that
changes something must come from a page of the dashboard.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from covenant.dashboard.act_pages import Act, ActPages
from covenant.dashboard.admin_acts import DelegationAct, GrantAct, RevokeAct, TenantAct, TrustAct
from covenant.dashboard.audit_export import AuditExport
from covenant.dashboard.curl_command import curl_page
from covenant.dashboard.feed import FeedCollector, FeedEndpoint
from covenant.dashboard.file_download import FileDownload
from covenant.dashboard.form_page import FormPage, tag
from covenant.dashboard.login_pages import CodePage, LoginPage, LogoutPage
from covenant.dashboard.page_endpoint import HOME, ROOT, redirect, reply_page, session_name
from covenant.dashboard.same_origin import check_same_origin, read_cookie, security_headers
from covenant.dashboard.session_operations import SESSION, SessionPage, allowed, operation_router
from covenant.dashboard.sessions import Role, Sessions, UiSession
from covenant.dashboard.settle_rates import RateSampler
from covenant.dashboard.static_files import StaticFiles, reply_file
from covenant.dashboard.task_acts import AnswerAct, BulkAct, CancelAct, PushAct, RepairAct
from covenant.dashboard.timeline import timeline_page
from covenant.doors.http.host_names import BaseUrl
from covenant.doors.http.responses import MAILBOX, reply_not_allowed, reply_refused
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, HttpExchange, exchange_of
from covenant.doors.operator_api.operation import ApiContext
from covenant.exchange.access.principals import Principal
from covenant.model.errors import Refusal

FIRST_PAGE: Final = "attention"
FEED: Final = "/ui/feed"
SAFE: Final = ("GET", "HEAD")
RELOAD: Final = b"covenant-reload"
"""A page sends this header with a request that it makes by itself. Such a request does not keep the session open."""
TASK_PAGES: Final = ("task", "tree")
"""Pages of one task, whose id follows the page's name in the path."""


ACTS: Final[dict[str, Act]] = {
    "repair": RepairAct(),
    "cancel": CancelAct(),
    "answer": AnswerAct(),
    "push": PushAct(),
    "bulk": BulkAct(),
    "trust": TrustAct(),
    "revoke": RevokeAct(),
    "grant": GrantAct(),
    "tenant": TenantAct(),
    "delegation": DelegationAct(),
}
"""The acts that have a form, by their name in the path."""
VERBS: Final = {**{verb: act.kind for verb, act in ACTS.items()}, "inspect": "inspect_a2a_agent"}
"""Every act that the pages offer, with the operation that it runs."""


class Dashboard:
    def __init__(
        self,
        api: ApiContext,
        sessions: Sessions,
        base_url: BaseUrl,
        *,
        node: str,
        operator: Principal,
        body_bytes_max: int,
    ) -> None:
        self._api = api
        self._node = node
        self._base_url = base_url
        self.sessions: Final = sessions
        self._files = StaticFiles()
        self.sampler: Final = RateSampler(api.services, operator)
        gets: dict[str, ASGIApp] = {
            "/session": SessionPage("ui_session", api, self._show_session),
            "/rates": SessionPage("ui_rates", api, self.sampler.page),
            "/audit/export": AuditExport(api, sessions),
            "/files": FileDownload(api),
            "/timeline": SessionPage("ui_timeline", api, partial(timeline_page, api.services)),
            "/curl": SessionPage("ui_curl", api, partial(curl_page, api.services, base_url)),
        }
        self._operations = operation_router(api, body_bytes_max=body_bytes_max, gets=gets)
        self.feed: Final = FeedEndpoint(api, sessions, base_url, node=node, followers_max=sessions.settings.feeds_max)
        self._pages: dict[str, ASGIApp] = {
            "login": LoginPage("ui_login", api, sessions, base_url),
            "code": CodePage("ui_code", api, sessions, base_url),
            "logout": LogoutPage("ui_logout", api, sessions, base_url),
            "act": ActPages(ACTS, api, sessions, base_url),
        }

    @property
    def schedulers(self) -> tuple[FeedCollector, RateSampler]:
        return self.feed.collector, self.sampler

    def routes(self) -> Sequence[BaseRoute]:
        return [Route(path, self, name=path) for path in (ROOT, ROOT + "/{rest:path}")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(send)
        exchange.add_headers(security_headers(self._base_url.of(scope)))
        path: str = scope["path"]
        if path == ROOT:
            await redirect(exchange, HOME)
            return
        first, _, rest = path.removeprefix(HOME).partition("/")
        if first == "api":
            await self._serve_operation({**scope, "path": f"/{rest}", "path_params": {}}, receive, send)
        elif path == FEED and scope["method"] != "GET":
            reply_not_allowed(exchange, MAILBOX, ("GET",))
        elif path == FEED:
            await self.feed(scope, receive, send)
        elif first in self._pages:
            await self._pages[first](scope, receive, send)
        elif scope["method"] in SAFE:
            await self._serve_file(scope, exchange, first, rest)
        else:
            reply_not_allowed(exchange, MAILBOX, SAFE)

    async def _serve_operation(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_same_origin(scope, self._base_url, unsafe=scope["method"] not in SAFE)
            used = RELOAD not in scope[HEADERS_BY_NAME]
            scope[SESSION] = self.sessions.find(read_cookie(scope, self._base_url), used=used)
        except Refusal as refusal:
            reply_refused(exchange_of(send), MAILBOX, refusal)
            return
        await self._operations(scope, receive, send)

    async def _serve_file(self, scope: Scope, exchange: HttpExchange, first: str, rest: str) -> None:
        files = self._files
        found = files.assets.get(rest) if first == "static" else files.pages.get(first or FIRST_PAGE)
        names_no_task = first in TASK_PAGES and not rest.strip("/")
        if found is not None and not names_no_task:
            await reply_file(scope, exchange, found)
            return
        page = FormPage("Nothing here", "There is no page at this address.")
        if names_no_task:
            link = tag("p", tag("a", "Choose a task", href="/ui/tasks", class_="button"))
            page = FormPage("Which task?", "This address names no task.", link)
        who = session_name(scope, self.sessions, self._base_url)
        await reply_page(exchange, 404, page._replace(who=who))

    async def _show_session(self, session: UiSession, scope: Scope) -> SessionShown:
        services, sees_daemon = self._api.services, session.role is not Role.TENANT
        return SessionShown(
            role=session.role.value,
            name=session.name,
            tenant=session.tenant,
            node=self._node,
            version=self._api.version,
            url=self._base_url.of(scope),
            can=tuple(verb for verb, kind in VERBS.items() if allowed(session.role, kind)),
            peers=services.peers is not None and sees_daemon,
            several=sees_daemon and len(await services.ledger.nodes()) > 1,
            frames=services.frames is not None and sees_daemon,
            expires_in_ms=self.sessions.expires_in_ms(session),
        )


class SessionShown(msgspec.Struct, frozen=True, kw_only=True, tag="ui_session", tag_field="kind"):
    """The logged-in principal, and the acts that the pages may offer to it."""

    role: str
    name: str
    tenant: str | None
    node: str
    version: str
    url: str
    """The address by which the browser reached the daemon."""
    can: tuple[str, ...]
    """The acts that this role may use."""
    peers: bool
    several: bool
    """Whether other daemons serve the same ledger."""
    frames: bool
    """Whether the daemon records frames of the wire."""
    expires_in_ms: int
