"""Daemons of the version before the last level are replaced one after the other, while clients work at all of them."""

from __future__ import annotations

import asyncio
import sys

import pytest

from tests.cluster.campaign import run
from tests.cluster.checker import OTHERS
from tests.cluster.faults import UPGRADE
from tests.contracts.test_postgres_rolling_upgrade import version_before
from tests.places import short_folder

SEED = 7


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_rolling_upgrade_of_all_daemons_loses_nothing_and_does_nothing_twice() -> None:
    with short_folder() as trees, short_folder() as folder:
        before = await asyncio.to_thread(version_before, trees)
        history = await run(folder, [UPGRADE], seconds=0, seed=SEED, before=before)
    sys.stdout.write(history.summary())
    assert history.violations == []
    for kind in ("SendMessage", "SendStreamingMessage", "send", "take", "settle", "drain", "revoke", *OTHERS):
        assert any(history.of(kind)), f"no {kind} was acknowledged, so nothing was checked of it"
