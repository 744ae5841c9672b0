"""What is HTTP's own: headers, statuses, bodies, names; and that nobody ever sees a traceback."""

import asyncio
import json
import logging
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from covenant.doors.http.endpoint import OperationEndpoint
from covenant.doors.http.host_names import AllowedHosts, AllowedOrigins, as_host
from covenant.doors.http.server.http_exchange import HEADERS_BY_NAME
from covenant.doors.operator_api.operation import ApiAnswer, ApiContext, ApiOperation, Services
from covenant.exchange.access.principals import Principal
from covenant.wire.mailbox import EmptyRequest
from tests.doors.clients import Http, HttpConnection, Reply
from tests.doors.doors_under_test import DoorsUnderTest, new_task, open_doors


def error(reply: Reply) -> tuple[int, str]:
    assert reply.json["kind"] == "error", reply
    assert reply.headers["content-type"] == "application/json"
    return reply.status, reply.json["code"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (None, "missing Authorization header"),
        ("Basic abc", "expected Authorization: Bearer <token>"),
        ("Bearer", "expected Authorization: Bearer <token>"),
        ("Bearer  ", "expected Authorization: Bearer <token>"),
        ("Bearer wrong", "unknown or revoked token"),
        ("Bearer " + "x" * 5_000, "unknown or revoked token"),
        ("Bearer \xff\xfe", "unknown or revoked token"),
    ],
)
async def test_a_caller_who_is_not_known_is_turned_away_and_audited(
    under_test: DoorsUnderTest, header: str | None, message: str
) -> None:
    headers = {} if header is None else {"Authorization": header}
    for method, target in (("POST", "/a2a/tasks"), ("GET", "/a2a/queue")):
        reply = await Http(under_test.port).ask(method, target, headers=headers)
        assert error(reply) == (401, "unknown_token")
        assert reply.json["message"] == message
        assert reply.headers["www-authenticate"] == "Bearer"
    (row,) = await under_test.audit("authentication_failed")
    assert (row["kind"]["transport"], row["kind"]["reason"], row["kind"]["address"]) == ("http", message, "127.0.0.1")


async def test_the_scheme_is_read_in_any_case(under_test: DoorsUnderTest) -> None:
    for scheme in ("bearer", "BEARER", "Bearer  "):
        headers = {"Authorization": f"{scheme} {under_test.operator.token}"}
        assert (await Http(under_test.port).ask("GET", "/a2a/queue", headers=headers)).status == 200


async def test_a_revoked_token_is_not_known_any_longer(under_test: DoorsUnderTest) -> None:
    alice, _ = await under_test.pair()
    await under_test.registry.revoke(under_test.principal, "alice@test")
    reply = await alice.http.ask("GET", "/a2a/queue")
    assert error(reply) == (401, "unknown_token")


async def test_unknown_paths_and_methods_are_told_in_the_same_shape(under_test: DoorsUnderTest) -> None:
    operator = under_test.operator.http
    for target in ("/a2a", "/a2a/tasks/", "/a2a/tasks/next/", "/a2a/tasks/123", "/nope", "/a2a/tasks/a/b/show"):
        assert error(await operator.ask("GET", target)) == (404, "unknown_route")
    assert error(await operator.ask("POST", "/a2a/tasks/send")) == (404, "unknown_route")
    reply = await operator.ask("DELETE", "/a2a/tasks")
    assert error(reply) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "POST, GET"
    assert error(await operator.ask("GET", "/a2a/repair")) == (405, "method_not_allowed")
    # A HEAD is taken for harmless; this GET leases.
    assert (await operator.ask("HEAD", "/a2a/tasks/next")).headers["allow"] == "GET"
    assert (await operator.ask("POST", "/healthz")).headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_request"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_request"),
        (b'"text"', "invalid_request"),
        (b'{"id":"\xff","task_id":"\xff"}', "invalid_json"),
        (b"[" * 100_000, "invalid_request"),
        (b'{"x":' * 50_000 + b"1" + b"}" * 50_000, "invalid_json"),
        (b"\x1f\x8b\x08\x00", "invalid_json"),
    ],
)
async def test_a_body_that_is_no_request_is_refused(under_test: DoorsUnderTest, body: bytes, code: str) -> None:
    for target in ("/a2a/tasks", "/a2a/results", "/a2a/repair"):
        assert error(await under_test.operator.http.ask("POST", target, body)) == (400, code)


