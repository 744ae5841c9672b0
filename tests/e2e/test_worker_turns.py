"""What a worker elsewhere can do in a turn: files, data, calls, rejections, usage; and what is said without one."""

import asyncio
import base64
import json
import signal
import sys
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest

from covenant import Client
from covenant.model.content import Content, Image, Text
from covenant.model.errors import Forbidden, TooLarge, Unauthenticated
from covenant.model.task_event import ArtifactUpdate
from covenant.worker import WorkerJob
from tests.cli.daemons import Daemon, started
from tests.e2e.test_worker import Site, site, text_of
from tests.waits import BOUND_S, LONGER_S, until

__all__ = ["site"]

CALLING = """
import asyncio, os, signal, sys
from pathlib import Path
from covenant import Worker

worker = Worker(sys.argv[1], sys.argv[2])

@worker
async def work(job):
    await job.say(f"attempt {job.attempt}. ")
    said = await job.call("echo@default", job.text)
    mark = Path(sys.argv[3])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    worker.stop()
    return said.content[0].text

asyncio.run(worker.run())
"""


async def test_files_data_and_usage_of_a_worker_reach_the_caller(site: Site, tmp_path: Path) -> None:
    large = b"x" * 600_000
    (tmp_path / "sources.bin").write_bytes(large)
    worker = site.worker()

    @worker
    async def work(job: WorkerJob) -> str:
        await job.data({"found": [1, 2]}, "facts")
        await job.file("sources.bin", tmp_path / "sources.bin")
        await job.file("note.txt", b"short", media_type="text/plain")
        job.spend(tokens=700, searches=2)
        job.spend(tokens=500)
        return "done"

    async with site.working(worker):
        task = await site.send("go")
    assert task["status"]["state"] == "TASK_STATE_COMPLETED"
    named = {each["name"]: each["parts"][0] for each in task["artifacts"]}
    assert named["facts"]["data"] == {"found": [1, 2]}
    async with httpx2.AsyncClient(timeout=BOUND_S, trust_env=False) as http:
        for name, content in (("sources.bin", large), ("note.txt", b"short")):
            assert (await http.get(named[name]["url"])).content == content
    shown = site.daemon.json("a2a", "show", task["id"])
    assert shown["result"]["metadata"]["usage"] == {"tokens": 1_200, "searches": 2}


async def test_what_a_worker_spent_before_a_question_counts_with_the_result(site: Site) -> None:
    worker = site.worker()

    @worker
    async def work(job: WorkerJob) -> str | None:
        if job.turn < 3:
            job.spend(tokens=10, searches=1)
            await job.ask("more?")
        job.spend(tokens=5)
        return "done"

    async with site.working(worker):
        task = await site.send("go")
        for _ in range(2):
            task = await site.send("yes", message={"taskId": task["id"]})
    assert task["status"]["state"] == "TASK_STATE_COMPLETED"
    assert task["metadata"]["covenant.usage"] == {"tokens": 25, "searches": 2}


async def test_a_result_that_is_posted_twice_counts_what_was_used_before_once(site: Site) -> None:
    sent = await site.send("go", configuration={"returnImmediately": True})
    headers = {"authorization": f"Bearer {site.token}"}
    async with httpx2.AsyncClient(base_url=site.daemon.url, headers=headers, timeout=BOUND_S, trust_env=False) as http:
        taken = (await http.get("/a2a/tasks/next", params={"wait_ms": 5_000})).json()
        asks = {"type": "status", "state": "input-required", "text": "more?", "metadata": {"usage": {"tokens": 10}}}
        said = {"lease_id": taken["lease"]["lease_id"], "update": asks, "update_no": 1}
        for _ in range(2):
            assert (await http.post(f"/a2a/tasks/{sent['id']}/updates", json=said)).status_code == 200
        await site.send("yes", message={"taskId": sent["id"]}, configuration={"returnImmediately": True})
        taken = (await http.get("/a2a/tasks/next", params={"wait_ms": 5_000})).json()
        result = {"task_id": sent["id"], "status": "ok", "lease_id": taken["lease"]["lease_id"], "usage": {"tokens": 5}}
        answers = [(await http.post("/a2a/results", json=result)).json() for _ in range(2)]
    assert [each.get("duplicate", False) for each in answers] == [False, True]
    shown = site.daemon.json("a2a", "show", sent["id"])
    assert shown["result"]["metadata"]["usage"] == {"tokens": 15}


