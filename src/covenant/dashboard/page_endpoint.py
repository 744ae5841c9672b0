"""Endpoints that answer with a page which the server writes: how forms are read, and how pages are sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from covenant.dashboard.form_page import FormPage, tag
from covenant.dashboard.same_origin import check_same_origin, read_cookie
from covenant.dashboard.sessions import Sessions, UiSession
from covenant.doors.http.endpoint import Endpoint
from covenant.doors.http.host_names import BaseUrl
from covenant.doors.http.request_body import read_body
from covenant.doors.http.responses import (
    MAILBOX,
    NO_STORE,
    Header,
    refusal_headers,
    reply_not_allowed,
)
from covenant.doors.operator_api.operation import ApiContext
from covenant.model.errors import Invalid, Refusal

ROOT: Final = "/ui"
HOME: Final = "/ui/"
FORM_FIELDS_MAX: Final = 64
METHODS: Final = ("GET", "HEAD", "POST")
_HTML: Final[Header] = (b"content-type", b"text/html; charset=utf-8")


class PageEndpoint(Endpoint, ABC):
    """A page for GET and for POST. A refusal is a page, too."""

    def __init__(self, name: str, api: ApiContext, sessions: Sessions, base_url: BaseUrl) -> None:
        super().__init__(name, MAILBOX, api.meter)
        self._api = api
        self._sessions = sessions
        self._base_url = base_url

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in METHODS:
            await reply_not_allowed(send, MAILBOX, METHODS)
        elif scope["method"] == "POST":
            check_same_origin(scope, self._base_url, unsafe=True)
            await self._post(scope, receive, send)
        else:
            await self._get(scope, send)

    @abstractmethod
    async def _get(self, scope: Scope, send: Send) -> None: ...

    @abstractmethod
    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def _session(self, scope: Scope) -> UiSession:
        return await self._sessions.find(read_cookie(scope, self._base_url))

    async def _refuse(self, send: Send, error: Exception, headers: Sequence[Header] = ()) -> None:
        if not isinstance(error, Refusal):
            await super()._refuse(send, error, headers)
            return
        self._meter.refused(self._style.transport, error.code)
        page = FormPage("Refused", body=tag("p", tag("a", "Back", href=HOME, class_="button")), refused=error.message)
        await reply_page(send, error.status, page, (*refusal_headers(error), *headers))


async def reply_page(send: Send, status: int, page: FormPage, headers: Sequence[Header] = ()) -> None:
    body = page.encode()
    length = (b"content-length", b"%d" % len(body))
    # Not by `reply`, which keeps the heads of answers: one of these may have a cookie.
    await send({"type": "http.response.start", "status": status, "headers": [_HTML, NO_STORE, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def redirect(send: Send, to: str, headers: Sequence[Header] = ()) -> None:
    """To a path of ours, by GET."""
    said = [(b"location", to.encode()), NO_STORE, (b"content-length", b"0"), *headers]
    await send({"type": "http.response.start", "status": 303, "headers": said})
    await send({"type": "http.response.body", "body": b""})


def next_path(asked: str) -> str:
    """Where to go on: a path of the dashboard, and nothing else that somebody may have put into a link."""
    if not asked.startswith(HOME) or not asked.isascii() or not asked.isprintable() or len(asked) > 2_000:
        return HOME
    return HOME if "\\" in asked or " " in asked else asked


def query_of(scope: Scope) -> dict[str, str]:
    return _fields(scope["query_string"])


async def read_form(scope: Scope, receive: Receive, bytes_max: int) -> dict[str, str]:
    """The fields of a form; of one given twice, the last."""
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if kind.partition(b";")[0].strip().lower() != b"application/x-www-form-urlencoded":
        raise Invalid("invalid_form", "send the form as application/x-www-form-urlencoded")
    return _fields(await read_body(scope, receive, bytes_max))


def _fields(encoded: bytes) -> dict[str, str]:
    try:
        return dict(parse_qsl(encoded.decode("latin-1"), keep_blank_values=True, max_num_fields=FORM_FIELDS_MAX))
    except ValueError:
        raise Invalid("invalid_form", f"a form may have at most {FORM_FIELDS_MAX} fields") from None
