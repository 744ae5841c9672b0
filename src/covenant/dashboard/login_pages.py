"""Logging in and out: by a token that is pasted into a form, or by a code that `covenant ui` asked for."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from typing import Final
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from covenant.dashboard.form_page import FormPage, field, hidden, joined, tag
from covenant.dashboard.page_endpoint import (
    HOME,
    PageEndpoint,
    next_path,
    query_of,
    read_form,
    redirect,
    reply_page,
)
from covenant.dashboard.same_origin import write_cookie
from covenant.dashboard.sessions import Role, UiSession
from covenant.doors.http.bearer_auth import address
from covenant.doors.http.responses import refusal_headers
from covenant.model.errors import Refusal, Unauthenticated

LOGIN: Final = "/ui/login"
TENANTS_HOME: Final = "/ui/tasks"
"""A tenant may not see what needs attention."""
FORM_BYTES_MAX: Final = 4 * 1024
LOOK: Final = "form login"


def login_link(to: str) -> str:
    return f"{LOGIN}?next={quote(to, safe='/')}"


class EntryPage(PageEndpoint):
    """A form whose one field opens a session."""

    async def _get(self, scope: Scope, send: Send) -> None:
        await reply_page(send, 200, self._page(next_path(query_of(scope).get("next", ""))))

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = await read_form(scope, receive, FORM_BYTES_MAX)
        to = next_path(given.get("next", ""))
        try:
            session, secret = await self._open(given, address(scope))
        except Refusal as refusal:
            self._meter.refused(self._style.transport, refusal.code)
            await reply_page(send, refusal.status, self._page(to, refusal.message), refusal_headers(refusal))
            return
        # A browser has one session, under a secret that nobody chose for it: what it came with ends here.
        await self._leave(scope)
        if to == HOME and session.role is Role.TENANT:
            to = TENANTS_HOME
        await redirect(send, to, [write_cookie(scope, self._base_url, secret)])

    async def _leave(self, scope: Scope) -> None:
        with suppress(Unauthenticated):
            self._sessions.end(await self._session(scope))

    @abstractmethod
    async def _open(self, given: dict[str, str], where: str) -> tuple[UiSession, str]: ...

    @abstractmethod
    def _page(self, to: str, refused: str = "") -> FormPage: ...


class LoginPage(EntryPage):
    async def _open(self, given: dict[str, str], where: str) -> tuple[UiSession, str]:
        return await self._sessions.login(given.get("token", "").strip(), where)

    def _page(self, to: str, refused: str = "") -> FormPage:
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
        return FormPage("Log in", lead, joined((form, hint)), refused=refused, kind=LOOK)


class CodePage(EntryPage):
    """Its script takes the code from the address's fragment, which no server sees, and sends the form."""

    async def _open(self, given: dict[str, str], where: str) -> tuple[UiSession, str]:
        return await self._sessions.trade(given.get("code", "").strip(), where)

    def _page(self, to: str, refused: str = "") -> FormPage:
        form = tag(
            "form",
            hidden({"next": to}),
            field("Code", "code", required=True, autocomplete="off", spellcheck="false"),
            tag("div", tag("button", "Log in", type="submit", class_="primary"), class_="buttons"),
            method="post",
            action="/ui/code",
            name="code",
            class_="act",
        )
        lead = "A code from covenant ui works once, for a minute."
        return FormPage("Log in", lead, form, refused=refused, script="form.js", kind=LOOK)


class LogoutPage(PageEndpoint):
    async def _get(self, scope: Scope, send: Send) -> None:  # noqa: ARG002  (of every page)
        form = tag("form", tag("button", "Log out", type="submit", class_="primary"), method="post", class_="act")
        await reply_page(send, 200, FormPage("Log out", "Your session ends here and now.", form, kind=LOOK))

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  (of every page)
        with suppress(Unauthenticated):
            self._sessions.end(await self._session(scope))
        await redirect(send, LOGIN, [write_cookie(scope, self._base_url, "")])
