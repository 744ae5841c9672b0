"""The OpenAPI document, built from the table of operations and the types that they decode and encode."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec

from covenant.doors.http.responses import PROBLEM, Problem, style_of
from covenant.doors.operator_api.operation import AnyApiOperation, ErrorAnswer

_REF: Final = "#/components/schemas/{name}"
_STATUSES: Final = {
    "400": "The request itself is wrong",
    "401": "The token is missing, unknown or revoked",
    "403": "The capability is missing or out of scope, or the sender is another identity",
    "404": "Unknown, or not visible to you",
    "409": "A duplicate with other content, a stale lease, or a state that does not allow this",
    "413": "Over a size limit",
    "429": "Over a limit; Retry-After says when to try again",
    "503": "The daemon cannot make this durable now",
}
F = TypeVar("F", bound=Callable[..., Any])
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


class Page(NamedTuple):
    """A route for operators and their tools, without a token, and beside the table of operations."""

    path: str
    summary: str
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class DescribedRoute:
    """A route as the document describes it: by default with a bearer token, in JSON."""

    method: str
    path: str
    name: str
    summary: str
    answer: type[msgspec.Struct]
    """The type of the answer; for a stream, of its events."""
    request: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    status: int = 200
    body_required: bool = True
    token: bool = True
    streams: bool = False
    refusal: type[msgspec.Struct] | None = None
    """The type of the route's refusals, if it is not the usual one of its path."""
    media_type: str = "application/json"
    """The media type of the answer. Any other than JSON is described as bytes, and `answer` does not count."""
    second_status: int | None = None
    """A second status whose body has the type of the answer."""

    @classmethod
    def operation(cls, row: AnyApiOperation) -> DescribedRoute:
        request, query = (row.request, None) if row.in_body else (None, row.request)
        needed = any(field.required for field in msgspec.structs.fields(row.request))
        return cls(row.method, row.path, row.kind, row.summary, row.answer, request, query, row.status, needed)


def route(
    method: str, path: str, summary: str, *, events: type[msgspec.Struct] | None = None, **fields: Any
) -> Callable[[F], F]:
    """Describes the method of a door that answers this route.

    The method returns a status and the answer; or a stream, whose events have the type `events`. `fields` are other
    fields of `DescribedRoute`.
    """

    def describe(run: F) -> F:
        answer = events or get_args(get_type_hints(run)["return"])[1]
        described = DescribedRoute(method, path, run.__name__, summary, answer, streams=events is not None, **fields)
        run.described = described  # type: ignore[attr-defined]  # read by `routes_of`
        return run

    return describe


def routes_of(door: type) -> tuple[DescribedRoute, ...]:
    """The routes that the methods of a door answer, in their order."""
    return tuple(run.described for run in vars(door).values() if hasattr(run, "described"))


def document(
    operations: Sequence[AnyApiOperation], pages: Sequence[Page], version: str, described: Sequence[DescribedRoute] = ()
) -> dict[str, Any]:
    routes = [*described, *map(DescribedRoute.operation, operations)]
    schemas = _schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for each in routes:
        paths.setdefault(each.path, {})[each.method.lower()] = _route(each, schemas)
    for page in pages:
        paths.setdefault(page.path, {})["get"] = _page(page)
    for query_type in {each.query for each in routes if each.query} - {each.request for each in routes}:
        del schemas[query_type.__name__]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Covenant",
            "version": version,
            "description": "Durable tasks between agents: send, lease, report, settle, drain, repair.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {
                **{status: _json(text, ErrorAnswer) for status, text in _STATUSES.items()},
                **{f"v1.{status}": _json(text, Problem) for status, text in _STATUSES.items()},
            },
        },
    }


def _schemas(routes: Sequence[DescribedRoute]) -> dict[str, Any]:
    types: set[type[msgspec.Struct]] = {ErrorAnswer, Problem}
    for each in routes:
        types |= {kind for kind in (each.request, each.answer, each.query, each.refusal) if kind is not None}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    return msgspec.json.schema_components(ordered, ref_template=_REF)[1]


