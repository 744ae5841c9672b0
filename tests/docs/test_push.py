"""The receiver's code in docs/formats/push.md, run on a real delivery."""

import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature

from covenant.daemon.environment import now_ms
from covenant.ledger.embedded.open import open_ledger
from covenant.model.a2a_requests import PushConfig
from covenant.seal.cards import CardSigner
from tests.outbound.receivers import KEY, begin, pushing, receiver

PAGE = Path(__file__).parents[2] / "docs/formats/push.md"


async def test_a_delivery_is_verified_as_the_page_says_and_a_changed_one_is_not(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    verify = names["verify"]
    ledger = await open_ledger(tmp_path / "home", clock=now_ms)
    async with receiver() as hook, pushing(ledger):
        await begin(ledger, 1, PushConfig(url=hook.url(), token="t"))
        await hook.got(2)
    await ledger.close()
    jwks = CardSigner(KEY).key_set()
    for request in hook.taken:
        assert verify(request.headers, request.body, jwks) in hook.bodies
        with pytest.raises(InvalidSignature):
            verify(request.headers, request.body.replace(b"TASK", b"MASK"), jwks)
        later = {**request.headers, "webhook-id": request.headers["webhook-id"] + "0"}
        with pytest.raises(InvalidSignature):
            verify(later, request.body, jwks)
    for name in hook.taken[0].headers:
        ours = name.startswith(("webhook-", "covenant-", "x-a2a")) or name == "a2a-version"
        assert not ours or f"`{name}`" in page.lower(), f"{name} is not on the page"
