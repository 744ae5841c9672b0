"""Pages that the server writes: forms that act without any script. Everything in them is escaped here, once.

A page is made of `Markup`, which nothing but this module makes from text: a plain string is text, and is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final, NamedTuple

STYLE: Final = "/ui/static/app.css"
SHOWN_MAX: Final = 20_000
"""Characters of one text on a page: a longer one is cut."""


class Markup(str):
    """HTML, written by this module."""

    __slots__ = ()


EMPTY: Final = Markup("")


def text(value: object) -> Markup:
    """A value as text, whatever is in it."""
    if isinstance(value, Markup):
        return value
    shown = str(value)
    if len(shown) > SHOWN_MAX:
        shown = f"{shown[:SHOWN_MAX]}… ({len(shown) - SHOWN_MAX} more characters)"
    return Markup(escape(shown.encode("utf-8", "replace").decode(), quote=True))


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """An element. An attribute that is None or False is left out, one that is True has no value; `class_` is class."""
    said = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{''.join(map(text, inside))}</{name}>")


_VOID: Final = frozenset({"input", "link", "meta", "br"})


def joined(parts: Iterable[Markup]) -> Markup:
    return Markup("".join(parts))


def field(label: str, name: str, value: str = "", *, kind: str = "text", **attributes: object) -> Markup:
    return tag("label", label, tag("input", type=kind, name=name, value=value, **attributes))


def long_field(label: str, name: str, value: str = "", **attributes: object) -> Markup:
    # A new line right after the tag is not part of the value.
    return tag("label", label, tag("textarea", Markup("\n"), value, name=name, rows=3, **attributes))


def hidden(fields: Mapping[str, str]) -> Markup:
    return joined(tag("input", type="hidden", name=name, value=value) for name, value in fields.items() if value)


def select(label: str, name: str, options: Sequence[tuple[str, str]], chosen: str = "") -> Markup:
    """`options`: the value of each, and its words."""
    made = [tag("option", words, value=value, selected=value == chosen) for value, words in options]
    return tag("label", label, tag("select", *made, name=name))


def choices(
    legend: str, name: str, options: Sequence[tuple[str, str]], chosen: str = "", *, required: bool = True
) -> Markup:
    """Radio buttons; none is chosen unless that was said."""
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


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", each, scope="col") for each in heads)))
    body = tag("tbody", *(tag("tr", *(tag("td", each) for each in row)) for row in rows))
    return tag("table", head, body)


def buttons(words: str, *, back: str, danger: bool = False) -> Markup:
    kind = "danger" if danger else "primary"
    return tag(
        "div",
        tag("button", words, type="submit", class_=kind),
        tag("a", "Back", href=back, class_="button"),
        class_="buttons",
    )


class FormPage(NamedTuple):
    """`lead` says in words what will happen; `refused` why it did not."""

    title: str
    lead: str = ""
    body: Markup = EMPTY
    refused: str = ""
    done: str = ""
    who: str = ""
    """Who is logged in."""
    script: str = ""
    """The name of a module that the page loads."""
    kind: str = "form"
    """The classes of its body."""

    def encode(self) -> bytes:
        head = (
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", f"{self.title} · Covenant"),
            tag("link", rel="stylesheet", href=STYLE),
            tag("script", type="module", src=f"/ui/static/{self.script}") if self.script else EMPTY,
        )
        bar = tag("header", tag("a", "Covenant", href="/ui/", class_="brand"), self._leave(), class_="bar")
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

    def _leave(self) -> Markup:
        if not self.who:
            return EMPTY
        logout = tag("form", tag("button", "Log out", type="submit"), method="post", action="/ui/logout")
        return tag("span", tag("span", self.who, class_="who"), logout, class_="session")
