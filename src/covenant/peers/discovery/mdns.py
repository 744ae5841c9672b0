"""Instances on the local network (RFC 6762): announces this one, and listens for others.

Starting waits for nothing and never fails: a network that is not there, or changes, is tried again, and `failure` says
what is wrong meanwhile. When `run` is canceled, a goodbye is sent. An announcement becomes a candidate, and nothing
else. A candidate that says goodbye is dropped, and so is one that is silent for longer than its announcement is valid.

Anybody can announce anything, so the work for it is bounded. Link-local addresses are skipped, and loopback counts only
if we listen on it. A host that is not under `local` is left to DNS. zeroconf is imported when `run` begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address
from typing import TYPE_CHECKING, Final

from covenant.model.rate_limits import Backoff
from covenant.outbound.urls import Address, InvalidUrl, host_text, read_host, special_use
from covenant.peers.discovery.candidates import Candidate, CandidateNote, Candidates, shown_name
from covenant.peers.discovery.dns_sd import TxtRecord, decode_txt, encode_txt
from covenant.peers.peer_settings import root_of

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

log = logging.getLogger(__name__)
SERVICE_TYPE: Final = "_friday-a2a._tcp.local."
SERVICES_MAX: Final = 1_000
"""How many service names are followed at once."""
ASKERS: Final = 8
READ_MS: Final = 3_000
ADDRESSES_MAX: Final = 16
CLOSE_S: Final = 3.0
LOOK_AGAIN_S: Final = 60.0
"""How often known services are asked again, and how often this machine's addresses are compared."""
RETRIES: Final = Backoff(2.0, longest=60.0)
SETTLE_S: Final = 1.5
"""RFC 6762, 10.2: a replaced record is still valid for a second."""
LABEL_BYTES_MAX: Final = 63
WILDCARDS: Final = frozenset({"", "0.0.0.0", "::", "*"})  # noqa: S104  (read from settings, never listened on here)


