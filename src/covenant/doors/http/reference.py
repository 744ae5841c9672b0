"""The OpenAPI document as a page for people: plain HTML, no script, nothing fetched from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any, Final

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid #8884; border-radius: 6px; }
details { border-bottom: 1px solid #8884; padding: .5rem 0; }
summary { cursor: pointer; }
summary b { display: inline-block; min-width: 3.5rem; }
table { border-collapse: collapse; } td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
"""


def page(document: dict[str, Any]) -> str:
    return "".join(_page(document))


def _page(document: dict[str, Any]) -> Iterator[str]:
    info = document["info"]
    title = escape(info["title"])
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
    yield f"<h1>{title} <small>{escape(info['version'])}</small></h1><p>{escape(info['description'])} "
    yield 'Machine-readable: <a href="/openapi.json">/openapi.json</a>.</p>'
    tags: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tags.setdefault(operation["tags"][0], []).append(_operation(method, path, operation))
    for tag, operations in tags.items():
        yield f"<h2>{escape(tag)}</h2>{''.join(operations)}"
    yield "<h2>Types</h2>"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_json(schema)}</details>'
    yield "</body></html>"


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    token = "" if operation["security"] else " <small>(no token)</small>"
    rows = "".join(
        f"<tr><td><code>{escape(given['name'])}</code></td><td>{given['in']}</td>"
        f"<td><code>{escape(json.dumps(given['schema']))}</code></td></tr>"
        for given in operation.get("parameters", ())
    )
    parts = [f"<table>{rows}</table>" if rows else ""]
    if "requestBody" in operation:
        parts.append(f"<p>Body: {_link(operation['requestBody']['content'])}</p>")
    answer = next(response for status, response in operation["responses"].items() if status.startswith("2"))
    parts.append(f"<p>Answer: {_link(answer['content'])}</p>")
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> "
        f"{escape(operation['summary'])}{token}</summary>{''.join(parts)}</details>"
    )


def _link(content: dict[str, Any]) -> str:
    content_type, described = next(iter(content.items()))
    reference = described.get("schema", {}).get("$ref")
    if reference is None:
        return f"<code>{escape(content_type)}</code>"
    name = escape(reference.rpartition("/")[2])
    return f'<a href="#{name}"><code>{name}</code></a>'


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2))}</pre>"
