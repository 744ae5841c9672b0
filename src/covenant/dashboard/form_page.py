"""Pages that the server writes: forms that work without scripts. This module alone escapes their contents.

A page is made of `Markup`, and only this module makes `Markup` from text. A plain string is text, and is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final, NamedTuple

STYLE: Final = "/ui/static/app.css"
ICON: Final = "/ui/static/icon.svg"
SHOWN_MAX: Final = 20_000
"""The most characters of one text that a page shows; a longer text is cut. The value of a form field is never cut."""
DIRECTION_MARKS: Final = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that change the direction of writing."""
_VOID: Final = frozenset({"input", "link", "meta", "br"})


class Markup(str):
    """HTML that this module wrote."""

    __slots__ = ()


EMPTY: Final = Markup("")


def text(value: object) -> Markup:
    """Escapes a value as text. `DIRECTION_MARKS` are spelled out, since they can make one text look like another."""
    if isinstance(value, Markup):
        return value
    shown = DIRECTION_MARKS.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", str(value))
    if len(shown) > SHOWN_MAX:
        shown = f"{shown[:SHOWN_MAX]}… ({len(shown) - SHOWN_MAX} more characters)"
    return escaped(shown)


def escaped(value: object) -> Markup:
    """Escapes a value without cutting it, since the browser sends it back with the form."""
    return Markup(escape(str(value).encode("utf-8", "replace").decode(), quote=True))


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """An element. An attribute that is None or False is left out, one that is True has no value; `class_` is class."""
    rendered = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{rendered}>")
    return Markup(f"<{name}{rendered}>{''.join(map(text, inside))}</{name}>")


def joined(parts: Iterable[Markup]) -> Markup:
    return Markup("".join(parts))


def field(label: str, name: str, value: str = "", *, kind: str = "text", **attributes: object) -> Markup:
    return tag("label", label, tag("input", type=kind, name=name, value=value, **attributes))


def long_field(label: str, name: str, value: str = "", **attributes: object) -> Markup:
    # HTML drops a newline right after the opening tag.
    return tag("label", label, tag("textarea", Markup("\n"), escaped(value), name=name, rows=3, **attributes))


def hidden(fields: Mapping[str, str]) -> Markup:
    return joined(tag("input", type="hidden", name=name, value=value) for name, value in fields.items() if value)


def select(label: str, name: str, options: Sequence[tuple[str, str]], chosen: str = "") -> Markup:
    """`options` are pairs of a value and its label."""
    made = [tag("option", words, value=value, selected=value == chosen) for value, words in options]
    return tag("label", label, tag("select", *made, name=name))


def choices(
    legend: str, name: str, options: Sequence[tuple[str, str]], chosen: str = "", *, required: bool = True
) -> Markup:
    """Radio buttons, none selected unless `chosen` names one."""
    made = [
        tag(
            "label",
            tag("input", type="radio", name=name, value=value, checked=value == chosen, required=required),
            " ",
            words,
            class_="choice",
        )
        for value, words in options
    ]
    return tag("fieldset", tag("legend", legend), *made)


def facts(rows: Iterable[tuple[str, object]]) -> Markup:
    found = [(name, value) for name, value in rows if value is not None and value != ""]
    return tag("dl", *(joined((tag("dt", name), tag("dd", value))) for name, value in found), class_="facts")


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """A table. On a narrow screen each row is a card whose cells show their column's name."""
    head = tag("thead", tag("tr", *(tag("th", each, scope="col") for each in headings)))
    cells = ([tag("td", each, data_label=name) for name, each in zip(headings, row, strict=True)] for row in rows)
    return tag("table", head, tag("tbody", *(tag("tr", *row) for row in cells)), class_="cards")


def buttons(words: str, *, back: str, danger: bool = False) -> Markup:
    kind = "danger" if danger else "primary"
    return tag(
        "div",
        tag("button", words, type="submit", class_=kind),
        tag("a", "Back", href=back, class_="button"),
        class_="buttons",
    )


class FormPage(NamedTuple):
    """`lead` says what will happen; `refused` says why the last try was refused; `done` says what was done."""

    title: str
    lead: str = ""
    body: Markup = EMPTY
    refused: str = ""
    done: str = ""
    who: str = ""
    """The logged-in principal."""
    script: str = ""
    """The file name of a module that the page loads."""
    kind: str = "form"
    """The CSS classes of the page's body."""

    def encode(self) -> bytes:
        head = (
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", f"{self.title} · Covenant"),
            tag("link", rel="icon", type="image/svg+xml", href=ICON),
            tag("link", rel="stylesheet", href=STYLE),
            tag("script", type="module", src=f"/ui/static/{self.script}") if self.script else EMPTY,
        )
        bar = tag("header", tag("a", "Covenant", href="/ui/", class_="brand"), self._session_links(), class_="bar")
        main = tag(
            "main",
            tag("h1", self.title),
            tag("p", self.refused, class_="refused", role="alert") if self.refused else EMPTY,
            tag("p", self.done, class_="done", role="status") if self.done else EMPTY,
            tag("p", self.lead, class_="lead") if self.lead else EMPTY,
            self.body,
        )
        page = tag("html", tag("head", *head), tag("body", bar, main, class_=self.kind), lang="en", data_page="act")
        return f"<!doctype html>\n{page}\n".encode()

    def _session_links(self) -> Markup:
        if not self.who:
            return EMPTY
        forms = tag("a", "All forms", href="/ui/act")
        logout = tag("form", tag("button", "Log out", type="submit"), method="post", action="/ui/logout")
        return tag("span", forms, tag("span", self.who, class_="who"), logout, class_="session")
