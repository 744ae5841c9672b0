"""A trace over two daemons: what one calls at the other is below the call, as their spans say on standard output."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2

from tests.cli.daemons import Daemon
from tests.doors.mcp.daemon import called, gate_at, operator_token, over_http, start
from tests.waits import BOUND_S

TRACED = {"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_SCHEDULE_DELAY": "60000"}
CANARY = "canary-51c2"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans(daemon: Daemon) -> Iterator[dict[str, Any]]:
    """Everything it has told by its end."""
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.stdout is not None
    text = daemon.process.stdout.read()
    assert daemon.stop() == 0
    assert CANARY not in text
    decoder, at = json.JSONDecoder(), text.find("{")
    while at != -1:
        span, end = decoder.raw_decode(text, at)
        yield span
        at = text.find("{", end)


def by_name(daemon: Daemon) -> dict[tuple[str, str], dict[str, Any]]:
    return {(span["name"], span["kind"]): span for span in spans(daemon)}


def test_the_work_of_a_worker_outside_is_told_when_it_is_over(short_path: Path) -> None:
    daemon = Daemon(short_path / "home", "--demo", env=TRACED)
    task_id = str(uuid4())
    headers = {"authorization": f"Bearer {operator_token(daemon)}", "traceparent": PARENT}
    task = {"id": task_id, "recipient": {"display": "echo@local"}, "intent_text": CANARY}
    with httpx2.Client(base_url=daemon.url, headers=headers, trust_env=False, timeout=BOUND_S) as http:
        assert http.post("/a2a/tasks", json=task).status_code == 200
        drained = http.get("/a2a/results/next", params={"task_id": task_id, "wait_ms": 20_000})
        assert drained.json()["result"] is not None
    found = by_name(daemon)
    accept = found["accept echo", "SpanKind.SERVER"]
    assert accept["context"]["trace_id"] == f"0x{PARENT.split('-')[1]}"
    assert accept["parent_id"] == f"0x{PARENT.split('-')[2]}"
    for name in ("queue echo", "invoke_agent echo"):
        span = found[name, "SpanKind.INTERNAL"]
        assert span["parent_id"] == accept["context"]["span_id"]
        assert span["attributes"]["covenant.task.id"] == accept["attributes"]["covenant.task.id"]
    assert (
        found["queue echo", "SpanKind.INTERNAL"]["end_time"]
        == found["invoke_agent echo", "SpanKind.INTERNAL"]["start_time"]
    )


async def test_what_is_called_elsewhere_is_below_the_call(short_path: Path) -> None:
    for name in ("far", "near"):
        (short_path / name).mkdir()
    published = ("--a2a-publish", "held", "--a2a-publish-anonymous", "loopback")
    far = start(short_path / "far", *published, env=TRACED)
    near = start(short_path / "near", "--outbound-allow", far.url.removeprefix("http://"), env=TRACED)
    agent_url = f"{far.url}/v1/a2a/agents/held"
    async with gate_at(short_path / "far") as gate, over_http(near) as client:
        calling = asyncio.create_task(called(client, "invoke_remote_agent", None, agent_url=agent_url, message=CANARY))
        await asyncio.wait_for(gate.held.wait(), BOUND_S)
        await gate.open("done")
        failed, text, _ = await calling
        assert not failed, text
    here, there = await asyncio.to_thread(by_name, near), await asyncio.to_thread(by_name, far)
    call = here["invoke_agent held", "SpanKind.CLIENT"]
    arrival = there["accept held", "SpanKind.SERVER"]
    attempt = there["invoke_agent held", "SpanKind.INTERNAL"]
    assert arrival["context"]["trace_id"] == call["context"]["trace_id"]
    assert arrival["parent_id"] == call["context"]["span_id"]
    assert attempt["parent_id"] == arrival["context"]["span_id"]
    assert call["attributes"]["a2a.protocol.binding"] == "JSONRPC"
    assert call["attributes"]["a2a.agent.card.url"].startswith(agent_url)
    assert call["resource"]["attributes"]["service.name"] == "covenant"
    # The tool call of the MCP client is the root of it all: its SDK traces too.
    root = here["tools/call invoke_remote_agent", "SpanKind.SERVER"]
    assert root["context"]["trace_id"] == call["context"]["trace_id"]
