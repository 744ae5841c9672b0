"""What is described is what is served: the OpenAPI document, the page in docs, and answers from a real socket."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.daemon.wiring.doors import TENANT_DESCRIBED
from covenant.doors.simple import CODES, A2ATask, A2ATaskSendRequest
from tests.doors.http.test_openapi import DOCUMENT, problems, resolve
from tests.doors.simple.simple_under_test import echo, open_simple

PAGE = Path(__file__).parents[3].joinpath("docs", "formats", "simple-http.md").read_text(encoding="utf-8")
REQUEST, TASK = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)


def described(path: str, method: str, status: int, kind: str = "application/json") -> dict[str, Any]:
    response = DOCUMENT["paths"][path][method]["responses"][str(status)]
    if "$ref" in response:
        response = resolve(response["$ref"])
    schema: dict[str, Any] = response["content"][kind]["schema"]
    return schema


async def test_every_answer_of_these_doors_is_as_described(tmp_path: Path) -> None:
    async with open_simple(tmp_path, echo()) as s:
        sent = await s.send({"message": "Hello", "skill": "unheard-of"})
        task = sent.json()
        done = await s.ended(task["id"])
        served = [
            ("/a2a/tasks/send", "post", 200, task),
            ("/a2a/tasks/send", "post", 400, (await s.send({})).json()),
            ("/a2a/tasks/send", "post", 401, (await s.send({}, token=None)).json()),
            ("/a2a/tasks/{task_id}", "get", 200, done),
            ("/a2a/tasks/{task_id}", "get", 404, (await s.get("x")).json()),
            ("/v1/requests", "get", 200, (await s.ask("GET", "/v1/requests")).json()),
            ("/v1/requests/{request_id}", "get", 200, (await s.ask("GET", f"/v1/requests/{task['id']}")).json()),
            ("/v1/requests/{request_id}", "get", 404, (await s.ask("GET", "/v1/requests/x")).json()),
            (
                "/v1/requests/{request_id}/cancel",
                "post",
                404,
                (await s.ask("POST", "/v1/requests/x/cancel")).json(),
            ),
        ]
        for path, method, status, answer in served:
            assert list(problems(answer, described(path, method, status))) == [], (path, status)
        schema = described("/v1/requests/{request_id}/events", "get", 200, "text/event-stream")
        for _, _, data in await s.events(task["id"]):
            assert list(problems(data, schema)) == []


def test_the_documented_task_and_request_are_those_of_the_code() -> None:
    task = msgspec.json.decode(TASK, type=A2ATask)
    assert json.loads(msgspec.json.encode(task)) == json.loads(TASK)
    request = msgspec.json.decode(REQUEST, type=A2ATaskSendRequest)
    assert json.loads(msgspec.json.encode(request)) == json.loads(REQUEST)


@pytest.mark.parametrize("route", TENANT_DESCRIBED, ids=lambda route: route.name)
def test_every_route_is_documented(route: Any) -> None:
    pages = Path(__file__).parents[3].joinpath("docs", "formats")
    text = "".join(
        pages.joinpath(name).read_text(encoding="utf-8") for name in ("simple-http.md", "native-http.md", "agents.md")
    )
    path = re.sub(r"\{\w+\}", "{id}", route.path)
    assert f"{route.method} {path}" in text


@pytest.mark.parametrize("code", CODES.values())
def test_every_code_is_documented(code: str) -> None:
    assert f"`{code}`" in PAGE or code in {"AUTHORIZATION_ERROR", "CONFLICT"}
