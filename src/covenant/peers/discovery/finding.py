"""Discovery: the ways that are switched on, and what they have found.

Promises: `start` waits for nothing, and whatever fails is logged and shown in `ways`, never raised; `scan` ends in the
time it is given; two scans at once are one. All of it gives candidates: no peer is added, changed or trusted here.

Static addresses and domains are asked when discovery starts and at every scan; the local network is listened to all the
time. An instance is called by settings or when somebody asks `who_is` there, never because it was announced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from covenant.model.ids import PublicKey
from covenant.model.peers.instance import InstanceId
from covenant.outbound.allowlist import port_is_open
from covenant.outbound.failures import AddressRefused, CallFailed
from covenant.outbound.fetching import Fetcher
from covenant.outbound.location import host_text, read_address, read_url
from covenant.outbound.resolving import DNS_PORT
from covenant.peers.discovery.candidate import Candidate, Candidates, Conflict, Note, Source, replace
from covenant.peers.discovery.dns_sd import DomainBrowser
from covenant.peers.discovery.mdns import LOOK_AGAIN_S, Announcement, Mdns
from covenant.peers.discovery.probing import NotShown, Shown, ask_identity
from covenant.peers.discovery.settings import DiscoverySettings, root_of
from covenant.peers.discovery.txt import CARD_PATH
from covenant.seal.identity import fingerprint

log = logging.getLogger(__name__)

SCAN_S: Final = 5.0
SCAN_S_MAX: Final = 30.0
AT_ONCE_MAX: Final = 8

Known = Callable[[], Mapping[InstanceId, str | None]]
"""The peers, and where each is called."""


class Way(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One way of finding, for the operator. `failures` are what does not work now, in words."""

    source: Source
    on: bool
    failures: tuple[str, ...] = ()
    announced_as: str | None = None
    """By mDNS: the name under which we are announced."""


