"""`/ui/act/<verb>`: a form for each action. GET shows the form and says what will happen. POST runs the action.

`/ui/act` lists the things that need a person, and every form with the fields that it needs to open. No page here needs
a script. Each form runs an operation of the operator API as the session's own principal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from starlette.types import Scope

from covenant.dashboard.form_page import EMPTY, FormPage, Markup, buttons, hidden, joined, table, tag
from covenant.dashboard.login_pages import login_link
from covenant.dashboard.page_endpoint import HOME, PageEndpoint, next_path, query_of, read_form, redirect, reply_page
from covenant.dashboard.session_operations import allowed, role_forbidden, run_for
from covenant.dashboard.sessions import Role, Sessions, UiSession
from covenant.doors.http.host_names import BaseUrl
from covenant.doors.http.responses import refusal_headers
from covenant.doors.http.server.http_exchange import HttpExchange
from covenant.doors.operator_api.attention import Attention, Need
from covenant.doors.operator_api.operation import ApiContext, Services
from covenant.model.errors import Invalid, NotFound, Refusal, Unauthenticated

FORM_BYTES_MAX: Final = 256 * 1024
NO_SCRIPT_FIELD: Final = "plain"
"""A form field that only a browser without scripts sends."""
GRANT_BUTTON: Final = "offered"
"""The name of the button that gives the missing grant and changes nothing else."""
INDEX: Final = f"{HOME}act"
MISSING: Final = "capability_missing"

FormFields = Mapping[str, str]
"""The fields of a form, or of a link to it."""


class ActDone(NamedTuple):
    """The outcome of an act: the path `to` of the next page and the confirmation `message`; or `page`, shown once."""

    to: str = ""
    message: str = ""
    page: FormPage | None = None


class ActForm(NamedTuple):
    """`lead` says what will happen. The person fills in `fields`; `kept` are hidden fields, sent back unchanged."""

    lead: str
    fields: Markup
    button: str
    kept: Mapping[str, str]
    back: str
    danger: bool = False


class ActContext(NamedTuple):
    """One request for a form: its session, and the fields that came with it."""

    session: UiSession
    services: Services
    values: FormFields
    refused: Refusal | None = None
    """The refusal that is the reason for showing the form again."""

    async def run(self, kind: str, **fields: Any) -> Any:
        """Runs an operation for the session and returns its answer. Fields that are None are left out."""
        request = {name: value for name, value in fields.items() if value is not None}
        return await run_for(self.session, kind, self.services, request)

    def text(self, name: str) -> str:
        return self.values.get(name, "").strip()

    def next(self, otherwise: str = HOME) -> str:
        wanted = self.values.get("next", "")
        return next_path(wanted) if wanted else otherwise


class Act(ABC):
    """A verb with a form. `kind` names the operation; a role that may not run the operation may not open the form."""

    title: str
    kind: str
    asks: Markup = EMPTY
    """The fields that the index asks for before it opens this form."""
    action: str | None = None
    """The grant that the operation needs, if it needs one."""

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

    async def _get(self, scope: Scope, exchange: HttpExchange) -> None:
        act, values = self._act(scope), query_of(scope)
        try:
            session = self._session(scope)
        except Unauthenticated:
            query: bytes = scope["query_string"]
            path = scope["path"] + (f"?{query.decode('latin-1')}" if query else "")
            await redirect(exchange, login_link(path))
            return
        context = ActContext(session, self._api.services, values)
        if act is None:
            await reply_page(exchange, 200, await self._index(context))
            return
        _check_role(act, session)
        await reply_page(exchange, 200, await _page(act, context))

    async def _post(self, scope: Scope, exchange: HttpExchange) -> None:
        act, session = self._act(scope), self._session(scope)
        if act is None:
            raise Invalid("invalid_form", "this address takes no form; choose a form at /ui/act")
        _check_role(act, session)
        values = await read_form(scope, exchange, FORM_BYTES_MAX)
        context = ActContext(session, self._api.services, values)
        try:
            if GRANT_BUTTON in values:
                await reply_page(exchange, 200, await _grant(act, context))
                return
            done = await act.act(context)
        except Refusal as refusal:
            self._meter.refused(self._style.transport, refusal.code)
            page = await _page(act, context._replace(refused=refusal))
            await reply_page(exchange, refusal.status, page, refusal_headers(refusal))
            return
        if done.page is not None:
            await reply_page(exchange, 200, done.page._replace(who=session.name))
        elif NO_SCRIPT_FIELD in values and not done.to.startswith(INDEX):
            await reply_page(exchange, 200, _confirmation(act, done, session))
        else:
            await redirect(exchange, done.to)

    def _act(self, scope: Scope) -> Act | None:
        """The act that the path names; None for the index of all forms."""
        verb: str = scope["path"].removeprefix(INDEX).removeprefix("/")
        if verb and verb not in self._acts:
            raise NotFound("unknown_act", "no form has this name; /ui/act lists them all")
        return self._acts.get(verb)

    async def _index(self, context: ActContext) -> FormPage:
        role = context.session.role
        needs = await _list_needs(context) if allowed(role, "show_attention") else EMPTY
        forms = [_form_link(verb, act) for verb, act in self._acts.items() if allowed(role, act.kind)]
        lead = (
            "Each form says what will happen before it does anything."
            if forms
            else "A viewer can look at everything and change nothing."
        )
        body = joined((needs, tag("div", *forms, class_="grid")))
        return FormPage("Forms", lead, body, who=context.session.name, kind="form index")


def _check_role(act: Act, session: UiSession) -> None:
    if not allowed(session.role, act.kind):
        raise role_forbidden(session.role, act.kind)


def _form_link(verb: str, act: Act) -> Markup:
    opens = tag("div", tag("button", "Open", type="submit"), class_="buttons")
    return tag("form", tag("h2", act.title), act.asks, opens, method="get", action=f"{INDEX}/{verb}", class_="act")


async def _list_needs(context: ActContext) -> Markup:
    found: Attention = await context.run("show_attention")
    acts = context.session.role is Role.OPERATOR
    rows = [(_fix_of(item, acts=acts), item.title, item.detail) for item in found.items]
    shown = table(("Act", "What needs you", "Why"), rows) if rows else tag("p", "Nothing needs you.", class_="done")
    return tag("section", shown, class_="card")


def _fix_of(item: Need, *, acts: bool) -> Markup:
    """The fix for an item: a link for a role that may act, otherwise the command to run."""
    return tag("a", item.act["verb"], href=item.act["href"]) if acts and item.act else tag("code", item.command or "")


def _confirmation(act: Act, done: ActDone, session: UiSession) -> FormPage:
    """Confirms the act and links onward. The usual next page is filled by a script, and this browser runs none."""
    links = (tag("a", "All forms", href=INDEX, class_="button"), tag("a", "Go on", href=done.to, class_="button"))
    body = tag("div", *links, class_="buttons")
    return FormPage(act.title, body=body, done=done.message, who=session.name)


async def _page(act: Act, context: ActContext, done: str = "") -> FormPage:
    form, refusal = await act.form(context), context.refused
    offers = refusal is not None and refusal.code == MISSING
    body = tag(
        "form",
        hidden({**form.kept, "next": context.values.get("next", "")}),
        tag("noscript", hidden({NO_SCRIPT_FIELD: "yes"})),
        form.fields,
        tag("p", f"You act as {context.session.name}. The audit records it.", class_="who"),
        buttons(form.button, back=form.back, danger=form.danger),
        _offer_grant(act, context) if offers else EMPTY,
        method="post",
        class_="act",
    )
    return FormPage(
        act.title,
        form.lead,
        body,
        refused=refusal.message if refusal is not None else "",
        done=done,
        who=context.session.name,
        script="form.js",
    )


def _offer_grant(act: Act, context: ActContext) -> Markup:
    """A button that grants the missing capability, for a role that may grant. The form then comes back as it was."""
    action = act.missing_action(context)
    if action is None or not allowed(context.session.role, "grant_capability"):
        return EMPTY
    label = f"Grant {action} to {context.session.name}"
    return tag(
        "p", tag("button", label, type="submit", name=GRANT_BUTTON, value="yes", formnovalidate=True), class_="offer"
    )


async def _grant(act: Act, context: ActContext) -> FormPage:
    """Grants only the capability that this act needs, and only to the logged-in identity."""
    action, to = act.missing_action(context), context.session.name
    if action is None:
        raise Invalid("invalid_form", "this form needs no grant")
    await context.run("grant_capability", action=action, to=to)
    return await _page(act, context, f"{to} now has the grant {action}. Nothing else has changed: send the form again.")
