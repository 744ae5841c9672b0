"""What leaves the instance: secrets do not, in any mode silently; ordinary text does, unchanged."""

import base64
import json
import random
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.wire.redaction import SecretFinding, redact, refuse_secrets

# Spelled in pieces, so that nothing here is taken for a leaked secret.
RANDOM = "q7Zp2Lx9Vb4Kd8Rt3Wm6Yc1Hn5Js0Fg"
PEM_BODY = "\n".join(["MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcw" + RANDOM] * 3)


def pem(label: str) -> str:
    return f"-----BEGIN {label}-----\n{PEM_BODY}\n-----END {label}-----"


JWT = f"eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{RANDOM}"
HEX64 = "0123456789abcdef" * 4

SECRETS: list[tuple[str, str]] = [
    ("private_key", pem("PRIVATE KEY")),
    ("private_key", pem("RSA PRIVATE KEY")),
    ("private_key", pem("EC PRIVATE KEY")),
    ("private_key", pem("OPENSSH PRIVATE KEY")),
    ("private_key", pem("ENCRYPTED PRIVATE KEY")),
    ("private_key", pem("PGP PRIVATE KEY BLOCK")),
    ("private_key", pem("PRIVATE KEY").replace("\n", "\\n")),
    ("private_key", pem("PRIVATE KEY").rpartition("\n")[0]),
    ("openai_key", "sk-" + "proj-" + RANDOM),
    ("openai_key", "sk-" + RANDOM * 2),
    ("anthropic_key", "sk-" + "ant-api03-" + RANDOM),
    ("github_token", "ghp" + "_" + RANDOM + "abcd"),
    ("github_token", "ghs" + "_" + RANDOM + "abcd"),
    ("github_token", "github" + "_pat_" + RANDOM + "_" + RANDOM),
    ("gitlab_token", "glpat" + "-" + RANDOM),
    ("aws_key", "AKIA" + "IOSFODNN7EXAMPLE"),
    ("google_key", "AIza" + (RANDOM + RANDOM)[:35]),
    ("google_token", "ya29" + ".a0" + RANDOM),
    ("slack_token", "xoxb" + "-123456789012-" + RANDOM),
    ("stripe_key", "sk" + "_live_" + RANDOM),
    ("npm_token", "npm" + "_" + (RANDOM + RANDOM)[:36]),
    ("pypi_token", "pypi" + "-AgEIcHlwaS5vcmc" + RANDOM),
    ("huggingface_token", "hf" + "_" + RANDOM + "ab"),
    ("sendgrid_key", "SG" + "." + RANDOM[:22] + "." + RANDOM),
    ("digitalocean_token", "dop" + "_v1_" + HEX64),
    ("age_key", "AGE-SECRET-" + "KEY-1" + "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L" * 2),
    ("telegram_token", "123456789" + ":AA" + RANDOM + "x"),
    ("covenant_token", "atr" + "_" + HEX64),
    ("jwt", JWT),
    ("azure_key", "AccountKey=" + RANDOM * 2 + "=="),
    ("basic_auth", "Authorization: Basic " + base64.b64encode(b"alice:wonderland").decode()),
    ("bearer_token", "Authorization: Bearer " + "8f14e45fceea167a5a36dedd4bea2543"),
    ("url_password", "postgres://admin:letmein@db.internal/app"),
    ("slack_webhook", "https://hooks.slack.com/services/" + "T00000000/B00000000/" + RANDOM[:24]),
    ("assigned_secret", 'password = "hunter2!"'),
    ("assigned_secret", "DB_PASSWORD=c0rrect-h0rse"),
    ("assigned_secret", '{"api_key": "abc123def456"}'),
    ("assigned_secret", "client_secret: 8f14e45fceea167a5a36dedd4bea2543"),
    ("assigned_secret", "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG"),
    ("assigned_secret", "authToken: 'zx81-spectrum-48k'"),
    ("high_entropy", RANDOM),
    ("high_entropy", "see " + base64.b64encode(bytes(range(7, 199, 4))).decode() + " there"),
]

