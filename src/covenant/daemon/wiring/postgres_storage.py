"""The ledger on a database that several daemons share: opened, moved in and out, marked as restored.

Every daemon on a ledger has the same key and the same operator's token. With a passphrase, the first daemon leaves both
in the database, locked with it; a daemon with an empty home and the same passphrase takes them from there. Without a
passphrase, the operator copies both files. The database never has a secret in the clear.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from covenant.daemon.environment import PASSPHRASE_VARIABLE, environment, machine_name, now_ms
from covenant.daemon.home import (
    KEY_NAME,
    LOST_COMMITS_NAME,
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
    find_passphrase,
)
from covenant.daemon.settings import Settings, ledger_limits
from covenant.daemon.telemetry import Log
from covenant.daemon.wiring.peer_keys import save_stored_keys, stored_keys
from covenant.exchange.access.identities import operator_agent
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.blobs import BlobStore
from covenant.ledger.contract.ledger import Ledger, SharedLedger
from covenant.ledger.embedded.moved_mark import find_own_ledger, read_mark
from covenant.ledger.embedded.open import CLOCK_NAME, load_ages, save_ages
from covenant.mailbox import local_agent
from covenant.model.errors import CovenantError, HomeUnusable, SettingsError, Unavailable
from covenant.model.extras import install_command
from covenant.outbound.s3_objects import PART_BYTES, PARTS_MAX, REFUSED, S3Credentials, S3Objects
from covenant.seal.keys import (
    new_private_key,
    new_token,
    token_hash,
)

IDENTITY: Final = "identity"
TOKEN_INTERVAL_MS: Final = 2_000
"""The pause between two checks whether the operator's token was rotated here."""
COPY_KEY: Final = (
    "daemons that share a ledger are one instance: copy identity/local.key and operator.token from the home of the "
    f"daemon that made it into this one, or start all of them with one {PASSPHRASE_VARIABLE}"
)


class InstanceSecrets(NamedTuple):
    key: bytes
    token: str


class _StoredSecrets(msgspec.Struct, frozen=True):
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
    postgres, path = await asyncio.to_thread(import_postgres, "open_postgres"), settings.home / CLOCK_NAME
    ledger: SharedLedger = await postgres.open_postgres_ledger(
        settings.ledger.url,
        clock=clocks.now_ms,
        monotonic_ms=clocks.monotonic_ms,
        clock_pause_ms=settings.daemon.clock_pause_ms,
        keep=partial(save_ages, path),
        kept=await asyncio.to_thread(load_ages, path),
        limits=ledger_limits(settings),
        durability=settings.ledger.durability,
        node=node_name(settings),
        lease_ms=settings.ledger.node_lease_ms,
        pooler=settings.ledger.pooler,
        lost_path=settings.home / LOST_COMMITS_NAME,
    )
    return ledger


async def open_shared_blobs(settings: Settings, stack: AsyncExitStack) -> BlobStore:
    """The blob store.

    Resources to close later are put on the stack. Raises SettingsError, but not for a bucket that cannot be reached.
    """
    postgres = await asyncio.to_thread(import_postgres, "open_postgres")
    bucket = await _open_bucket(settings, stack) if settings.blobs.url else None
    try:
        blobs: BlobStore = await postgres.open_blob_rows(
            settings.ledger.url, pooler=settings.ledger.pooler, upload_bytes=bucket
        )
    except BaseException:
        if bucket is not None:
            await bucket.close()
        raise
    return blobs


async def _open_bucket(settings: Settings, stack: AsyncExitStack) -> S3Objects:
    from covenant.daemon.connect import open_outbound  # noqa: PLC0415  (not needed without a bucket)

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
        clock_s=lambda: now_ms() / 1000,
        chance=random.random,
    )
    try:
        await bucket.check()
    except Unavailable as error:
        if error.code == REFUSED:
            await bucket.close()
            raise SettingsError(error.message) from error
    return bucket