async def test_words_that_are_refused_are_no_part_of_the_answer(site: Site) -> None:
    worker = site.worker()

    @worker
    async def work(job: WorkerJob) -> str:
        with pytest.raises(TooLarge):
            await job.say("x" * 20_000_000)
        return "done"

    async with site.working(worker):
        task = await site.send("go")
    assert (task["status"]["state"], text_of(task)) == ("TASK_STATE_COMPLETED", "done")
    assert ["".join(part["text"] for part in each["parts"]) for each in task.get("artifacts", ())] in ([], ["done"])


async def test_a_worker_rejects_a_task_for_its_reason(site: Site) -> None:
    worker = site.worker()

    @worker
    async def work(job: WorkerJob) -> str:
        await job.say("I looked at it. ")
        await job.reject("this is not for me")
        return "never told"

    async with site.working(worker):
        task = await site.send("go")
    assert (task["status"]["state"], text_of(task)) == ("TASK_STATE_REJECTED", "this is not for me")


async def test_only_an_error_rejects_a_task(site: Site) -> None:
    sent = await site.send("go", configuration={"returnImmediately": True})
    headers = {"authorization": f"Bearer {site.token}"}
    async with httpx2.AsyncClient(base_url=site.daemon.url, headers=headers, timeout=BOUND_S, trust_env=False) as http:
        taken = (await http.get("/a2a/tasks/next", params={"wait_ms": 5_000})).json()
        result = {"task_id": sent["id"], "status": "ok", "rejected": True, "lease_id": taken["lease"]["lease_id"]}
        refused = await http.post("/a2a/results", json=result)
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_result")
        odd = {**result, "status": "error", "usage": {"tokens": -5, "x" * 1_000: 1, "words": "many"}}
        assert (await http.post("/a2a/results", json=odd)).status_code == 200
    shown = site.daemon.json("a2a", "show", sent["id"])
    assert not shown["result"].get("metadata")


async def test_what_a_worker_says_in_a_later_turn_is_an_artifact_of_that_turn(site: Site) -> None:
    worker = site.worker()

    @worker
    async def work(job: WorkerJob) -> str | None:
        await job.say(f"turn {job.turn}, ")
        await job.say("twice")
        if job.turn == 1:
            await job.ask("more?")
            return None
        return "done"

    async with site.working(worker):
        asked = await site.send("go")
        task = await site.send("yes", message={"taskId": asked["id"]})
    texts = ["".join(part["text"] for part in each["parts"]) for each in task["artifacts"]]
    assert texts[0] == "turn 1, twice"
    assert texts[1] in ("turn 2, twice", "done")
    chunks = await site.chunks(task["id"])
    assert [said for said, _ in chunks] == ["turn 1, ", "twice", "", "turn 2, ", "twice", ""]
    assert [last for _, last in chunks] == [False, False, True] * 2


async def ended(site: Site, folder: Path) -> int:
    """The exit code of the worker."""
    script = folder / "calling.py"
    script.write_text(CALLING)
    with started([sys.executable, script, site.daemon.url, site.token, folder / "killed"]) as worker:
        return await asyncio.to_thread(worker.wait, BOUND_S)


