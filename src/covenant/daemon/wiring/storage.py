"""The home of a daemon: its ledger, its keys and its operator.

The ledger's lock lets one daemon in. Signatures are checked once, here: those of every live grant, and of the audit
rows that are new since the last start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from covenant.daemon.environment import environment, machine_name, monotonic_ms, now_ms, program_environment
from covenant.daemon.home import KEY_NAME, UnsafeHome, make_home, read_or_make_token, save_token
from covenant.daemon.home_backup import SegmentShipper, command_words
from covenant.daemon.keystore import OPERATOR_DISPLAY, Keystore, admit_operator, find_passphrase
from covenant.daemon.schedulers import ArchiveReport, AuditAnchors, Maintenance, Scheduler, Singleton, Sweeper
from covenant.daemon.settings import Settings, ledger_limits
from covenant.daemon.telemetry import Log
from covenant.daemon.wiring.peer_keys import SharedKeys
from covenant.daemon.wiring.postgres_storage import (
    InstanceSecrets,
    SharedTokenUpdater,
    agree_on_secrets,
    check_instance,
    open_shared_blobs,
    open_shared_ledger,
)
from covenant.exchange.access.identities import operator_agent
from covenant.exchange.access.principals import Principal
from covenant.ledger.clock import uuid_source
from covenant.ledger.contract.blobs import BlobStore
from covenant.ledger.contract.ledger import Ledger, SharedLedger
from covenant.ledger.embedded.backup_file import StagedBackups, read_incarnation
from covenant.ledger.embedded.blob_folder import FOLDER_NAME, BlobFolder
from covenant.ledger.embedded.disk import unusable_by
from covenant.ledger.embedded.engine import EmbeddedLedger
from covenant.ledger.embedded.journal.recovery import lock_home
from covenant.ledger.embedded.journal.shipped_segments import ShippedSegments
from covenant.ledger.embedded.moved_mark import mark_served
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.identity_commands import WriteAuditRow
from covenant.model.errors import SettingsError, Unavailable
from covenant.model.ids import AgentId, PublicKey
from covenant.peers.directory.instance_keys import InstanceKeys
from covenant.seal.keys import new_private_key, new_token, verify_grant

MAINTENANCE_INTERVAL_MS: Final = 5_000
ANCHOR_INTERVAL_MS: Final = 60_000


class Clocks(NamedTuple):
    """The wall clock and the monotonic clock, both in milliseconds."""

    now_ms: Callable[[], int] = now_ms
    monotonic_ms: Callable[[], int] = monotonic_ms


SYSTEM_CLOCKS: Final = Clocks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    ledger: Ledger
    shared_ledger: SharedLedger | None
    """The same ledger, if other daemons share it."""
    key: bytes
    """The private key of this instance."""
    instance_keys: InstanceKeys | None
    """The keys that other instances seal messages to. None: peers are switched off."""
    shared_keys: SharedKeys | None
    """These keys in the ledger, if other daemons share it."""
    operator: Principal
    blobs: BlobStore
    backups: StagedBackups | None
    """None: the ledger is on PostgreSQL."""
    shipper: SegmentShipper | None
    """None: segments are not shipped."""
    schedulers: tuple[Scheduler, ...]

    @property
    def shared(self) -> bool:
        """Whether other daemons have the same ledger."""
        return self.shared_ledger is not None

    def singleton(self, name: str, scheduler: Scheduler) -> Scheduler:
        """Runs a scheduler at only one of the daemons that share this ledger."""
        return Singleton(name, scheduler, self.ledger) if self.shared else scheduler


@asynccontextmanager
async def open_storage(
    settings: Settings,
    log: Log,
    *,
    clocks: Clocks = SYSTEM_CLOCKS,
    archive_process: bool = True,
    begins_ledger: bool = False,
) -> AsyncIterator[Storage]:
    """Raises HomeLocked, Damaged, HomeUnusable, UnsafeHome or SettingsError.

    `begins_ledger`: an empty database is taken although the home has a ledger elsewhere.
    """
    home = settings.home
    make_home(home)
    keystore = Keystore(home, find_passphrase(environment()))
    key = await asyncio.to_thread(keystore.read_key)
    await check_instance(settings, keystore, key, begins_ledger=begins_ledger)
    shipped = _shipped_segments(settings)
    async with (
        _open_ledger(settings, log, clocks, archive_process=archive_process, shipped=shipped) as ledger,
        AsyncExitStack() as stack,
    ):
        key, operator = await _admit(settings, ledger, keystore, key, log)
        agent = operator.agent
        if settings.ledger.url:
            await asyncio.to_thread(mark_served, home, settings.ledger.url, clocks.now_ms())
        await _report(ledger, log)
        backups = shipper = None
        blobs: BlobStore
        if isinstance(ledger, EmbeddedLedger):
            if settings.blobs.url:
                raise SettingsError("blobs.url needs ledger.url: without a database, files are in the home")
            blobs = await asyncio.to_thread(_open_blobs, home)
        else:
            blobs = await open_shared_blobs(settings, stack)
        stack.push_async_callback(blobs.close)
        if isinstance(ledger, EmbeddedLedger):
            backups = StagedBackups(home, ledger, uuid_source(), shipped=shipped)
            await backups.clear()
            shipper = _make_shipper(settings, ledger, shipped, log) if shipped is not None else None
        instance_keys = shared_keys = None
        if settings.peers.enabled:
            hybrid = settings.peers.suite == "hybrid"
            if isinstance(ledger, EmbeddedLedger):
                instance_keys = await _read_instance_keys(key, keystore, ledger, clocks, hybrid=hybrid, by=agent)
            else:
                shared_keys = SharedKeys(ledger, keystore, key)
                instance_keys = await shared_keys.open(clocks.now_ms(), hybrid=hybrid)
                if instance_keys.changes and shared_keys.past.noted != instance_keys.id:
                    await _audit_identity(instance_keys, ledger, agent)
                    await shared_keys.note_identity()
        yield Storage(
            ledger=ledger,
            shared_ledger=None if isinstance(ledger, EmbeddedLedger) else ledger,
            key=key,
            instance_keys=instance_keys,
            shared_keys=shared_keys,
            operator=operator,
            blobs=blobs,
            backups=backups,
            shipper=shipper,
            schedulers=(
                *_schedulers(ledger, agent, settings, log),
                *((shipper,) if shipper is not None else ()),
                *(() if isinstance(ledger, EmbeddedLedger) else (SharedTokenUpdater(home, ledger, keystore, log=log),)),
            ),
        )


async def _admit(
    settings: Settings, ledger: EmbeddedLedger | SharedLedger, keystore: Keystore, key: bytes | None, log: Log
) -> tuple[bytes, Principal]:
    """The instance's key, and its operator. `key` is the home's key, if it has one."""
    if isinstance(ledger, EmbeddedLedger):
        key, token = await _own_secrets(ledger, keystore, settings.home, key)
    else:
        key, token = await agree_on_secrets(settings, ledger, keystore, key)
    if await asyncio.to_thread(keystore.lock_key):
        log.info("identity.locked", file=KEY_NAME)
    agent = operator_agent(OPERATOR_DISPLAY, key)
    await check_grants(ledger, agent.pubkey)
    return key, await admit_operator(ledger, agent, token, partial(save_token, settings.home))


def _schedulers(
    ledger: EmbeddedLedger | SharedLedger, agent: AgentId, settings: Settings, log: Log
) -> tuple[Scheduler, ...]:
    return (
        Sweeper(ledger, agent, log=log, interval_ms=settings.daemon.sweep_interval_ms),
        Maintenance(ledger.maintain, log=log, interval_ms=MAINTENANCE_INTERVAL_MS),
        Singleton("audit_anchors", AuditAnchors(ledger, agent, log=log, interval_ms=ANCHOR_INTERVAL_MS), ledger),
        ArchiveReport(ledger, log=log, interval_ms=MAINTENANCE_INTERVAL_MS),
    )


def _open_blobs(home: Path) -> BlobFolder:
    try:
        return BlobFolder(home / FOLDER_NAME, uuid_source())
    except OSError as error:
        raise unusable_by(error, home / FOLDER_NAME) from error


async def _own_secrets(ledger: Ledger, keystore: Keystore, home: Path, key: bytes | None) -> InstanceSecrets:
    token = read_or_make_token(home, new_token)
    if key is None:
        if await ledger.identities():
            raise UnsafeHome(
                f"{KEY_NAME} is missing, and this home's grants are signed with it; put it back from a backup, "
                "or start with an empty home"
            )
        key = await asyncio.to_thread(keystore.make_key, new_private_key)
    return InstanceSecrets(key, token)


def _shipped_segments(settings: Settings) -> ShippedSegments | None:
    """None: nothing is shipped."""
    if not settings.backup.command or settings.ledger.url:
        return None
    command_words(settings.backup.command)
    return ShippedSegments(settings.home, kept_bytes_max=settings.backup.kept_bytes_max)


def _make_shipper(settings: Settings, ledger: EmbeddedLedger, shipped: ShippedSegments, log: Log) -> SegmentShipper:
    return SegmentShipper(
        ledger,
        shipped,
        settings.backup,
        incarnation=read_incarnation(settings.home).id,
        variables=program_environment(),
        log=log,
    )


@asynccontextmanager
async def _open_ledger(
    settings: Settings, log: Log, clocks: Clocks, *, archive_process: bool, shipped: ShippedSegments | None
) -> AsyncIterator[EmbeddedLedger | SharedLedger]:
    async with AsyncExitStack() as stack:
        ledger: EmbeddedLedger | SharedLedger
        if settings.ledger.url:
            stack.callback(lock_home(settings.home).close)
            ledger = await open_shared_ledger(settings, clocks)
        else:
            ledger = await open_ledger(
                settings.home,
                clock=clocks.now_ms,
                monotonic_ms=clocks.monotonic_ms,
                clock_pause_ms=settings.daemon.clock_pause_ms,
                limits=ledger_limits(settings),
                node=settings.daemon.node or machine_name(),
                durability=settings.ledger.durability,
                segment_bytes=settings.ledger.segment_bytes,
                archive_process=archive_process,
                shipped=shipped,
            )
        stack.callback(log.info, "ledger.closed")
        stack.push_async_callback(ledger.close)
        yield ledger


async def _read_instance_keys(
    key: bytes, keystore: Keystore, ledger: Ledger, clocks: Clocks, *, hybrid: bool, by: AgentId
) -> InstanceKeys:
    """The instance's keys, with a fresh prekey if one is due.

    `key` is the home's. A new home gets another key for its identity.
    """
    prekeys = await asyncio.to_thread(keystore.read_prekeys)
    past = await asyncio.to_thread(keystore.read_past)
    own = await asyncio.to_thread(keystore.read_instance_key)
    if own is None and not prekeys and not past.changes and not ledger.peers():
        own = await asyncio.to_thread(keystore.make_instance_key, new_private_key)
    keys = InstanceKeys(
        own or key,
        prekeys,
        keystore.save_prekeys,
        changes=past.changes,
        revocations=past.revocations,
        salt_key=key,
        hybrid=hybrid,
        purpose_keys=await asyncio.to_thread(keystore.read_purpose_keys),
        save_purpose_keys=keystore.save_purpose_keys,
    )
    await asyncio.to_thread(keys.rotate, clocks.now_ms())
    if keys.changes and past.noted != keys.id:
        await _audit_identity(keys, ledger, by)
        await asyncio.to_thread(keystore.note_identity, msgspec.structs.replace(past, noted=keys.id))
    return keys


async def _audit_identity(keys: InstanceKeys, ledger: Ledger, by: AgentId) -> None:
    """Writes to the audit that the identity was changed while no daemon ran.

    After a crash the row may be written twice.
    """
    before = keys.former[-1]
    row: dict[str, object] = {
        "type": "identity_rotated",
        "before": before.id,
        "id": keys.id,
        "compromised": before.dead,
        "changed_at_ms": keys.changes[-1].issued_at_ms,
    }
    await ledger.commit(WriteAuditRow(by=by, row=row))


async def _report(ledger: Ledger, log: Log) -> None:
    """Logs what an operator should know about the ledger that was just opened."""
    counts = await ledger.counts()
    log.info("ledger.opened", boot=ledger.boot, queued=counts.queued, in_flight=counts.leased)
    torn = ledger.torn if isinstance(ledger, EmbeddedLedger) else None
    if torn is not None:
        log.warning("journal.torn_tail_cut", file=torn.file, line=torn.line, length=torn.length, kept=torn.kept)
    if counts.holders_lost:
        log.warning("lease.holders_lost", count=counts.holders_lost, look="covenant a2a status")
    try:
        audit = await ledger.audit_verify_new()
    except Unavailable as refusal:
        # A machine that is too busy to archive now still serves; `covenant audit verify` checks later.
        log.warning("audit.unverified", why=refusal.message, look="covenant audit verify")
        return
    if not audit.valid:
        # The daemon keeps serving: somebody who can damage the audit must not be able to stop the work as well.
        log.warning("audit.invalid", failures="; ".join(audit.failures), look="covenant audit verify")


async def check_grants(ledger: Ledger, operator: PublicKey) -> None:
    """Checks that this home's operator signed every live grant. Requests then trust the ledger."""
    now = ledger.now_ms()
    forged = [
        grant
        for grant in await ledger.grants()
        if grant.live(now) and not (grant.granted_by.pubkey == operator and verify_grant(grant))
    ]
    if forged:
        named = "\n".join(f"  {grant.subject.display} {grant.action} {grant.signature_b58}" for grant in forged)
        raise UnsafeHome(
            "these grants are not signed by this home's key, so the journal or identity/local.key was changed; "
            f"put both back from a backup:\n{named}"
        )