def addresses_of(interfaces: Sequence[str]) -> list[Address]:
    """The addresses of the named interfaces, or of all but the loopback if none is named. Asks the system."""
    import ifaddr  # noqa: PLC0415  (needed where mDNS is on)

    found: set[Address] = set()
    for adapter in ifaddr.get_adapters():
        addresses = {ip_address(each.ip if isinstance(each.ip, str) else each.ip[0]) for each in adapter.ips}
        if not interfaces:
            found |= {each for each in addresses if not each.is_loopback}
        elif adapter.name in interfaces:
            found |= addresses
        else:
            found |= {each for each in addresses if str(each) in interfaces}
    return sorted(found, key=lambda each: (each.version, each.packed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    record: TxtRecord
    port: int
    listen_addresses: tuple[str, ...] = ("0.0.0.0",)  # noqa: S104  (see WILDCARDS)
    """The addresses that this daemon listens on: only there it is announced. A wildcard means all interfaces."""
    host: str = ""
    """The host name of our certificate, if there is one; otherwise a name under `local`."""


class Mdns:
    def __init__(
        self,
        candidates: Candidates,
        *,
        name: str,
        interfaces: Sequence[str],
        announcement: Announcement | None,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        look_again_s: float = LOOK_AGAIN_S,
    ) -> None:
        self._candidates = candidates
        self._name = name
        self._interfaces = tuple(interfaces)
        self._announcement = announcement
        self._now_ms = now_ms
        self._monotonic_ms = monotonic_ms
        self._look_again_s = look_again_s
        self._services = _ServiceQueue()
        self._own: AsyncServiceInfo | None = None
        self._loopback = False
        self.failure: str | None = "not started"
        self.announced_as: str | None = None
        """The name of our own service, once it is announced."""

    async def run(self) -> None:
        try:
            await self._run(await asyncio.to_thread(_load))
        except Exception:
            self.failure = "ended; the log says why"
            raise

    async def _run(self, mdns_error: type[Exception]) -> None:
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            begun = loop.time()
            try:
                await self._run_at(await asyncio.to_thread(addresses_of, self._interfaces))
            except* (OSError, RuntimeError, ValueError, mdns_error) as failed:
                self.failure = "; ".join(str(each) or type(each).__name__ for each in failed.exceptions)
                log.warning("peers.mdns.failed", extra={"reason": self.failure})
            failures = 1 if loop.time() - begun > RETRIES.longest else failures + 1
            await asyncio.sleep(RETRIES.pause(failures))

    async def _run_at(self, addresses: Sequence[Address]) -> None:
        """Runs with one set of sockets, for as long as the machine has these addresses."""
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf  # noqa: PLC0415  (loaded by now)

        to_join = _addresses_to_join(addresses, self._interfaces)
        if not to_join:
            raise OSError("none of the interfaces has an address to send from")
        self._loopback = any(address.is_loopback for address in addresses)
        self._services = _ServiceQueue()
        network = AsyncZeroconf(interfaces=to_join)
        browser = AsyncServiceBrowser(network.zeroconf, [SERVICE_TYPE], handlers=[self._changed])
        try:
            self.failure = None
            async with asyncio.TaskGroup() as group:
                for _ in range(ASKERS):
                    group.create_task(self._ask_pending(network.zeroconf))
                group.create_task(self._announce(network, addresses))
                await self._look_again(network.zeroconf, addresses)
        except* _AddressesChanged:
            log.info("peers.mdns.moved")
        finally:
            self.announced_as, self._own = None, None
            self._candidates.remove_source("mdns")
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await browser.async_cancel()
                    # Sends a goodbye for everything that was announced.
                    await network.async_close()

    async def _look_again(self, network: Zeroconf, addresses: Sequence[Address]) -> None:
        while True:
            await asyncio.sleep(self._look_again_s)
            for name in tuple(self._services.answered):
                info = _service_named(name)
                # Only services whose records have run out are asked.
                if info is not None and not info.load_from_cache(network):
                    self._services.add(name)
            if await asyncio.to_thread(addresses_of, self._interfaces) != addresses:
                raise _AddressesChanged

    async def _announce(self, network: AsyncZeroconf, addresses: Sequence[Address]) -> None:
        ours = self._announcement
        if ours is None:
            return
        wildcard = WILDCARDS.intersection(ours.listen_addresses)
        reachable = [
            each for each in addresses if (wildcard or str(each) in ours.listen_addresses) and not each.is_link_local
        ]
        if not reachable:
            self.failure = "not announced: our door does not listen on any address of these interfaces"
            return
        info = _service(self._name, ours, reachable)
        self._own = info
        await (await network.async_register_service(info, allow_name_change=True))
        self.announced_as = info.name
        log.info("peers.mdns.announced", extra={"service": info.name, "port": ours.port})

    def _changed(self, *, zeroconf: Zeroconf, name: str, state_change: ServiceStateChange, **_: object) -> None:
        """Called by zeroconf's browser, on our loop."""
        if state_change.name == "Removed":
            self._services.forget(name)
            self._candidates.remove_group(_group(name))
            return
        self._read_now(zeroconf, name)
        if state_change.name == "Updated" and self._services.begin_settling(name):
            asyncio.get_running_loop().call_later(SETTLE_S, self._settled, zeroconf, self._services, name)

    def _settled(self, network: Zeroconf, services: _ServiceQueue, name: str) -> None:
        services.settling.discard(name)
        if services is self._services and name in services.answered:
            self._read_now(network, name)

    def _read_now(self, network: Zeroconf, name: str) -> None:
        """A service that announces everything at once, as is usual, does not wait for services that must be asked."""
        if (info := _service_named(name)) is None:
            return
        if info.load_from_cache(network):
            self._put_candidate(network, info)
        else:
            self._services.add(name)

    async def _ask_pending(self, network: Zeroconf) -> None:
        while True:
            name = await self._services.next()
            info = await self._request_info(network, name)
            # A service that said goodbye while it was asked is gone.
            if self._services.remove(name) and info is not None:
                self._put_candidate(network, info)

    async def _request_info(self, network: Zeroconf, name: str) -> AsyncServiceInfo | None:
        info = _service_named(name)
        try:
            return info if info is not None and await info.async_request(network, READ_MS) else None
        except Exception as error:  # noqa: BLE001  (whatever somebody managed to announce, the others are heard)
            log.info("peers.mdns.not_asked", extra={"service": shown_name(name), "reason": str(error)})
            return None

    def _put_candidate(self, network: Zeroconf, info: AsyncServiceInfo) -> None:
        try:
            if self._is_ours(info):
                return
            candidate = _candidate(info, loopback=self._loopback, now_ms=self._now_ms())
            until_ms = self._monotonic_ms() + self._holds_ms(network, info.name)
        except Exception:
            # One service's malformed announcement must not hide others.
            log.exception("peers.mdns.unread", extra={"service": shown_name(info.name)})
            return
        self._services.note_answer(info.name)
        self._candidates.add(candidate, group=_group(info.name), until_ms=until_ms)

    def _holds_ms(self, network: Zeroconf, name: str) -> int:
        """How long a service may be silent before it is gone: the lifetime of its host's record, and one look more."""
        from zeroconf import current_time_millis  # noqa: PLC0415  (loaded by now)
        from zeroconf.const import _CLASS_IN, _TYPE_SRV  # noqa: PLC0415  (the library has no public names for these)

        record = network.cache.get_by_details(name, _TYPE_SRV, _CLASS_IN)
        remaining_s = 0 if record is None else record.get_remaining_ttl(current_time_millis())
        return int(1000 * (remaining_s + self._look_again_s)) + 2 * READ_MS

    def _is_ours(self, info: AsyncServiceInfo) -> bool:
        own = self._own
        return (
            own is not None
            and (info.name, info.port, info.text) == (own.name, own.port, own.text)
            and set(info.parsed_addresses()) <= set(own.parsed_addresses())
        )


class _AddressesChanged(Exception):
    """The machine has other addresses now."""


class _ServiceQueue:
    """Services that have answered, and services that must still be asked. Both are bounded, each by itself: a flood of
    names that lead nowhere does not displace a service that has answered.
    """

    def __init__(self) -> None:
        self.answered: dict[str, None] = {}
        self.settling: set[str] = set()
        self._pending: set[str] = set()
        self._queue: asyncio.Queue[str] = asyncio.Queue(SERVICES_MAX)

    def note_answer(self, name: str) -> None:
        """If there is no room, the service that was silent for longest goes, as among the candidates."""
        self.answered.pop(name, None)
        self.answered[name] = None
        if len(self.answered) > SERVICES_MAX:
            del self.answered[next(iter(self.answered))]

    def begin_settling(self, name: str) -> bool:
        if name in self.settling or len(self.settling) >= SERVICES_MAX:
            return False
        self.settling.add(name)
        return True

    def add(self, name: str) -> None:
        if name not in self._pending and not self._queue.full():
            self._pending.add(name)
            self._queue.put_nowait(name)

    async def next(self) -> str:
        while True:
            name = await self._queue.get()
            if name in self._pending:
                return name

    def remove(self, name: str) -> bool:
        """Whether the service is still followed."""
        try:
            self._pending.remove(name)
        except KeyError:
            return False
        return True

    def forget(self, name: str) -> None:
        self.answered.pop(name, None)
        self._pending.discard(name)


def _load() -> type[Exception]:
    """The exceptions of zeroconf. Imported in a thread, since that takes a tenth of a second."""
    import zeroconf.asyncio  # noqa: PLC0415  (see the module's contract)

    return zeroconf.Error


def _service_named(name: str) -> AsyncServiceInfo | None:
    """None if the announced name is no valid service name."""
    from zeroconf import Error  # noqa: PLC0415  (loaded by now)
    from zeroconf.asyncio import AsyncServiceInfo  # noqa: PLC0415

    try:
        return AsyncServiceInfo(SERVICE_TYPE, name)
    except (Error, ValueError):
        return None


def _group(name: str) -> str:
    return f"mdns:{name.lower()}"


def _addresses_to_join(addresses: Sequence[Address], wanted: Sequence[str]) -> list[str]:
    """The addresses to send from and listen on: IPv4, and IPv6 if the operator named such an address."""
    return [str(each) for each in addresses if isinstance(each, IPv4Address) or str(each) in wanted]


def _service(name: str, ours: Announcement, addresses: Sequence[Address]) -> AsyncServiceInfo:
    from zeroconf.asyncio import AsyncServiceInfo  # noqa: PLC0415  (loaded by now)

    tail = ours.record.instance_id[-12:]
    return AsyncServiceInfo(
        SERVICE_TYPE,
        f"{_label(name, tail)}.{SERVICE_TYPE}",
        port=ours.port,
        properties=encode_txt(ours.record),
        server=f"{ours.host}." if ours.host else f"covenant-{tail}.local.",
        parsed_addresses=[str(each) for each in addresses[:ADDRESSES_MAX]],
    )


def _label(name: str, tail: str) -> str:
    """A unique name for people: the instance's name, cut to fit, and the end of its id."""
    room = LABEL_BYTES_MAX - len(tail) - 1 - len("-999")
    plain = " ".join("".join(each if each.isprintable() and each != "." else " " for each in name).split())
    return f"{plain.encode()[:room].decode('utf-8', 'ignore').strip() or 'covenant'} {tail}"


def _candidate(info: AsyncServiceInfo, *, loopback: bool, now_ms: int) -> Candidate:
    record = decode_txt(info.text or b"")
    server = (info.server or "").removesuffix(".")
    host, note = _host_to_call(server, info.parsed_addresses(), loopback=loopback)
    url, wrong = "", record.malformed
    if host is not None:
        try:
            url = root_of(f"{'https' if record.tls else 'http'}://{host}:{info.port}")
        except InvalidUrl as error:
            wrong = wrong or str(error)
    return record.candidate(
        source="mdns",
        url=url,
        wrong=wrong,
        name=shown_name(info.name.removesuffix(f".{SERVICE_TYPE}")),
        host=shown_name(server),
        port=info.port or 0,
        seen_at_ms=now_ms,
        note=note,
        announced_as=shown_name(info.name),
    )


def _host_to_call(server: str, texts: Sequence[str], *, loopback: bool) -> tuple[str | None, CandidateNote | None]:
    """The host to call. A name under `local` is known on this network only, so an address is used instead."""
    if not server.lower().endswith(".local"):
        with suppress(InvalidUrl):
            return host_text(read_host(server)), None
    addresses = [ip_address(text) for text in texts[:ADDRESSES_MAX]]
    usable = [each for each in addresses if _may_be_called(each, loopback=loopback)]
    skipped = any(each.is_link_local for each in addresses)
    if not usable:
        return None, CandidateNote.LINK_LOCAL_SKIPPED if skipped else CandidateNote.NO_USABLE_ADDRESS
    best = min(usable, key=lambda each: (each.version, each.packed))
    return host_text(best), CandidateNote.LINK_LOCAL_SKIPPED if skipped else None


def _may_be_called(address: Address, *, loopback: bool) -> bool:
    use = special_use(address)
    return use is None or (use.by_name and (loopback or not address.is_loopback))