async def test_a_call_of_a_worker_that_was_killed_is_found_again_and_not_made_twice(site: Site, tmp_path: Path) -> None:
    echo = json.dumps({"type": "assistant", "text": "an echo"})
    site.daemon.json("agents", "add", "echo", "--command", f"printf '%s\\n' '{echo}'")
    site.daemon.json("capabilities", "grant", "a2a.send.echo@default", "--to", "helper@default")
    site.daemon.json("capabilities", "grant", "a2a.repair.requeue")
    sent = await site.send("go", configuration={"returnImmediately": True})
    assert await ended(site, tmp_path) == -signal.SIGKILL
    words = ("a2a", "requeue", sent["id"], "--reason", "its worker was killed", "--duplicate-risk", "operator-accepted")
    assert site.daemon.run(*words).code == 0
    assert await ended(site, tmp_path) == 0
    task = await site.rpc("GetTask", {"id": sent["id"]})
    assert (task["status"]["state"], text_of(task)) == ("TASK_STATE_COMPLETED", "an echo")
    called = site.daemon.json("a2a", "list", "--agent", "echo")["tasks"]
    assert len(called) == 1


async def test_a_caller_of_a_worker_agent_that_nobody_is_enrolled_as_hears_so(site: Site) -> None:
    site.daemon.json("agents", "add", "lonely", "--kind", "worker")
    task = await site.send("go", "lonely", configuration={"returnImmediately": True})
    assert task["status"]["state"] == "TASK_STATE_SUBMITTED"
    assert "no worker serves lonely@default: no worker is enrolled" in text_of(task)
    again = await site.rpc("GetTask", {"id": task["id"]}, "lonely")
    assert "no worker serves" in text_of(again)
    site.daemon.json("identities", "enroll", "lonely@default")
    assert "message" not in (await site.rpc("GetTask", {"id": task["id"]}, "lonely"))["status"]


async def test_who_calls_such_an_agent_through_another_one_hears_so_too(site: Site) -> None:
    site.daemon.json("agents", "add", "lonely", "--kind", "worker")
    task = await site.send("lonely", "index", configuration={"returnImmediately": True})
    why = "a call waits: no worker serves lonely@default: no worker is enrolled"
    async with asyncio.timeout(BOUND_S):
        while why not in (said := text_of(task) if "message" in task["status"] else ""):
            assert task["status"]["state"] in ("TASK_STATE_SUBMITTED", "TASK_STATE_WORKING"), said
            task = await site.rpc("GetTask", {"id": task["id"]}, "index")


def test_a_command_that_waits_in_vain_for_such_an_agent_says_why(site: Site) -> None:
    site.daemon.json("agents", "add", "lonely", "--kind", "worker")
    said = ""
    for seconds in LONGER_S:
        called = site.daemon.run("call", "lonely", "go", "--timeout", f"{seconds:g}s")
        assert called.code == 1
        said = called.err
        if f"no answer within {seconds:g} s" in said and "its last status: " in said:
            break
    assert "its last status: no worker serves lonely@default: no worker is enrolled" in said


async def test_a_priority_that_an_a2a_client_gives_decides_who_is_taken_first(site: Site) -> None:
    at_once = {"returnImmediately": True}
    plain = await site.send("plain", configuration=at_once)
    urgent = await site.send("urgent", configuration=at_once, metadata={"covenant.priority": 9})
    async with Client(site.daemon.url, site.token) as client:
        taken = await client.take(2, wait_ms=5_000)
    assert [each.task.id for each in taken] == [urgent["id"], plain["id"]]


