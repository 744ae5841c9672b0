"""Strict parsing of URLs: each address has one spelling, and a URL that two parsers could read as two addresses is
refused.

The host becomes an IP address or a name in lower-case ASCII (international names by IDNA 2008), without a final dot. An
address is written the ordinary way: `127.1`, `0x7f000001`, `2130706433` and `0177.0.0.1` are refused, since the system
would read some of them as an address. `InvalidUrl` says what is wrong with the text; its writer may see it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Final, NamedTuple
from urllib.parse import quote

from covenant.model.errors import CovenantError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

DNS_PORT: Final = 53
_GLOBAL_V6: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")
URL_CHARS_MAX: Final = 4_096
HOST_CHARS_MAX: Final = 253
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<target>[^#]*)(?:#.*)?")
# Controls, spaces of every script, and backslashes, which some readers take for slashes.
_FORBIDDEN: Final = re.compile(r"[\x00-\x20\x7f-\xa0\\\s]")
_AUTHORITY: Final = re.compile(r"(?P<host>\[[^\[\]]*\]|[^\[\]:]*)(?::(?P<port>[0-9]{1,5}))?", re.ASCII)
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
# The characters that a path or query may contain unquoted, and `%`, since the text may be quoted already.
_TARGET_SAFE: Final = "%/?:@!$&'()*+,;=-._~[]"


class SpecialUse(NamedTuple):
    """What an address is for, and whether allowing a name is enough to call it there.

    A name is only as trustworthy as its name servers, so addresses that nobody means by a host name (above all a
    cloud's metadata service) must be allowed as addresses.
    """

    network: Network
    words: str
    by_name: bool = False


def _table(*rows: tuple[str, str, bool]) -> tuple[SpecialUse, ...]:
    return tuple(SpecialUse(ip_network(network), words, by_name) for network, words, by_name in rows)


# The first row that holds an address names it, so single addresses stand before the networks around them.
_SPECIAL_V4: Final = _table(
    ("100.100.100.200/32", "a cloud's metadata", False),
    ("168.63.129.16/32", "a cloud's metadata", False),
    ("0.0.0.0/8", "this host", False),
    ("10.0.0.0/8", "private", True),
    ("100.64.0.0/10", "shared by carriers", True),
    ("127.0.0.0/8", "loopback", True),
    ("169.254.0.0/16", "link-local, a cloud's metadata", False),
    ("172.16.0.0/12", "private", True),
    ("192.0.0.0/24", "reserved for protocols", False),
    ("192.0.2.0/24", "documentation", False),
    ("192.88.99.0/24", "6to4 relays", False),
    ("192.168.0.0/16", "private", True),
    ("198.18.0.0/15", "benchmarks", False),
    ("198.51.100.0/24", "documentation", False),
    ("203.0.113.0/24", "documentation", False),
    ("224.0.0.0/4", "multicast", False),
    ("255.255.255.255/32", "broadcast", False),
    ("240.0.0.0/4", "reserved", False),
)
_SPECIAL_V6: Final = _table(
    ("fd00:ec2::/32", "a cloud's metadata", False),
    ("::/128", "unspecified", False),
    ("::1/128", "loopback", True),
    ("::ffff:0:0/96", "IPv4 inside IPv6 (mapped)", False),
    ("::/96", "IPv4 inside IPv6 (compatible)", False),
    ("64:ff9b:1::/48", "IPv4 inside IPv6 (local NAT64)", False),
    ("fc00::/7", "private (unique local)", True),
    ("fe80::/10", "link-local", False),
    ("fec0::/10", "site-local", False),
    ("ff00::/8", "multicast", False),
    ("2001::/32", "IPv4 inside IPv6 (Teredo)", False),
    ("2001::/23", "reserved for protocols", False),
    ("2001:db8::/32", "documentation", False),
    ("2002::/16", "IPv4 inside IPv6 (6to4)", False),
    ("3fff::/20", "documentation", False),
)
_NOT_GLOBAL: Final = SpecialUse(IPv6Network("::/0"), "not global unicast")


def special_use(address: Address) -> SpecialUse | None:
    """What this address is for, or None if it is public.

    The tables are our own, after IANA's registries: the standard library's differ between releases of Python. An IPv6
    address with an embedded IPv4 address is refused, whatever that is. The exception is NAT64's well-known prefix, by
    which hosts without IPv4 reach the whole IPv4 internet: there the address inside is checked.
    """
    if isinstance(address, IPv4Address):
        return _first(_SPECIAL_V4, address)
    if address in _NAT64:
        inside = special_use(IPv4Address(int(address) & 0xFFFF_FFFF))
        return inside and SpecialUse(_NAT64, f"NAT64 of {inside.words}")
    return _first(_SPECIAL_V6, address) or (None if address in _GLOBAL_V6 else _NOT_GLOBAL)


def _first(table: tuple[SpecialUse, ...], address: Address) -> SpecialUse | None:
    return next((row for row in table if address in row.network), None)


Host = Address | str
Origin = tuple[str, Host, int]
"""Scheme, host and port."""


class InvalidUrl(CovenantError, ValueError):
    """Not a URL that can be called. The text says why, in terms of the text alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    scheme: str
    host: Host
    port: int
    target: str
    """Path and query, ready to be sent."""

    @property
    def origin(self) -> Origin:
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        """Host and, unless it is the scheme's own, port: what the Host header says."""
        host = host_text(self.host)
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def has_forbidden(text: str) -> bool:
    return _FORBIDDEN.search(text) is not None


def host_text(host: Host) -> str:
    return f"[{host}]" if isinstance(host, IPv6Address) else str(host)


def read_url(text: str) -> Location:
    """Raises InvalidUrl."""
    if len(text) > URL_CHARS_MAX:
        raise InvalidUrl(f"it has more than {URL_CHARS_MAX} characters")
    if has_forbidden(text):
        raise InvalidUrl("it has spaces, control characters or backslashes")
    found = _URL.fullmatch(text)
    if found is None:
        raise InvalidUrl("it is not an absolute URL, such as https://host/path")
    scheme = found["scheme"].lower()
    if scheme not in DEFAULT_PORTS:
        raise InvalidUrl("only http and https can be called")
    if "@" in found["authority"]:
        raise InvalidUrl("it has a user name or password before the host")
    host, port = read_authority(found["authority"])
    target = found["target"]
    return Location(
        scheme=scheme,
        host=host,
        port=DEFAULT_PORTS[scheme] if port is None else port,
        target=quote(target if target.startswith("/") else f"/{target}", safe=_TARGET_SAFE),
    )


def origin_of(url: str) -> Origin | None:
    """The URL's scheme, host and port; None if it cannot be called."""
    try:
        return read_url(url).origin
    except InvalidUrl:
        return None


def read_authority(text: str) -> tuple[Host, int | None]:
    """`host` or `host:port`; an IPv6 address stands in brackets. Raises InvalidUrl."""
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        raise InvalidUrl("its host and port are not written as host:port")
    port = None if found["port"] is None else int(found["port"])
    if port is not None and not 0 < port <= 65_535:
        raise InvalidUrl("its port is not between 1 and 65535")
    host = found["host"]
    return _read_ipv6(host[1:-1]) if host.startswith("[") else read_host(host), port


def read_host(text: str) -> Host:
    """A name, or an IPv4 address. Raises InvalidUrl."""
    name = (text if text.isascii() else _to_ascii(text)).lower().removesuffix(".")
    if not name:
        raise InvalidUrl("it has no host")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return IPv4Address(name)
        except AddressValueError:
            raise InvalidUrl("its host ends in a number and is no address such as 192.0.2.1") from None
    if len(name) > HOST_CHARS_MAX or not all(map(_LABEL.fullmatch, labels)):
        raise InvalidUrl("its host is neither a name nor an address")
    return name


def read_address(text: str, default_port: int) -> tuple[Address, int]:
    """`address` or `address:port`, and never a name. Raises InvalidUrl."""
    bare = text.count(":") > 1 and not text.startswith("[")
    host, port = read_authority(f"[{text}]" if bare else text)
    if isinstance(host, str):
        raise InvalidUrl("it is no address")
    return host, default_port if port is None else port


def _read_ipv6(text: str) -> IPv6Address:
    if "%" in text:
        raise InvalidUrl("its address has a zone")
    try:
        return IPv6Address(text)
    except AddressValueError:
        raise InvalidUrl("the text in brackets is no IPv6 address") from None


def _to_ascii(text: str) -> str:
    import idna  # noqa: PLC0415  (large tables, for names that are rare)

    if len(text) > HOST_CHARS_MAX:
        raise InvalidUrl("its host is too long")
    try:
        return idna.encode(text, uts46=True, std3_rules=True).decode("ascii")
    except idna.IDNAError:
        raise InvalidUrl("its host is not a name that international domain names allow") from None


@dataclass(frozen=True, slots=True)
class AllowedEntry:
    """One entry. `port` is None for every open port."""

    name_or_network: str | Network
    port: int | None = None


def read_entry(text: str) -> AllowedEntry:
    """Raises ValueError if it is no name, address or network."""
    if "/" in text or (text.count(":") > 1 and not text.startswith("[")):
        return AllowedEntry(ip_network(text))
    host, port = read_authority(text)
    return AllowedEntry(ip_network(host) if isinstance(host, IPv4Address | IPv6Address) else host, port)
