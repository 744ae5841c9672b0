"""A daemon that a peer tells that its keys are void, alone and on a shared ledger."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from covenant.model.errors import Unavailable
from covenant.peers.directory.instance_keys import RENEWED_MS
from covenant.peers.peer_settings import PeerService, SharedInstance
from covenant.seal.purpose_keys import PurposeKeySet
from tests.peers.transport_under_test import TransportUnderTest, transport_under_test

HOUR_MS: Final = 3_600_000


async def nothing(*_: object) -> None:
    """No other daemon has made keys."""


@asynccontextmanager
async def keys_under_test(
    folder: Path, *, shared: bool, saving: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[TransportUnderTest, PeerService]]:
    """An instance whose keys are as old as those of a backup. `saving` is called before new keys are saved."""
    async with transport_under_test(folder) as alice:

        async def replace(*, compromised: bool) -> None:
            saving()
            alice.keyring.replace_purpose_keys(alice.clock(), compromised=compromised)

        if shared:
            alice.context.shared = SharedInstance(
                ledger_epoch=lambda: None,
                serves=lambda _: True,
                renew_keys=nothing,
                refresh_keys=nothing,
                replace_keys=replace,
                on_void=[],
            )
        else:
            alice.keyring._save_purpose_keys = lambda _: saving()
        yield alice, PeerService(alice.context)


@pytest.mark.parametrize("shared", [True, False])
async def test_keys_that_could_not_be_replaced_are_replaced_when_a_peer_says_again_that_they_are_void(
    tmp_path: Path, shared: bool
) -> None:
    is_away = True

    def saving() -> None:
        if is_away:
            raise Unavailable("unavailable", "the database is away, or the disk is full")

    async with keys_under_test(tmp_path, shared=shared, saving=saving) as (alice, service):
        alice.clock.ahead_ms += RENEWED_MS
        with pytest.raises(Unavailable):
            await service._renew_void_keys()
        assert alice.keyring.void_before_ms == 0
        is_away = False
        assert await service._renew_void_keys()
        replaced_ms = alice.keyring.void_before_ms
        alice.clock.ahead_ms += RENEWED_MS
        assert await service._renew_void_keys() is shared
        assert 0 < replaced_ms == alice.keyring.void_before_ms


@pytest.mark.parametrize("shared", [True, False])
async def test_a_peer_that_says_again_and_again_that_our_keys_are_void_replaces_them_once_after_each_restore(
    tmp_path: Path, shared: bool
) -> None:
    async with keys_under_test(tmp_path, shared=shared) as (alice, service):
        restored = PurposeKeySet(alice.keyring.purpose_keys())
        assert await service._renew_void_keys() is shared
        assert alice.keyring.void_before_ms == 0, "keys of just now are not those of a backup"
        for _ in range(2):
            alice.clock.ahead_ms += HOUR_MS
            before_ms = alice.keyring.void_before_ms
            assert await service._renew_void_keys()
            replaced_ms = alice.keyring.void_before_ms
            assert replaced_ms > before_ms
            for _ in range(4):
                alice.clock.ahead_ms += HOUR_MS
                assert await service._renew_void_keys() is shared
            assert alice.keyring.void_before_ms == replaced_ms
            alice.keyring.adopt_purpose_keys(restored)
