"""The ledger on a database that several daemons share, and the identity that makes them one instance.

Every daemon on a ledger has the same key and the same operator's token. With a passphrase, the first daemon leaves both
in the database, locked with it; a daemon with an empty home and the same passphrase takes them from there. Without one,
both files are copied by whoever sets the daemons up: the database is never told a secret in the clear.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from covenant.daemon.environment import PASSPHRASE_VARIABLE, environment, machine_name
from covenant.daemon.home import UnsafeHome, read_or_make_token, save_token
from covenant.daemon.keystore import Keystore
from covenant.daemon.settings import Settings, ledger_limits
from covenant.ledger.contract.blobs import BlobStore
from covenant.ledger.contract.ledger import Ledger, SharedLedger
from covenant.model.errors import SettingsError, Unavailable
from covenant.model.extras import install_command
from covenant.outbound.s3_objects import PART_BYTES, PARTS_MAX, REFUSED, S3Credentials, S3Objects
from covenant.seal.keys import new_private_key, new_token, token_hash

IDENTITY: Final = "identity"
COPY_KEY: Final = (
    "daemons that share a ledger are one instance: copy identity/local.key and operator.token from the home of the "
    f"daemon that made it into this one, or start all of them with one {PASSPHRASE_VARIABLE}"
)


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
    """The ledger that other daemons have, too. What only one daemon can do yet is refused here."""
    if settings.peers.enabled:
        raise SettingsError("peers.enabled does not work with ledger.url yet; switch one of them off")
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
    """What is to be closed after it is left on the stack. Raises SettingsError; not for a bucket that is just away."""
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
        outbound.fetcher.meaning(f"{where.netloc.removesuffix(f':{where.port}')}:{port}"),
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
    """What another daemon has left for this one; None without a passphrase."""
    body = await ledger.secret(IDENTITY) if keystore.has_passphrase else None
    if body is None:
        return None
    opened = await asyncio.to_thread(keystore.unseal, body, "the key in the database")
    shared = msgspec.json.decode(opened, type=_Shared)
    return InstanceSecrets(bytes.fromhex(shared.key), shared.token)


async def _leave(ledger: SharedLedger, keystore: Keystore, made: InstanceSecrets) -> InstanceSecrets | None:
    """Leave it for the others, unless somebody was first: then theirs counts. None without a passphrase."""
    if not keystore.has_passphrase:
        return None
    text = msgspec.json.encode(_Shared(made.key.hex(), made.token)).decode()
    await ledger.keep_secret(IDENTITY, await asyncio.to_thread(keystore.seal, text))
    return await _left(ledger, keystore)


async def _other_tokens(ledger: Ledger, token: str) -> bool:
    """Whether the operator has a live token, and this is not the one: nobody revokes that of the others."""
    live = [each for each in await ledger.identities() if each.operator and each.revoked_at_ms is None]
    return bool(live) and all(each.token_sha256 != token_hash(token) for each in live)
