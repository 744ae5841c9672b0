"""What is the socket's own: the handshake, frames, turns, endings, and who may connect at all."""

import asyncio
import json
import socket
import stat
import struct
from pathlib import Path

import pytest

from covenant.doors.ipc_server import HANDSHAKE_BYTES_MAX
from covenant.model.errors import SettingsError
from covenant.model.settings import Limits
from tests.doors.clients import Ipc
from tests.doors.doors_under_test import VERSION, DoorsUnderTest, new_task, open_doors
from tests.doors.operator_api.test_operations import result_of
from tests.waits import BOUND_S

INFO = {
    "kind": "protocol_info",
    "info": {"protocol": "covenant.ipc", "version": 1, "min_supported": 1, "max_supported": 1},
    "server": f"covenant/{VERSION}",
}


async def test_only_the_owner_of_the_home_may_connect(under_test: DoorsUnderTest) -> None:
    mode = under_test.socket.lstat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


async def test_probes_and_pings_come_before_and_after_authentication(under_test: DoorsUnderTest) -> None:
    async with under_test.connect() as connection:
        for _ in range(3):
            assert await connection.ask("protocol_info") == INFO
            assert await connection.ask("ProtocolInfo") == INFO
            assert await connection.ask("ping") == {"kind": "pong"}
        answer = await connection.ask("authenticate", token_b58=under_test.operator.token)
        assert answer == {"kind": "authenticated", "display": "operator@test"}
        assert await connection.ask("Ping") == {"kind": "pong"}
        assert await connection.ask("protocol_info") == INFO
        again = await connection.ask("authenticate", token_b58=under_test.operator.token)
        assert (again["kind"], again["code"]) == ("error", "already_authenticated")
        assert (await connection.ask("a2a_queue"))["kind"] == "a2a_queue"


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ({"kind": "authenticate", "token_b58": "wrong"}, "unknown or revoked token"),
        ({"kind": "authenticate"}, "unknown or revoked token"),
        ({"kind": "authenticate", "token_b58": None}, "unknown or revoked token"),
        ({"kind": "authenticate", "token_b58": 5}, "first frame must be Authenticate"),
        ({"kind": "a2a_queue"}, "first frame must be Authenticate"),
        ({"kind": "no such kind"}, "first frame must be Authenticate"),
        ({"knd": "authenticate"}, "first frame must be Authenticate"),
        (["authenticate"], "first frame must be Authenticate"),
    ],
)
async def test_a_caller_who_is_not_known_is_told_so_audited_and_cut_off(
    under_test: DoorsUnderTest, first: object, reason: str
) -> None:
    async with under_test.connect() as connection:
        await connection.ask("ping")
        await connection.send_bytes(json.dumps(first).encode())
        assert await connection.hear() == {"kind": "authentication_failed", "reason": reason}
        assert await connection.hear() is None
    (row,) = await under_test.audit("authentication_failed")
    assert (row["kind"]["transport"], row["kind"]["reason"]) == ("ipc", reason)
    assert row["kind"]["address"].startswith("uid:")


async def test_the_token_of_a_tenant_is_told_which_one_the_socket_takes(under_test: DoorsUnderTest) -> None:
    async with under_test.connect() as connection:
        await connection.ask("authenticate", token_b58=under_test.operator.token)
        token = (await connection.ask("add_tenant", name="acme"))["token"]
    async with under_test.connect() as connection:
        told = await connection.ask("authenticate", token_b58=token)
        assert told["kind"] == "authentication_failed"
        assert "covenant identities enroll" in told["reason"]


@pytest.mark.parametrize("authenticated", [False, True])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff\xfe\x00", b'{"kind":"ping"} x', b'{"kind":"ping","x":' + b"[" * 9_000]
)
async def test_a_malformed_frame_ends_the_connection(
    under_test: DoorsUnderTest, body: bytes, authenticated: bool
) -> None:
    async with under_test.connect() as connection:
        if authenticated:
            await connection.authenticate(under_test.operator.token)
        await connection.send_bytes(body)
        assert await connection.hear() == {"kind": "error", "code": "invalid_json", "message": "malformed frame"}
        assert await connection.hear() is None


@pytest.mark.parametrize("authenticated", [False, True])
@pytest.mark.parametrize("length", [8 * 1024 * 1024 + 1, 2**32 - 1])
async def test_a_frame_over_the_limit_ends_the_connection(
    under_test: DoorsUnderTest, length: int, authenticated: bool
) -> None:
    async with under_test.connect() as connection:
        if authenticated:
            await connection.authenticate(under_test.operator.token)
        connection.writer.write(struct.pack(">I", length) + b"{")
        assert await connection.hear() == {"kind": "error", "code": "frame_too_large", "message": "frame too large"}
        assert await connection.hear() is None


