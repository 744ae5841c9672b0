"""The instance's keys on a ledger that several daemons share: rows that only the holders of the home's key can open.

The daemons are one instance to its peers. A ledger that is moved takes these keys along, in either direction.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from covenant.daemon.home import UnsafeHome
from covenant.daemon.keystore import (
    Keystore,
    PastIdentities,
    decode_prekeys,
    decode_purpose_keys,
    encode_prekeys,
    encode_purpose_keys,
)
from covenant.ledger.contract.identities import Register, RegisterChange
from covenant.ledger.contract.ledger import SharedLedger
from covenant.model.errors import Refusal, Unavailable
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.seal.identity import instance_id
from covenant.seal.keys import COST_MIN, KeyLocked, Locker, derived_secret, new_private_key, public_key

PEER_IDENTITY: Final = "peers.identity"
PREKEYS: Final = "peers.prekeys"
PURPOSES: Final = "peers.purposes"
TRIES: Final = 8
OTHER_IDENTITY: Final = (
    "identity/instance.key is not the identity that the daemons on this ledger have, nor one that came of it; "
    "put the right one there, or remove the file and take the ledger's"
)

log = logging.getLogger(__name__)


class SharedLocker:
    """Locks the instance's keys for a database, with what follows from the home's key."""

    def __init__(self, key: bytes) -> None:
        # The secret cannot be guessed, so the lock need not be slow to try.
        self._locker = Locker(derived_secret(key, "shared keys").hex(), cost=COST_MIN)

    def lock(self, text: str) -> str:
        return self._locker.lock(text.encode()).decode().strip()

    def unlock(self, body: str) -> bytes:
        """Raises UnsafeHome."""
        try:
            return self._locker.unlock(body.encode())
        except KeyLocked:
            raise UnsafeHome(
                "the instance's keys in the database are locked with another home's key: identity/local.key is not "
                "the one that the daemons on this ledger have; put that one back"
            ) from None


class _Identity(msgspec.Struct, frozen=True):
    key: str
    """In hex."""
    past: PastIdentities


def stored_keys(keystore: Keystore, key: bytes) -> Mapping[str, str]:
    """The keys in a home, as a database stores them; none if the instance has no identity yet."""
    prekeys, past = keystore.read_prekeys(), keystore.read_past()
    own = keystore.read_instance_key() or (key if prekeys or past.changes else None)
    if own is None:
        return {}
    locker = SharedLocker(key)
    return {
        PEER_IDENTITY: locker.lock(msgspec.json.encode(_Identity(own.hex(), past)).decode()),
        PREKEYS: locker.lock(encode_prekeys(prekeys)),
        PURPOSES: locker.lock(encode_purpose_keys(keystore.read_purpose_keys())),
    }


def save_stored_keys(secrets: Mapping[str, str], keystore: Keystore, key: bytes) -> None:
    """Saves the instance's keys of a database in the home. Raises UnsafeHome."""
    locker = SharedLocker(key)
    opened = {name: locker.unlock(secrets[name]) for name in (PEER_IDENTITY, PREKEYS, PURPOSES) if name in secrets}
    if PEER_IDENTITY in opened:
        identity = msgspec.json.decode(opened[PEER_IDENTITY], type=_Identity)
        keystore.save_identity(identity.past, bytes.fromhex(identity.key))
    if PREKEYS in opened:
        keystore.save_prekeys(decode_prekeys(opened[PREKEYS]))
    if PURPOSES in opened:
        keystore.save_purpose_keys(decode_purpose_keys(opened[PURPOSES]))


