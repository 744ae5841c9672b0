"""`/metrics` costs the loop next to nothing, however many ask for it, and can be kept from strangers."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.cli.daemons import Daemon, covenant
from tests.hostile.client import RawConnection, request
from tests.hostile.conftest import StartDaemon

BYTES_MAX = 20_000
"""Of a daemon that was asked for a handful of things: 230 KB when every series was there from the start."""


def test_a_series_is_there_when_it_has_a_number_and_not_before(daemon: Daemon) -> None:
    request(daemon.url, "GET", "/a2a/queue", token="wrong")
    body = request(daemon.url, "GET", "/metrics").body
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    timed = {sample.labels["operation"] for sample in families["covenant_request_seconds"].samples}
    assert timed == {"a2a_queue"}
    assert {"covenant_tasks", "covenant_queue_depth", "covenant_commits", "process_resident_memory_bytes"} <= set(
        families
    )
    assert len(body) < BYTES_MAX


def test_however_many_ask_there_is_one_text_a_second(daemon: Daemon) -> None:
    begun_s = time.monotonic()
    with RawConnection(daemon.url) as connection:
        seen = set()
        for _ in range(100):
            connection.send(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            answer = connection.read_answer()
            assert answer.status == 200
            seen.add(answer.body)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: request(daemon.url, "GET", "/metrics"), range(40)))
    assert {answer.status for answer in answers} == {200}
    # Each text tells the processor time that the daemon had used: equal texts are one text, told again.
    assert len(seen | {answer.body for answer in answers}) <= time.monotonic() - begun_s + 1


def test_numbers_are_for_whoever_has_the_token_where_a_setting_names_one(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    token = tmp_path / "metrics.token"
    token.write_text("s3cret-for-metrics\n")
    token.chmod(0o600)
    daemon = start_daemon(env={"COVENANT_HTTP_METRICS_TOKEN_FILE": str(token)})
    for wrong in (None, "s3cret-for-metric", "s3cret-for-metricsx", "ü"):
        headers = {} if wrong is None else {"Authorization": f"Bearer {wrong}".encode().decode("latin-1")}
        answer = request(daemon.url, "GET", "/metrics", headers=headers)
        assert (answer.status, answer.json["code"]) == (401, "unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert request(daemon.url, "GET", "/metrics", token="s3cret-for-metrics").status == 200
    assert request(daemon.url, "GET", "/healthz").status == 200
    assert request(daemon.url, "GET", "/readyz").status == 200


def test_a_token_file_that_others_can_read_is_refused_at_the_start(tmp_path: Path) -> None:
    token = tmp_path / "metrics.token"
    token.write_text("s3cret\n")
    token.chmod(0o644)
    ran = covenant(
        "serve",
        "--home",
        str(tmp_path / "home"),
        "--http-port",
        "0",
        env={"COVENANT_HTTP_METRICS_TOKEN_FILE": str(token)},
    )
    assert ran.code != 0
    assert f"chmod 600 {token}" in ran.err
    assert "Traceback" not in ran.err
