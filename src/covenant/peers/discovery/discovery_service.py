"""Discovery: candidates from settings, DNS and mDNS, and the identity that an address shows.

`start` waits for nothing. Failures are logged and shown in `methods`, never raised. `scan` ends in the given time, and
two scans at the same time are one. Discovery yields candidates only: it adds, changes and trusts no peer.

Static addresses and domains are asked at the start and at every scan; mDNS listens all the time. An instance is called
because a setting names it or somebody calls `ask_identity`, never because it was announced. It answers with its name
and its bundle of keys (docs/formats/envelope.md), which is checked. That does not prove who answers, since anybody can
show another's public keys: only an answered challenge does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from covenant.model.errors import CovenantError, Invalid
from covenant.model.ids import PublicKey
from covenant.model.peers.instance import InstanceId, negotiate, parse_instance_id
from covenant.outbound.address_guard import port_is_open
from covenant.outbound.call_errors import AddressRefused, CallFailed
from covenant.outbound.http_fetcher import Fetcher
from covenant.outbound.urls import DNS_PORT, host_text, read_address, read_url
from covenant.peers.directory.peer_directory import read_peer_entry
from covenant.peers.discovery.candidates import (
    Candidate,
    CandidateConflict,
    CandidateNote,
    Candidates,
    Source,
    replace,
    shown_name,
)
from covenant.peers.discovery.dns_sd import CARD_PATH, DomainBrowser
from covenant.peers.discovery.mdns import LOOK_AGAIN_S, Announcement, Mdns
from covenant.peers.peer_settings import PeerSettings, root_of
from covenant.seal.identity import bundle_holds, fingerprint
from covenant.wire.peers import IDENTITY_PATH, Introduction, decode_introduction

IDENTITY_MS: Final = 5_000
log = logging.getLogger(__name__)
SCAN_S: Final = 5.0
SCAN_S_MAX: Final = 30.0
AT_ONCE_MAX: Final = 8


class IdentityNotShown(CovenantError):
    """The address answered, but not with a valid identity. `note` or `conflict` says why."""

    def __init__(
        self,
        message: str,
        note: CandidateNote | None = CandidateNote.NO_ANSWER,
        conflict: CandidateConflict | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.note = note
        self.conflict = conflict


async def ask_identity(fetcher: Fetcher, root: str, now_ms: int) -> Introduction:
    """Raises IdentityNotShown, AddressRefused and CallFailed."""
    asked = root + IDENTITY_PATH
    answer = await fetcher.fetch("GET", asked, headers={"accept": "application/json"}, total_ms=IDENTITY_MS)
    if answer.url != asked:
        raise IdentityNotShown("it redirects to another address")
    if answer.status != 200:
        raise IdentityNotShown(f"answered {answer.status} where an instance shows its keys")
    try:
        shown = decode_introduction(answer.body)
    except Invalid as error:
        raise IdentityNotShown(f"it shows no valid identity document: {error.message}") from error
    versions = shown.keys.versions
    if negotiate(versions) is None:
        spoken = ", ".join(map(str, versions)) or "none"
        raise IdentityNotShown(f"speaks versions {spoken}", CandidateNote.VERSION_NOT_SUPPORTED)
    if not bundle_holds(shown.keys, parse_instance_id(shown.keys.id), now_ms):
        raise IdentityNotShown("the keys that it showed are not valid", None, CandidateConflict.UNVERIFIED_KEYS)
    return shown


Known = Callable[[], Mapping[InstanceId, str | None]]


class DiscoveryMethod(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One method of discovery, as the operator sees it. `failures`: what does not work now."""

    source: Source
    on: bool
    failures: tuple[str, ...] = ()
    announced_as: str | None = None
    """For mDNS: the name under which this instance is announced."""


