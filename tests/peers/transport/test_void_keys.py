"""A daemon on a shared ledger that a peer tells that its keys are void."""

from pathlib import Path

import pytest

from covenant.model.errors import Unavailable
from covenant.peers.directory.instance_keys import RENEWED_MS
from covenant.peers.peer_settings import PeerService, SharedInstance
from tests.peers.transport_under_test import transport_under_test


async def test_keys_that_a_shared_ledger_could_not_replace_are_replaced_when_a_peer_says_so_again(
    tmp_path: Path,
) -> None:
    is_away = True

    async def nothing(*_: object) -> None:
        """No other daemon has made keys."""

    async def replace(*, compromised: bool) -> None:
        if is_away:
            raise Unavailable("database_unavailable", "the database is away")
        alice.keyring.replace_purpose_keys(alice.clock(), compromised=compromised)

    async with transport_under_test(tmp_path) as alice:
        alice.keyring.replace_purpose_keys(alice.clock(), compromised=False)
        context = alice.inbox._context
        context.shared = SharedInstance(
            ledger_epoch=lambda: None,
            serves=lambda _: True,
            renew_keys=nothing,
            refresh_keys=nothing,
            replace_keys=replace,
            on_void=[],
        )
        service = PeerService(context)
        alice.clock.ahead_ms += RENEWED_MS
        with pytest.raises(Unavailable):
            await service._renew_void_keys()
        assert alice.keyring.void_before_ms == 0
        is_away = False
        await service._renew_void_keys()
        replaced_ms = alice.keyring.void_before_ms
        alice.clock.ahead_ms += RENEWED_MS
        await service._renew_void_keys()
        assert 0 < replaced_ms == alice.keyring.void_before_ms
