"""Tokens that we give to peers. Each is remembered with its peer for as long as it is good, so that it can be revoked.

A peer that asks often gets the same token for half of its life: otherwise it could ask until the first ones are
forgotten. Where there are too many all the same, the oldest is revoked before the next one is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from covenant.ledger.contract import Ledger
from covenant.ledger.machine.peer_commands import LearnPeer, RevokeToken
from covenant.ledger.machine.peering import ISSUED_MAX
from covenant.model.peers.peer_record import IssuedToken, Peer
from covenant.model.ids import AgentId
from covenant.model.peers.instance import InstanceId
from covenant.peers.answering import Offering, terms_for
from covenant.peers.keyring import Keyring
from covenant.peers.settings import PeerSettings
from covenant.seal.tokens import Narrowing, issue, token_ids


class _Given(NamedTuple):
    token: str
    id: str
    terms: Narrowing
    until_ms: int


class Issuing:
    def __init__(
        self,
        ledger: Ledger,
        keyring: Keyring,
        settings: PeerSettings,
        *,
        us: AgentId,
        now_ms: Callable[[], int],
    ) -> None:
        self._ledger = ledger
        self._keyring = keyring
        self._settings = settings
        self._us = us
        self._now_ms = now_ms
        self._given: dict[InstanceId, _Given] = {}

    async def token_for(self, peer: Peer, offering: Offering) -> str | None:
        """None for one that may not delegate. Told to nobody before it is durable that it was given."""
        terms = terms_for(peer, offering, self._settings)
        if terms is None:
            self._given.pop(peer.id, None)
            return None
        given = self._given.get(peer.id)
        if given is not None and given.terms == terms and self._good(given):
            return given.token
        until_ms = self._now_ms() + self._settings.token_life_ms
        token = issue(self._keyring.private_key, peer.id, msgspec.structs.replace(terms, expires_at_ms=until_ms))
        token_id = token_ids(token, self._keyring.key)[0]
        await self._make_room(peer)
        await self._ledger.commit(LearnPeer(id=peer.id, by=self._us, issued=IssuedToken(token_id, until_ms)))
        self._given[peer.id] = _Given(token, token_id, terms, until_ms)
        return token

    def _good(self, given: _Given) -> bool:
        left_ms = given.until_ms - self._now_ms()
        life_ms = self._settings.token_life_ms
        return life_ms // 2 <= left_ms <= life_ms and not self._ledger.token_revoked(given.id)

    async def _make_room(self, peer: Peer) -> None:
        now_ms = self._now_ms()
        good = [each for each in peer.issued if each.until_ms > now_ms]
        for each in good[: max(0, len(good) - ISSUED_MAX + 1)]:
            await self._ledger.commit(RevokeToken(by=self._us, token_id=each.id, until_ms=each.until_ms))
