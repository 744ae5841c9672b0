"""Pages to log in and out: by a token pasted into a form, or by a one-time code from `covenant ui`."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from typing import Final
from urllib.parse import quote

from starlette.types import Scope

from covenant.dashboard.form_page import FormPage, field, hidden, joined, tag
from covenant.dashboard.page_endpoint import (
    HOME,
    PageEndpoint,
    next_path,
    query_of,
    read_form,
    redirect,
    reply_page,
    session_name,
)
from covenant.dashboard.same_origin import write_cookie
from covenant.dashboard.sessions import Role, UiSession
from covenant.doors.http.bearer_auth import client_address
from covenant.doors.http.responses import refusal_headers
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, HttpExchange
from covenant.model.errors import Refusal, Unauthenticated

LOGIN: Final = "/ui/login"
TENANTS_HOME: Final = "/ui/tasks"
"""The first page of a tenant's session: a tenant may not see the page of things that need attention."""
FORM_BYTES_MAX: Final = 4 * 1024
BODY_CLASSES: Final = "form login"


def login_link(to: str) -> str:
    return f"{LOGIN}?next={quote(to, safe='/')}"


class EntryPage(PageEndpoint):
    """A form whose one field opens a session."""

    async def _get(self, scope: Scope, exchange: HttpExchange) -> None:
        query = query_of(scope)
        ended = "Your session has ended. Log in again to go on where you were." if "ended" in query else ""
        page = self._page(next_path(query.get("next", "")), ended, linked=self._is_linked(scope))
        await reply_page(exchange, 200, page)

    def _is_linked(self, scope: Scope) -> bool:
        """Whether somebody else may have made the link to this page: another site's page has it, or the browser already
        has a session, which logging in would replace."""
        headers: dict[bytes, bytes] = scope[HEADERS_BY_NAME]
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin") or b"referer" in headers:
            return True
        return bool(session_name(scope, self._sessions, self._base_url))

    async def _post(self, scope: Scope, exchange: HttpExchange) -> None:
        given = await read_form(scope, exchange, FORM_BYTES_MAX)
        to = next_path(given.get("next", ""))
        try:
            session, secret = await self._open(given, client_address(scope))
        except Refusal as refusal:
            self._meter.refused(self._style.transport, refusal.code)
            await reply_page(exchange, refusal.status, self._page(to, refusal.message), refusal_headers(refusal))
            return
        # A browser has one session, and its secret is always the daemon's own choice: the previous session ends here.
        self._end_session(scope)
        if to == HOME and session.role is Role.TENANT:
            to = TENANTS_HOME
        await redirect(exchange, to, [write_cookie(scope, self._base_url, secret)])

    def _end_session(self, scope: Scope) -> None:
        with suppress(Unauthenticated):
            self._sessions.end(self._session(scope))

    @abstractmethod
    async def _open(self, given: dict[str, str], browser_address: str) -> tuple[UiSession, str]: ...

    @abstractmethod
    def _page(self, to: str, refused: str = "", *, linked: bool = False) -> FormPage: ...


class LoginPage(EntryPage):
    async def _open(self, given: dict[str, str], browser_address: str) -> tuple[UiSession, str]:
        return await self._sessions.login(given.get("token", "").strip(), browser_address)

    def _page(self, to: str, refused: str = "", *, linked: bool = False) -> FormPage:  # noqa: ARG002  (of every page)
        form = tag(
            "form",
            hidden({"next": to}),
            field(
                "Token", "token", kind="password", required=True, autofocus=True, autocomplete="off", spellcheck="false"
            ),
            tag("div", tag("button", "Log in", type="submit", class_="primary"), class_="buttons"),
            method="post",
            action=LOGIN,
            class_="act",
        )
        hint = tag("p", "On the daemon's machine, ", tag("code", "covenant ui"), " logs you in.", class_="hint")
        lead = "Paste the operator's token, the token of an identity that may see the dashboard, or a tenant's token."
        return FormPage("Log in", lead, joined((form, hint)), refused=refused, kind=BODY_CLASSES)


class CodePage(EntryPage):
    """The page's script takes the code from the address's fragment, which browsers never send, and submits the form."""

    async def _open(self, given: dict[str, str], browser_address: str) -> tuple[UiSession, str]:
        return await self._sessions.trade(given.get("code", "").strip(), browser_address)

    def _page(self, to: str, refused: str = "", *, linked: bool = False) -> FormPage:
        form = tag(
            "form",
            hidden({"next": to}),
            field("Code", "code", required=True, autofocus=True, autocomplete="off", spellcheck="false"),
            tag("div", tag("button", "Log in", type="submit", class_="primary"), class_="buttons"),
            method="post",
            action="/ui/code",
            name="code",
            class_="act",
            data_ask="yes" if linked else None,
        )
        lead = "Enter the code that covenant ui printed. A code works once, within a minute."
        if linked:
            lead += " Log in only if you asked for this code yourself: it may belong to somebody else."
        return FormPage("Log in", lead, form, refused=refused, script="form.js", kind=BODY_CLASSES)


class LogoutPage(PageEndpoint):
    async def _get(self, scope: Scope, exchange: HttpExchange) -> None:  # noqa: ARG002  (of every page)
        form = tag("form", tag("button", "Log out", type="submit", class_="primary"), method="post", class_="act")
        await reply_page(exchange, 200, FormPage("Log out", "Your session ends at once.", form, kind=BODY_CLASSES))

    async def _post(self, scope: Scope, exchange: HttpExchange) -> None:
        with suppress(Unauthenticated):
            self._sessions.end(self._session(scope))
        await redirect(exchange, LOGIN, [write_cookie(scope, self._base_url, "")])