async def check_instance(
    settings: Settings, keystore: Keystore, key: bytes | None, *, begins_ledger: bool = False
) -> None:
    """Refuses the ledger of another instance before this daemon joins it, as that fences the daemon of the same name.

    Refuses an empty database, too, if the home's ledger is or was elsewhere, unless this `begins_ledger`. `key` is the
    home's key. Raises UnsafeHome, LockedHome, HomeUnusable and DatabaseUnusable. Does nothing without a database.
    """
    if not settings.ledger.url:
        return
    admin = await asyncio.to_thread(import_postgres, "database_admin")
    instance = await admin.read_instance(settings.ledger.url)
    if instance.is_empty and not begins_ledger:
        await asyncio.to_thread(_check_no_ledger, settings, instance.hidden_in)
    live = {each.token_sha256: each for each in instance.identities if each.operator and each.revoked_at_ms is None}
    if not live:
        return
    path = settings.home / TOKEN_NAME
    token = await asyncio.to_thread(read_token, path) if path.exists() else None
    if key is None or token is None or token_hash(token) not in live:
        shared = await _unseal_secrets(keystore, instance.secrets.get(IDENTITY))
        if shared is None or token_hash(shared.token) not in live or key not in (None, shared.key):
            raise await asyncio.to_thread(_other_instance, settings)
    elif live[token_hash(token)].agent.pubkey != operator_agent(OPERATOR_DISPLAY, key).pubkey:
        raise await asyncio.to_thread(_other_instance, settings)


def _check_no_ledger(settings: Settings, hidden_in: str | None) -> None:
    """Raises HomeUnusable if the home has a ledger already, which is not in the empty database.

    `hidden_in`: a schema that has the tables of a ledger, outside of the role's search_path.
    """
    home, begin = settings.home, "begin a new one there with `covenant ledger init`"
    own = find_own_ledger(home, settings.ledger.url)
    if own is not None:
        why = f"the database has no ledger, and that of {home} is {own.place}: {own.next_step}, or {begin}"
        raise HomeUnusable(why, None)
    if read_mark(home) is not None and hidden_in is not None:
        why = f"{home} was served on this database, and the tables of a ledger are in its schema {hidden_in}, outside"
        fix = f"set the search_path to that schema, and grant USAGE there, or {begin}"
        raise HomeUnusable(f"{why} of the role's search_path: {fix}", None)
    if read_mark(home) is not None:
        why = f"the database has no ledger any more, though {home} was served on it: restore it from its backup"
        raise HomeUnusable(f"{why} and run `covenant ledger restored`, or {begin}", None)


def _other_instance(settings: Settings) -> UnsafeHome:
    own = find_own_ledger(settings.home, settings.ledger.url)
    if own is None:
        return UnsafeHome(COPY_KEY)
    return UnsafeHome(
        f"the database has the ledger of another instance, and that of {settings.home} is {own.place}: "
        f"{own.next_step}, or name the home of a daemon of that instance, or an empty one, with --home"
    )


async def agree_on_secrets(
    settings: Settings, ledger: SharedLedger, keystore: Keystore, key: bytes | None
) -> InstanceSecrets:
    """The key and the token that all daemons on the ledger have; both are in the home from then on.

    `key` is the home's key. Raises UnsafeHome and LockedHome.
    """
    shared = await _read_shared_secrets(ledger, keystore)
    if key is not None:
        token = await asyncio.to_thread(read_or_make_token, settings.home, new_token)
        if shared is None:
            if not await _other_tokens(ledger, token):
                await _share_secrets(ledger, keystore, InstanceSecrets(key, token))
        elif shared.key == key and await _other_tokens(ledger, token) and not await _other_tokens(ledger, shared.token):
            save_token(settings.home, token := shared.token)
        if await _other_tokens(ledger, token):
            raise UnsafeHome(COPY_KEY)
        return InstanceSecrets(key, token)
    if shared is None:
        if await ledger.identities():
            raise UnsafeHome(COPY_KEY)
        made = InstanceSecrets(new_private_key(), new_token())
        shared = await _share_secrets(ledger, keystore, made) or made
    await asyncio.to_thread(keystore.make_key, lambda: shared.key)
    save_token(settings.home, shared.token)
    return shared