async def test_a_body_over_the_limit_is_refused_however_it_comes(short_path: Path) -> None:
    async with open_doors(short_path, body_bytes_max=1_000_000) as under_test:
        token = {"Authorization": f"Bearer {under_test.operator.token}"}
        big = b" " * 1_000_001
        for body in (big, big * 3):
            assert error(await under_test.operator.http.ask("POST", "/a2a/tasks", body)) == (413, "body_too_large")
        async with HttpConnection(under_test.port) as connection:
            chunked = {"Transfer-Encoding": "chunked", "Content-Length": "", **token}
            await connection.say("POST", "/a2a/tasks", chunked, b"%x\r\n%b\r\n0\r\n\r\n" % (len(big), big))
            reply = await connection.hear()
            assert error(reply) == (413, "body_too_large")
            assert reply.headers["connection"] == "close"
            assert await connection.ended()
        async with HttpConnection(under_test.port) as connection:
            await connection.say("POST", "/a2a/tasks", {**token, "Content-Length": str(10**12)}, b"")
            assert error(await connection.hear()) == (413, "body_too_large")
        fits = await under_test.operator.http.ask("POST", "/a2a/tasks", b" " * 999_998 + b"{}")
        assert error(fits) == (400, "invalid_request")


async def test_a_stranger_may_not_even_upload(under_test: DoorsUnderTest) -> None:
    async with HttpConnection(under_test.port) as connection:
        await connection.say("POST", "/a2a/tasks", {"Content-Length": str(10**12)}, b"{")
        assert error(await connection.hear()) == (401, "unknown_token")


async def test_a_body_in_pieces_is_put_together(under_test: DoorsUnderTest) -> None:
    alice, bob = await under_test.pair()
    task = new_task(bob, "x" * 200_000)
    async with HttpConnection(under_test.port) as connection:
        headers = {"Authorization": f"Bearer {alice.token}", "Transfer-Encoding": "chunked", "Content-Length": ""}
        await connection.say("POST", "/a2a/tasks", headers, b"")
        data = json.dumps(task).encode()
        for start in range(0, len(data), 50_000):
            piece = data[start : start + 50_000]
            connection.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await connection.writer.drain()
        connection.writer.write(b"0\r\n\r\n")
        assert (await connection.hear()).json == {"kind": "a2a_task_queued", "task_id": task["id"]}


async def test_one_connection_serves_many_requests_after_errors_too(under_test: DoorsUnderTest) -> None:
    token = {"Authorization": f"Bearer {under_test.operator.token}"}
    async with HttpConnection(under_test.port) as connection:
        for target, status in (("/a2a/queue", 200), ("/nope", 404), ("/a2a/queue?limit=x", 400), ("/a2a/queue", 200)):
            await connection.say("GET", target, token, b"")
            reply = await connection.hear()
            assert reply.status == status
            assert reply.headers.get("cache-control") == "no-store"


async def test_what_is_over_a_limit_says_when_to_come_back(under_test: DoorsUnderTest) -> None:
    under_test.waits.stop()
    reply = await under_test.operator.http.ask("GET", "/a2a/tasks/next?wait_ms=1000")
    assert error(reply) == (503, "stopping")
    assert reply.headers["retry-after"] == "1"
    assert reply.json["retry_after_ms"] == 1_000


async def test_a_page_under_a_rebound_name_is_refused(short_path: Path) -> None:
    async with open_doors(short_path, allowed_hosts=("localhost", "127.0.0.1", "[::1]", "box.example")) as under_test:
        http = under_test.operator.http
        for host in ("localhost", "LocalHost:8421", "127.0.0.1", "127.0.0.1:80", "[::1]:8421", "box.example", ""):
            assert (await http.ask("GET", "/a2a/queue", headers={"Host": host})).status == 200, host
        for host in ("evil.example", "localhost.evil.example:8421", "127.0.0.1.evil", "[::2]", "box.example:x", "\xff"):
            for target in ("/a2a/tasks/next", "/healthz", "/docs"):
                reply = await http.ask("GET", target, headers={"Host": host})
                assert error(reply) == (403, "host_not_allowed"), host