async def test_a_stranger_may_not_send_large_frames(under_test: DoorsUnderTest) -> None:
    async with under_test.connect() as connection:
        connection.writer.write(struct.pack(">I", HANDSHAKE_BYTES_MAX + 1))
        assert (await connection.hear())["code"] == "frame_too_large"


async def test_a_refused_request_leaves_the_connection_as_it_was(under_test: DoorsUnderTest) -> None:
    async with under_test.connect() as connection:
        await connection.authenticate(under_test.operator.token)
        for body, code in (
            (b'{"kind":"no_such_kind"}', "unknown_kind"),
            (b'{"kind":7}', "invalid_request"),
            (b"[]", "invalid_request"),
            (b'{"kind":"a2a_queue","limit":"ten"}', "invalid_request"),
            (b'{"kind":"send_a2a_task"}', "invalid_request"),
            (b'{"kind":"send_a2a_task","task":[]}', "invalid_request"),
            (b'{"kind":"show_a2a_task"}', "invalid_id"),
        ):
            await connection.send_bytes(body)
            answer = await connection.hear()
            assert (answer["kind"], answer["code"]) == ("error", code)
        assert (await connection.ask("a2a_queue"))["kind"] == "a2a_queue"


async def test_frames_may_come_in_pieces_and_together(under_test: DoorsUnderTest) -> None:
    async with under_test.connect() as connection:
        data = b"".join(
            struct.pack(">I", len(body)) + body
            for body in (
                b'{"kind":"ping"}',
                json.dumps({"kind": "authenticate", "token_b58": under_test.operator.token}).encode(),
                *([b'{"kind":"ping"}'] * 50),
            )
        )
        for start in range(0, len(data), 7):
            connection.writer.write(data[start : start + 7])
            await connection.writer.drain()
        kinds = [(await connection.hear())["kind"] for _ in range(52)]
        assert kinds == ["pong", "authenticated", *["pong"] * 50]


async def test_what_was_asked_before_a_half_close_is_still_answered(under_test: DoorsUnderTest) -> None:
    async with under_test.connect() as connection:
        await connection.authenticate(under_test.operator.token)
        for _ in range(3):
            await connection.send_bytes(b'{"kind":"a2a_queue"}')
        connection.writer.write_eof()
        assert [(await connection.hear())["kind"] for _ in range(3)] == ["a2a_queue"] * 3
        assert await connection.hear() is None


async def test_large_frames_go_both_ways(short_path: Path) -> None:
    async with open_doors(
        short_path, limits=Limits(task_bytes_max=8 * 1024 * 1024, result_bytes_max=8 * 1024 * 1024)
    ) as under_test:
        alice, bob = await under_test.pair()
        task = new_task(bob, "x" * 7_000_000)
        async with under_test.connect() as sender, under_test.connect() as worker:
            await sender.authenticate(alice.token)
            await worker.authenticate(bob.token)
            assert (await sender.ask("send_a2a_task", task=task))["kind"] == "a2a_task_queued"
            taken = await worker.ask("try_recv_a2a_task")
            # It fits a frame once; the list that would repeat it is left empty.
            assert (taken["task"]["id"], taken["tasks"]) == (task["id"], [])
            result = result_of(task, "y" * 7_000_000)
            assert (await worker.ask("post_a2a_result", result=result))["kind"] == "a2a_result_posted"
            drained = await sender.ask("try_recv_a2a_result")
            assert (drained["result"], drained["results"]) == (result, [])


async def test_leases_that_do_not_fit_a_frame_are_given_back(short_path: Path) -> None:
    async with open_doors(short_path, frame_bytes_max=100_000) as under_test:
        alice, bob = await under_test.pair()
        tasks = [new_task(bob, "x" * 40_000) for _ in range(3)]
        for task in tasks:
            await alice.http.post("/a2a/tasks", task)
        async with under_test.connect() as worker:
            await worker.authenticate(bob.token)
            refused = await worker.ask("try_recv_a2a_task", max=3)
            assert (refused["kind"], refused["code"]) == ("error", "answer_too_large")
            taken = [(await worker.ask("try_recv_a2a_task"))["task"]["id"] for _ in range(3)]
        assert sorted(taken) == sorted(task["id"] for task in tasks)