class Discovery:
    """Calls go through `fetcher`. A private address is called only if a setting or the local network names it."""

    def __init__(
        self,
        settings: PeerSettings,
        *,
        own_id: InstanceId,
        known: Known,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int] | None = None,
        fetcher: Fetcher,
        announcement: Announcement | None = None,
        look_again_s: float = LOOK_AGAIN_S,
    ) -> None:
        self._settings = settings
        self._known = known
        self._now_ms = now_ms
        self._monotonic_ms = monotonic_ms or now_ms
        self._fetcher = fetcher
        urls = (read_peer_entry(entry).url for entry in settings.static)
        self._static = tuple(dict.fromkeys(root_of(url) for url in urls if url is not None))
        self._candidates = Candidates(own_id)
        self._domains = DomainBrowser([read_address(text, DNS_PORT) for text in settings.dns_servers])
        self._mdns = Mdns(
            self._candidates,
            name=settings.name or own_id[-8:],
            interfaces=settings.mdns_interfaces,
            announcement=announcement,
            now_ms=now_ms,
            monotonic_ms=self._monotonic_ms,
            look_again_s=look_again_s,
        )
        self._failures: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._candidates.on_change = self._mdns.on_change = self._notify
        self._methods: asyncio.Task[None] | None = None
        self._scanning: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for url in self._static:
            self._put_static(self._static_candidate(url, CandidateNote.NOT_ASKED))
        self._methods = asyncio.create_task(self._run_methods(), name="peers.discovery")

    async def stop(self) -> None:
        tasks = [task for task in (self._scanning, self._methods) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def candidates(self) -> tuple[Candidate, ...]:
        return self._candidates.listed(self._monotonic_ms(), self._known())

    async def changed(self) -> None:
        """Waits until a candidate was found or lost, or a method began to fail."""
        await self._changed.wait()

    async def scan(self, timeout_s: float = SCAN_S) -> tuple[Candidate, ...]:
        """Asks the static addresses and the domains again, then returns all candidates. With a timeout of 0
        nobody is asked."""
        if timeout_s <= 0:
            return self.candidates()
        scanning = self._scanning
        if scanning is None or scanning.done():
            scanning = asyncio.create_task(self._scan(min(timeout_s, SCAN_S_MAX)), name="peers.discovery.scan")
            self._scanning = scanning
        # A caller that stops waiting does not end the scan, which others may share.
        await asyncio.wait([scanning])
        if not scanning.cancelled():
            scanning.result()
        return self.candidates()

    async def ask_identity(self, url: str) -> Introduction:
        """Asks an address for its keys.

        Raises IdentityNotShown, AddressRefused, CallFailed, and ValueError if it is no URL.
        """
        root = root_of(url)
        if not self.may_be_private(root):
            return await ask_identity(self._fetcher, root, self._now_ms())
        location = read_url(root)
        fetcher = self._fetcher.allowing(f"{host_text(location.host)}:{location.port}")
        try:
            return await ask_identity(fetcher, root, self._now_ms())
        finally:
            await fetcher.close()

    def methods(self) -> tuple[DiscoveryMethod, ...]:
        mdns = (self._mdns.failure,) if self._settings.mdns and self._mdns.failure else ()
        dns = tuple(f"{domain}: {why}" for domain, why in sorted(self._failures.items()))
        return (
            DiscoveryMethod(source="static", on=bool(self._static)),
            DiscoveryMethod(source="mdns", on=self._settings.mdns, failures=mdns, announced_as=self._mdns.announced_as),
            DiscoveryMethod(source="dns", on=bool(self._settings.dns_domains), failures=dns),
        )

    def may_be_private(self, url: str) -> bool:
        """Whether an instance there may be called at a private address: the settings or the local network name it."""
        root = root_of(url)
        if root in self._static:
            return True
        # Anybody on the network may have announced it, so only an address, and only a port that speaks HTTP, is called.
        location = read_url(root)
        announced = root in self._candidates.urls("mdns")
        return announced and port_is_open(location.port) and not isinstance(location.host, str)

    async def _run_methods(self) -> None:
        async with asyncio.TaskGroup() as group:
            if self._static or self._settings.dns_domains:
                group.create_task(self._run_logged(self.scan))
            if self._settings.mdns:
                group.create_task(self._run_logged(self._mdns.run))

    async def _run_logged(self, work: Callable[[], Awaitable[object]]) -> None:
        try:
            await work()
        except Exception:
            # The daemon works without discovery, and logs the failure.
            log.exception("peers.discovery.failed")

    async def _scan(self, timeout_s: float) -> None:
        free = asyncio.Semaphore(AT_ONCE_MAX)
        async with asyncio.TaskGroup() as group:
            for domain in self._settings.dns_domains:
                group.create_task(self._ask_domain(domain, timeout_s))
            for url in self._static:
                group.create_task(self._ask_static(url, free, timeout_s))

    async def _ask_domain(self, domain: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                listed = await self._domains.look_up(domain, self._now_ms())
        except TimeoutError:
            self._failures[domain] = "no answer in time"
            return
        if listed.left_out:
            log.warning("peers.dns.left_out", extra={"domain": domain, "left_out": listed.left_out})
        if listed.failure is None:
            self._failures.pop(domain, None)
        else:
            self._failures[domain] = listed.failure
            log.warning("peers.dns.failed", extra={"domain": domain, "reason": listed.failure})
        self._candidates.add_found(listed.candidates, group=f"dns:{domain}", whole=listed.failure is None)

    async def _ask_static(self, url: str, free: asyncio.Semaphore, timeout_s: float) -> None:
        candidate = self._static_candidate(url)
        try:
            async with asyncio.timeout(timeout_s), free:
                shown = await self.ask_identity(url)
            found = replace(
                candidate,
                instance_id=shown.keys.id,
                name=shown_name(shown.name),
                versions=shown.keys.versions,
                fingerprint=fingerprint(PublicKey(shown.keys.identity_key)),
            )
        except TimeoutError:
            found = replace(candidate, note=CandidateNote.NO_ANSWER, detail="no answer in time")
        except AddressRefused as refused:
            found = replace(candidate, note=CandidateNote.NOT_ALLOWED, detail=refused.detail)
        except CallFailed as failed:
            found = replace(candidate, note=CandidateNote.NO_ANSWER, detail=failed.detail)
        except IdentityNotShown as failed:
            found = replace(candidate, note=failed.note, conflict=failed.conflict, detail=failed.message)
        self._put_static(found)

    def _static_candidate(self, url: str, note: CandidateNote | None = None) -> Candidate:
        location = read_url(url)
        return Candidate(
            instance_id="",
            url=url,
            name="",
            source="static",
            host=str(location.host),
            port=location.port,
            path=CARD_PATH,
            tls=location.scheme == "https",
            seen_at_ms=self._now_ms(),
            note=note,
            announced_as=url,
        )

    def _put_static(self, candidate: Candidate) -> None:
        self._candidates.add_found((candidate,), group=f"static:{candidate.url}", whole=True)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