def _route(route: DescribedRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    in_path = re.findall(r"\{(\w+)\}", route.path)
    shape = route.request or route.query
    schema = schemas[shape.__name__] if shape is not None else {}
    for name in in_path:
        schema.get("properties", {}).pop(name, None)
    described: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.path.split("/")[1]],
        "security": [{"token": []}] if route.token else [],
        "parameters": [_path_parameter(name) for name in in_path],
        "responses": _responses(route),
    }
    if route.query is not None:
        named = schema["properties"].items()
        described["parameters"] += [_parameter("query", name, _without_null(field)) for name, field in named]
    if route.request is not None:
        content = _json(route.summary, route.request)["content"]
        described["requestBody"] = {"required": route.body_required, "content": content}
    return described


def _responses(route: DescribedRoute) -> dict[str, Any]:
    if route.refusal is not None:
        refusals = {status: _json(text, route.refusal) for status, text in _STATUSES.items()}
    else:
        prefix = "v1." if style_of(route.path) is PROBLEM else ""
        refusals = {status: {"$ref": f"#/components/responses/{prefix}{status}"} for status in _STATUSES}
    if route.second_status is not None:
        refusals[str(route.second_status)] = _json(_STATUSES[str(route.second_status)], route.answer)
    if route.media_type != "application/json":
        return {str(route.status): {"description": "Done", "content": {route.media_type: {}}}, **refusals}
    media_type = "text/event-stream" if route.streams else "application/json"
    return {str(route.status): _json("Done", route.answer, media_type), **refusals}


def _path_parameter(name: str) -> dict[str, Any]:
    return _parameter("path", name, {"type": "string", **({"format": "uuid"} if name == "task_id" else {})})


def _parameter(place: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without `null`: a query leaves such a field out."""
    alternatives: Iterable[dict[str, Any]] = schema.get("anyOf", ())
    not_null = [alternative for alternative in alternatives if alternative.get("type") != "null"]
    if len(not_null) == 1:
        return not_null[0]
    return {name: value for name, value in schema.items() if name != "default"}


def _json(text: str, kind: type[msgspec.Struct], media_type: str = "application/json") -> dict[str, Any]:
    schema = {"$ref": _REF.format(name=kind.__name__)}
    return {"description": text, "content": {media_type: {"schema": schema}}}


def _page(page: Page) -> dict[str, Any]:
    return {
        "operationId": page.path.strip("/").replace(".", "_"),
        "summary": page.summary,
        "tags": ["operations"],
        "security": [],
        "responses": {"200": {"description": page.summary, "content": {page.content_type: {}}}},
    }


class ReferenceForms(NamedTuple):
    document: bytes
    page: str


class Reference:
    """The document as JSON and as a page. Both are made in a thread on first use, so that no start waits for them."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make
        self._making = asyncio.Lock()
        self._made: ReferenceForms | None = None

    async def read(self) -> ReferenceForms:
        async with self._making:
            if self._made is None:
                self._made = await asyncio.to_thread(self._render)
            return self._made

    def _render(self) -> ReferenceForms:
        described = self._make()
        return ReferenceForms(msgspec.json.encode(described), reference_page(described))


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
        shown = f"<pre>{escape(json.dumps(schema, indent=2))}</pre>"
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{shown}</details>'
    yield "</body></html>"


def _html_operation(method: str, path: str, operation: dict[str, Any]) -> str:
    token = "" if operation["security"] else " <small>(no token)</small>"
    rows = "".join(
        f"<tr><td><code>{escape(parameter['name'])}</code></td><td>{parameter['in']}</td>"
        f"<td><code>{escape(json.dumps(parameter['schema']))}</code></td></tr>"
        for parameter in operation.get("parameters", ())
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
