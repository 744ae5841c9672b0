"""Worker agents: tasks that an A2A client sends are leased over the mailbox by whoever is enrolled as the agent."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

from covenant import Client, Worker
from covenant.model.errors import Conflict, Unauthenticated
from covenant.model.task import Result, ResultStatus
from covenant.worker import WorkerJob
from tests.cli.daemons import Daemon
from tests.places import short_folder
from tests.waits import BOUND_S, LONGER_S, until

EXAMPLES = Path(__file__).parents[2] / "examples"


class Site:
    """A daemon with one worker agent, and whoever is enrolled as it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        daemon.json("agents", "add", "helper", "--kind", "worker")
        self.token = daemon.json("identities", "enroll", "helper@default")["token_b58"]
        self.operator = (daemon.home / "operator.token").read_text().strip()

    async def rpc(self, method: str, params: dict[str, Any], agent: str = "helper") -> Any:
        async with httpx2.AsyncClient(timeout=BOUND_S, trust_env=False) as http:
            answer = await http.post(
                f"{self.daemon.url}/v1/a2a/agents/{agent}",
                json={"jsonrpc": "2.0", "id": 1, "method": method, "params": params},
                headers={"authorization": f"Bearer {self.operator}"},
            )
        found = answer.json()
        assert "result" in found, found
        return found["result"]

    async def send(self, text: str, agent: str = "helper", **more: Any) -> dict[str, Any]:
        """The task, as a blocking send answers with it."""
        message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": text}], **more.pop("message", {})}
        result = await self.rpc("SendMessage", {"message": message, **more}, agent)
        task: dict[str, Any] = result["task"]
        return task

    async def chunks(self, task_id: str, agent: str = "helper") -> list[tuple[str, bool]]:
        """The text of a task that has ended as its stream tells it: each chunk, and whether it is the last."""
        async with httpx2.AsyncClient(timeout=BOUND_S, trust_env=False) as http:
            answer = await http.post(
                f"{self.daemon.url}/v1/a2a/agents/{agent}",
                json={"jsonrpc": "2.0", "id": 1, "method": "tasks/resubscribe", "params": {"id": task_id}},
                headers={"authorization": f"Bearer {self.operator}"},
            )
        lines = (line.removeprefix("data:") for line in answer.text.splitlines() if line.startswith("data:"))
        events = [json.loads(line)["result"] for line in lines]
        assert events[-1]["final"]
        updates = [event for event in events if event["kind"] == "artifact-update"]
        return [(update["artifact"]["parts"][0]["text"], update["lastChunk"]) for update in updates]

    @asynccontextmanager
    async def working(self, worker: Worker) -> AsyncIterator[None]:
        running = asyncio.create_task(worker.run())
        try:
            yield
        finally:
            worker.stop()
            async with asyncio.timeout(BOUND_S):
                await running

    def worker(self, **how: Any) -> Worker:
        return Worker(self.daemon.url, self.token, **how)


@pytest.fixture
def site() -> Iterator[Site]:
    with short_folder() as folder:
        daemon = Daemon(folder / "home")
        opened: Site | None = None
        try:
            opened = Site(daemon)
            yield opened
        finally:
            (opened.daemon if opened is not None else daemon).stop(signal.SIGKILL)  # whatever is under way


def text_of(task: dict[str, Any]) -> str:
    text: str = task["status"]["message"]["parts"][0]["text"]
    return text


async def test_a_worker_elsewhere_does_what_an_a2a_client_asks(site: Site) -> None:
    worker = site.worker()

    @worker
    async def shout(job: WorkerJob) -> str:
        await job.status("thinking")
        await job.say("HEL")
        await job.say("LO")
        return job.text.upper()

    async with site.working(worker):
        task = await site.send("hello")
    assert (task["status"]["state"], text_of(task)) == ("TASK_STATE_COMPLETED", "HELLO")
    assert [part["text"] for part in task["artifacts"][0]["parts"]] == ["HELLO"]
    assert await site.chunks(task["id"]) == [("HEL", False), ("LO", False), ("", True)]


