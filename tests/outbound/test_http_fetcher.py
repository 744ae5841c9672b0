"""Calling out: where a call goes, what it takes along, and what a redirect may do with it."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest

from covenant.model.errors import Invalid
from covenant.outbound.call_errors import AddressRefused, CallFailed
from tests.outbound.corpus import PUBLIC
from tests.outbound.dns_server import name_server
from tests.outbound.http_servers import LIMITS, always, by_path, fetcher, http_server, redirect, reply, silence
from tests.waits import BOUND_S

OTHER = "127.0.0.2"
INSIDE = "127.0.0.3"


async def test_a_call_is_sent_and_answered() -> None:
    async with http_server(always(reply(201, b"made", x_kind="good"))) as server, fetcher("127.0.0.1") as calls:
        answer = await calls.fetch("post", server.url("/p?q=1#f"), headers={"X-Token": "t"}, content=b"body")
    assert (answer.status, answer.body, answer.headers["x-kind"]) == (201, b"made", "good")
    assert answer.url == server.url("/p?q=1")
    (request,) = server.requests
    assert (request.method, request.target, request.body) == ("POST", "/p?q=1", b"body")
    assert (request.headers["x-token"], request.headers["user-agent"]) == ("t", "covenant")


async def test_a_name_is_looked_up_once_and_called_where_it_led_then() -> None:
    """The rebinding attack: good when it is judged, inside when it is called."""
    async with (
        name_server() as names,
        http_server(always(reply(200, b"outside"))) as outside,
        http_server(always(reply(200, b"inside")), host=INSIDE, port=outside.port) as inside,
        fetcher("127.0.0.1", resolver=names.resolver()) as calls,
    ):
        names.then("evil.example", ["127.0.0.1"], [INSIDE])
        answer = await calls.fetch("GET", outside.url(host="evil.example"))
        assert answer.body == b"outside"
        assert names.asked == {("evil.example", "A"): 1, ("evil.example", "AAAA"): 1}
        assert outside.requests[0].headers["host"] == f"evil.example:{outside.port}"
        assert inside.connections == 0


async def test_a_url_that_was_good_when_it_was_given_is_judged_when_it_is_called() -> None:
    async with (
        name_server() as names,
        http_server(always(reply()), host=INSIDE) as inside,
        fetcher(resolver=names.resolver()) as calls,
    ):
        names.then("evil.example", [PUBLIC], [INSIDE])
        await calls.guard.check(inside.url(host="evil.example"))
        with pytest.raises(AddressRefused):
            await calls.fetch("GET", inside.url(host="evil.example"))
        assert inside.connections == 0


async def test_every_call_is_judged_anew() -> None:
    async with (
        name_server() as names,
        http_server(always(reply(body=b"outside"))) as outside,
        http_server(always(reply(body=b"inside")), host=INSIDE, port=outside.port) as inside,
        fetcher("127.0.0.1", resolver=names.resolver()) as calls,
    ):
        names.then("evil.example", ["127.0.0.1"], ["127.0.0.1"], [INSIDE])
        for _ in range(2):
            assert (await calls.fetch("GET", outside.url(host="evil.example"))).body == b"outside"
        with pytest.raises(AddressRefused):
            await calls.fetch("GET", outside.url(host="evil.example"))
        assert (outside.connections, inside.connections) == (2, 0)


async def test_a_dead_address_is_passed_over_for_the_next() -> None:
    async with (
        name_server({"two.example": [OTHER, "127.0.0.1"]}) as names,
        http_server(always(reply(body=b"here"))) as server,
        fetcher("127.0.0.0/8", resolver=names.resolver()) as calls,
    ):
        assert (await calls.fetch("GET", server.url(host="two.example"))).body == b"here"


async def test_nobody_listening_says_so_and_names_the_address_to_the_operator_only() -> None:
    async with http_server(silence) as server:
        pass
    async with (
        name_server({"gone.example": ["127.0.0.1"]}) as names,
        fetcher("gone.example", resolver=names.resolver()) as calls,
    ):
        with pytest.raises(CallFailed) as failed:
            await calls.fetch("GET", server.url(host="gone.example"))
    assert (failed.value.code, failed.value.transient) == ("connect_failed", True)
    assert "127.0.0.1" not in failed.value.message


PLACES = ["http://{inside}/", "//{inside}/", "http://127.1/", "http://169.254.169.254/", "http://evil.example:{port}/"]


@pytest.mark.parametrize("place", PLACES)
async def test_a_redirect_leads_nowhere_that_could_not_be_called(place: str) -> None:
    async with (
        name_server({"evil.example": [INSIDE]}) as names,
        http_server(always(reply(body=b"inside")), host=INSIDE) as inside,
        http_server(redirect(place.format(inside=f"{INSIDE}:{inside.port}", port=inside.port))) as server,
        fetcher("127.0.0.1", resolver=names.resolver()) as calls,
    ):
        with pytest.raises((AddressRefused, CallFailed)):
            await calls.fetch("GET", server.url())
        assert inside.connections == 0


@pytest.mark.parametrize(
    "place",
    ["ftp://x/", "http://a@b/", "http://[", "/\\evil.example", "http:\\\\evil.example", "http://a b/", "http://a\tb/"],
)
async def test_a_redirect_to_what_is_no_url_is_refused(place: str) -> None:
    async with http_server(redirect(place)) as server, fetcher("127.0.0.1") as calls:
        with pytest.raises(CallFailed) as failed:
            await calls.fetch("GET", server.url())
    assert failed.value.code == "bad_redirect"
    assert len(server.requests) == 1


async def test_redirects_are_followed_a_few_times_and_then_no_more() -> None:
    steps = {f"r{left}": redirect(f"r{left - 1}") for left in range(1, 9)}
    async with http_server(by_path(**steps, r0=always(reply(body=b"end")))) as server, fetcher("127.0.0.1") as calls:
        answer = await calls.fetch("GET", server.url("/r3"))
        assert (answer.body, answer.url) == (b"end", server.url("/r0"))
        with pytest.raises(CallFailed) as failed:
            await calls.fetch("GET", server.url("/r4"))
    assert failed.value.code == "bad_redirect"


SECRETS = {
    "Authorization": "Bearer s3cret",
    "Cookie": "s3cret",
    "X-A2A-Notification-Token": "s3cret",
    "X-Api-Key": "s3cret",
    "Webhook-Signature": "s3cret",
}


async def test_credentials_stay_with_the_origin_that_they_were_for() -> None:
    async with (
        http_server(always(reply()), host=OTHER) as other,
        http_server(by_path(near=redirect("/root"), root=redirect(other.url()))) as server,
        fetcher("127.0.0.0/8") as calls,
    ):
        await calls.fetch("GET", server.url("/near"), headers={**SECRETS, "A2A-Version": "1.0"})
    assert all("s3cret" in server.requests[1].headers[name.lower()] for name in SECRETS)
    (request,) = other.requests
    assert "s3cret" not in str(request)
    assert (request.headers["a2a-version"], request.headers["host"]) == ("1.0", f"{OTHER}:{other.port}")


async def test_another_port_is_another_origin() -> None:
    async with (
        http_server(always(reply())) as other,
        http_server(redirect(other.url(), 307)) as server,
        fetcher("127.0.0.1") as calls,
    ):
        await calls.fetch("GET", server.url(), headers=SECRETS)
    assert "s3cret" not in str(other.requests)


async def test_a_body_is_repeated_at_home_and_never_sent_elsewhere() -> None:
    async with (
        http_server(always(reply()), host=OTHER) as other,
        http_server(by_path(near=redirect("/end", 308), far=redirect(other.url(), 307), end=always(reply()))) as server,
        fetcher("127.0.0.0/8") as calls,
    ):
        assert (await calls.fetch("POST", server.url("/near"), content=b"task")).status == 200
        assert [request.body for request in server.requests] == [b"task", b"task"]
        with pytest.raises(CallFailed) as failed:
            await calls.fetch("POST", server.url("/far"), content=b"task")
        assert (failed.value.code, other.connections) == ("bad_redirect", 0)


@pytest.mark.parametrize("status", [301, 302, 303])
async def test_a_redirect_that_would_turn_a_post_into_something_else_is_the_answer(status: int) -> None:
    async with http_server(redirect("/elsewhere", status)) as server, fetcher("127.0.0.1") as calls:
        assert (await calls.fetch("POST", server.url(), content=b"task")).status == status
    assert len(server.requests) == 1


async def test_cookies_are_not_kept() -> None:
    async with http_server(always(reply(set_cookie="session=s3cret"))) as server, fetcher("127.0.0.1") as calls:
        for _ in range(2):
            await calls.fetch("GET", server.url())
    assert "s3cret" not in str(server.requests)


async def test_proxies_and_credentials_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    netrc = tmp_path_factory.mktemp("home") / ".netrc"
    netrc.write_text("machine 127.0.0.1 login user password s3cret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    async with http_server(always(reply())) as proxy, http_server(always(reply())) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url())
        async with fetcher("127.0.0.1") as calls:
            await calls.fetch("GET", server.url())
    assert (proxy.connections, server.connections) == (0, 1)
    assert "authorization" not in server.requests[0].headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("X-Bad", value) for value in ("a\r\nHost: evil", "a\nb", "a\0b", "ä", " a", "a ")),
        *((name, "x") for name in ("", "a b", "a:b", "Host", "content-length", "Transfer-Encoding", "Connection", "ä")),
    ],
)
async def test_headers_that_would_change_the_request_are_refused(name: str, value: str) -> None:
    async with fetcher("127.0.0.1") as calls:
        with pytest.raises(Invalid) as refused:
            await calls.fetch("GET", "http://127.0.0.1/", headers={name: value})
    assert refused.value.code == "bad_header"


async def test_a_url_is_refused_before_anything_is_opened() -> None:
    async with fetcher() as calls:
        with pytest.raises(AddressRefused):
            await calls.fetch("GET", "http://user:pass@93.184.215.14/")
        with pytest.raises(AddressRefused):
            async with calls.stream("GET", "gopher://93.184.215.14/"):
                pass
        assert calls._transport is None


async def test_the_number_of_connections_is_bounded_and_waiting_for_one_too() -> None:
    limits = replace(LIMITS, connections_max=1, connect_ms=500)
    async with http_server(silence) as server, fetcher("127.0.0.1", limits=limits) as calls:
        first = asyncio.create_task(calls.fetch("GET", server.url()))
        await asyncio.wait_for(server.asked.wait(), BOUND_S)
        with pytest.raises(CallFailed) as failed:
            await calls.fetch("GET", server.url())
        assert failed.value.code == "timed_out"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        # A call that is given up closes its connection.
        await asyncio.wait_for(server.closed.wait(), BOUND_S)


def test_the_client_library_is_loaded_with_the_first_call_and_not_before() -> None:
    program = (
        "import sys, covenant.outbound.http_fetcher, covenant.outbound.address_guard\n"
        "print(*sorted({'httpx2', 'httpcore2', 'dns', 'anyio', 'idna'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND_S, check=True)
    assert ran.stdout.strip() == ""