ORDINARY = [
    "max_token: 500",
    "max_tokens=4096, temperature=0.2",
    "MAX_TOKENS: 32k",
    '{"max_token_budget": 50000, "token_count": 12}',
    "tokens: 1_000_000",
    "next_page_token: abc123def456",
    "pad_token: <pad>, eos_token='</s>1'",
    "The keyboard has a key for every token in the tokenizer.",
    "Enter your password: it must have 8 characters.",
    "password: string;",
    "password: Optional[str] = None",
    "password=${DB_PASSWORD}",
    "api_key = os.environ['API_KEY_1']",
    "api_key: <your-api-key-1>",
    "token = settings.token2",
    "secret: ********",
    "token = base64.b64encode(data)",
    "token = b64encode(data)",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B",
    "the token: `$ADMIN_TOKEN_2`",
    "postgres://user:password@localhost/app",
    "https://example.com:8443/path?x=1@2",
    "123e4567-e89b-42d3-a456-426614174000",
    "d41d8cd98f00b204e9800998ecf8427e",
    "commit 2cedb4c8a3f1e0b9d7c6a5f4e3d2c1b0a9f8e7d6",
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "integrity sha512-" + base64.b64encode(bytes(range(64))).decode(),
    "SHA256:" + base64.b64encode(bytes(range(32))).decode().rstrip("="),
    "data:image/png;base64," + base64.b64encode(bytes(range(256))).decode(),
    pem("CERTIFICATE"),
    pem("PUBLIC KEY"),
    "frd1_eh7ddx5bksrgcytl7bkai36se4nxx3klnk7elksy",
    "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "HTTPSConnectionPoolManagerFactory2Config3",
    "test_Base64Encode_Utf8ToUtf16_RoundTrip",
    "src/covenant/ledger/machine/states.py and /usr/lib/python3.11/site-packages",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "https://en.wikipedia.org/wiki/Public-key_cryptography#Description_2024_Overview",
    "sk-learn-compatible-estimators-version-2",
    "Basic configuration of the Bearer authentication-scheme-2 takes a minute.",
    "a task-based approach (asia-pacific-2, AKIA is a prefix)",
    "Gesundheit! Ein Schlüssel für jede Tür – 2024.",
    "",
]


@pytest.mark.parametrize(("kind", "text"), SECRETS, ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(SECRETS)])
@pytest.mark.parametrize("around", ["{}", "before {} after", '"{}",'], ids=["alone", "in prose", "in JSON"])
def test_a_secret_is_found_and_taken_out_whole(kind: str, text: str, around: str) -> None:
    given_text = around.replace("{}", text)
    redaction = redact(given_text, "redact")
    assert kind in {finding.kind for finding in redaction.findings}
    assert RANDOM not in redaction.value
    assert "MIIEvQ" not in redaction.value
    assert f"[redacted:{redaction.findings[0].kind}]" in redaction.value
    assert redact(redaction.value, "redact").value == redaction.value, "what is clean stays as it is"


def test_most_of_what_a_generator_makes_is_seen_without_a_name_or_a_prefix() -> None:
    chance = random.Random(1)
    letters = string.ascii_letters + string.digits
    made = ["".join(chance.choices(letters, k=32)) for _ in range(1_000)]
    assert sum(bool(redact(text, "warn").findings) for text in made) > 950


@pytest.mark.parametrize("text", ORDINARY, ids=[f"{n}-{text[:16]!r}" for n, text in enumerate(ORDINARY)])
@pytest.mark.parametrize("mode", ["block", "redact", "warn"])
def test_ordinary_text_leaves_unchanged(text: str, mode: Any) -> None:
    redaction = redact(text, mode)
    assert redaction.findings == ()
    assert redaction.value is text
    assert not redaction.blocked


def test_each_mode_does_what_it_says_and_all_say_what_was_found() -> None:
    text = f"use {RANDOM} please"
    found = (SecretFinding("/note", "high_entropy"),)
    given_value = {"note": text}
    changed = redact(given_value, "redact")
    assert (changed.value, changed.findings, changed.blocked) == (
        {"note": "use [redacted:high_entropy] please"},
        found,
        False,
    )
    warned = redact(given_value, "warn")
    assert (warned.value, warned.findings, warned.blocked) == (given_value, found, False)
    stopped = redact(given_value, "block")
    assert (stopped.value, stopped.findings, stopped.blocked) == (None, found, True)
    refusal = refuse_secrets(stopped)
    assert (refusal.code, refusal.status) == ("secret_found", 403)
    assert refusal.message == "not sent, since it seems to hold secrets: high_entropy at /note"