async def test_results_that_do_not_fit_a_frame_are_given_back(short_path: Path) -> None:
    async with open_doors(short_path, frame_bytes_max=100_000) as under_test:
        alice, bob = await under_test.pair()
        tasks = [new_task(bob, "hello") for _ in range(3)]
        for task in tasks:
            await alice.http.post("/a2a/tasks", task)
            await bob.http.get("/a2a/tasks/next")
            await bob.http.post("/a2a/results", result_of(task, "y" * 40_000))
        async with under_test.connect() as sender:
            await sender.authenticate(alice.token)
            refused = await sender.ask("try_recv_a2a_result", max=3)
            assert (refused["kind"], refused["code"]) == ("error", "answer_too_large")
            drained = [(await sender.ask("try_recv_a2a_result"))["result"]["task_id"] for _ in range(3)]
        assert drained == [task["id"] for task in tasks]


async def test_a_drain_with_a_request_id_that_does_not_fit_a_frame_is_repeated_over_http(short_path: Path) -> None:
    async with open_doors(short_path, frame_bytes_max=100_000) as under_test:
        alice, bob = await under_test.pair()
        tasks = [new_task(bob, "hello") for _ in range(3)]
        for task in tasks:
            await alice.http.post("/a2a/tasks", task)
            await bob.http.get("/a2a/tasks/next")
            await bob.http.post("/a2a/results", result_of(task, "y" * 40_000))
        async with under_test.connect() as sender:
            await sender.authenticate(alice.token)
            refused = await sender.ask("try_recv_a2a_result", max=3, request_id="one")
            assert refused["code"] == "answer_too_large"
            assert (await sender.ask("try_recv_a2a_result"))["result"] is None
        again = await alice.http.get("/a2a/results/next?max=3&request_id=one")
        assert [each["task_id"] for each in again["results"]] == [task["id"] for task in tasks]


async def test_nobody_has_to_wait_for_those_who_never_say_who_they_are(short_path: Path) -> None:
    async with open_doors(short_path, handshake_s=0.05) as under_test, under_test.connect() as connection:
        answer = await connection.hear()
        assert answer == {"kind": "authentication_failed", "reason": "no authentication in time"}
        assert await connection.hear() is None


async def test_the_number_of_connections_is_bounded(short_path: Path) -> None:
    async with open_doors(short_path, connections_max=2) as under_test:
        async with under_test.connect() as first, under_test.connect() as second:
            await first.authenticate(under_test.operator.token)
            await second.authenticate(under_test.operator.token)
            async with under_test.connect() as third:
                assert (await third.hear())["code"] == "too_many_connections"
                assert await third.hear() is None
            assert (await first.ask("ping"))["kind"] == "pong"
        async with asyncio.timeout(BOUND_S):
            while True:  # until the server has noticed that they are gone
                async with under_test.connect() as fourth:
                    if (await fourth.ask("ping"))["kind"] == "pong":
                        break


async def test_a_stale_socket_is_replaced_and_anything_else_is_left_alone(short_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(short_path / "sock"))
    stale.close()
    async with open_doors(short_path) as under_test, under_test.connect() as connection:
        assert await connection.ask("ping") == {"kind": "pong"}
    assert not (short_path / "sock").exists()
    other = short_path / "other"
    other.mkdir()
    (other / "sock").write_text("precious")
    with pytest.raises(SettingsError, match="is not a socket"):
        async with open_doors(other):
            pass
    assert (other / "sock").read_text() == "precious"


async def test_a_home_with_too_long_a_name_is_refused_with_the_reason(short_path: Path) -> None:
    deep = short_path / ("d" * 120)
    deep.mkdir()
    with pytest.raises(SettingsError, match="too long"):
        async with open_doors(deep):
            pass


async def test_a_stop_lets_the_answer_under_way_finish_and_closes_the_rest(short_path: Path) -> None:
    async with open_doors(short_path) as under_test:
        idle = Ipc(under_test.socket)
        async with idle, under_test.connect() as waiting:
            await idle.authenticate(under_test.operator.token)
            await waiting.authenticate(under_test.operator.token)
            await waiting.send_bytes(b'{"kind":"try_recv_a2a_task","wait_ms":20000}')
            await under_test.waits.until(1)
            under_test.waits.stop()
            await under_test.ipc.stop()
            assert (await waiting.hear())["code"] == "stopping"
            assert await waiting.hear() is None
            assert await idle.hear() is None
            assert not under_test.socket.exists()