def test_all_hosts_may_be_allowed_and_addresses_are_written_as_hosts() -> None:
    assert AllowedHosts(["*"]).allows({HEADERS_BY_NAME: {b"host": b"any.example"}})
    assert [as_host(address) for address in ("127.0.0.1", "::1")] == ["127.0.0.1", "[::1]"]


async def test_only_listed_origins_may_call_from_a_page(short_path: Path) -> None:
    async with open_doors(short_path, origins=("https://desk.example",)) as under_test:
        good, bad = {"Origin": "https://desk.example"}, {"Origin": "https://evil.example"}
        preflight = await Http(under_test.port).ask("OPTIONS", "/a2a/tasks", headers=good)
        assert preflight.status == 204
        assert preflight.headers["access-control-allow-origin"] == "https://desk.example"
        sent = preflight.headers["access-control-allow-headers"].split(", ")
        # All that an A2A client says in headers, so that an inspector in a page can be one.
        assert {"Authorization", "A2A-Version", "A2A-Extensions", "Idempotency-Key", "Last-Event-ID"} <= {*sent}
        for reply in (
            await under_test.operator.http.ask("GET", "/a2a/tasks/next", headers=good),
            await Http(under_test.port).ask("GET", "/a2a/queue", headers=good),
        ):
            assert reply.headers["access-control-allow-origin"] == "https://desk.example"
            assert reply.headers["access-control-allow-credentials"] == "true"
            assert "Retry-After" in reply.headers["access-control-expose-headers"]
            assert reply.headers["vary"] == "Origin"
        refused = await Http(under_test.port).ask("OPTIONS", "/a2a/tasks", headers=bad)
        assert error(refused) == (405, "method_not_allowed")
        assert not [name for name in refused.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("origin", "foreign"),
    [
        (None, False),
        (b"http://127.0.0.1:8421", False),
        (b"HTTPS://Desk.example", False),
        (b"https://evil.example", True),
        (b"http://127.0.0.1:9999", True),
        (b"http://127.0.0.1:8421.evil.example", True),
        (b"null", True),
        (b"", True),
    ],
)
def test_a_page_is_foreign_unless_it_is_our_own_or_listed(origin: bytes | None, foreign: bool) -> None:
    headers = {b"host": b"127.0.0.1:8421", **({b"origin": origin} if origin is not None else {})}
    assert AllowedOrigins(["https://desk.example"]).is_foreign_page({HEADERS_BY_NAME: headers}) is foreign


async def fail(office: Services, caller: Principal, request: EmptyRequest) -> ApiAnswer:
    raise RuntimeError("secret detail of our own")


async def test_a_fault_of_ours_is_a_plain_500_and_a_line_in_the_log(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = ApiOperation("GET", "/fail", fail, "Fails")

    async def crash(_: Request) -> Response:
        raise RuntimeError("secret detail of our own")

    async with open_doors(short_path, more_routes=[Route("/crash", crash)]) as under_test:
        api = ApiContext(
            services=under_test.office,
            identity_auth=under_test.identity_auth,
            waits=under_test.waits,
            meter=under_test.meter,
            version="1",
        )
        call = OperationEndpoint(failing, api, body_bytes_max=10)
        under_test.door.router.routes.append(Route("/fail", call))
        for target in ("/fail", "/crash"):
            with caplog.at_level(logging.ERROR):
                reply = await under_test.operator.http.ask("GET", target)
            assert (reply.status, reply.json) == (
                500,
                {"kind": "error", "code": "internal", "message": "internal error"},
            )
            assert "secret detail" in caplog.text
            caplog.clear()


async def test_a_client_that_leaves_in_the_middle_of_a_body_harms_nobody(
    under_test: DoorsUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    token = {"Authorization": f"Bearer {under_test.operator.token}"}
    async with HttpConnection(under_test.port) as connection:
        await connection.say("POST", "/a2a/tasks", {**token, "Content-Length": "100"}, b"{")
    await asyncio.sleep(0)
    assert (await under_test.operator.http.ask("GET", "/a2a/queue")).status == 200
    assert caplog.text == ""