@pytest.mark.parametrize("closed", [False, True])
async def test_the_text_of_a_worker_over_plain_http_ends_with_its_last_chunk(site: Site, closed: bool) -> None:
    """A worker may close its text itself; a result closes a text that was left open, and closes nothing twice."""
    sent = await site.send("hello", configuration={"returnImmediately": True})
    chunks: list[dict[str, Any]] = [
        {"artifact_id": "words", "parts": [{"type": "text", "text": "HEL"}]},
        {"artifact_id": "words", "parts": [{"type": "text", "text": "LO"}], "append": True, "last_chunk": closed},
    ]
    headers = {"authorization": f"Bearer {site.token}"}
    async with httpx2.AsyncClient(
        base_url=site.daemon.url, headers=headers, timeout=BOUND_S, trust_env=False
    ) as worker:
        taken = (await worker.get("/a2a/tasks/next", params={"wait_ms": 5_000})).json()
        lease_id = taken["lease"]["lease_id"]
        for chunk in chunks:
            told = {"lease_id": lease_id, "update": {"type": "artifact", **chunk}}
            assert (await worker.post(f"/a2a/tasks/{sent['id']}/updates", json=told)).status_code == 200
        result = {"task_id": sent["id"], "status": "ok", "content": [{"type": "text", "text": "HELLO"}]}
        for _ in range(2):  # a result may be repeated
            posted = await worker.post("/a2a/results", json={**result, "lease_id": lease_id})
            assert posted.status_code == 200, posted.text
    assert await site.chunks(sent["id"]) == [("HEL", False), ("LO", closed)] + ([] if closed else [("", True)])
    task = await site.rpc("GetTask", {"id": sent["id"]})
    assert [part["text"] for part in task["artifacts"][0]["parts"]] == ["HELLO"]


