"""What operators see without a token: alive, ready, numbers, and which protocol; never a name."""

import errno
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.doors.clients import Http
from tests.doors.doors_under_test import DoorsUnderTest, new_task, open_doors
from tests.doors.test_ipc_session import INFO
from tests.ledger_contract.fault_plans import Plan, armed, fail


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_living_daemon_says_so_without_a_token(under_test: DoorsUnderTest) -> None:
    anybody = Http(under_test.port)
    assert await anybody.get("/healthz") == {"status": "ok"}
    assert await anybody.get("/health") == {"status": "ok"}
    assert await anybody.get("/readyz") == {"status": "ready", "reasons": []}
    assert await anybody.get("/version") == INFO
    assert (await anybody.ask("HEAD", "/healthz")).status == 200


async def test_the_first_page_names_addresses_that_are_there(under_test: DoorsUnderTest) -> None:
    anybody = Http(under_test.port)
    page = await anybody.ask("GET", "/")
    assert (page.status, page.headers["content-type"]) == (200, "application/json")
    named = set(page.json["links"].values())
    assert {"/docs", "/openapi.json", "/healthz", "/readyz", "/metrics"} <= named
    for path in named:
        if not path.startswith(("/v1/", "/.well-known/")):
            assert (await anybody.ask("GET", path)).status == 200, path


async def test_a_stopping_daemon_is_alive_but_not_ready(under_test: DoorsUnderTest) -> None:
    under_test.waits.stop()
    anybody = Http(under_test.port)
    assert (await anybody.ask("GET", "/healthz")).status == 200
    reply = await anybody.ask("GET", "/readyz")
    assert (reply.status, reply.json) == (503, {"status": "unready", "reasons": ["the daemon is stopping"]})


@pytest.mark.embedded
async def test_the_numbers_follow_what_happens(under_test: DoorsUnderTest) -> None:
    alice, bob = await under_test.pair()
    anybody = Http(under_test.port)
    for _ in range(3):
        await alice.http.post("/a2a/tasks", new_task(bob))
    await bob.http.get("/a2a/tasks/next")
    task = (await bob.http.get("/a2a/tasks/next"))["task"]
    await bob.http.post("/a2a/results", {"task_id": task["id"], "status": "ok"})
    await anybody.ask("GET", "/a2a/queue")
    async with under_test.connect() as connection:
        await connection.authenticate(bob.token)
        await connection.ask("show_a2a_task", task_id="nonsense")
        reply = await anybody.ask("GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    text = reply.body.decode()
    seen = samples(text)
    assert seen["covenant_queue_depth", ()] == 1
    assert seen["covenant_leases", ()] == 1
    assert seen["covenant_results_undrained", ()] == 1
    assert seen["covenant_peer_outbox", ()] == 0
    assert seen["covenant_tasks", ("result_pending",)] == 1
    assert seen["covenant_writer_failed", ()] == 0
    assert seen["covenant_holders_lost", ()] == 0
    assert seen["covenant_oldest_lease_age_seconds", ()] >= 0
    assert seen["covenant_commits_total", ()] > 5
    assert seen["covenant_syncs_total", ()] > 0
    assert seen["covenant_request_seconds_count", ("http", "send_a2a_task")] == 3
    assert seen["covenant_request_seconds_bucket", ("http", "+Inf", "send_a2a_task")] == 3
    assert seen["covenant_request_seconds_count", ("ipc", "show_a2a_task")] == 1
    assert seen["covenant_refused_total", ("unknown_token", "http")] == 1
    assert seen["covenant_refused_total", ("unknown_task", "ipc")] == 1
    assert seen["covenant_ipc_connections", ()] == 1
    for secret in ("alice", "bob", "test", alice.token, alice.agent.pubkey, task["id"]):
        assert secret not in text, secret


@pytest.mark.embedded
async def test_a_daemon_whose_disk_failed_is_not_ready_and_says_why(under_test: DoorsUnderTest) -> None:
    alice, bob = await under_test.pair()
    anybody, task = Http(under_test.port), new_task(bob)
    await alice.http.post("/a2a/tasks", task)
    with armed(Plan("journal.write", fail(errno.ENOSPC))):
        failed = await alice.http.ask("POST", "/a2a/tasks", new_task(bob))
    assert (failed.status, failed.json["code"]) == (503, "outcome_unknown")
    assert failed.headers["retry-after"] == "5"
    later = await alice.http.ask("POST", "/a2a/tasks", new_task(bob))
    assert (later.status, later.json["code"]) == (503, "storage_failed")
    stranger = await anybody.ask("GET", "/a2a/queue")
    assert (stranger.status, stranger.json["code"]) == (503, "storage_failed")
    async with under_test.connect() as connection:
        assert (await connection.ask("authenticate", token_b58="wrong"))["code"] == "storage_failed"

    assert (await anybody.ask("GET", "/healthz")).status == 200
    unready = await anybody.ask("GET", "/readyz")
    assert (unready.status, unready.json["status"]) == (503, "unready")
    assert "the writer has failed" in unready.json["reasons"][0]
    metrics = await anybody.ask("GET", "/metrics")
    assert samples(metrics.body.decode())["covenant_writer_failed", ()] == 1
    queue = await alice.http.get("/a2a/queue")
    assert [entry["task"]["id"] for entry in queue["tasks"]] == [task["id"]]


async def test_agents_are_named_only_where_the_numbers_need_a_token(
    under_test: DoorsUnderTest, short_path: Path
) -> None:
    alice, bob = await under_test.pair()
    await alice.http.post("/a2a/tasks", new_task(bob))
    assert "bob@test" not in (await Http(under_test.port).ask("GET", "/metrics")).body.decode()
    (short_path / "other").mkdir()
    async with open_doors(short_path / "other", metrics_token="shown") as guarded:
        alice, bob = await guarded.pair()
        for _ in range(2):
            await alice.http.post("/a2a/tasks", new_task(bob))
        assert (await Http(guarded.port).ask("GET", "/metrics")).status == 401
        seen = samples((await Http(guarded.port, "shown").ask("GET", "/metrics")).body.decode())
        assert seen["covenant_recipient_queue_depth", ("bob@test",)] == 2
        assert seen["covenant_recipient_oldest_queued_age_seconds", ("bob@test",)] >= 0
