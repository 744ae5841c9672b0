"""The ledger on a database that several daemons share: opened, moved in and out, marked as restored; and its keys.

Every daemon on a ledger has the same key and the same operator's token. With a passphrase, the first daemon leaves both
in the database, locked with it; a daemon with an empty home and the same passphrase takes them from there. Without a
passphrase, the operator copies both files. The daemons are one instance to its peers, too: `SharedKeys`. The database
never has a secret in the clear.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from covenant.daemon.environment import PASSPHRASE_VARIABLE, environment, machine_name, now_ms
from covenant.daemon.home import (
    KEY_NAME,
    TOKEN_NAME,
    UnsafeHome,
    make_home,
    read_or_make_token,
    read_token,
    save_token,
)
from covenant.daemon.keystore import (
    OPERATOR_DISPLAY,
    Keystore,
    PastIdentities,
    decode_prekeys,
    decode_purpose_keys,
    encode_prekeys,
    encode_purpose_keys,
    find_passphrase,
)
from covenant.daemon.settings import Settings, ledger_limits
from covenant.exchange.access.identities import operator_agent
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.blobs import BlobStore
from covenant.ledger.contract.identities import Register, RegisterChange
from covenant.ledger.contract.ledger import Ledger, SharedLedger
from covenant.mailbox import local_agent
from covenant.model.errors import Refusal, SettingsError, Unavailable
from covenant.model.extras import install_command
from covenant.outbound.s3_objects import PART_BYTES, PARTS_MAX, REFUSED, S3Credentials, S3Objects
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.seal.identity import instance_id
from covenant.seal.keys import (
    COST_MIN,
    KeyLocked,
    Locker,
    derived_secret,
    new_private_key,
    new_token,
    public_key,
    token_hash,
)

IDENTITY: Final = "identity"
COPY_KEY: Final = (
    "daemons that share a ledger are one instance: copy identity/local.key and operator.token from the home of the "
    f"daemon that made it into this one, or start all of them with one {PASSPHRASE_VARIABLE}"
)
PEER_IDENTITY: Final = "peers.identity"
PREKEYS: Final = "peers.prekeys"
PURPOSES: Final = "peers.purposes"
TRIES: Final = 8
OTHER_IDENTITY: Final = (
    "identity/instance.key is not the identity that the daemons on this ledger have, nor one that came of it; "
    "put the right one there, or remove the file and take the ledger's"
)

log = logging.getLogger(__name__)


class InstanceSecrets(NamedTuple):
    key: bytes
    token: str


class _Shared(msgspec.Struct, frozen=True):
    key: str
    """In hex."""
    token: str


def import_postgres(module: str) -> Any:
    """A module of the engine, which is an extra. Raises SettingsError."""
    try:
        return import_module(f"covenant.ledger.postgres.{module}")
    except ImportError as error:
        raise SettingsError(
            f"ledger.url needs the extra `postgres`: {install_command('postgres')} ({error})"
        ) from error


def node_name(settings: Settings) -> str:
    """Two daemons of one machine are two nodes."""
    of_home = hashlib.sha256(str(settings.home.resolve()).encode()).hexdigest()[:8]
    return settings.daemon.node or f"{machine_name()}-{of_home}"


async def open_shared_ledger(settings: Settings, clocks: Any) -> SharedLedger:
    """The ledger that other daemons have, too."""
    postgres = await asyncio.to_thread(import_postgres, "open_postgres")
    ledger: SharedLedger = await postgres.open_postgres_ledger(
        settings.ledger.url,
        clock=clocks.now_ms,
        monotonic_ms=clocks.monotonic_ms,
        clock_pause_ms=settings.daemon.clock_pause_ms,
        limits=ledger_limits(settings),
        durability=settings.ledger.durability,
        node=node_name(settings),
        lease_ms=settings.ledger.node_lease_ms,
        pooler=settings.ledger.pooler,
    )
    return ledger


async def open_shared_blobs(settings: Settings, stack: AsyncExitStack) -> BlobStore:
    """The blob store.

    Resources to close later are put on the stack. Raises SettingsError, but not for a bucket that cannot be reached.
    """
    postgres = await asyncio.to_thread(import_postgres, "open_postgres")
    kept = await _open_bucket(settings, stack) if settings.blobs.url else None
    try:
        blobs: BlobStore = await postgres.open_blob_rows(settings.ledger.url, pooler=settings.ledger.pooler, kept=kept)
    except BaseException:
        if kept is not None:
            await kept.close()
        raise
    return blobs


async def _open_bucket(settings: Settings, stack: AsyncExitStack) -> S3Objects:
    from covenant.daemon.wiring.remote_agents import open_outbound  # noqa: PLC0415  (not needed without a bucket)

    blobs, variables, place = settings.blobs, environment(), urlsplit(settings.blobs.url)
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    if missing := [name for name in names if not variables.get(name)]:
        raise SettingsError(f"blobs.url needs {' and '.join(missing)} in the environment of the daemon")
    if blobs.file_bytes_max > PARTS_MAX * PART_BYTES:
        raise SettingsError(f"with blobs.url, blobs.file_bytes_max is at most {PARTS_MAX * PART_BYTES}")
    endpoint = blobs.endpoint or f"https://s3.{blobs.region}.amazonaws.com"
    where = urlsplit(endpoint)
    outbound = await stack.enter_async_context(open_outbound(settings.outbound))
    port = where.port or (443 if where.scheme == "https" else 80)
    bucket = S3Objects(
        outbound.fetcher.allowing(f"{where.netloc.removesuffix(f':{where.port}')}:{port}"),
        endpoint,
        place.netloc,
        place.path,
        S3Credentials(
            access_key=variables[names[0]],
            secret_key=variables[names[1]],
            session_token=variables.get("AWS_SESSION_TOKEN", ""),
        ),
        region=blobs.region,
        clock_s=time.time,
        chance=random.random,
    )
    try:
        await bucket.check()
    except Unavailable as error:
        if error.code == REFUSED:
            await bucket.close()
            raise SettingsError(error.message) from error
    return bucket


async def check_instance(settings: Settings, keystore: Keystore, key: bytes | None) -> None:
    """Refuses the ledger of another instance before this daemon joins it, as that fences the daemon of the same name.

    `key` is what the home has. Raises UnsafeHome, LockedHome and DatabaseUnusable. Does nothing without a database.
    """
    if not settings.ledger.url:
        return
    admin = await asyncio.to_thread(import_postgres, "database_admin")
    secret, identities = await admin.read_instance(settings.ledger.url, IDENTITY)
    live = {each.token_sha256: each for each in identities if each.operator and each.revoked_at_ms is None}
    if not live:
        return
    path = settings.home / TOKEN_NAME
    token = await asyncio.to_thread(read_token, path) if path.exists() else None
    if key is None or token is None or token_hash(token) not in live:
        left = await _opened(keystore, secret)
        if left is None or token_hash(left.token) not in live or key not in (None, left.key):
            raise UnsafeHome(COPY_KEY)
    elif live[token_hash(token)].agent.pubkey != operator_agent(OPERATOR_DISPLAY, key).pubkey:
        raise UnsafeHome(COPY_KEY)


async def agree_on_secrets(
    settings: Settings, ledger: SharedLedger, keystore: Keystore, key: bytes | None
) -> InstanceSecrets:
    """The key and the token that all daemons on the ledger have; both are in the home from then on.

    `key` is what the home has. Raises UnsafeHome and LockedHome.
    """
    left = await _left(ledger, keystore)
    if key is not None:
        token = await asyncio.to_thread(read_or_make_token, settings.home, new_token)
        if left is None:
            if not await _other_tokens(ledger, token):
                await _leave(ledger, keystore, InstanceSecrets(key, token))
        elif left.key == key and await _other_tokens(ledger, token) and not await _other_tokens(ledger, left.token):
            save_token(settings.home, token := left.token)
        if await _other_tokens(ledger, token):
            raise UnsafeHome(COPY_KEY)
        return InstanceSecrets(key, token)
    if left is None:
        if await ledger.identities():
            raise UnsafeHome(COPY_KEY)
        made = InstanceSecrets(new_private_key(), new_token())
        left = await _leave(ledger, keystore, made) or made
    await asyncio.to_thread(keystore.make_key, lambda: left.key)
    save_token(settings.home, left.token)
    return left


async def _left(ledger: SharedLedger, keystore: Keystore) -> InstanceSecrets | None:
    """The secrets that another daemon left in the database; None without a passphrase."""
    return await _opened(keystore, await ledger.secret(IDENTITY))


async def _opened(keystore: Keystore, body: str | None) -> InstanceSecrets | None:
    if body is None or not keystore.has_passphrase:
        return None
    opened = await asyncio.to_thread(keystore.unseal, body, "the key in the database")
    shared = msgspec.json.decode(opened, type=_Shared)
    return InstanceSecrets(bytes.fromhex(shared.key), shared.token)


async def _leave(ledger: SharedLedger, keystore: Keystore, made: InstanceSecrets) -> InstanceSecrets | None:
    """Leaves the secrets for other daemons, unless another was first: then its secrets count.

    None without a passphrase.
    """
    if not keystore.has_passphrase:
        return None
    text = msgspec.json.encode(_Shared(made.key.hex(), made.token)).decode()
    await ledger.keep_secret(IDENTITY, await asyncio.to_thread(keystore.seal, text))
    return await _left(ledger, keystore)


async def _other_tokens(ledger: Ledger, token: str) -> bool:
    """Whether the operator has a live token other than this one. Other daemons use it, so it must not be revoked."""
    live = [each for each in await ledger.identities() if each.operator and each.revoked_at_ms is None]
    return bool(live) and all(each.token_sha256 != token_hash(token) for each in live)


async def mark_restored(settings: Settings) -> int:
    """Marks the ledger in the database as restored. Returns how many runs of daemons were fenced."""
    admin = import_postgres("database_admin")
    key = await asyncio.to_thread(Keystore(settings.home, find_passphrase(environment())).read_key)
    by = operator_agent(OPERATOR_DISPLAY, key) if key is not None else local_agent("process@local")
    fenced: int = await admin.mark_restored(settings.ledger.url, by, now_ms(), uuid_source()())
    return fenced


async def move_ledger(settings: Settings, *, out: bool) -> Mapping[str, Any]:
    """Moves the ledger into the database, or `out` of it. Returns what was moved, by kind. Raises CovenantError."""
    if settings.blobs.url:
        raise SettingsError("files are moved between the home and the database alone: move without blobs.url")
    import_postgres("open_postgres")
    from covenant.ledger.transfer.ledger_move import Mover  # noqa: PLC0415  (it needs the extra)

    make_home(settings.home)
    key = await asyncio.to_thread(Keystore(settings.home, find_passphrase(environment())).read_key)
    if key is None:
        raise UnsafeHome(
            f"{settings.home} has no {KEY_NAME}; copy it, and operator.token, from a home that serves this ledger"
        )
    mover = Mover(
        settings.home,
        settings.ledger.url,
        ledger_limits(settings),
        now_ms=now_ms,
        new_id=uuid_source(),
        by=operator_agent(OPERATOR_DISPLAY, key),
    )
    return (await (mover.move_out() if out else mover.move_in())).measures


class _Identity(msgspec.Struct, frozen=True):
    key: str
    """In hex."""
    past: PastIdentities


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
        # The secret cannot be guessed, so the lock need not be slow to try.
        self._locker = Locker(derived_secret(key, "shared keys").hex(), cost=COST_MIN)
        self._seen: dict[str, str] = {}
        """The rows of the ledger that are in use here."""
        self._takes = {PREKEYS: self._take_prekeys, PURPOSES: self._take_purpose_keys}
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
        self.ledger.on_registers(self._changed)
        await self.renew(now_ms)
        return self.keys

    async def refresh(self) -> None:
        """Use the keys that the ledger has."""
        for name in self._takes:
            known = self._seen.get(name)
            body = await self.ledger.secret(name)
            if body is not None and self._seen.get(name) == known:  # otherwise newer keys came meanwhile
                self._take(name, body)

    def _changed(self, change: RegisterChange) -> None:
        """A daemon has replaced keys, and waits until they are in use here."""
        if change.register is not Register.SECRETS or change.name not in self._takes:
            return
        body = self.ledger.replaced_secret(change.name)
        try:
            if body is not None:
                self._take(change.name, body)
        except UnsafeHome as unsafe:
            log.error("peers.keys_not_taken", extra={"reason": str(unsafe)})  # noqa: TRY400  the reason says it all

    def _take(self, name: str, body: str) -> None:
        if body != self._seen.get(name):
            self._takes[name](self._unlocked(body))
            self._seen[name] = body

    def _take_prekeys(self, data: bytes) -> None:
        self.keys.adopt(decode_prekeys(data))

    def _take_purpose_keys(self, data: bytes) -> None:
        known_ms = self.keys.void_before_ms
        self.keys.adopt_purpose_keys(decode_purpose_keys(data))
        if self.keys.void_before_ms > known_ms:
            for tell in self.on_void:
                tell()

    async def renew(self, now_ms: int) -> None:
        """Replaces keys that are due, and drops expired prekeys."""
        for _ in range(TRIES):
            await self.refresh()
            prekeys, purpose_keys = self.keys.renewed(now_ms), self.keys.renewed_purpose_keys(now_ms)
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
        before, body = self._seen.get(name), self._locked(text)
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
        """The instance's identity: the ledger's, or this home's if it was changed since."""
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
            shared = msgspec.json.decode(self._unlocked(body), type=_Identity)
            if own is None or own.hex() == shared.key:
                await self._keep(shared, own)
                return shared
            here, there = _id(own), _id(bytes.fromhex(shared.key))
            if here in {change.old_id for change in shared.past.changes}:
                await self._keep(shared, own)
                return shared
            if there not in {change.old_id for change in past.changes}:
                raise UnsafeHome(OTHER_IDENTITY)
            if await self.ledger.replace_secret(PEER_IDENTITY, body, self._encoded(_Identity(own.hex(), past))):
                log.warning("peers.identity_changed", extra={"before": there, "id": here})
        raise UnsafeHome("other daemons on this ledger change the instance's identity all the time")

    async def _keep(self, shared: _Identity, own: bytes | None) -> None:
        """Saves the identity in the home, too, for commands that work without a daemon."""
        if own is None or own.hex() != shared.key:
            await asyncio.to_thread(self._keystore.save_identity, shared.past, bytes.fromhex(shared.key))

    def _encoded(self, identity: _Identity) -> str:
        return self._locked(msgspec.json.encode(identity).decode())

    def _locked(self, text: str) -> str:
        return self._locker.lock(text.encode()).decode().strip()

    def _unlocked(self, body: str) -> bytes:
        try:
            return self._locker.unlock(body.encode())
        except KeyLocked:
            raise UnsafeHome(
                "the instance's keys in the database are locked with another home's key: identity/local.key is not "
                "the one that the daemons on this ledger have; put that one back"
            ) from None


def _id(key: bytes) -> str:
    return instance_id(public_key(key))