def test_values_anywhere_are_looked_at_and_named_by_their_place() -> None:
    value = {"parts": [{"type": "text", "text": "hi"}, {"metadata": {"a/b": {"deep": [1, None, RANDOM]}}}], "n": 500}
    redaction = redact(value, "redact")
    assert redaction.findings == (SecretFinding("/parts/1/metadata/a~1b/deep/2", "high_entropy"),)
    assert redaction.value["parts"][0] is value["parts"][0]  # type: ignore[index]  # a list
    assert redaction.value["parts"][1]["metadata"]["a/b"]["deep"] == [1, None, "[redacted:high_entropy]"]


def test_a_value_is_judged_by_its_name_too() -> None:
    assert redact({"password": "hunter2!"}, "redact").value == {"password": "[redacted:named_secret]"}
    assert redact({"apiKey": "abc123def456"}, "warn").findings == (SecretFinding("/apiKey", "named_secret"),)
    for harmless in (
        {"max_tokens": "500"},
        {"keyboard": "qwerty123"},
        {"token_type": "bearer2"},
        {"nextPageToken": "abc123def456"},
        {"password": "see the vault, entry 12"},
        {"publicKey": RANDOM},
        {"delegationId": RANDOM},
        {"sha256": RANDOM},
        {"max_token": 500},
    ):
        assert redact(harmless, "block").findings == ()


def test_a_secret_in_a_name_is_taken_out_and_not_told_by_its_path() -> None:
    redaction = redact({RANDOM: {"x": RANDOM}}, "redact")
    assert RANDOM not in json.dumps(redaction.value)
    assert all(RANDOM not in finding.path for finding in redaction.findings)


def test_images_marked_as_such_are_left_alone_and_files_of_text_are_read() -> None:
    image = {"type": "image", "mimeType": "image/png", "data": base64.b64encode(bytes(range(256)) * 4).decode()}
    assert redact(image, "block").findings == ()
    text = base64.b64encode(f"key: {RANDOM}\n".encode()).decode()
    file = {"type": "resource", "resource": {"uri": "f:x", "mimeType": "application/octet-stream", "blob": text}}
    redaction = redact(file, "redact")
    assert [finding.path for finding in redaction.findings] == ["/resource/blob"]
    assert RANDOM.encode() not in base64.b64decode(redaction.value["resource"]["blob"])
    assert redact({"data": image["data"]}, "warn").findings, "unmarked, it could be anything"
    assert redact({"mimeType": "image/png", "data": f"not base64: {RANDOM}"}, "block").blocked


def test_what_was_found_is_never_in_the_report() -> None:
    secrets = {f"k{n}": text for n, (_, text) in enumerate(SECRETS)}
    redaction = redact(secrets, "warn")
    report = repr(redaction.findings) + refuse_secrets(redaction).message
    assert RANDOM not in report
    assert "letmein" not in report


def test_many_secrets_are_all_taken_out_and_reported_up_to_a_bound() -> None:
    redaction = redact([RANDOM] * 500, "redact")
    assert set(redaction.value) == {"[redacted:high_entropy]"}
    assert len(redaction.findings) == 100
    assert redact(f"{RANDOM} {RANDOM}", "warn").findings == (SecretFinding("", "high_entropy", 2),)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=60),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_any_value_comes_back_and_what_comes_back_is_clean(value: Any) -> None:
    redaction = redact(value, "redact")
    if not redaction.findings:
        assert redaction.value is value
    assert redact(value, "warn").value is value


@given(st.text(alphabet="abc XYZ09.,\n", max_size=200), st.text(alphabet="abc XYZ09.,\n", max_size=200))
def test_a_whole_key_is_taken_out_wherever_it_stands(before: str, after: str) -> None:
    cleaned = redact(f"{before}{pem('PRIVATE KEY')}{after}", "redact").value
    assert PEM_BODY[:20] not in cleaned
    assert RANDOM not in cleaned