class Discovery:
    """Calls by `fetcher`; at addresses that are not public only where an instance is by settings, by what the local
    network said, or as `meant` says of a URL (in its one spelling) that somebody named otherwise."""

    def __init__(
        self,
        settings: DiscoverySettings,
        *,
        own_id: InstanceId,
        known: Known,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int] | None = None,
        fetcher: Fetcher,
        meant: Callable[[str], bool] = lambda _url: False,
        announcement: Announcement | None = None,
        look_again_s: float = LOOK_AGAIN_S,
    ) -> None:
        self._settings = settings
        self._known = known
        self._now_ms = now_ms
        self._monotonic_ms = monotonic_ms or now_ms
        self._fetcher = fetcher
        self._meant = meant
        self._static = tuple(dict.fromkeys(map(root_of, settings.static)))
        self._candidates = Candidates(own_id)
        self._domains = DomainBrowser([read_address(text, DNS_PORT) for text in settings.dns_servers])
        self._mdns = Mdns(
            self._candidates,
            name=settings.name,
            interfaces=settings.mdns_interfaces,
            announcement=announcement,
            now_ms=now_ms,
            monotonic_ms=self._monotonic_ms,
            look_again_s=look_again_s,
        )
        self._failures: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._candidates.on_change = self._mdns.on_change = self._tell
        self._life: asyncio.Task[None] | None = None
        self._scanning: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for url in self._static:
            self._keep_static(self._of_static(url, note=Note.NOT_ASKED))
        self._life = asyncio.create_task(self._live(), name="peers.discovery")

    async def stop(self) -> None:
        """Says goodbye to the local network."""
        for task in (self._scanning, self._life):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def candidates(self) -> tuple[Candidate, ...]:
        """What is known now, the last seen first."""
        return self._candidates.listed(self._monotonic_ms(), self._known())

    async def changed(self) -> None:
        """Waits until something has been heard, found, lost, or begun to fail."""
        await self._changed.wait()

    async def scan(self, timeout_s: float = SCAN_S) -> tuple[Candidate, ...]:
        """Asks the static addresses and the domains again, and tells all that is known after that. With no time at all
        nobody is asked."""
        if timeout_s <= 0:
            return self.candidates()
        scanning = self._scanning
        if scanning is None or scanning.done():
            scanning = asyncio.create_task(self._scan(min(timeout_s, SCAN_S_MAX)), name="peers.discovery.scan")
            self._scanning = scanning
        # Whoever does not wait any longer does not end the scan of those who do; and it may have ended with us.
        await asyncio.wait([scanning])
        if not scanning.cancelled():
            scanning.result()
        return self.candidates()

    async def who_is(self, url: str) -> Shown:
        """Asks whoever is there for its keys. Raises NotShown, AddressRefused, CallFailed; ValueError for no URL."""
        root = root_of(url)
        if not self.vouches(root) and not self._meant(root):
            return await ask_identity(self._fetcher, root, self._now_ms)
        location = read_url(root)
        fetcher = self._fetcher.meaning(f"{host_text(location.host)}:{location.port}")
        try:
            return await ask_identity(fetcher, root, self._now_ms)
        finally:
            await fetcher.close()

    def ways(self) -> tuple[Way, ...]:
        mdns = (self._mdns.failure,) if self._settings.mdns and self._mdns.failure else ()
        dns = tuple(f"{domain}: {why}" for domain, why in sorted(self._failures.items()))
        return (
            Way(source="static", on=bool(self._static)),
            Way(source="mdns", on=self._settings.mdns, failures=mdns, announced_as=self._mdns.announced_as),
            Way(source="dns", on=bool(self._settings.dns_domains), failures=dns),
        )

    def vouches(self, url: str) -> bool:
        """Whether an instance is there by settings, or by what the local network says: so it may be called inside."""
        root = root_of(url)
        if root in self._static:
            return True
        # Anybody on the network may have announced it, so only at a port that speaks HTTP, and only as an address.
        location = read_url(root)
        announced = root in self._candidates.urls("mdns")
        return announced and port_is_open(location.port) and not isinstance(location.host, str)

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            if self._static or self._settings.dns_domains:
                group.create_task(self._kept_from_harm(self._first_scan))
            if self._settings.mdns:
                group.create_task(self._kept_from_harm(self._mdns.run))

    async def _kept_from_harm(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception:
            # Finding others is a convenience: the daemon goes on without it, and says so.
            log.exception("peers.discovery.failed")

    async def _first_scan(self) -> None:
        await self.scan()

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
        self._candidates.found(listed.candidates, group=f"dns:{domain}", whole=listed.failure is None)

    async def _ask_static(self, url: str, free: asyncio.Semaphore, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s), free:
                self._keep_static(_shown_at(await self.who_is(url), self._of_static(url)))
        except TimeoutError:
            self._keep_static(self._of_static(url, note=Note.NO_ANSWER, detail="no answer in time"))
        except AddressRefused as refused:
            self._keep_static(self._of_static(url, note=Note.NOT_ALLOWED, detail=refused.detail))
        except CallFailed as failed:
            self._keep_static(self._of_static(url, note=Note.NO_ANSWER, detail=failed.detail))
        except NotShown as failed:
            self._keep_static(_not_shown_at(failed, self._of_static(url)))

    def _of_static(self, url: str, *, note: Note | None = None, detail: str = "") -> Candidate:
        location = read_url(url)
        return Candidate(
            instance_id="",
            url=url,
            name="",
            source="static",
            host=str(location.host),
            port=location.port,
            path=CARD_PATH,
            tls=url.startswith("https:"),
            seen_at_ms=self._now_ms(),
            note=note,
            detail=detail,
            announced_as=url,
        )

    def _keep_static(self, candidate: Candidate) -> None:
        self._candidates.found((candidate,), group=f"static:{candidate.url}", whole=True)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _shown_at(shown: Shown, place: Candidate) -> Candidate:
    return replace(
        place,
        instance_id=shown.bundle.id,
        name=shown.name,
        versions=shown.bundle.versions,
        fingerprint=fingerprint(PublicKey(shown.bundle.identity_key)),
    )


def _not_shown_at(failed: NotShown, place: Candidate) -> Candidate:
    match failed.code:
        case "unverified_keys":
            return replace(place, conflict=Conflict.UNVERIFIED_KEYS, detail=failed.message)
        case "version_not_supported":
            return replace(place, note=Note.VERSION_NOT_SUPPORTED, detail=failed.message)
        case "no_identity":
            return replace(place, note=Note.NO_ANSWER, detail=failed.message)