async def test_the_text_of_a_worker_over_plain_http_that_parks_its_task_ends_with_its_last_chunk(site: Site) -> None:
    sent = await site.send("hello", configuration={"returnImmediately": True})
    headers = {"authorization": f"Bearer {site.token}"}
    async with httpx2.AsyncClient(
        base_url=site.daemon.url, headers=headers, timeout=BOUND_S, trust_env=False
    ) as worker:
        taken = (await worker.get("/a2a/tasks/next", params={"wait_ms": 5_000})).json()
        words = {"type": "artifact", "artifact_id": "words", "parts": [{"type": "text", "text": "HEL"}]}
        asks = {"type": "status", "state": "input-required", "text": "which one?"}
        for update in (words, asks):
            told = {"lease_id": taken["lease"]["lease_id"], "update": update}
            posted = await worker.post(f"/a2a/tasks/{sent['id']}/updates", json=told)
            assert posted.status_code == 200, posted.text
    assert (await site.rpc("GetTask", {"id": sent["id"]}))["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"
    await site.rpc("CancelTask", {"id": sent["id"]})  # the stream of a task that waits goes on
    assert await site.chunks(sent["id"]) == [("HEL", False), ("", True)]


async def test_the_text_of_a_turn_that_times_out_ends_with_its_last_chunk(site: Site, tmp_path: Path) -> None:
    says = """echo '{"type": "assistant", "text": "I am"}'; exec sleep 3600"""
    definition = tmp_path / "hanging.json"
    said: list[tuple[str, bool]] = []
    for seconds in LONGER_S:  # a busy machine may need more of it until the program has said something
        agent = f"hanging-{seconds:.0f}"
        program = {"kind": "process", "command": ["sh", "-c", says], "timeout_ms": int(seconds * 1_000)}
        definition.write_text(json.dumps(program))
        site.daemon.json("agents", "add", agent, "--file", str(definition))
        task = await site.send("hang", agent)
        assert (task["status"]["state"], text_of(task)) == ("TASK_STATE_FAILED", "Task timed out")
        if said := await site.chunks(task["id"], agent):
            break
    assert said == [("I am", False), ("", True)]


async def test_what_only_mcp_blocks_have_passes_through_a2a_both_ways(site: Site) -> None:
    more = {"annotations": {"audience": ["user"], "priority": 0.5}, "_meta": {"example.org/trace": "7"}}
    icons = [{"src": "https://example.org/icon.png", "sizes": ["48x48"]}]
    described = {"title": "The report", "description": "Of the year", "size": 12, "icons": icons, **more}
    parts: list[dict[str, Any]] = [
        {"text": "read this", "metadata": {"covenant.mcp": more, "mine": 1}},
        {"url": "https://example.org/r", "filename": "report", "metadata": {"covenant.mcp": described}},
        {"raw": "aGk=", "mediaType": "image/png", "metadata": {"covenant.mcp": {**more, "resource_meta": {"a": 1}}}},
        {"raw": "aGk=", "mediaType": "image/png", "metadata": {"covenant.mcp": more}},
        {"raw": "aGk=", "mediaType": "audio/wav"},
        {"raw": "aGk=", "mediaType": "image/png", "filename": "a.png"},
        {"raw": "aGk=", "mediaType": "image/png", "metadata": {"covenant.mcp": {"uri": "file:///a.png"}}},
        {"text": "t", "mediaType": "text/x", "metadata": {"covenant.mcp": {"uri": "file:///t", **more}}},
        {"text": "no such fields of a text", "metadata": {"covenant.mcp": {"size": 1}}},
        {"text": "no object", "metadata": {"covenant.mcp": "words"}},
    ]
    blocks = [
        {"type": "text", "text": "read this", "metadata": {"mine": 1}, **more},
        {"type": "resource_link", "uri": "https://example.org/r", "name": "report", **described},
        {
            "type": "resource",
            "resource": {"uri": "", "mimeType": "image/png", "blob": "aGk=", "_meta": {"a": 1}},
            **more,
        },
        {"type": "image", "data": "aGk=", "mimeType": "image/png", **more},
        {"type": "audio", "data": "aGk=", "mimeType": "audio/wav"},
        {
            "type": "resource",
            "resource": {"uri": "", "mimeType": "image/png", "blob": "aGk="},
            "filename": "a.png",
        },
        {"type": "resource", "resource": {"uri": "file:///a.png", "mimeType": "image/png", "blob": "aGk="}},
        {"type": "resource", "resource": {"uri": "file:///t", "mimeType": "text/x", "text": "t"}, **more},
        {"type": "text", "text": "no such fields of a text"},
        {"type": "text", "text": "no object"},
    ]
    sent = await site.send("", message={"parts": parts}, configuration={"returnImmediately": True})
    headers = {"authorization": f"Bearer {site.token}"}
    async with httpx2.AsyncClient(
        base_url=site.daemon.url, headers=headers, timeout=BOUND_S, trust_env=False
    ) as worker:
        taken = (await worker.get("/a2a/tasks/next", params={"wait_ms": 5_000})).json()
        assert taken["task"]["parts"] == blocks
        result = {"task_id": sent["id"], "status": "ok", "content": blocks}
        posted = await worker.post("/a2a/results", json={**result, "lease_id": taken["lease"]["lease_id"]})
        assert posted.status_code == 200, posted.text
    expected = [part.get("metadata", {}).get("covenant.mcp") for part in parts[:-2]] + [None, None]
    for method in ("GetTask", "tasks/get"):
        task = await site.rpc(method, {"id": sent["id"]})
        told = [part.get("metadata", {}) for part in task["status"]["message"]["parts"]]
        assert [metadata.get("covenant.mcp") for metadata in told] == expected
        assert told[0]["mine"] == 1


async def test_the_archive_tells_a_task_by_the_documented_columns(site: Site) -> None:
    worker = site.worker()

    @worker
    async def fail(job: WorkerJob) -> Result:
        return Result(task_id=job.task.id, status=ResultStatus.ERROR, error_message="no money")

    async with site.working(worker):
        task = await site.send("hello", message={"contextId": "the-context"})
    columns = "tenant_id, agent_id, context_id, state, error_message, created_at <= updated_at"
    found: list[tuple[Any, ...]] = []

    def archived() -> bool:
        with closing(sqlite3.connect(f"file:{site.daemon.home}/archive.db?mode=ro", uri=True)) as db:
            found[:] = db.execute(f"SELECT {columns} FROM a2a_tasks WHERE task_id = ?", (task["id"],)).fetchall()
        return bool(found) and found[0][3] == "failed"

    await asyncio.to_thread(until, archived)
    assert found == [("default", "helper", "the-context", "failed", "no money", 1)]


async def test_a_worker_asks_and_the_answer_is_the_next_turn(site: Site) -> None:
    worker = site.worker()

    @worker
    async def greet(job: WorkerJob) -> str | None:
        if job.turn == 1:
            await job.ask("who is it?")
            return None
        return f"hello, {job.text}"

    async with site.working(worker):
        asked = await site.send("greet")
        assert (asked["status"]["state"], text_of(asked)) == ("TASK_STATE_INPUT_REQUIRED", "who is it?")
        done = await site.send("bob", message={"taskId": asked["id"]})
    assert (done["id"], text_of(done)) == (asked["id"], "hello, bob")


async def test_a_worker_that_raises_fails_its_task_and_takes_the_next(site: Site) -> None:
    worker = site.worker()

    @worker
    async def fail_once(job: WorkerJob) -> str:
        if job.text == "bad":
            raise ValueError("a secret of the worker")
        return "fine"

    async with site.working(worker):
        failed = await site.send("bad")
        assert failed["status"]["state"] == "TASK_STATE_FAILED"
        assert "secret" not in json.dumps(failed)
        assert text_of(await site.send("good")) == "fine"


async def test_a_worker_whose_task_is_canceled_is_stopped_by_its_next_heartbeat(site: Site) -> None:
    worker = site.worker(renew_s=0.05)
    begun, stopped = asyncio.Event(), asyncio.Event()

    @worker
    async def hang(job: WorkerJob) -> str:
        await job.say("I am")
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return "never"

    async with site.working(worker), asyncio.timeout(BOUND_S):
        task = await site.send("hang", configuration={"returnImmediately": True})
        await begun.wait()
        canceled = await site.rpc("CancelTask", {"id": task["id"]})
        assert canceled["status"]["state"] == "TASK_STATE_CANCELED"
        await stopped.wait()
    assert await site.chunks(task["id"]) == [("I am", False), ("", True)]


async def test_refusals_come_back_as_what_they_are(site: Site) -> None:
    async with Client(site.daemon.url, "nobody's") as stranger:
        with pytest.raises(Unauthenticated):
            await stranger.take()
    async with Client(site.daemon.url, site.token) as client:
        await site.send("x", configuration={"returnImmediately": True})
        (taken,) = await client.take(wait_ms=5_000)
        await site.rpc("CancelTask", {"id": taken.task.id})
        with pytest.raises(Conflict) as refused:
            await client.renew(taken.task.id, taken.lease.lease_id)
        assert refused.value.code == "canceled"


async def test_a_handler_whose_own_task_was_cancelled_fails_its_task_and_the_worker_goes_on(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    worker = site.worker()

    @worker
    async def wait_in_vain(job: WorkerJob) -> str:
        if job.text == "bad":
            inner = asyncio.create_task(asyncio.Event().wait())
            inner.cancel()
            await inner
        return "fine"

    async with site.working(worker):
        failed = await asyncio.wait_for(site.send("bad"), BOUND_S)
        done = await site.send("good")
    assert (failed["status"]["state"], text_of(failed)) == ("TASK_STATE_FAILED", "the worker failed")
    assert text_of(done) == "fine"
    assert [record.message for record in caplog.records if record.name == "covenant.worker"] == ["worker.failed"]


async def test_the_worker_in_plain_shell_does_its_tasks_and_ends(site: Site) -> None:
    environment = {"URL": site.daemon.url, "TOKEN": site.token, "TASKS": "2", "PATH": os.environ["PATH"]}
    shell = subprocess.Popen(["sh", str(EXAMPLES / "worker.sh")], env=environment, stdout=subprocess.PIPE)
    try:
        for text in ("hello", "good morning"):
            assert text_of(await site.send(text)) == text.upper()
        assert await asyncio.to_thread(shell.wait, BOUND_S) == 0
    finally:
        shell.kill()
        shell.communicate()


async def test_the_worker_in_plain_shell_survives_a_restart_of_the_daemon(site: Site) -> None:
    environment = {"URL": site.daemon.url, "TOKEN": site.token, "TASKS": "2", "PATH": os.environ["PATH"]}
    shell = subprocess.Popen(["sh", str(EXAMPLES / "worker.sh")], env=environment, stdout=subprocess.PIPE)
    try:
        assert text_of(await site.send("before")) == "BEFORE"
        port = site.daemon.url.rpartition(":")[2]
        assert await asyncio.to_thread(site.daemon.stop) == 0
        site.daemon = await asyncio.to_thread(Daemon, site.daemon.home, "--http-port", port)
        assert text_of(await site.send("after")) == "AFTER"
        assert await asyncio.to_thread(shell.wait, BOUND_S) == 0
    finally:
        shell.kill()
        shell.communicate()


async def test_a_task_put_into_the_mailbox_is_an_agents_task_like_any_other(site: Site) -> None:
    worker = site.worker()

    @worker
    async def shout(job: WorkerJob) -> str:
        return job.text.upper()

    site.daemon.json("capabilities", "grant", "a2a.send.helper@default")
    site.daemon.json("capabilities", "grant", "a2a.respond.operator@local", "--to", "helper@default")
    async with site.working(worker):
        sent = await asyncio.to_thread(site.daemon.json, "a2a", "send", "--to", "helper@default", "--wait", "hello")
    assert "HELLO" in json.dumps(sent)
    (task_id,) = _ids(sent)
    seen = await site.rpc("GetTask", {"id": task_id})
    assert (seen["status"]["state"], text_of(seen)) == ("TASK_STATE_COMPLETED", "HELLO")


def _ids(told: Any) -> set[str]:
    """Every task id in what was told."""
    if isinstance(told, dict):
        own = {told["task_id"]} if "task_id" in told else set()
        return own.union(*(_ids(value) for value in told.values()))
    return set().union(*map(_ids, told)) if isinstance(told, list) else set()
