"""Files through the doors of a whole daemon: in, out, limits, rights, and what becomes of them."""

import asyncio
import base64
import hashlib
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx2
import pytest
from a2a.types import a2a_pb2 as pb
from a2a.types import a2a_pb2_grpc
from grpc import aio  # type: ignore[import-untyped]

from covenant import (
    Agent,
    Client,
    Embedded,
    File,
    Image,
    Invalid,
    Resource,
    ResourceLink,
    Result,
    SyncTurn,
    Task,
    TaskId,
    Turn,
)
from covenant.daemon.environment import now_ms
from covenant.daemon.schedulers import FileCollector, Retention, Singleton
from covenant.ledger.contract.blobs import CHUNK_BYTES, BlobUsage, space_of
from covenant.ledger.embedded.blob_folder import BYTES, INCOMING, BlobFolder
from covenant.model.settings import HOUR_MS
from tests.daemon_under_test import DaemonUnderTest, open_daemon_under_test
from tests.ledger_contract.fake_clock import FakeClock
from tests.waits import BOUND_S, until

LARGE = os.urandom(400_000)
SHA256 = hashlib.sha256(LARGE).hexdigest()


def make_agents() -> tuple[Agent, ...]:
    sizes, echo, plain = Agent("sizes"), Agent("echo"), Agent("plain")

    @sizes
    async def tell(turn: Turn) -> str:
        told = []
        for part in turn.parts:
            pieces = [piece async for piece in turn.open_file(part)]
            whole = b"".join(pieces)
            kind = type(part).__name__
            told.append(f"{kind} {len(whole)} {hashlib.sha256(whole).hexdigest()} {max(map(len, pieces), default=0)}")
        return "; ".join(told)

    @echo
    async def again(turn: Turn) -> AsyncIterator[Any]:
        for part in turn.parts:
            if isinstance(part, File):
                yield await turn.save_file(part.filename or "copy", turn.open_file(part))
            elif isinstance(part, Image | Resource):
                yield part

    @plain
    def sync(turn: SyncTurn) -> Any:
        size = 0
        for part in turn.parts:
            size += sum(map(len, turn.open_file(part)))
        yield f"{size} "
        yield turn.save_file("zeros.bin", (b"\0" * 100_000 for _ in range(10)))

    return sizes, echo, plain


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[DaemonUnderTest]:
    async with open_daemon_under_test(tmp_path / "home", *make_agents(), a2a={"message_bytes_max": 8_000_000}) as made:
        yield made


def message(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"message": {"messageId": "m", "role": "ROLE_USER", "parts": list(parts)}}


def raw(data: bytes, **more: str) -> dict[str, Any]:
    return {"raw": base64.b64encode(data).decode(), **more}


