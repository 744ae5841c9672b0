"""The keys of this instance: its identity key, a key for each purpose, and the prekeys that others encrypt to.

A prekey is saved before it is shown to anybody. Its private half is erased, in memory and on disk, once nothing that
was sealed to it can arrive any more.

For peers that know certificates, a purpose key signs; for all others the identity key does. A purpose key is replaced
each month, or when an operator says so. Its certificate goes with each signature, so nobody has to remember old keys.

`rotate` and `replace_purpose_keys` may be called from a thread, since they write to disk. Everything else must be used
on the event loop.
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
    KeyCertificate,
    KeyPurpose,
    KeyRevocation,
    Prekey,
)
from covenant.seal.envelope import RELAYED_LIFE_MS_MAX, seal
from covenant.seal.identity import (
    ENVELOPE_LIFE_MS_MAX,
    SKEW_MS,
    InstanceIdentity,
    PrivatePrekey,
    chain_to,
    former_keys,
    new_prekey,
    prekey_due,
    prekey_holds,
    prekey_over,
    prekey_to_use,
    sign_bundle,
)
from covenant.seal.keys import nonce
from covenant.seal.purpose_keys import KEY_PERIOD_MS, NO_PURPOSE_KEYS, PurposeKey, PurposeKeySet, certify, key_due
from covenant.seal.suites import suites_spoken
from covenant.wire.peers import Introduction

RENEWED_MS: Final = 60_000
"""Keys younger than this are not replaced when a peer says that they are void."""
BUNDLE_MS: Final = 3_600_000
"""How long a bundle is shown before it is signed again."""
PREKEYS_KEPT_MAX: Final = 6
"""The most prekeys of each suite. Two or three are usual; a clock that jumps back and forth makes more."""


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
        purpose_keys: PurposeKeySet = NO_PURPOSE_KEYS,
        save_purpose_keys: Callable[[PurposeKeySet], None] = lambda _: None,
    ) -> None:
        """`save` durably replaces the saved prekeys; `save_purpose_keys` does so with the purpose keys.

        `changes`: how the identity changed, the newest last. `salt_key`: the key of salts, which outlives identities.
        `hybrid`: whether to offer the hybrid suite. Hybrid prekeys that we have open envelopes in any case.
        """
        self.identity = InstanceIdentity(private_key)
        self.private_key = private_key
        self._save = save
        self.changes = chain_to(changes, self.identity.id)
        self.revocations = tuple(revocations)
        self.former = former_keys(self.changes, self.revocations)
        self.salt_key = salt_key or private_key
        # Prekeys of another identity, as from a mismatched backup, are dropped: no peer would believe them.
        self._prekeys = {each.prekey.kid: each for each in prekeys if prekey_holds(self.key, each.prekey)}
        self._save_purpose_keys = save_purpose_keys
        self.void_before_ms, self.renewed_void = 0, False
        self.adopt_purpose_keys(purpose_keys)
        self._envelopes: InstanceIdentity | None = None
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
        """Our present and former ids."""
        return self.id, *(each.id for each in self.former)

    def signed_as(self, claimed: str) -> FormerKey:
        """Our key under this id, present or former, if it is not dead; otherwise our present key."""
        alive = (each for each in self.former if each.id == claimed and not each.dead)
        return next(alive, FormerKey(id=self.id, key=self.key))

    def __repr__(self) -> str:
        return f"InstanceKeys({self.id})"

    def bundle(self, now_ms: int) -> KeyBundle:
        """Our public keys, signed. The same bundle for an hour, unless the keys change."""
        kept = self._bundle
        if kept is not None and 0 <= now_ms - kept.issued_at_ms < BUNDLE_MS and prekey_to_use(kept.prekeys, now_ms):
            return kept
        prekeys = self._valid_prekeys(now_ms, SUITE)
        if prekey_to_use(prekeys, now_ms) is None:
            # No prekey can be used, as after a long sleep of the machine: rotate now.
            self.rotate(now_ms)
            prekeys = self._valid_prekeys(now_ms, SUITE)
        change = self.changes[-1] if self.changes else None
        self._bundle = sign_bundle(self.private_key, prekeys, now_ms, change=change, versions=self.versions)
        return self._bundle

    def introduction(self, now_ms: int, name: str = "") -> Introduction:
        """What we show of ourselves: this name, our keys, and our former identities."""
        return Introduction(
            name=name,
            keys=self.bundle(now_ms),
            changes=self.changes,
            revocations=self.revocations,
            hybrid_prekey=self.hybrid_prekey(now_ms),
        )

    def hybrid_prekey(self, now_ms: int) -> Prekey | None:
        """The hybrid prekey that we show beside the bundle; None if we do not offer the hybrid suite.

        A peer that finds our hybrid version in the bundle seals to it.
        """
        if not self.hybrid:
            return None
        prekey = prekey_to_use(self._valid_prekeys(now_ms, HYBRID_SUITE), now_ms)
        if prekey is None:
            self.rotate(now_ms)
            prekey = prekey_to_use(self._valid_prekeys(now_ms, HYBRID_SUITE), now_ms)
        return prekey

    def signing(self, purpose: KeyPurpose, reader: KeyBundle | None, now_ms: int) -> PurposeKey:
        """The key that signs for a reader with these keys: the purpose key, if the reader knows certificates."""
        if reader is None or not reader.has_certificates or now_ms < self.void_before_ms:
            # The clock was set back to before the moment up to which keys are void: a new certificate
            # would be void, too.
            return PurposeKey(self.private_key)
        key = self._purpose_keys.get(purpose)
        if key is None or key_due(key, self.key, now_ms):
            self.rotate(now_ms)
            key = self._purpose_keys[purpose]
        return key

    def sender(self, *, certified: bool, now_ms: int) -> InstanceIdentity:
        """The identity that signs envelopes and receipts. `certified`: whether the recipient knows certificates."""
        if not certified or now_ms < self.void_before_ms:
            return self.identity
        found, held = self._envelopes, self._purpose_keys.get(KeyPurpose.ENVELOPES)
        if found is None or found.certificate is not (held.certificate if held is not None else None):
            held = self.signing(KeyPurpose.ENVELOPES, self.bundle(now_ms), now_ms)
            found = self._envelopes = InstanceIdentity(*held)
        return found

    def purpose_keys(self) -> tuple[PurposeKey, ...]:
        return tuple(self._purpose_keys.values())

    def certificates(self) -> tuple[KeyCertificate, ...]:
        return tuple(each.certificate for each in self.purpose_keys() if each.certificate is not None)

    def replace_purpose_keys(self, now_ms: int, *, compromised: bool) -> None:
        """Makes and saves new keys for all purposes.

        `compromised`: signatures of the old keys are void from now on.
        """
        with self._rotating:
            self._save_and_adopt(self.replaced_purpose_keys(now_ms, compromised=compromised))

    def replaced_purpose_keys(self, now_ms: int, *, compromised: bool) -> PurposeKeySet:
        """The new keys of `replace_purpose_keys`. The caller saves them before they are used."""
        return self._certified(tuple(KeyPurpose), now_ms, now_ms if compromised else self.void_before_ms)

    def believes_void(self, now_ms: int) -> bool:
        """Whether to replace our keys because a peer says that they are void. Young keys are not replaced.

        A peer is believed once after each start and restore (`renewed_void`): a lying peer, or somebody on the way,
        causes no more.
        """
        old = any(key_due(each, self.key, now_ms + KEY_PERIOD_MS - RENEWED_MS) for each in self.purpose_keys())
        return old and not self.renewed_void

    def _save_and_adopt(self, kept: PurposeKeySet) -> None:
        self._save_purpose_keys(kept)
        self.adopt_purpose_keys(kept)

    def _certified(self, purposes: Sequence[KeyPurpose], now_ms: int, void_before_ms: int) -> PurposeKeySet:
        made = {each: certify(self.private_key, each, now_ms, void_before_ms) for each in purposes}
        return PurposeKeySet(tuple(made.get(each) or self._purpose_keys[each] for each in KeyPurpose), void_before_ms)

    def renewed_purpose_keys(self, now_ms: int) -> PurposeKeySet | None:
        """The purpose keys for now, to be saved before they are used; None if the present keys are."""
        due = self._purposes_due(now_ms)
        return self._certified(due, now_ms, self.void_before_ms) if due else None

    def adopt_purpose_keys(self, kept: PurposeKeySet) -> None:
        """Uses these keys, which are saved, and no others."""
        self.renewed_void &= kept.void_before_ms >= self.void_before_ms  # earlier: the shared ledger was restored
        self.void_before_ms = kept.void_before_ms
        self._purpose_keys = {each.certificate.purpose: each for each in kept.keys if each.certificate is not None}

    def _purposes_due(self, now_ms: int) -> list[KeyPurpose]:
        return [each for each in KeyPurpose if key_due(self._purpose_keys.get(each), self.key, now_ms)]

    def prekey(self, kid: str) -> PrivatePrekey | None:
        return self._prekeys.get(kid)

    def is_due(self, now_ms: int) -> bool:
        """Whether a key must be replaced or erased by now."""
        held = [each.prekey for each in self._prekeys.values()]
        return (
            bool(self._suites_due(held, now_ms))
            or any(prekey_over(each, now_ms) for each in held)
            or bool(self._purposes_due(now_ms))
        )

    def _suites_due(self, held: Sequence[Prekey], now_ms: int) -> list[str]:
        return [suite for suite in self._suites if prekey_due((each for each in held if each.suite == suite), now_ms)]

    def rotate(self, now_ms: int) -> bool:
        """Replaces keys that are due and drops expired prekeys, and saves the rest.

        Returns whether anything changed.
        """
        with self._rotating:
            purpose_keys, prekeys = self.renewed_purpose_keys(now_ms), self.renewed_prekeys(now_ms)
            if purpose_keys is not None:
                self._save_and_adopt(purpose_keys)
            if prekeys is not None:
                self._save(prekeys)
                self.adopt_prekeys(prekeys)
            return purpose_keys is not None or prekeys is not None

    def renewed_prekeys(self, now_ms: int) -> Sequence[PrivatePrekey] | None:
        """The prekeys for now, to be saved before they are used; None if the present ones are."""
        held = self._prekeys
        kept = [each for each in held.values() if not prekey_over(each.prekey, now_ms)]
        due = self._suites_due([each.prekey for each in kept], now_ms)
        kept += [new_prekey(self.private_key, now_ms, suite) for suite in due]
        kept = [*_latest(kept, SUITE), *_latest(kept, HYBRID_SUITE)]
        return kept if {each.prekey.kid for each in kept} != held.keys() else None

    def adopt_prekeys(self, prekeys: Iterable[PrivatePrekey]) -> None:
        """Uses these prekeys, which are saved, and no others."""
        after = {each.prekey.kid: each for each in prekeys if prekey_holds(self.key, each.prekey)}
        if after.keys() != self._prekeys.keys():
            self._prekeys, self._bundle = after, None

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
        certified: bool = False,
        relayed: bool = False,
    ) -> bytes:
        """An envelope for `to`, sealed to this prekey, with a new `jti`.

        `certified`: whether the recipient knows certificates. `relayed`: the envelope waits at a relay; then it is
        valid for as long as the prekey, within the limit for relayed envelopes.
        """
        life_ms = min(RELAYED_LIFE_MS_MAX, prekey.not_after_ms - now_ms) if relayed else ENVELOPE_LIFE_MS_MAX
        jti = nonce()
        return seal(
            body,
            typ=typ,
            sender=self.sender(certified=certified, now_ms=now_ms),
            to=to,
            prekey=prekey,
            jti=jti,
            now_ms=now_ms,
            life_ms=life_ms,
            seq=seq,
            epoch=epoch,
        )

    def _valid_prekeys(self, now_ms: int, suite: str) -> list[Prekey]:
        held = (each.prekey for each in self._prekeys.values() if each.prekey.suite == suite)
        # A prekey from a time when the clock was ahead is not valid yet, and must not hide one that is.
        return [each for each in held if each.not_before_ms <= now_ms + SKEW_MS]


def _latest(held: Iterable[PrivatePrekey], suite: str) -> list[PrivatePrekey]:
    of_suite = (each for each in held if each.prekey.suite == suite)
    return sorted(of_suite, key=lambda each: each.prekey.not_after_ms)[-PREKEYS_KEPT_MAX:]
