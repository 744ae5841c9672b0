"""The OpenAPI document: every route is in it, every reference leads somewhere, and real answers match it."""

import json
import re
from collections.abc import Iterator
from typing import Any

from starlette.routing import Route

from covenant.daemon.wiring.doors import TENANT_DESCRIBED
from covenant.doors.http.app import PAGES
from covenant.doors.http.endpoint import MethodRouter
from covenant.doors.http.openapi import document, reference_page
from covenant.doors.operator_api.operation_table import OPERATIONS
from tests.doors.clients import Http
from tests.doors.doors_under_test import DoorsUnderTest
from tests.doors.operator_api.test_answers import GOLDEN

DOCUMENT = document(OPERATIONS, PAGES, "1.2.3", TENANT_DESCRIBED)
METHODS = {"get", "post", "put", "patch", "delete", "head"}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def resolve(reference: str) -> Any:
    value: Any = DOCUMENT
    for step in reference.removeprefix("#/").split("/"):
        value = value[step]
    return value


async def test_it_lists_exactly_the_routes_of_the_router(under_test: DoorsUnderTest) -> None:
    served = set()
    for route in under_test.door.router.routes:
        assert isinstance(route, Route)
        assert isinstance(route.endpoint, MethodRouter)
        served |= {(route.path, method.lower()) for method in route.endpoint.calls if method != "HEAD"}
    described = await Http(under_test.port).get("/openapi.json")
    assert {(path, method) for path, methods in described["paths"].items() for method in methods} == served
    assert described["info"]["version"] == "0.0.test"


def test_every_reference_leads_somewhere_and_every_type_is_used() -> None:
    used = set(references(DOCUMENT))
    for reference in used:
        assert resolve(reference)
    components = DOCUMENT["components"]
    named = {f"#/components/{section}/{name}" for section in ("schemas", "responses") for name in components[section]}
    assert named == used
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name.rpartition("/")[2]) for name in named)


def test_it_has_what_the_specification_demands() -> None:
    """OpenAPI 3.1, sections on the document, info, path item, operation, parameter and response objects."""
    assert DOCUMENT["openapi"].startswith("3.1.")
    assert DOCUMENT["info"].keys() >= {"title", "version"}
    seen = set()
    for path, methods in DOCUMENT["paths"].items():
        assert path.startswith("/")
        assert methods.keys() <= METHODS
        for operation in methods.values():
            assert operation["operationId"] not in seen
            seen.add(operation["operationId"])
            parameters = operation.get("parameters", [])
            assert len({(each["name"], each["in"]) for each in parameters}) == len(parameters)
            in_path = {each["name"] for each in parameters if each["in"] == "path"}
            assert in_path == set(re.findall(r"\{(\w+)\}", path))
            assert all(each["required"] for each in parameters if each["in"] == "path")
            assert all(each.keys() == {"name", "in", "required", "schema"} for each in parameters)
            for response in operation["responses"].values():
                assert "$ref" in response or response["description"]
            for requirement in operation["security"]:
                assert requirement.keys() <= DOCUMENT["components"]["securitySchemes"].keys()


def problems(value: Any, schema: dict[str, Any], place: str = "$") -> Iterator[str]:
    """Where `value` does not match; knows as much of JSON Schema as the document uses."""
    if "$ref" in schema:
        yield from problems(value, resolve(schema["$ref"]), place)
        return
    if "anyOf" in schema:
        if all(any(problems(value, option, place)) for option in schema["anyOf"]):
            yield f"{place}: matches no alternative"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {value!r} is not one of {schema['enum']}"
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):  # type: ignore[arg-type]
        yield f"{place}: {value!r} is no {schema['type']}"
        return
    if isinstance(value, dict):
        yield from (f"{place}: {name} is missing" for name in schema.get("required", ()) if name not in value)
        properties = schema.get("properties")
        for name, inner in value.items():
            if properties is not None and name not in properties:
                yield f"{place}: {name} is not described"
            yield from problems(inner, (properties or {}).get(name, {}), f"{place}.{name}")
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from problems(inner, schema.get("items", {}), f"{place}[{index}]")


def test_what_is_answered_is_what_is_described() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    found = {}
    for answer, golden in GOLDEN:
        if type(answer).__name__ in schemas:  # the others are the socket's own
            found[golden] = list(problems(json.loads(golden), schemas[type(answer).__name__]))
    assert len(found) > len(OPERATIONS)
    assert not any(found.values()), found


def test_the_check_of_answers_can_fail() -> None:
    schema = {"$ref": "#/components/schemas/TaskQueued"}
    assert list(problems({"kind": "a2a_task_queued"}, schema)) == ["$: task_id is missing"]
    assert list(problems({"kind": "other", "task_id": 5, "extra": 1}, schema))


async def test_the_page_for_people_names_every_route_and_fetches_nothing(under_test: DoorsUnderTest) -> None:
    reply = await Http(under_test.port).ask("GET", "/docs")
    assert reply.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    text = reply.body.decode()
    for path in (await Http(under_test.port).get("/openapi.json"))["paths"]:
        assert f"<code>{path}</code>" in text
    assert not re.search(r"<script|<link|<img|src=|https?://", text)


def test_the_page_escapes_what_it_shows() -> None:
    hostile = {**DOCUMENT, "info": {"title": "<b>", "version": "&", "description": "<script>"}}
    assert "<script>" not in reference_page(hostile)
    assert "<h1>&lt;b&gt;" in reference_page(hostile)
