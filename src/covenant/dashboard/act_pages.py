"""`/ui/act/<verb>`: a form for each act, with what will happen in words. GET shows it, POST acts and leads on.

The forms work without any script. What they do is an operation of the operator API, by the session's own principal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from starlette.types import Receive, Scope, Send

from covenant.dashboard.form_page import EMPTY, FormPage, Markup, buttons, hidden, joined, tag
from covenant.dashboard.login_pages import login_link
from covenant.dashboard.page_endpoint import HOME, PageEndpoint, next_path, query_of, read_form, redirect, reply_page
from covenant.dashboard.session_operations import allowed, role_forbidden, run_for
from covenant.dashboard.sessions import Sessions, UiSession
from covenant.doors.http.host_names import BaseUrl
from covenant.doors.http.responses import refusal_headers
from covenant.doors.operator_api.operation import ApiContext, Services
from covenant.model.errors import NotFound, Refusal, Unauthenticated

FORM_BYTES_MAX: Final = 256 * 1024
MISSING: Final = "capability_missing"

Given = Mapping[str, str]
"""The fields of a form, or of the link that leads to it."""


class ActDone(NamedTuple):
    """What comes after an act: the way on, or a page that is shown once."""

    to: str = ""
    page: FormPage | None = None


class ActForm(NamedTuple):
    """`lead` says what will happen; `fields` are asked for, `kept` are sent along as they are."""

    title: str
    lead: str
    fields: Markup
    button: str
    kept: Mapping[str, str]
    back: str
    danger: bool = False


class ActContext(NamedTuple):
    """One visit of a form: whose it is, and what was given with it."""

    session: UiSession
    services: Services
    given: Given

    async def run(self, kind: str, **fields: Any) -> Any:
        """The answer of an operation. Fields that are None are left out."""
        said = {name: value for name, value in fields.items() if value is not None}
        return await run_for(self.session, kind, self.services, said)

    def text(self, name: str) -> str:
        return self.given.get(name, "").strip()

    def next(self, otherwise: str = HOME) -> str:
        asked = self.given.get("next", "")
        return next_path(asked) if asked else otherwise


class Act(ABC):
    """A verb. `kind` is the operation that decides whether a role may do it at all."""

    kind: str
    action: str | None = None
    """The grant that the operation asks for, where it asks for one."""

    @abstractmethod
    async def form(self, context: ActContext) -> ActForm: ...

    @abstractmethod
    async def act(self, context: ActContext) -> ActDone: ...

    def missing_action(self, context: ActContext) -> str | None:  # noqa: ARG002  (some look at the form)
        return self.action


class ActPages(PageEndpoint):
    """`acts` by verb, which is the last part of the path."""

    def __init__(self, acts: Mapping[str, Act], api: ApiContext, sessions: Sessions, base_url: BaseUrl) -> None:
        super().__init__("ui_act", api, sessions, base_url)
        self._acts = acts

    async def _get(self, scope: Scope, send: Send) -> None:
        act, given = self._act(scope), query_of(scope)
        try:
            session = await self._session(scope)
        except Unauthenticated:
            asked: bytes = scope["query_string"]
            path = scope["path"] + (f"?{asked.decode('latin-1')}" if asked else "")
            await redirect(send, login_link(path))
            return
        context = ActContext(session, self._api.services, given)
        _check_role(act, session)
        await reply_page(send, 200, await _page(act, context))

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        act, session = self._act(scope), await self._session(scope)
        _check_role(act, session)
        given = await read_form(scope, receive, FORM_BYTES_MAX)
        context = ActContext(session, self._api.services, given)
        try:
            done = await act.act(context)
        except Refusal as refusal:
            self._meter.refused(self._style.transport, refusal.code)
            page = await _page(act, context, refusal)
            await reply_page(send, refusal.status, page, refusal_headers(refusal))
            return
        if done.page is not None:
            await reply_page(send, 200, done.page._replace(who=session.name))
        else:
            await redirect(send, done.to)

    def _act(self, scope: Scope) -> Act:
        act = self._acts.get(scope["path"].removeprefix(f"{HOME}act/"))
        if act is None:
            raise NotFound("unknown_act", "there is no such form")
        return act


def _check_role(act: Act, session: UiSession) -> None:
    if not allowed(session.role, act.kind):
        raise role_forbidden(session.role, act.kind)


async def _page(act: Act, context: ActContext, refusal: Refusal | None = None) -> FormPage:
    form = await act.form(context)
    body = tag(
        "form",
        hidden({**form.kept, "next": context.given.get("next", "")}),
        form.fields,
        tag("p", f"As {context.session.name}. It is written to the audit.", class_="who"),
        buttons(form.button, back=form.back, danger=form.danger),
        method="post",
        class_="act",
    )
    offer = _offer_grant(act, context) if refusal is not None and refusal.code == MISSING else EMPTY
    return FormPage(
        form.title,
        form.lead,
        joined((offer, body)),
        refused=refusal.message if refusal is not None else "",
        who=context.session.name,
        script="form.js",
    )


def _offer_grant(act: Act, context: ActContext) -> Markup:
    """The grant is missing: whoever may give it is led to where it is given, and back here."""
    action = act.missing_action(context)
    if action is None or not allowed(context.session.role, "grant_capability"):
        return EMPTY
    asked = {"action": action, "to": context.session.name, "next": context.next()}
    link = tag("a", f"Grant {action} to {context.session.name}", href=f"/ui/act/grant?{urlencode(asked)}")
    return tag("p", link, class_="offer")
