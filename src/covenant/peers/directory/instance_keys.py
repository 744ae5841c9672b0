"""The keys of this instance: its identity key, and the prekeys that others seal to, a new one each day.

A prekey is saved before it is shown to anybody. Its private half is erased, in memory and on disk, once nothing that
was sealed to it can arrive any more.

`rotate` may be called from a thread, since it writes to disk; everything else is for the loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from covenant.model.ids import PublicKey
from covenant.model.peers.instance import (
    HYBRID_SUITE,
    HYBRID_VERSIONS,
    SUITE,
    SUPPORTED_VERSIONS,
    FormerKey,
    IdentityChange,
    InstanceId,
    KeyBundle,
    KeyRevocation,
    Prekey,
)
from covenant.seal.envelope import seal
from covenant.seal.identity import (
    SKEW_MS,
    InstanceIdentity,
    PrivatePrekey,
    new_prekey,
    prekey_due,
    prekey_holds,
    prekey_over,
    prekey_to_use,
    sign_bundle,
)
from covenant.seal.identity_chain import chain_to, former_keys
from covenant.seal.keys import nonce
from covenant.seal.suites import suites_spoken

BUNDLE_MS: Final = 3_600_000
"""How long a bundle is shown before it is signed again."""
PREKEYS_KEPT_MAX: Final = 6
"""Of each suite. Two or three are usual. A clock that jumps to and fro makes more."""


class InstanceKeys:
    def __init__(
        self,
        private_key: bytes,
        prekeys: Iterable[PrivatePrekey],
        save: Callable[[Sequence[PrivatePrekey]], None],
        *,
        changes: Sequence[IdentityChange] = (),
        revocations: Sequence[KeyRevocation] = (),
        salt_key: bytes | None = None,
        hybrid: bool = False,
    ) -> None:
        """`save` puts these prekeys in the place of those saved before, durably.

        `changes`: from whom we came to be, the newest last. `salt_key`: what salts follow from; it outlives identities.
        `hybrid`: whether the hybrid suite is wanted. Prekeys of it that we have open what comes in any case.
        """
        self.identity = InstanceIdentity(private_key)
        self.private_key = private_key
        self._save = save
        self.changes = chain_to(changes, self.identity.id)
        self.revocations = tuple(revocations)
        self.former = former_keys(self.changes, self.revocations)
        self.salt_key = salt_key or private_key
        # Those of another identity, from a backup that does not go together, could seal nothing that anybody believes.
        self._prekeys = {each.prekey.kid: each for each in prekeys if prekey_holds(self.key, each.prekey)}
        self._suites = suites_spoken(hybrid=hybrid)
        self.hybrid = HYBRID_SUITE in self._suites
        self.versions = HYBRID_VERSIONS if self.hybrid else SUPPORTED_VERSIONS
        self._bundle: KeyBundle | None = None
        self._rotating = threading.Lock()

    @property
    def id(self) -> InstanceId:
        return self.identity.id

    @property
    def key(self) -> PublicKey:
        return self.identity.key

    @property
    def ids(self) -> tuple[str, ...]:
        """The identities that we have and had."""
        return self.id, *(each.id for each in self.former)

    def signed_as(self, claimed: str) -> FormerKey:
        """The key of ours that this identity was, if it is not dead; otherwise the one that we have now."""
        alive = (each for each in self.former if each.id == claimed and not each.dead)
        return next(alive, FormerKey(id=self.id, key=self.key))

    def __repr__(self) -> str:
        return f"InstanceKeys({self.id})"

    def bundle(self, now_ms: int) -> KeyBundle:
        """What we show of our keys. The same for an hour, unless they change."""
        kept = self._bundle
        if kept is not None and 0 <= now_ms - kept.issued_at_ms < BUNDLE_MS and prekey_to_use(kept.prekeys, now_ms):
            return kept
        prekeys = self._shown(now_ms, SUITE)
        if prekey_to_use(prekeys, now_ms) is None:
            # Nobody has rotated for a day, as after a long sleep of the machine: late is better than never.
            self.rotate(now_ms)
            prekeys = self._shown(now_ms, SUITE)
        change = self.changes[-1] if self.changes else None
        self._bundle = sign_bundle(self.private_key, prekeys, now_ms, change=change, versions=self.versions)
        return self._bundle

    def hybrid_prekey(self, now_ms: int) -> Prekey | None:
        """What we show beside the bundle: whoever finds our hybrid version in there seals to this. None: we do not."""
        if not self.hybrid:
            return None
        prekey = prekey_to_use(self._shown(now_ms, HYBRID_SUITE), now_ms)
        if prekey is None:
            self.rotate(now_ms)
            prekey = prekey_to_use(self._shown(now_ms, HYBRID_SUITE), now_ms)
        return prekey

    def prekey(self, kid: str) -> PrivatePrekey | None:
        return self._prekeys.get(kid)

    def due(self, now_ms: int) -> bool:
        held = [each.prekey for each in self._prekeys.values()]
        return bool(self._suites_due(held, now_ms)) or any(prekey_over(each, now_ms) for each in held)

    def _suites_due(self, held: Sequence[Prekey], now_ms: int) -> list[str]:
        return [suite for suite in self._suites if prekey_due((each for each in held if each.suite == suite), now_ms)]

    def rotate(self, now_ms: int) -> bool:
        """A new prekey if it is time for one, and none that is over. Whether anything changed; then it is saved."""
        with self._rotating:
            held = self._prekeys
            kept = [each for each in held.values() if not prekey_over(each.prekey, now_ms)]
            due = self._suites_due([each.prekey for each in kept], now_ms)
            kept += [new_prekey(self.private_key, now_ms, suite) for suite in due]
            kept = [*_latest(kept, SUITE), *_latest(kept, HYBRID_SUITE)]
            after = {each.prekey.kid: each for each in kept}
            if after.keys() == held.keys():
                return False
            self._save(kept)
            self._prekeys = after
            self._bundle = None
            return True

    def seal(
        self,
        body: bytes,
        *,
        typ: str,
        to: InstanceId,
        prekey: Prekey,
        now_ms: int,
        seq: int | None = None,
        epoch: str | None = None,
    ) -> bytes:
        """An envelope for `to`, which has shown this prekey. Each has a `jti` of its own."""
        jti = nonce()
        return seal(
            body,
            typ=typ,
            sender=self.identity,
            to=to,
            prekey=prekey,
            jti=jti,
            now_ms=now_ms,
            seq=seq,
            epoch=epoch,
        )

    def _shown(self, now_ms: int, suite: str) -> list[Prekey]:
        held = (each.prekey for each in self._prekeys.values() if each.prekey.suite == suite)
        # One from a time when the clock was ahead is not valid yet, and would stand in the place of one that is.
        return [each for each in held if each.not_before_ms <= now_ms + SKEW_MS]


def _latest(held: Iterable[PrivatePrekey], suite: str) -> list[PrivatePrekey]:
    of_suite = (each for each in held if each.prekey.suite == suite)
    return sorted(of_suite, key=lambda each: each.prekey.not_after_ms)[-PREKEYS_KEPT_MAX:]
