"""The kit against real servers: Covenant keeps every promise, and the official SDK in memory is known to lose tasks."""

import sys
from pathlib import Path

import pytest

from covenant.prove.runner import ROWS
from tests.matrices import first_of
from tests.prove.conftest import EXAMPLES, Prove, rows

COVENANT = (
    "env PROVE_ON_LOST={policy} COVENANT_A2A_PUSH_NOTIFICATIONS=1 COVENANT_OUTBOUND_ALLOW=127.0.0.1 "
    f"{Path(sys.executable).with_name('covenant')} serve {EXAMPLES / 'covenant_agent.py'} "
    "--home {home} --http-port {port}"
)
COVENANT_CARD = "http://127.0.0.1:{port}/v1/a2a/agents/prove/.well-known/agent-card.json"
COVENANT_MORE = ["--token-file", "{home}/operator.token", "--idempotency-header", "Idempotency-Key"]
SDK = f"{sys.executable} {EXAMPLES / 'a2a_sdk.py'} {{port}} memory"
SOME = ("acknowledged", "interrupted", "input-required", "stream-resumed", "duplicate", "graceful-stop")


@pytest.mark.matrix
def test_covenant_keeps_promises_that_are_tried_one_after_the_other(prove: Prove) -> None:
    found = prove(COVENANT.replace("{policy}", "fail"), *COVENANT_MORE, *rows(*SOME), card=COVENANT_CARD)
    assert {row: finding["verdict"] for row, finding in found.items()} == dict.fromkeys(SOME, "kept"), found


@pytest.mark.parametrize("row", first_of([row.name for row in ROWS]))
def test_covenant_keeps_every_promise_of_the_kit(prove: Prove, row: str) -> None:
    found = prove(COVENANT.replace("{policy}", "fail"), *COVENANT_MORE, *rows(row), card=COVENANT_CARD)
    assert found[row]["verdict"] == "kept", found


@pytest.mark.matrix
@pytest.mark.parametrize("spoken", [("1.0", "HTTP+JSON"), ("0.3", "JSONRPC")], ids=" ".join)
def test_every_way_to_speak_to_covenant_shows_the_same(prove: Prove, spoken: tuple[str, str]) -> None:
    words = ["--protocol-version", spoken[0], "--binding", spoken[1], *COVENANT_MORE]
    found = prove(COVENANT.replace("{policy}", "requeue"), *words, *rows(*SOME), card=COVENANT_CARD)
    assert {row: finding["verdict"] for row, finding in found.items()} == dict.fromkeys(SOME, "kept"), found


@pytest.mark.parametrize("binding", first_of(["JSONRPC", "HTTP+JSON"]))
def test_the_official_sdk_in_memory_loses_tasks(prove: Prove, binding: str) -> None:
    found = prove(SDK, "--binding", binding, *rows("acknowledged", "input-required", "duplicate"))
    verdicts = {row: finding["verdict"] for row, finding in found.items()}
    assert verdicts == {"acknowledged": "broken", "input-required": "broken", "duplicate": "not offered"}, found