async def send(daemon: DaemonUnderTest, agent: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": message(*parts)}
    answer = (await daemon.ask("POST", f"/v1/a2a/agents/{agent}", json=body, **more)).json()
    assert "result" in answer, answer
    task: dict[str, Any] = answer["result"]["task"]
    return task


async def upload(daemon: DaemonUnderTest, data: bytes, **more: Any) -> dict[str, Any]:
    answer = await daemon.ask("POST", "/v1/files", content=data, **more)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def path_of(url: str) -> str:
    split = urlsplit(url)
    return f"{split.path}?{split.query}"


def store_of(daemon: DaemonUnderTest) -> BlobFolder:
    store = daemon.daemon.base.storage.blobs
    assert isinstance(store, BlobFolder)
    return store


def text_of(task: dict[str, Any]) -> str:
    return "".join(part.get("text", "") for each in task["artifacts"] for part in each["parts"])


async def test_large_bytes_go_to_the_store_and_the_ledger_has_their_hash(daemon: DaemonUnderTest) -> None:
    task = await send(daemon, "sizes", raw(LARGE, mediaType="image/png"), raw(b"small", filename="s.bin"))
    # The agent has them as they came.
    assert text_of(task).startswith(f"Image 400000 {SHA256}")
    assert "Resource 5 " in text_of(task)
    first, second = task["history"][0]["parts"]
    assert ("raw" in first, first["mediaType"], "raw" in second) == (False, "image/png", True)
    downloaded = await daemon.ask("GET", path_of(first["url"]), token="")
    assert downloaded.content == LARGE
    assert (await store_of(daemon).usage(space_of("default"))) == BlobUsage(1, len(LARGE))
    segments = b"".join(path.read_bytes() for path in (daemon.home / "journal").iterdir())
    assert SHA256.encode() in segments
    assert base64.b64encode(LARGE[:3000]) not in segments


async def test_an_upload_is_named_by_its_url_in_a_message_and_read_as_a_stream(daemon: DaemonUnderTest) -> None:
    data = os.urandom(3_000_000)
    stored = await upload(daemon, data, headers={"x-content-sha256": hashlib.sha256(data).hexdigest()})
    assert (stored["size"], stored["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    task = await send(daemon, "sizes", {"url": stored["url"], "filename": "big.bin", "mediaType": "text/csv"})
    kind, size, sha256, most = text_of(task).split()
    assert (kind, int(size), sha256) == ("File", len(data), stored["sha256"])
    assert int(most) <= 256 * 1024
    (part,) = task["history"][0]["parts"]
    assert (part["filename"], part["mediaType"]) == ("big.bin", "text/csv")
    assert part["url"] != stored["url"]
    assert (await daemon.ask("GET", path_of(part["url"]), token="")).content == data


async def test_agents_save_files_of_any_size_as_artifacts(daemon: DaemonUnderTest) -> None:
    stored = await upload(daemon, LARGE)
    task = await send(daemon, "echo", {"url": stored["url"], "filename": "../../etc/passwd"})
    (artifact,) = [each for each in task["artifacts"] if each["artifactId"].endswith("-file-0")]
    assert artifact["name"] == artifact["parts"][0]["filename"] == "passwd"
    assert (await daemon.ask("GET", path_of(artifact["parts"][0]["url"]))).content == LARGE
    made = await send(daemon, "plain", {"url": stored["url"]})
    assert text_of(made) == "400000 "
    (part,) = [part for each in made["artifacts"] for part in each["parts"] if "url" in part]
    assert (await daemon.ask("GET", path_of(part["url"]))).content == b"\0" * 1_000_000


async def test_a_download_serves_ranges(daemon: DaemonUnderTest) -> None:
    url = path_of((await upload(daemon, LARGE))["url"])
    for wanted, status, expected in [
        ("bytes=0-0", 206, LARGE[:1]),
        ("bytes=399990-", 206, LARGE[399_990:]),
        ("bytes=-7", 206, LARGE[-7:]),
        ("bytes=10-9999999", 206, LARGE[10:]),
        ("bytes=400000-", 416, b""),
        ("bytes=5-2", 416, b""),
        ("bytes=0-1,5-6", 200, LARGE),
        ("pieces=0-1", 200, LARGE),
    ]:
        answer = await daemon.ask("GET", url, headers={"range": wanted})
        assert (answer.status_code, answer.content) == (status, expected), wanted
    head = await daemon.ask("HEAD", url)
    assert (head.headers["content-length"], head.headers["etag"]) == ("400000", f'"{SHA256}"')
    assert head.headers["content-type"] == "application/octet-stream"
    assert (await daemon.ask("GET", url, headers={"if-none-match": f'"{SHA256}"'})).status_code == 304


async def test_a_url_is_good_for_its_file_alone_and_no_token_of_another_tenant_opens_it(
    daemon: DaemonUnderTest,
) -> None:
    other = await daemon.add_tenant("other")
    task = await send(daemon, "sizes", raw(LARGE))
    url = path_of(task["history"][0]["parts"][0]["url"])
    bare = url.partition("?")[0]
    stranger = {"authorization": f"Bearer {other}"}
    assert (await daemon.ask("GET", bare, token="")).status_code == 401
    assert (await daemon.ask("GET", bare, headers=stranger)).status_code == 404
    assert (await daemon.ask("GET", bare)).status_code == 200
    for wrong in (
        url.replace("size=400000", "size=400001"),
        url.replace("expires=1", "expires=2"),
        url[:-1] + ("0" if url[-1] != "0" else "1"),
        url.replace(task["id"], "00000000-0000-4000-8000-000000000000"),
        url + "&size=1",
    ):
        assert (await daemon.ask("GET", wrong, token="")).status_code == 401, wrong
    # A hash that is guessed opens nothing: neither another tenant's file, nor one of a task that has no part in it.
    guessed = f"/v1/files/{space_of('other')}/{task['id']}/{SHA256}"
    assert (await daemon.ask("GET", guessed, headers=stranger)).status_code == 404
    refused = await daemon.ask(
        "POST",
        "/v1/a2a/agents/sizes",
        json={
            "jsonrpc": "2.0",
            "id": 1,
            "method": "SendMessage",
            "params": message({"url": f"http://elsewhere{bare}", "filename": "x"}),
        },
    )
    assert refused.json()["error"]["data"][0]["metadata"]["code"] == "link_changed"


async def test_another_tenant_learns_nothing_from_the_same_content(daemon: DaemonUnderTest) -> None:
    other = await daemon.add_tenant("other")
    await upload(daemon, LARGE)
    mine = {"authorization": f"Bearer {other}"}
    assert (await daemon.ask("GET", "/v1/files", headers=mine)).json()["count"] == 0
    stored = await upload(daemon, LARGE, headers=mine)
    assert stored["sha256"] == SHA256
    listed = (await daemon.ask("GET", "/v1/files", headers=mine)).json()
    assert (listed["count"], listed["bytes"]) == (1, 400_000)
    assert (await store_of(daemon).usage()).files == 2


async def test_a_hash_that_is_claimed_wrongly_is_refused(daemon: DaemonUnderTest) -> None:
    wrong = hashlib.sha256(b"else").hexdigest()
    answer = await daemon.ask("POST", "/v1/files", content=LARGE, headers={"x-content-sha256": wrong})
    assert (answer.status_code, answer.json()["code"]) == (400, "wrong_hash")
    answer = await daemon.ask("POST", "/v1/files", content=LARGE, headers={"x-content-sha256": "../.."})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_hash")
    assert (await store_of(daemon).usage()).files == 0
    assert (await daemon.ask("POST", "/v1/files", content=b"x", token="")).status_code == 401


async def test_files_are_limited_in_bytes_count_and_time(tmp_path: Path) -> None:
    limits = {
        "file_bytes_max": 100_000,
        "tenant_bytes_max": 150_000,
        "tenant_files_max": 3,
        "uploads_max": 1,
        "upload_ms_max": 3_000,
    }
    async with open_daemon_under_test(tmp_path / "home", *make_agents(), blobs=limits) as daemon:
        too_large = await daemon.ask("POST", "/v1/files", content=b"x" * 100_001)
        assert (too_large.status_code, too_large.json()["code"]) == (413, "file_too_large")
        await upload(daemon, b"x" * 100_000)
        full = await daemon.ask("POST", "/v1/files", content=b"y" * 60_000)
        assert (full.status_code, full.json()["code"]) == (429, "files_full")

        begun, given_up = asyncio.Event(), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"a"
            begun.set()
            await given_up.wait()
            yield b"b"

        late = asyncio.ensure_future(daemon.ask("POST", "/v1/files", content=slow()))
        await begun.wait()

        incoming = daemon.home / "blobs" / INCOMING
        await asyncio.to_thread(until, lambda: list(incoming.iterdir()))
        second = await daemon.ask("POST", "/v1/files", content=b"z")
        assert (second.status_code, second.json()["code"]) == (429, "uploads_full")
        await asyncio.to_thread(until, lambda: not list(incoming.iterdir()))
        given_up.set()
        answer = await late
        assert (answer.status_code, answer.json()["code"]) == (408, "request_timeout")
        assert list(incoming.iterdir()) == []
        await upload(daemon, b"z")


async def test_a_truncated_file_is_refused_and_never_given_out_as_whole(daemon: DaemonUnderTest) -> None:
    task = await send(daemon, "sizes", raw(LARGE))
    url = path_of(task["history"][0]["parts"][0]["url"])
    os.truncate(store_of(daemon).place(space_of("default"), SHA256) / BYTES, 1_000)
    answer = await daemon.ask("GET", url)
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_file")


@pytest.mark.parametrize("size", [100_000, 3_000_000])
async def test_a_damaged_file_is_never_given_out_as_whole_and_an_upload_mends_it(
    daemon: DaemonUnderTest, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    data = os.urandom(size)
    stored = await upload(daemon, data)
    task = await send(daemon, "sizes", {"url": stored["url"]})
    url = path_of(task["history"][0]["parts"][0]["url"])
    path = store_of(daemon).place(space_of("default"), stored["sha256"]) / BYTES
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    if size <= CHUNK_BYTES:
        answer = await daemon.ask("GET", url)
        assert (answer.status_code, answer.json()["code"]) == (404, "file_damaged")
    else:
        with pytest.raises(httpx2.RemoteProtocolError):
            await daemon.ask("GET", url)
    (told,) = [each for each in caplog.records if each.message == "files.damaged"]
    assert told.__dict__["sha256"] == stored["sha256"]
    assert 'code="file_damaged"' in (await daemon.ask("GET", "/metrics")).text
    assert (await send(daemon, "sizes", {"url": stored["url"]}))["status"]["state"] == "TASK_STATE_FAILED"
    await upload(daemon, data)
    assert (await daemon.ask("GET", url)).content == data
    for known in ("*", f'"{stored["sha256"]}"', f'"x", W/"{stored["sha256"]}"'):
        answer = await daemon.ask("GET", url, headers={"if-none-match": known})
        assert (answer.status_code, "content-length" in answer.headers) == (304, False), known
    assert (await daemon.ask("GET", url, headers={"if-none-match": '"x"'})).status_code == 200


async def test_what_no_task_refers_to_is_collected_and_what_a_task_has_is_not(daemon: DaemonUnderTest) -> None:
    task = await send(daemon, "sizes", raw(LARGE))
    await upload(daemon, b"nobody's")
    files = daemon.daemon.base.access.files
    assert files is not None
    store = store_of(daemon)
    since_the_start_ns = (now_ms() - files.settings.kept_ms - 1) * 1_000_000
    for path in (daemon.home / "blobs").rglob("*"):
        os.utime(path, ns=(since_the_start_ns, since_the_start_ns))
    collector = FileCollector(files, daemon.daemon.base.telemetry)
    assert (await collector.step()).blobs == 1
    assert await store.find(space_of("default"), SHA256, task["id"]) == len(LARGE)
    metrics = (await daemon.ask("GET", "/metrics")).text
    assert "covenant_files 1.0" in metrics
    assert "covenant_files_collected_total 1.0" in metrics


async def test_what_retention_has_erased_the_tasks_of_is_collected(tmp_path: Path) -> None:
    clock = FakeClock()
    settings: dict[str, Any] = {"retention": {"task_hours": 2}, "a2a": {"message_bytes_max": 8_000_000}}
    async with open_daemon_under_test(tmp_path / "home", *make_agents(), clock=clock, **settings) as daemon:
        first = await send(daemon, "echo", raw(LARGE, filename="a.bin"))
        clock.advance(HOUR_MS)
        second = await send(daemon, "sizes", raw(LARGE), raw(b"x" * 300_000))
        assert (await daemon.ask("GET", f"/v1/a2a/agents/sizes/tasks/{second['id']}")).status_code == 200
        inner = [each.scheduler if isinstance(each, Singleton) else each for each in daemon.daemon.schedulers]
        (retention,) = [each for each in inner if isinstance(each, Retention)]
        (collector,) = [each for each in inner if isinstance(each, FileCollector)]
        store = store_of(daemon)

        async def erase_and_collect() -> tuple[int, int, int]:
            clock.advance(HOUR_MS + 60_000)
            erased = await retention.step()
            for path in (daemon.home / "blobs").rglob("*"):
                os.utime(path, (1, 1))
            collected = await collector.step()
            return erased.tasks, collected.references, collected.blobs

        assert await erase_and_collect() == (1, 1, 0)
        assert await store.find(space_of("default"), SHA256, TaskId(first["id"])) is None
        assert await store.find(space_of("default"), SHA256, TaskId(second["id"])) == len(LARGE)
        assert await erase_and_collect() == (1, 2, 2)
        assert await store.usage() == BlobUsage(0, 0)
        assert await erase_and_collect() == (0, 0, 0)


async def test_removing_a_tenant_removes_its_files(daemon: DaemonUnderTest) -> None:
    other = await daemon.add_tenant("other")
    await upload(daemon, LARGE, headers={"authorization": f"Bearer {other}"})
    await upload(daemon, b"kept")
    removals, operator = daemon.daemon.base.access.removals, daemon.operator
    await removals.begin(operator, "other", "gone", cancel_live=True)
    report = await removals.report(operator, "other", 30)
    assert report.done, report
    assert await store_of(daemon).usage() == BlobUsage(1, 4)


async def test_an_upload_that_is_under_way_when_its_tenant_is_removed_leaves_nothing(daemon: DaemonUnderTest) -> None:
    """A later tenant of the same name has the same space, and would find the file in its list."""
    other = await daemon.add_tenant("other")
    begun, removed = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        begun.set()
        await removed.wait()
        yield b"b"

    headers = {"authorization": f"Bearer {other}"}
    late = asyncio.ensure_future(daemon.ask("POST", "/v1/files", content=slow(), headers=headers))
    await begun.wait()
    incoming = daemon.home / "blobs" / INCOMING
    await asyncio.to_thread(until, lambda: list(incoming.iterdir()))
    removals, operator = daemon.daemon.base.access.removals, daemon.operator
    await removals.begin(operator, "other", "gone", cancel_live=True)
    report = await removals.report(operator, "other", 30)
    removed.set()
    assert report.done, report
    answer = await late
    assert (answer.status_code, answer.json()["code"]) == (403, "files_erased")
    assert await store_of(daemon).usage() == BlobUsage(0, 0)
    assert list(incoming.iterdir()) == []


async def test_every_door_takes_large_bytes_and_tells_them_as_a_url(daemon: DaemonUnderTest) -> None:
    """REST in both versions, and JSON-RPC of 0.3; gRPC and the mailbox have tests of their own."""
    one = await daemon.ask("POST", "/v1/a2a/agents/sizes/message:send", json=message(raw(LARGE, filename="a.bin")))
    task = one.json()["task"]
    assert "400000" in text_of(task)
    got = (await daemon.ask("GET", f"/v1/a2a/agents/sizes/tasks/{task['id']}")).json()
    (part,) = got["history"][0]["parts"]
    assert (await daemon.ask("GET", path_of(part["url"]), token="")).content == LARGE
    told = {"kind": "file", "file": {"bytes": base64.b64encode(LARGE).decode(), "name": "a.bin"}}
    said = {"kind": "message", "messageId": "m", "role": "user", "parts": [told]}
    body = {"jsonrpc": "2.0", "id": 1, "method": "message/send", "params": {"message": said}}
    old = (await daemon.ask("POST", "/v1/a2a/agents/sizes", json=body)).json()["result"]
    (part,) = old["history"][0]["parts"]
    assert (await daemon.ask("GET", path_of(part["file"]["uri"]), token="")).content == LARGE
    native = {"agent": "sizes", "message": [{"type": "file", "name": "a", "data": raw(LARGE)["raw"]}]}
    ran = await daemon.ask("POST", "/v1/orchestrate", json=native)
    assert "400000" in ran.text
    assert (await store_of(daemon).usage()).files == 1


async def test_a_stream_tells_a_file_by_its_url(daemon: DaemonUnderTest) -> None:
    stored = await upload(daemon, LARGE)
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "SendStreamingMessage",
        "params": message({"url": stored["url"], "filename": "x.bin"}),
    }
    frames = (await daemon.ask("POST", "/v1/a2a/agents/echo", json=body)).text
    told = [line for line in frames.splitlines() if '"artifactUpdate"' in line and "-file-0" in line]
    assert len(told) == 1
    assert f"/{SHA256}?size=400000&expires=" in told[0]


async def test_the_same_send_again_is_the_same_task_and_the_same_file(daemon: DaemonUnderTest) -> None:
    sends = [await send(daemon, "sizes", raw(LARGE), headers={"idempotency-key": "once-and-for-all"}) for _ in range(2)]
    assert sends[0]["id"] == sends[1]["id"]
    (listed,) = await store_of(daemon).listing(space_of("default"), "", 10)
    assert (listed.references, listed.tasks) == (1, (sends[0]["id"],))


async def test_the_mailbox_keeps_large_bytes_in_the_store_both_ways(daemon: DaemonUnderTest) -> None:
    me, mailbox = daemon.operator.agent, daemon.mailbox
    block = Resource(Embedded("", "text/plain", blob=raw(LARGE)["raw"]), filename="in.txt")
    task = Task(id=TaskId(str(uuid4())), sender=me, recipient=me, intent_text="look", parts=(block,))
    for action in (f"a2a.send.{me.display}", f"a2a.respond.{me.display}"):
        await daemon.identities.grant(daemon.operator, action)
    await mailbox.accept(daemon.operator, task)
    (leased,) = (await mailbox.take(daemon.operator)).tasks
    (came,) = leased.task.parts
    assert isinstance(came, File)
    assert (came.sha256, came.size, came.filename, came.task_id) == (SHA256, len(LARGE), "in.txt", task.id)
    # Whoever works on it reads it with its own token, and nobody else does.
    place = f"/v1/files/{came.space}/{task.id}/{SHA256}"
    assert (await daemon.ask("GET", place)).content == LARGE
    other = await daemon.add_tenant("other")
    assert (await daemon.ask("GET", place, token=other)).status_code == 404
    with pytest.raises(Invalid):
        await mailbox.settle(daemon.operator, Result.ok(task.id, came), leased.lease.lease_id)
    stored = await upload(daemon, LARGE + b"!")
    answer = Result.ok(task.id, ResourceLink(stored["url"], "out.txt"))
    await mailbox.settle(daemon.operator, answer, leased.lease.lease_id)
    (result,) = (await mailbox.drain(daemon.operator)).results
    (made,) = result.content
    assert isinstance(made, File)
    assert (made.size, made.space) == (len(LARGE) + 1, came.space)
    assert (await daemon.ask("GET", f"/v1/files/{made.space}/{task.id}/{made.sha256}")).content == LARGE + b"!"


async def test_a_link_that_is_too_old_is_refused_in_a_message_and_at_its_place(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_daemon_under_test(tmp_path / "home", *make_agents(), clock=clock) as daemon:
        stored = await upload(daemon, LARGE)
        clock.advance(3_600_001)
        assert (await daemon.ask("GET", path_of(stored["url"]), token="")).json()["code"] == "link_expired"
        body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": message({"url": stored["url"]})}
        answer = (await daemon.ask("POST", "/v1/a2a/agents/sizes", json=body)).json()
        assert "expired" in answer["error"]["message"]


async def test_a_url_of_ours_that_was_changed_is_refused_and_one_from_elsewhere_is_a_link(
    daemon: DaemonUnderTest, tmp_path: Path
) -> None:
    url = (await upload(daemon, LARGE))["url"]

    async def ask(given: str) -> Any:
        body = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": message({"url": given})}
        return (await daemon.ask("POST", "/v1/a2a/agents/sizes", json=body)).json()

    changed = f"{url[:-4]}{'0000' if url[-4:] != '0000' else '1111'}"
    for wrong in (
        url.replace(SHA256, "1" * 64),
        changed,
        changed.replace("signature", "%73ignature"),
        url.partition("&signature")[0],
        url.partition("?")[0],
    ):
        assert "was changed" in (await ask(wrong))["error"]["message"], wrong
    async with open_daemon_under_test(tmp_path / "elsewhere", *make_agents()) as elsewhere:
        other = (await upload(elsewhere, LARGE))["url"]
    assert "was changed" not in str(await ask(other))
    unmarked = f"{url[: -64 - 16]}{url[-64:]}"
    assert "result" in await ask(unmarked), "an earlier version has given it out"


async def test_grpc_takes_large_bytes_and_tells_them_as_a_url(tmp_path: Path) -> None:
    grpc, a2a = {"enabled": True}, {"message_bytes_max": 8_000_000}
    async with open_daemon_under_test(tmp_path / "home", *make_agents(), grpc=grpc, a2a=a2a) as daemon:
        said = pb.Message(message_id="m", role=pb.ROLE_USER, parts=[pb.Part(raw=LARGE, filename="a.bin")])
        async with aio.insecure_channel(f"127.0.0.1:{daemon.grpc_port}") as channel:
            stub = a2a_pb2_grpc.A2AServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
            metadata = [("authorization", f"Bearer {daemon.token}")]
            request = pb.SendMessageRequest(tenant="sizes", message=said)
            answer = await stub.SendMessage(request, metadata=metadata, timeout=BOUND_S)
        (part,) = answer.task.history[0].parts
        assert (part.WhichOneof("content"), part.filename) == ("url", "a.bin")
        assert part.url.startswith(daemon.url)
        assert (await daemon.ask("GET", path_of(part.url), token="")).content == LARGE


async def test_a_worker_elsewhere_uploads_and_downloads_with_the_client(
    daemon: DaemonUnderTest, tmp_path: Path
) -> None:
    path = tmp_path / "big.bin"
    path.write_bytes(LARGE)
    async with Client(daemon.url, daemon.token) as client:
        link = await client.upload_file("big.bin", path)
        assert (link.name, link.size, link.mimeType) == ("big.bin", len(LARGE), "application/octet-stream")
        task = await send(daemon, "sizes", {"url": link.uri})
        assert SHA256 in text_of(task)
        pieces = [piece async for piece in client.download_file(link)]
        assert b"".join(pieces) == LARGE


async def test_an_agent_cannot_make_a_file_up(daemon: DaemonUnderTest) -> None:
    """Neither by a hash that it knows, nor under another space or task."""
    other = await send(daemon, "sizes", raw(LARGE))
    forger = Agent("forger")

    @forger
    async def forge(turn: Turn) -> AsyncIterator[File]:
        about = {"own": turn.task_id, "other": other["id"]}
        whose, _, where = turn.text.partition(" ")
        yield File(sha256=SHA256, size=len(LARGE) - 1, space=where, task_id=about[whose])

    daemon.add_agent(forger)
    for words in (f"own {space_of('default')}", f"own {space_of('other')}", f"other {space_of('other')}"):
        task = await send(daemon, "forger", {"text": words})
        assert (task["status"]["state"], task.get("artifacts")) == ("TASK_STATE_FAILED", None), words


async def test_mcp_and_the_simple_door_tell_a_large_file_by_a_url_that_works(tmp_path: Path) -> None:
    maker = Agent("maker", description="Makes files", default_project="p")

    @maker
    async def make(turn: Turn) -> AsyncIterator[Any]:
        yield await turn.save_file("big.bin", LARGE)

    async with open_daemon_under_test(tmp_path / "home", maker) as daemon:
        headers = {"accept": "application/json, text/event-stream"}
        asked = {"name": "send_task", "arguments": {"agent": "maker", "message": "go"}}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": asked}
        told = (await daemon.ask("POST", "/mcp", json=body, headers=headers)).text
        (url, *_) = re.findall(r"big\.bin <(\S+?)>", told)
        assert (await daemon.ask("GET", path_of(url), token="")).content == LARGE

        task = (await daemon.ask("POST", "/a2a/tasks/send", json={"message": "go"})).json()
        await daemon.ledger.finished(TaskId(task["id"]), int(BOUND_S * 1000))
        task = (await daemon.ask("GET", f"/a2a/tasks/{task['id']}")).json()
        texts = [part["text"] for each in task["messages"] for part in each["parts"]]
        (url,) = [text for text in texts if "/v1/files/" in text]
        assert (await daemon.ask("GET", path_of(url), token="")).content == LARGE