async def _read_shared_secrets(ledger: SharedLedger, keystore: Keystore) -> InstanceSecrets | None:
    """The secrets in the database; None if there are none, or without a passphrase."""
    return await _unseal_secrets(keystore, await ledger.secret(IDENTITY))


async def _unseal_secrets(keystore: Keystore, body: str | None) -> InstanceSecrets | None:
    if body is None or not keystore.has_passphrase:
        return None
    opened = await asyncio.to_thread(keystore.unseal, body, "the key in the database")
    shared = msgspec.json.decode(opened, type=_StoredSecrets)
    return InstanceSecrets(bytes.fromhex(shared.key), shared.token)


async def _share_secrets(ledger: SharedLedger, keystore: Keystore, made: InstanceSecrets) -> InstanceSecrets | None:
    """Stores the secrets for the other daemons, unless another daemon was first. Returns those that are stored.

    None without a passphrase.
    """
    if not keystore.has_passphrase:
        return None
    await ledger.keep_secret(IDENTITY, await asyncio.to_thread(keystore.seal, _encode_secrets(made)))
    return await _read_shared_secrets(ledger, keystore)


class SharedTokenUpdater:
    """Puts the operator's token into the database again after it was rotated here. Needs a passphrase."""

    def __init__(
        self, home: Path, ledger: SharedLedger, keystore: Keystore, *, log: Log, interval_ms: int = TOKEN_INTERVAL_MS
    ) -> None:
        self._path = home / TOKEN_NAME
        self._log = log
        self._interval_ms = interval_ms
        self._ledger = ledger
        self._keystore = keystore
        self._token = ""
        """The token in the database, as far as this daemon knows."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            try:
                await self.step()
            except (CovenantError, OSError) as error:  # the next step may succeed
                self._log.warning("operator.token_not_shared", reason=str(error))

    async def step(self) -> None:
        token = await asyncio.to_thread(read_token, self._path)
        if not self._keystore.has_passphrase or token == self._token or await _other_tokens(self._ledger, token):
            return
        body = await self._ledger.secret(IDENTITY)
        shared = await _unseal_secrets(self._keystore, body)
        if body is not None and shared is not None and shared.token != token:
            sealed = await asyncio.to_thread(self._keystore.seal, _encode_secrets(shared._replace(token=token)))
            await self._ledger.replace_secret(IDENTITY, body, sealed)
            return  # the next step finds out whether another daemon was first
        self._token = token


def _encode_secrets(secrets: InstanceSecrets) -> str:
    return msgspec.json.encode(_StoredSecrets(secrets.key.hex(), secrets.token)).decode()


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
    forget_lost = import_postgres("lost_commits").forget_lost_commits
    from covenant.ledger.transfer.ledger_move import Mover, check_has_ledger  # noqa: PLC0415  (it needs the extra)

    if not out:
        check_has_ledger(settings.home)
    make_home(settings.home)
    keystore = Keystore(settings.home, find_passphrase(environment()))
    key = await asyncio.to_thread(keystore.read_key)
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
        secrets={} if out else await asyncio.to_thread(stored_keys, keystore, key),
        durability=settings.ledger.durability,
        lost_path=settings.home / LOST_COMMITS_NAME,
    )
    if not out:
        moved = await mover.move_in()
        await asyncio.to_thread(keystore.drop_prekeys)
        await asyncio.to_thread(forget_lost, settings.home / LOST_COMMITS_NAME)
        return moved
    await check_instance(settings, keystore, key)
    await _save_keys(settings, keystore, key)
    measures = await mover.move_out()
    await _save_keys(settings, keystore, key)  # a daemon may have replaced some before it stopped
    await asyncio.to_thread(forget_lost, settings.home / LOST_COMMITS_NAME)
    return measures


async def _save_keys(settings: Settings, keystore: Keystore, key: bytes) -> None:
    instance = await import_postgres("database_admin").read_instance(settings.ledger.url)
    await asyncio.to_thread(save_stored_keys, instance.secrets, keystore, key)
