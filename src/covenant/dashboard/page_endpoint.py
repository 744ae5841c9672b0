"""Endpoints whose answers are pages written by the server: reads forms, sends pages and redirects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final
from urllib.parse import parse_qsl, unquote

from starlette.types import Scope

from covenant.dashboard.form_page import FormPage, tag
from covenant.dashboard.same_origin import check_same_origin, read_cookie
from covenant.dashboard.sessions import Sessions, UiSession
from covenant.doors.http.endpoint import Endpoint
from covenant.doors.http.host_names import BaseUrl
from covenant.doors.http.request_body import read_body
from covenant.doors.http.responses import (
    MAILBOX,
    NO_STORE,
    refusal_headers,
    reply_not_allowed,
    send_answer,
)
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME, Header, HttpExchange
from covenant.doors.operator_api.operation import ApiContext
from covenant.model.errors import Invalid, Refusal, Unauthenticated

ROOT: Final = "/ui"
HOME: Final = "/ui/"
FORM_FIELDS_MAX: Final = 64
METHODS: Final = ("GET", "HEAD", "POST")
_HTML: Final[Header] = (b"content-type", b"text/html; charset=utf-8")


class PageEndpoint(Endpoint, ABC):
    """A page for GET and for POST. A refusal is shown as a page, too."""

    def __init__(self, name: str, api: ApiContext, sessions: Sessions, base_url: BaseUrl) -> None:
        super().__init__(name, MAILBOX, api.meter)
        self._api = api
        self._sessions = sessions
        self._base_url = base_url

    async def _answer(self, scope: Scope, exchange: HttpExchange) -> None:
        if scope["method"] not in METHODS:
            reply_not_allowed(exchange, MAILBOX, METHODS)
            return
        try:
            if scope["method"] == "POST":
                check_same_origin(scope, self._base_url, unsafe=True)
                await self._post(scope, exchange)
            else:
                await self._get(scope, exchange)
        except Refusal as refusal:
            self._meter.refused(self._style.transport, refusal.code)
            body = tag("p", tag("a", "Back", href=HOME, class_="button"))
            who = session_name(scope, self._sessions, self._base_url)
            page = FormPage("Refused", body=body, refused=refusal.message, who=who)
            await reply_page(exchange, refusal.status, page, refusal_headers(refusal))

    @abstractmethod
    async def _get(self, scope: Scope, exchange: HttpExchange) -> None: ...

    @abstractmethod
    async def _post(self, scope: Scope, exchange: HttpExchange) -> None: ...

    def _session(self, scope: Scope) -> UiSession:
        return self._sessions.find(read_cookie(scope, self._base_url))


def session_name(scope: Scope, sessions: Sessions, base_url: BaseUrl) -> str:
    """The name of the principal whose session the browser has; empty without a session."""
    try:
        return sessions.find(read_cookie(scope, base_url)).name
    except Unauthenticated:
        return ""


async def reply_page(exchange: HttpExchange, status: int, page: FormPage, headers: Sequence[Header] = ()) -> None:
    body = page.encode()
    length = (b"content-length", b"%d" % len(body))
    # Not by `reply`, which caches the heads of its answers: a page's head may hold a cookie.
    await send_answer(exchange, status, [_HTML, NO_STORE, length, *headers], body)


async def redirect(exchange: HttpExchange, to: str, headers: Sequence[Header] = ()) -> None:
    """Redirects to a path of the dashboard, by GET."""
    await send_answer(exchange, 303, [(b"location", to.encode()), NO_STORE, (b"content-length", b"0"), *headers])


def next_path(path: str) -> str:
    """The path to go on to. Anything but a path of the dashboard becomes `HOME`: anybody may have made the link."""
    if not path.startswith(HOME) or not path.isascii() or not path.isprintable() or len(path) > 2_000:
        return HOME
    # A browser resolves `..` in a path before it sends the request, also when it is written as `%2e%2e`.
    steps = unquote(path.partition("?")[0].partition("#")[0]).split("/")
    return HOME if "\\" in path or " " in path or not {".", ".."}.isdisjoint(steps) else path


def query_of(scope: Scope) -> dict[str, str]:
    return _fields(scope["query_string"])


async def read_form(scope: Scope, exchange: HttpExchange, bytes_max: int) -> dict[str, str]:
    """The fields of a form; the last value of a repeated field counts."""
    kind: bytes = scope[HEADERS_BY_NAME].get(b"content-type", b"")
    if kind.partition(b";")[0].strip().lower() != b"application/x-www-form-urlencoded":
        raise Invalid("invalid_form", "send the form as application/x-www-form-urlencoded")
    return _fields(await read_body(scope, exchange.receive, bytes_max))


def _fields(encoded: bytes) -> dict[str, str]:
    try:
        return dict(parse_qsl(encoded.decode("latin-1"), keep_blank_values=True, max_num_fields=FORM_FIELDS_MAX))
    except ValueError:
        raise Invalid("invalid_form", f"a form may have at most {FORM_FIELDS_MAX} fields") from None
