"""DNS service discovery (RFC 6763): the TXT record of `_friday-a2a._tcp`, and instances that a domain lists.

    txtvers=1  pv=2,3,4,5,6,7  id=frd1_…  fp=0123456789abcdef  path=/.well-known/agent-card.json  tls=0

Reading a record never fails, since anybody may have written it; `malformed` says what cannot be true. Keys are compared
without regard to case, the first of a kind counts, and unknown keys are skipped.

`DomainBrowser` looks up PTR of `_friday-a2a._tcp.<domain>`, then SRV and TXT of each instance, at most `INSTANCES_MAX`
of a domain within `timeout_s`; `failure` says what is missing. A DNS answer is a hint, signed zone or not: the address
of a candidate is resolved through the guard when it is called. dnspython is imported with the first look-up.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from covenant.model.peers.instance import VERSIONS_MAX, is_instance_id
from covenant.outbound.urls import Address, InvalidUrl, host_text, read_host
from covenant.peers.discovery.candidates import Candidate, CandidateConflict, shown_name
from covenant.peers.peer_settings import root_of

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver
    from dns.name import Name
    from dns.resolver import Answer


CARD_PATH: Final = "/.well-known/agent-card.json"
TXT_BYTES_MAX: Final = 1_300
"""The size that RFC 6763 recommends for one packet. Our record has about 150 bytes."""
STRINGS_MAX: Final = 32
KEY_CHARS_MAX: Final = 9
PATH_CHARS_MAX: Final = 200
VERSION_MAX: Final = 1_000_000

_FINGERPRINT: Final = re.compile(r"[0-9a-f]{16}")
_PATH: Final = re.compile(r"/[A-Za-z0-9._~/%-]*")
_VERSION: Final = re.compile(r"[1-9][0-9]{0,6}")
SERVICE: Final = "_friday-a2a._tcp"
INSTANCES_MAX: Final = 50
SRV_RECORDS_MAX: Final = 8
AT_ONCE_MAX: Final = 8
TIMEOUT_S: Final = 3.0
UDP_BYTES: Final = 1_232
"""The size of a UDP answer that passes every network; a larger answer comes by TCP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TxtRecord:
    """`instance_id` is empty if none could be read; `malformed` tells the operator what is wrong."""

    instance_id: str = ""
    versions: tuple[int, ...] = ()
    fingerprint: str = ""
    path: str = CARD_PATH
    tls: bool = False
    malformed: str | None = None

    def candidate(self, *, wrong: str | None, **more: Any) -> Candidate:
        """The candidate that this record announces. `wrong`: what is malformed in the record, or beside it."""
        return Candidate(
            instance_id=self.instance_id,
            versions=self.versions,
            fingerprint=self.fingerprint,
            path=self.path,
            tls=self.tls,
            conflict=CandidateConflict.MALFORMED if wrong else None,
            detail=wrong or "",
            **more,
        )


def encode_txt(announced: TxtRecord) -> bytes:
    """The bytes of a packet: each string after its length."""
    strings = (
        "txtvers=1",
        f"pv={','.join(map(str, announced.versions))}",
        f"id={announced.instance_id}",
        f"fp={announced.fingerprint}",
        f"path={announced.path}",
        f"tls={int(announced.tls)}",
    )
    return b"".join(len(text).to_bytes(1) + text.encode() for text in strings)


def decode_txt(data: bytes) -> TxtRecord:
    """Reads the bytes of one record. Never raises."""
    if len(data) > TXT_BYTES_MAX:
        return TxtRecord(malformed=f"more than {TXT_BYTES_MAX} bytes")
    strings, whole = _split(data)
    return decode_strings(strings) if whole else TxtRecord(malformed="cut short")


