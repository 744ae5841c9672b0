"""The OpenAPI document, built from the table of operations and the types they decode and encode."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import msgspec

from covenant.doors.http.responses import PROBLEM, Problem, style_of
from covenant.doors.operator_api.answers import ErrorAnswer
from covenant.doors.operator_api.operation import AnyApiOperation

_REF: Final = "#/components/schemas/{name}"
_STATUSES: Final = {
    "400": "The request itself is wrong",
    "401": "No token, or one that is not known (any longer)",
    "403": "Without the capability, outside its scope, or as somebody else",
    "404": "Unknown, or not yours",
    "409": "A duplicate with other content, a stale lease, or a state that does not allow it",
    "413": "Over a size limit",
    "429": "Over a limit; Retry-After says when to come back",
    "503": "Cannot be made durable now",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A route for operators and their tools: no token, no operation."""

    path: str
    summary: str
    content_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A route of another door on the same port: with a tenant's token, unless it is for everybody, in JSON."""

    path: str
    method: str
    name: str
    summary: str
    answer: type[msgspec.Struct]
    request: type[msgspec.Struct] | None = None
    status: int = 200
    token: bool = True
    query: type[msgspec.Struct] | None = None
    media_type: str = "application/json"
    """Of the answer; of a stream, `answer` is what its events carry."""
    refusal: type[msgspec.Struct] | None = None
    """How it refuses, if not as its neighbours do."""
    same_at: int | None = None
    """A second status that carries the answer's shape."""


def document(
    operations: Sequence[AnyApiOperation], pages: Sequence[Page], version: str, described: Sequence[Described] = ()
) -> dict[str, Any]:
    schemas = _schemas(operations, described)
    paths: dict[str, dict[str, Any]] = {}
    for route in described:
        paths.setdefault(route.path, {})[route.method.lower()] = _described(route, schemas)
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas)
    for page in pages:
        paths.setdefault(page.path, {})["get"] = _page(page)
    in_bodies = {operation.request for operation in operations if operation.in_body}
    in_queries = {route.query for route in described if route.query is not None}
    for only_in_query in {operation.request for operation in operations} - in_bodies | in_queries:
        del schemas[only_in_query.__name__]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Covenant mailbox",
            "version": version,
            "description": "Durable tasks between agents: send, lease, report, settle, drain, repair.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {
                **{status: _json(text, ErrorAnswer.__name__) for status, text in _STATUSES.items()},
                **{f"v1.{status}": _json(text, Problem.__name__) for status, text in _STATUSES.items()},
            },
        },
    }


def _schemas(operations: Sequence[AnyApiOperation], described: Sequence[Described]) -> dict[str, Any]:
    types: set[type[msgspec.Struct]] = {ErrorAnswer, Problem}
    types |= {each for operation in operations for each in (operation.request, operation.answer)}
    for route in described:
        types |= {each for each in (route.request, route.answer, route.query, route.refusal) if each is not None}
    ordered = sorted(types, key=lambda each: each.__name__)
    return msgspec.json.schema_components(ordered, ref_template=_REF)[1]


def _operation(operation: AnyApiOperation, schemas: dict[str, Any]) -> dict[str, Any]:
    in_path = re.findall(r"\{(\w+)\}", operation.path)
    schema = schemas[operation.request.__name__]
    for name in in_path:
        schema["properties"].pop(name, None)
    described: dict[str, Any] = {
        "operationId": operation.kind,
        "summary": operation.summary,
        "tags": [operation.path.split("/")[1]],
        "security": [{"token": []}],
        "parameters": _path_parameters(operation.path),
        "responses": _responses(operation.path, operation.status, operation.answer),
    }
    if operation.in_body:
        body = _json(operation.summary, operation.request.__name__)
        described["requestBody"] = {"required": bool(schema.get("required")), "content": body["content"]}
    else:
        described["parameters"] += [
            _parameter("query", name, _without_null(given)) for name, given in schema["properties"].items()
        ]
    return described


def _described(route: Described, schemas: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.path.split("/")[1]],
        "security": [{"token": []}] if route.token else [],
        "parameters": _path_parameters(route.path),
        "responses": _responses(route.path, route.status, route.answer),
    }
    content = described["responses"][str(route.status)]["content"]
    content[route.media_type] = content.pop("application/json")
    if route.refusal is not None:
        refusals = {status: _json(text, route.refusal.__name__) for status, text in _STATUSES.items()}
        described["responses"].update(refusals)
    if route.same_at is not None:
        described["responses"][str(route.same_at)] = _json(_STATUSES[str(route.same_at)], route.answer.__name__)
    if route.query is not None:
        named = schemas[route.query.__name__]["properties"]
        described["parameters"] += [_parameter("query", name, _without_null(given)) for name, given in named.items()]
    if route.request is not None:
        content = _json(route.summary, route.request.__name__)["content"]
        described["requestBody"] = {"required": True, "content": content}
    return described


def _path_parameters(path: str) -> list[dict[str, Any]]:
    found = re.findall(r"\{(\w+)\}", path)
    uuid = {"type": "string", "format": "uuid"}
    return [_parameter("path", name, uuid if name == "task_id" else {"type": "string"}) for name in found]


def _responses(path: str, status: int, answer: type[msgspec.Struct]) -> dict[str, Any]:
    prefix = "v1." if style_of(path) is PROBLEM else ""
    refusals = {each: {"$ref": f"#/components/responses/{prefix}{each}"} for each in _STATUSES}
    return {str(status): _json("Done", answer.__name__), **refusals}


def _parameter(place: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A query cannot say `null`: it leaves the field out."""
    alternatives: Iterable[dict[str, Any]] = schema.get("anyOf", ())
    given = [alternative for alternative in alternatives if alternative.get("type") != "null"]
    if len(given) == 1:
        return given[0]
    return {name: value for name, value in schema.items() if name != "default"}


def _json(text: str, name: str) -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=name)}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _page(page: Page) -> dict[str, Any]:
    return {
        "operationId": page.path.strip("/").replace(".", "_"),
        "summary": page.summary,
        "tags": ["operations"],
        "security": [],
        "responses": {"200": {"description": page.summary, "content": {page.content_type: {}}}},
    }


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


def reference_page(document: dict[str, Any]) -> str:
    return "".join(_html_lines(document))


def _html_lines(document: dict[str, Any]) -> Iterator[str]:
    info = document["info"]
    title = escape(info["title"])
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
    yield f"<h1>{title} <small>{escape(info['version'])}</small></h1><p>{escape(info['description'])} "
    yield 'Machine-readable: <a href="/openapi.json">/openapi.json</a>.</p>'
    tags: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tags.setdefault(operation["tags"][0], []).append(_html_operation(method, path, operation))
    for tag, operations in tags.items():
        yield f"<h2>{escape(tag)}</h2>{''.join(operations)}"
    yield "<h2>Types</h2>"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_pretty(schema)}</details>'
    yield "</body></html>"


def _html_operation(method: str, path: str, operation: dict[str, Any]) -> str:
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


def _pretty(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2))}</pre>"