async def test_a_refusal_in_the_handler_fails_its_task_alone_with_its_words(site: Site) -> None:
    worker, begun, go_on = site.worker(concurrency=2), asyncio.Event(), asyncio.Event()

    @worker
    async def work(job: WorkerJob) -> str:
        odd: Any = object()
        match job.text:
            case "unknown":
                await job.call("nobody@default", "x")
            case "say":
                await job.say(cast(str, 5))
            case "long":
                await job.say("x" * 3_000_000)
            case "data":
                await job.say("so far. ")
                await job.data(odd)
            case "nan":
                await job.data(float("nan"))
            case "spend":
                job.spend(tokens=cast(float, "x"))
            case "reject":
                await job.reject(cast(str, 5))
            case "beside":
                begun.set()
                await asyncio.wait_for(go_on.wait(), BOUND_S)
            case _:
                pass
        return "done"

    async with site.working(worker):
        beside = asyncio.create_task(site.send("beside"))
        await asyncio.wait_for(begun.wait(), BOUND_S)
        for text in ("unknown", "say", "long", "data", "nan", "spend", "reject"):
            task = await site.send(text)
            assert (task["status"]["state"], text) == ("TASK_STATE_FAILED", text)
            assert text_of(task).startswith("the worker failed"), text
            if text in ("say", "spend"):
                assert ": " in text_of(task), "it says why"
        go_on.set()
        assert text_of(await beside) == "done", "what ran beside was not stopped"


async def test_a_worker_whose_token_was_revoked_ends(site: Site) -> None:
    worker, begun, go_on = site.worker(), asyncio.Event(), asyncio.Event()

    @worker
    async def work(job: WorkerJob) -> str:
        begun.set()
        await asyncio.wait_for(go_on.wait(), BOUND_S)
        return "done"

    running = asyncio.create_task(worker.run())
    await site.send("go", configuration={"returnImmediately": True})
    await asyncio.wait_for(begun.wait(), BOUND_S)
    site.daemon.json("identities", "revoke", "helper@default")
    go_on.set()
    with pytest.raises(BaseExceptionGroup) as ended:
        await asyncio.wait_for(running, BOUND_S)
    assert ended.group_contains((Unauthenticated, Forbidden))


async def test_a_file_of_a_worker_outlives_a_restart_of_the_daemon(site: Site, tmp_path: Path) -> None:
    worker, begun, go_on = site.worker(), asyncio.Event(), asyncio.Event()
    (tmp_path / "a.txt").write_bytes(b"from a path")

    @worker
    async def work(job: WorkerJob) -> str:
        begun.set()
        await asyncio.wait_for(go_on.wait(), BOUND_S)
        await job.file("b.txt", b"bytes")
        await job.file("a.txt", tmp_path / "a.txt")
        return "filed"

    async with site.working(worker):
        task_id = (await site.send("go", configuration={"returnImmediately": True}))["id"]
        await asyncio.wait_for(begun.wait(), BOUND_S)
        port = site.daemon.url.rpartition(":")[2]
        assert await asyncio.to_thread(site.daemon.stop, signal.SIGKILL) == -signal.SIGKILL
        go_on.set()  # it finds nobody while the daemon starts
        site.daemon = await asyncio.to_thread(Daemon, site.daemon.home, "--http-port", port)

        def ended() -> bool:
            return bool(site.daemon.json("a2a", "show", task_id)["a2a_state"] == "completed")

        await asyncio.to_thread(until, ended)
    task = await site.rpc("GetTask", {"id": task_id})
    assert [each["name"] for each in task["artifacts"]] == ["b.txt", "a.txt"]


async def test_a_file_over_the_quota_fails_its_task_and_says_so(site: Site) -> None:
    port = site.daemon.url.rpartition(":")[2]
    assert await asyncio.to_thread(site.daemon.stop) == 0
    flags = ("--http-port", port, "--blobs-tenant-bytes-max", "1000")
    site.daemon = await asyncio.to_thread(Daemon, site.daemon.home, *flags)
    worker = site.worker()

    @worker
    async def work(job: WorkerJob) -> Content:
        large = Image(base64.b64encode(b"x" * 300_000).decode(), "image/png")
        match job.text:
            case "file":
                await job.file("large", b"x" * 2_000)
            case "update":
                await job.update(ArtifactUpdate("large", (large,), "large"))
            case _:
                return large
        return Text("filed")

    async with site.working(worker):
        for how in ("file", "update", "result"):
            task = await site.send(how)
            assert task["status"]["state"] == "TASK_STATE_FAILED", how
            assert "would take more than 1000 bytes" in text_of(task)
