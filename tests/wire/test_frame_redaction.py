"""What an operator is shown of requests and answers: no secrets, and nothing that stops the one who shows it."""

import json

import pytest

from covenant.wire.frame_redaction import (
    HEADER_CHARS_MAX,
    HEADERS_MAX,
    HIDDEN,
    TEXT_CHARS_MAX,
    redact_answer_headers,
    redact_body,
    redact_request_headers,
    secrets_in,
)

KEY = "ghp_" + "aB3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3xY5"


def test_of_a_request_only_headers_without_secrets_are_told() -> None:
    said = {"Authorization": f"Bearer {KEY}", "X-Team": "blue", "Cookie": "a=b", "A2A-Version": "1.0", "host": "h"}
    shown = redact_request_headers(said)
    assert {name for name, value in shown.items() if value == HIDDEN} == {"Authorization", "X-Team", "Cookie"}
    assert (shown["A2A-Version"], shown["host"]) == ("1.0", "h")


@pytest.mark.parametrize("body", ['{"push": {"url": "URL"}, "n": 1}', "go to URL now", '{"list": ["see URL"], broken'])
def test_values_in_the_query_of_an_address_are_hidden_however_short(body: str) -> None:
    url = "https://hooks.example/a?h=S3&x=&bare#part"
    told = redact_body(body.replace("URL", url).encode())
    assert f"https://hooks.example/a?h={HIDDEN}&x={HIDDEN}&{HIDDEN}#part" in told
    plain = b'{"url": "https://hooks.example/a", "why": "really?"}'
    assert redact_body(plain) == plain.decode()


@pytest.mark.parametrize(
    "body",
    [
        '{"params": {"taskId": "t", "URL"}}',
        '{"params": {"task_id": "t", "URL"}}',
        '{"result": {"configs": [{"token": "s", "URL"}]}}',
        '{"URL", "authentication": {"scheme": "Bearer"}}',
        '{"URL"}',
        '{"configuration": {"taskPushNotificationConfig": {"URL"}}}',
        '{"configuration": {"push_notification_config": {"URL"}}}',
        '{"configuration": {"pushNotification": {"URL", "id": "c"}}}',
        '{"configuration": {"push_notification": {"URL"}}}',
        '{"configuration": {"pushNotification": {"URL", cut',
        '{"method": "CreateTaskPushNotificationConfig", "params": {"URL", cut',
    ],
)
def test_the_path_of_a_webhook_is_hidden(body: str) -> None:
    told = redact_body(body.replace('"URL"', '"url": "https://hooks.example:8443/services/T1/S3"').encode())
    assert "services" not in told
    assert f"https://hooks.example:8443/{HIDDEN}" in told


def test_the_address_of_a_file_is_no_webhook() -> None:
    part = b'{"message":{"parts":[{"url":"https://files.example/a/b.txt"}]}}'
    assert redact_body(part) == part.decode()


def test_a_query_is_found_in_linear_time() -> None:
    assert redact_body(b"http://" * 9_000) == "http://" * 9_000
    assert len(redact_body(b"http://a?" + b"&" * 60_000)) == TEXT_CHARS_MAX
    assert redact_body(b'pushNotificationConfig "url":"http://' * 1_500).startswith("pushNotificationConfig")


def test_of_an_answer_headers_are_told_unless_they_hold_a_secret() -> None:
    said = {
        "content-type": "text/plain",
        "set-cookie": "sid=1",
        "x-api-key": KEY,
        "x-note": f"token={KEY}",
        "x-id": "7",
    }
    shown = redact_answer_headers(said)
    assert {name for name, value in shown.items() if value == HIDDEN} >= {"set-cookie", "x-note"}
    assert KEY not in json.dumps(shown)
    assert (shown["content-type"], shown["x-id"]) == ("text/plain", "7")


def test_what_was_given_along_is_hidden_wherever_it_is_repeated() -> None:
    given = secrets_in({"Authorization": "Basic dXNlcjpwYXNz", "Accept": "text/plain"})
    assert "text/plain" not in given
    assert redact_body(b"you said dXNlcjpwYXNz twice: dXNlcjpwYXNz", given) == f"you said {HIDDEN} twice: {HIDDEN}"
    assert redact_body(b"public dXNlcjpwYXNz", given, public=True) == f"public {HIDDEN}"
    assert redact_answer_headers({"x-echo": "Basic dXNlcjpwYXNz"}, given) == {"x-echo": HIDDEN}


def test_secrets_in_a_body_are_taken_out_also_where_it_is_cut() -> None:
    body = json.dumps({"message": {"password": "hunter2hunter2", "text": f"the key is {KEY}"}}).encode()
    assert KEY not in redact_body(body)
    assert "hunter2hunter2" not in redact_body(body)
    long = b"x" * (TEXT_CHARS_MAX - len(KEY) // 2 - 1) + b" " + KEY.encode() + b" " + b"x" * 1_000
    shown = redact_body(long)
    assert len(shown) <= TEXT_CHARS_MAX
    assert KEY[: len(KEY) // 2] not in shown


@pytest.mark.parametrize("depth", [50, 200, 400, 900, 5_000, 100_000])
def test_deeply_nested_answers_stop_nobody(depth: int) -> None:
    for body in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"7" + b"}" * depth):
        assert len(redact_body(body)) == min(len(body), TEXT_CHARS_MAX)


def test_hostile_bytes_and_headers_are_bounded() -> None:
    assert redact_body(b"\xff\xfe\x00") == "\ufffd\ufffd\x00"
    many = {f"h{at}": "v" * 10_000 for at in range(1_000)}
    for shown in (redact_request_headers(many), redact_answer_headers(many)):
        assert len(shown) == HEADERS_MAX
        assert all(len(value) <= HEADER_CHARS_MAX for value in shown.values())