def decode_strings(strings: Sequence[bytes]) -> TxtRecord:
    """Reads the strings of one record. Never raises."""
    if len(strings) > STRINGS_MAX or sum(map(len, strings)) > TXT_BYTES_MAX:
        return TxtRecord(malformed="too long")
    record = dict(_pairs(reversed(strings)))
    wrong = [words for key, default, valid, words in _KEYS if not valid(record.setdefault(key, default))]
    valid = {key: record[key] if valid(record[key]) else default for key, default, valid, _ in _KEYS}
    return TxtRecord(
        instance_id=valid["id"],
        versions=tuple(map(int, filter(None, valid["pv"].split(",")))),
        fingerprint=valid["fp"],
        path=valid["path"],
        tls=valid["tls"] == "1",
        malformed="; ".join(wrong) or None,
    )


def _split(data: bytes) -> tuple[list[bytes], bool]:
    strings, at = [], 0
    while at < len(data):
        end = at + 1 + data[at]
        strings.append(data[at + 1 : end])
        at = end
    return strings, at == len(data)


def _pairs(strings: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """In reverse order, so that a dictionary of them keeps the first of each key."""
    for string in strings:
        key, _, value = string.partition(b"=")
        if key and len(key) <= KEY_CHARS_MAX and key.isascii():
            # Bytes that are not text become a text that is no valid value of any key.
            yield key.decode("ascii").lower(), value.decode("utf-8", "replace")


def _are_versions(text: str) -> bool:
    parts = text.split(",") if len(text) <= 8 * VERSIONS_MAX else []
    plain = 0 < len(parts) <= VERSIONS_MAX and all(map(_VERSION.fullmatch, parts))
    return plain and max(map(int, parts)) <= VERSION_MAX


# Key, default, check, and the message for a wrong value. A fingerprint may be left
# out: it is for people, and the id says more.
_KEYS: Final[tuple[tuple[str, str, Callable[[str], bool], str], ...]] = (
    ("txtvers", "", lambda text: text == "1", "txtvers is not 1"),
    ("id", "", is_instance_id, "id is no instance's id"),
    ("pv", "", _are_versions, "pv is no list of versions"),
    ("fp", "", lambda text: not text or _FINGERPRINT.fullmatch(text) is not None, "fp is no fingerprint"),
    ("path", CARD_PATH, lambda text: len(text) <= PATH_CHARS_MAX and bool(_PATH.fullmatch(text)), "path is no path"),
    ("tls", "0", lambda text: text in {"0", "1"}, "tls is neither 0 nor 1"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainListing:
    """The candidates that a domain lists. `failure` says what could not be looked up; None if the list is whole."""

    candidates: tuple[Candidate, ...] = ()
    left_out: int = 0
    failure: str | None = None


class DomainBrowser:
    def __init__(self, servers: Sequence[tuple[Address, int]], *, timeout_s: float = TIMEOUT_S) -> None:
        self._servers = servers
        self._timeout_s = timeout_s
        self._resolver: Resolver | None = None

    async def look_up(self, domain: str, now_ms: int) -> DomainListing:
        """Raises only if the domain is no valid name; any other failure is in the answer."""
        from dns.exception import DNSException  # noqa: PLC0415  (see the module's contract)
        from dns.name import from_text  # noqa: PLC0415

        service = from_text(f"{SERVICE}.{host_text(read_host(domain))}.")
        until = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(until):
                resolver = await self._open_resolver()
                answer = await self._ask(resolver, service, "PTR")
        except (DNSException, OSError, EOFError, ValueError, TimeoutError) as error:
            return DomainListing(failure=_reason(error))
        if answer is None:
            return DomainListing()
        names = sorted({record.target for record in answer})
        found = await self._look_up_instances(
            resolver, names[:INSTANCES_MAX], until, authenticated=_authenticated(answer), now_ms=now_ms
        )
        missing = min(len(names), INSTANCES_MAX) - len(found)
        return DomainListing(
            candidates=tuple(each for each in found if each is not None),
            left_out=max(0, len(names) - INSTANCES_MAX),
            failure=f"{missing} of {len(names)} instances could not be looked up" if missing else None,
        )

    async def _look_up_instances(
        self, resolver: Resolver, names: Sequence[Name], until: float, *, authenticated: bool, now_ms: int
    ) -> list[Candidate | None]:
        """For each instance that was answered for in time: the candidate, or None if its service is not offered."""
        found: list[Candidate | None] = []
        free = asyncio.Semaphore(AT_ONCE_MAX)

        async def look(name: Name) -> None:
            from dns.exception import DNSException  # noqa: PLC0415  (loaded by now)

            try:
                async with free:
                    found.append(
                        await self._look_up_instance(resolver, name, authenticated=authenticated, now_ms=now_ms)
                    )
            except (DNSException, OSError, EOFError, ValueError):
                """The instance is missing from the answer, as one is that took too long."""

        try:
            async with asyncio.timeout_at(until), asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(look(name))
        except TimeoutError:
            """Ends the look-up with what was found so far."""
        return found

    async def _look_up_instance(
        self, resolver: Resolver, name: Name, *, authenticated: bool, now_ms: int
    ) -> Candidate | None:
        srv_records = await self._ask(resolver, name, "SRV")
        txt_record = await self._ask(resolver, name, "TXT")
        answers = [each for each in (srv_records, txt_record) if each is not None]
        return _candidate(
            name,
            [] if srv_records is None else list(srv_records),
            TxtRecord(malformed="no TXT record") if txt_record is None else decode_strings(min(txt_record).strings),
            authenticated=authenticated and all(map(_authenticated, answers)),
            now_ms=now_ms,
        )

    async def _ask(self, resolver: Resolver, name: Name, kind: str) -> Answer | None:
        from dns.resolver import NXDOMAIN, NoAnswer  # noqa: PLC0415  (loaded by now)

        try:
            return await resolver.resolve(name, kind, search=False, lifetime=self._timeout_s)
        except (NXDOMAIN, NoAnswer):
            return None

    async def _open_resolver(self) -> Resolver:
        if self._resolver is None:
            # The import is slow, and a resolver without configured servers reads the system's files.
            self._resolver = await asyncio.to_thread(self._make_resolver)
        return self._resolver

    def _make_resolver(self) -> Resolver:
        from dns.asyncresolver import Resolver  # noqa: PLC0415  (see the module's contract)
        from dns.flags import AD, RD  # noqa: PLC0415
        from dns.nameserver import Do53Nameserver  # noqa: PLC0415

        resolver = Resolver(configure=not self._servers)
        if self._servers:
            resolver.nameservers = [Do53Nameserver(str(address), port) for address, port in self._servers]
        # RFC 6840, 5.7: a question with AD set is answered with whether the signatures were checked.
        resolver.set_flags(RD | AD)
        resolver.use_edns(0, 0, UDP_BYTES)
        return resolver


def _candidate(
    name: Name, srv_records: list[Any], record: TxtRecord, *, authenticated: bool, now_ms: int
) -> Candidate | None:
    """None if the domain says that the service is not available, by a target of `.` (RFC 2782)."""
    srv_records.sort(key=lambda srv: (srv.priority, -srv.weight, srv.target, srv.port))
    offered = [srv for srv in srv_records[:SRV_RECORDS_MAX] if srv.target.to_text() != "." and srv.port]
    if srv_records and not offered:
        return None
    urls = [url for srv in offered if (url := _url(srv, tls=record.tls))]
    best = offered[0] if offered else None
    return record.candidate(
        source="dns",
        url=urls[0] if urls else "",
        wrong=record.malformed or (None if urls else "no place to call"),
        name=shown_name(name.labels[0].decode("utf-8", "replace") if len(name.labels) > 1 else ""),
        host="" if best is None else shown_name(best.target.to_text(omit_final_dot=True)),
        port=0 if best is None else best.port,
        seen_at_ms=now_ms,
        announced_as=shown_name(name.to_text(omit_final_dot=True)),
        authenticated=authenticated,
        others=tuple(urls[1:]),
    )


def _url(srv: Any, *, tls: bool) -> str | None:
    try:
        host = host_text(read_host(srv.target.to_text(omit_final_dot=True)))
        return root_of(f"{'https' if tls else 'http'}://{host}:{srv.port}")
    except InvalidUrl:
        return None


def _authenticated(answer: Answer) -> bool:
    from dns.flags import AD  # noqa: PLC0415  (loaded by now)

    return bool(answer.response.flags & AD)


def _reason(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