class SharedKeys:
    """The instance's keys in the ledger. `keys` are those of the instance, once it is open.

    The identity key, the former identities, the purpose keys and the prekeys are locked with a key derived from the
    home's. Any daemon makes a new key when it is time; of two that do so at once, one is first and the other takes its
    key. Keys that are replaced are in use at every living daemon before that is acknowledged.
    """

    keys: InstanceKeys
    past: PastIdentities

    def __init__(self, ledger: SharedLedger, keystore: Keystore, key: bytes) -> None:
        self.ledger = ledger
        self._keystore = keystore
        self._key = key
        self._locker = SharedLocker(key)
        self._seen: dict[str, str] = {}
        """The rows of the ledger that are in use here."""
        self._adopters = {PREKEYS: self._adopt_prekeys, PURPOSES: self._adopt_purpose_keys}
        self.on_void: list[Callable[[], None]] = []
        """Each is called when a daemon has declared the former keys void."""
        self._saving: set[asyncio.Task[None]] = set()

    async def open(self, now_ms: int, *, hybrid: bool) -> InstanceKeys:
        """Raises UnsafeHome."""
        identity = await self._agree()
        self.past = identity.past
        self.keys = InstanceKeys(
            bytes.fromhex(identity.key),
            (),
            lambda prekeys: self._save(PREKEYS, encode_prekeys(prekeys)),
            changes=identity.past.changes,
            revocations=identity.past.revocations,
            salt_key=self._key,
            hybrid=hybrid,
            save_purpose_keys=lambda kept: self._save(PURPOSES, encode_purpose_keys(kept)),
        )
        self.ledger.on_registers(self._adopt_replaced)
        await self.renew(now_ms)
        return self.keys

    async def refresh(self) -> None:
        """Uses the keys that the ledger has."""
        for name in self._adopters:
            known = self._seen.get(name)
            body = await self.ledger.secret(name)
            if body is not None and self._seen.get(name) == known:  # otherwise newer keys came meanwhile
                self._adopt(name, body)

    def _adopt_replaced(self, change: RegisterChange) -> None:
        """A daemon has replaced keys, and waits until they are in use here."""
        if change.register is not Register.SECRETS or change.name not in self._adopters:
            return
        body = self.ledger.replaced_secret(change.name)
        try:
            if body is not None:
                self._adopt(change.name, body)
        except UnsafeHome as unsafe:
            log.error("peers.keys_not_taken", extra={"reason": str(unsafe)})  # noqa: TRY400  the reason says it all

    def _adopt(self, name: str, body: str) -> None:
        if body != self._seen.get(name):
            self._adopters[name](self._locker.unlock(body))
            self._seen[name] = body

    def _adopt_prekeys(self, data: bytes) -> None:
        self.keys.adopt_prekeys(decode_prekeys(data))

    def _adopt_purpose_keys(self, data: bytes) -> None:
        known_ms = self.keys.void_before_ms
        self.keys.adopt_purpose_keys(decode_purpose_keys(data))
        if self.keys.void_before_ms > known_ms:
            for callback in self.on_void:
                callback()

    async def renew(self, now_ms: int) -> None:
        """Replaces keys that are due, and drops expired prekeys."""
        for _ in range(TRIES):
            await self.refresh()
            prekeys, purpose_keys = self.keys.renewed_prekeys(now_ms), self.keys.renewed_purpose_keys(now_ms)
            if prekeys is None and purpose_keys is None:
                return
            # If another daemon is first, the next round takes its keys.
            if prekeys is not None:
                await self._put(PREKEYS, encode_prekeys(prekeys))
            if purpose_keys is not None:
                await self._put(PURPOSES, encode_purpose_keys(purpose_keys))
        raise Unavailable("keys_not_renewed", "other daemons on this ledger change the keys all the time")

    async def replace_purpose_keys(self, *, compromised: bool) -> None:
        """Makes new purpose keys. They are in use at every living daemon when this returns."""
        for _ in range(TRIES):
            await self.refresh()
            replaced = self.keys.replaced_purpose_keys(self.ledger.now_ms(), compromised=compromised)
            if await self._put(PURPOSES, encode_purpose_keys(replaced)):
                return
        raise Unavailable("keys_not_replaced", "other daemons on this ledger change the keys all the time")

    async def note_identity(self) -> None:
        """Notes that the audit has the present identity."""
        body = await self.ledger.secret(PEER_IDENTITY)
        assert body is not None
        past = msgspec.structs.replace(self.past, noted=self.keys.id)
        noted = _Identity(self.keys.private_key.hex(), past)
        await self.ledger.replace_secret(PEER_IDENTITY, body, self._encoded(noted))

    async def _put(self, name: str, text: str) -> bool:
        """Writes a row, unless another daemon has changed it meanwhile. Returns whether it did."""
        before, body = self._seen.get(name), self._locker.lock(text)
        if before is not None:
            return await self.ledger.replace_secret(name, before, body)
        await self.ledger.keep_secret(name, body)
        return True

    def _save(self, name: str, text: str) -> None:
        """Saves a row in the background, since a caller needs the key now."""
        saving = asyncio.ensure_future(self._save_soon(name, text))
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)

    async def _save_soon(self, name: str, text: str) -> None:
        try:
            await self._put(name, text)
            await self.refresh()  # another daemon may have been first
        except Refusal as refusal:
            log.warning("peers.keys_not_saved", extra={"code": refusal.code, "reason": refusal.message})

    async def _agree(self) -> _Identity:
        """The instance's identity: the ledger's, or this home's if the home has changed it since."""
        keystore = self._keystore
        own = await asyncio.to_thread(keystore.read_instance_key)
        past = await asyncio.to_thread(keystore.read_past)
        for _ in range(TRIES):
            body = await self.ledger.secret(PEER_IDENTITY)
            if body is None:
                is_known = bool(past.changes or self.ledger.peers())
                first = own or (self._key if is_known else new_private_key())
                await self.ledger.keep_secret(PEER_IDENTITY, self._encoded(_Identity(first.hex(), past)))
                continue
            shared = msgspec.json.decode(self._locker.unlock(body), type=_Identity)
            if own is None or own.hex() == shared.key:
                await self._save_in_home(shared, own)
                return shared
            here, there = _instance_id(own), _instance_id(bytes.fromhex(shared.key))
            if here in {change.old_id for change in shared.past.changes}:
                await self._save_in_home(shared, own)
                return shared
            if there not in {change.old_id for change in past.changes}:
                raise UnsafeHome(OTHER_IDENTITY)
            if await self.ledger.replace_secret(PEER_IDENTITY, body, self._encoded(_Identity(own.hex(), past))):
                log.warning("peers.identity_changed", extra={"before": there, "id": here})
        raise UnsafeHome("other daemons on this ledger change the instance's identity all the time")

    async def _save_in_home(self, shared: _Identity, own: bytes | None) -> None:
        """Saves the identity in the home, too, for commands that work without a daemon."""
        if own is None or own.hex() != shared.key:
            await asyncio.to_thread(self._keystore.save_identity, shared.past, bytes.fromhex(shared.key))

    def _encoded(self, identity: _Identity) -> str:
        return self._locker.lock(msgspec.json.encode(identity).decode())


def _instance_id(key: bytes) -> str:
    return instance_id(public_key(key))
