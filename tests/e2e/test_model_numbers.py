"""What a daemon tells of its models: numbers and prices in `/metrics`, spans by the GenAI names, files read again."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2

from tests.e2e.test_model_doors import V1, Site, a_site
from tests.e2e.test_traces import TRACED, by_name
from tests.waits import until

PRICES = {"currency": "EUR", "models": {"small": {"input": 1_000, "output": 10_000}}}


class Numbers:
    def __init__(self, site: Site, token: str) -> None:
        self._site = site
        self._token = token

    def get(self, path: str, token: str | None = None) -> httpx2.Response:
        headers = {"authorization": f"Bearer {token or self._token}"}
        return httpx2.get(f"{self._site.daemon.url}{path}", headers=headers, trust_env=False)

    def samples(self, name: str) -> dict[str, float]:
        lines = self.get("/metrics").text.splitlines()
        found = (line.rpartition(" ") for line in lines if line.startswith(f"{name}{{"))
        return {labels.partition("{")[2].rstrip("}"): float(value) for labels, _, value in found}

    def ready(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.get("/readyz").json()
        return answer


async def test_tokens_cost_and_spans_of_model_and_tool_are_told_and_prices_read_again(tmp_path: Path) -> None:
    token_file = tmp_path / "metrics.token"
    token_file.touch(mode=0o600)
    token_file.write_text("seen-by-few")
    env = {**TRACED, "COVENANT_HTTP_METRICS_TOKEN_FILE": str(token_file)}
    write = ("write", {"path": "a.txt", "content": "x"})
    async with a_site([write, "done", "more", "more"], env, model_prices=PRICES) as site:
        numbers, prices = Numbers(site, "seen-by-few"), site.daemon.home / "model_prices.json"
        await site.send("SendMessage", V1)
        who = 'agent="bot@default",model="openai:small"'
        # The numbers are made once a second at most.
        await asyncio.to_thread(until, lambda: numbers.samples("covenant_model_requests_total"))
        assert numbers.samples("covenant_model_requests_total") == {f'{who},outcome="completed"': 2}
        assert numbers.samples("covenant_model_tokens_total") == {f'{who},type="input"': 22, f'{who},type="output"': 10}
        cost = (22 * 1_000 + 10 * 10_000) / 1_000_000
        (told,) = numbers.samples("covenant_model_cost_total").items()
        assert told[0] == f'{who},currency="EUR"'
        assert abs(told[1] - cost) < 1e-9
        assert numbers.samples("covenant_model_request_seconds_count") == {who: 2}
        assert numbers.get("/metrics", token="other").status_code == 401

        prices.write_text('{"currency": "euro"}')
        await asyncio.to_thread(until, lambda: numbers.ready()["status"] == "degraded")
        (reason,) = numbers.ready()["reasons"]
        assert reason.startswith("model_prices.json cannot be used")
        assert str(site.daemon.home) not in reason
        assert "home.file_refused" in site.daemon.log
        await site.send("SendMessage", {**V1, "messageId": "2"})
        prices.write_text(json.dumps({**PRICES, "currency": "CHF"}))
        await asyncio.to_thread(until, lambda: numbers.ready()["status"] == "ready")
        await site.send("SendMessage", {**V1, "messageId": "3"})
        await asyncio.to_thread(until, lambda: len(numbers.samples("covenant_model_cost_total")) == 2)
        by_currency = {labels[-4:-1]: value for labels, value in numbers.samples("covenant_model_cost_total").items()}
        one = (11 * 1_000 + 5 * 10_000) / 1_000_000
        assert {name: round(value, 9) for name, value in by_currency.items()} == {"EUR": cost + one, "CHF": one}

        spans = await asyncio.to_thread(by_name, site.daemon)
        chat, tool = spans["chat small", "SpanKind.CLIENT"], spans["execute_tool write", "SpanKind.INTERNAL"]
        attempts = {span["context"]["span_id"] for (name, _), span in spans.items() if name == "invoke_agent bot"}
        assert chat["parent_id"] in attempts
        assert chat["attributes"]["gen_ai.provider.name"] == "openai"
        assert tool["attributes"]["gen_ai.operation.name"] == "execute_tool"
