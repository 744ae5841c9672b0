"""Discovery: candidates from settings, DNS and mDNS, and the identity that an address shows.

`start` waits for nothing. Failures are logged and shown in `methods`, never raised. `scan` ends in the given time, and
two scans at the same time are one. Discovery yields candidates only: it adds, changes and trusts no peer.

Static addresses and domains are asked at the start and at every scan; mDNS listens all the time. An instance is called
because a setting names it, never because it was announced. It answers with its name and its bundle of keys
(docs/formats/envelope.md), which is checked. That does not prove who answers, since anybody can show another's public
keys: only an answered challenge does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from covenant.model.errors import Refusal
from covenant.model.ids import PublicKey
from covenant.model.peers.instance import InstanceId
from covenant.outbound.urls import DNS_PORT, read_address, read_url
from covenant.peers.directory.peer_directory import UNVERIFIED_KEYS, VERSION_REFUSED, check_bundle, read_peer_entry
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
from covenant.peers.transport.peer_client import PeerConnections, fetch_introduction
from covenant.seal.identity import fingerprint

log = logging.getLogger(__name__)
IDENTITY_S: Final = 5.0
SCAN_S: Final = 5.0
SCAN_S_MAX: Final = 30.0
AT_ONCE_MAX: Final = 8


_NOTES: Final = {
    "address_refused": CandidateNote.NOT_ALLOWED,
    VERSION_REFUSED: CandidateNote.VERSION_NOT_SUPPORTED,
}
"""The note on an address by the code with which it is refused; for any other code it is `no_answer`."""
Known = Callable[[], Mapping[InstanceId, str | None]]


class DiscoveryMethod(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One method of discovery, as the operator sees it. `failures`: what does not work now."""

    source: Source
    on: bool
    failures: tuple[str, ...] = ()
    announced_as: str | None = None
    """For mDNS: the name under which this instance is announced."""


class Discovery:
    """Static addresses are called as peers are, also private ones, since a setting names them."""

    def __init__(
        self,
        settings: PeerSettings,
        *,
        own_id: InstanceId,
        known: Known,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int] | None = None,
        connections: PeerConnections,
        announcement: Announcement | None = None,
        look_again_s: float = LOOK_AGAIN_S,
    ) -> None:
        self._settings = settings
        self._known = known
        self._now_ms = now_ms
        self._monotonic_ms = monotonic_ms or now_ms
        self._connections = connections
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

    def methods(self) -> tuple[DiscoveryMethod, ...]:
        mdns = (self._mdns.failure,) if self._settings.mdns and self._mdns.failure else ()
        dns = tuple(f"{domain}: {why}" for domain, why in sorted(self._failures.items()))
        return (
            DiscoveryMethod(source="static", on=bool(self._static)),
            DiscoveryMethod(source="mdns", on=self._settings.mdns, failures=mdns, announced_as=self._mdns.announced_as),
            DiscoveryMethod(source="dns", on=bool(self._settings.dns_domains), failures=dns),
        )

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
            async with asyncio.timeout(timeout_s), free, asyncio.timeout(IDENTITY_S):
                shown = await fetch_introduction(self._connections, url)
            check_bundle(url, shown.keys, self._now_ms())
            found = replace(
                candidate,
                instance_id=shown.keys.id,
                name=shown_name(shown.name),
                versions=shown.keys.versions,
                fingerprint=fingerprint(PublicKey(shown.keys.identity_key)),
            )
        except TimeoutError:
            found = replace(candidate, note=CandidateNote.NO_ANSWER, detail="no answer in time")
        except Refusal as refusal:
            conflict = CandidateConflict.UNVERIFIED_KEYS if refusal.code == UNVERIFIED_KEYS else None
            note = _NOTES.get(refusal.code, CandidateNote.NO_ANSWER) if conflict is None else None
            found = replace(candidate, note=note, conflict=conflict, detail=refusal.message)
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
