"""The bounded form of `make cluster`: each fault once, while clients work, and no rule is broken."""

from __future__ import annotations

import sys

import pytest

from tests.cluster.campaign import run
from tests.cluster.checker import OTHERS
from tests.cluster.faults import FAULTS
from tests.places import short_folder

SEED = 13


@pytest.mark.matrix
@pytest.mark.timeout(400)
async def test_no_promise_is_broken_by_any_fault() -> None:
    with short_folder() as folder:
        history = await run(folder, list(FAULTS), seconds=0, seed=SEED)
    sys.stdout.write(history.summary())
    assert history.violations == []
    assert set(history.faults) == set(FAULTS)
    for kind in (
        "SendMessage",
        "GetTask",
        "SendStreamingMessage",
        "send",
        "take",
        "settle",
        "drain",
        "revoke",
        *OTHERS,
        "simple send",
    ):
        assert any(history.of(kind)), f"no {kind} was acknowledged, so nothing was checked of it"
