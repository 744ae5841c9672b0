"""Reading a URL strictly: each place has one spelling, and what two readers could take for two places is refused.

The host becomes an IP address or a name in lower-case ASCII (international names by IDNA 2008), without a final dot. An
address may only be written the ordinary way: `127.1`, `0x7f000001`, `2130706433`, `0177.0.0.1` and `127.0.0.1.5` are
refused, since the system's functions would read some of them as an address.

`Unreadable` says what is wrong with the text, and so can be told to whoever wrote it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final
from urllib.parse import quote

from covenant.outbound.addresses import Address

URL_CHARS_MAX: Final = 4_096
HOST_CHARS_MAX: Final = 253
DEFAULT_PORTS: Final = {"http": 80, "https": 443}

Host = Address | str

_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<target>[^#]*)(?:#.*)?")
# Controls, spaces of every script, and backslashes, which some readers take for slashes.
_FORBIDDEN: Final = re.compile(r"[\x00-\x20\x7f-\xa0\\\s]")
_AUTHORITY: Final = re.compile(r"(?P<host>\[[^\[\]]*\]|[^\[\]:]*)(?::(?P<port>[0-9]{1,5}))?", re.ASCII)
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
# All that may stand in a path or query as itself, and `%`, which is there because somebody has quoted already.
_TARGET_SAFE: Final = "%/?:@!$&'()*+,;=-._~[]"


class Unreadable(ValueError):
    """Not a URL that can be called. The text says why, in terms of the text alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    scheme: str
    host: Host
    port: int
    target: str
    """Path and query, ready to be sent."""

    @property
    def origin(self) -> tuple[str, Host, int]:
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
    """Raises Unreadable."""
    if len(text) > URL_CHARS_MAX:
        raise Unreadable(f"it has more than {URL_CHARS_MAX} characters")
    if has_forbidden(text):
        raise Unreadable("it has spaces, control characters or backslashes")
    found = _URL.fullmatch(text)
    if found is None:
        raise Unreadable("it is not an absolute URL, such as https://host/path")
    scheme = found["scheme"].lower()
    if scheme not in DEFAULT_PORTS:
        raise Unreadable("only http and https can be called")
    if "@" in found["authority"]:
        raise Unreadable("it has a user name or password before the host")
    host, port = read_authority(found["authority"])
    target = found["target"]
    return Location(
        scheme=scheme,
        host=host,
        port=DEFAULT_PORTS[scheme] if port is None else port,
        target=quote(target if target.startswith("/") else f"/{target}", safe=_TARGET_SAFE),
    )


def read_authority(text: str) -> tuple[Host, int | None]:
    """`host` or `host:port`; an IPv6 address stands in brackets. Raises Unreadable."""
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        raise Unreadable("its host and port are not written as host:port")
    port = None if found["port"] is None else int(found["port"])
    if port is not None and not 0 < port <= 65_535:
        raise Unreadable("its port is not between 1 and 65535")
    host = found["host"]
    return _read_ipv6(host[1:-1]) if host.startswith("[") else read_host(host), port


def read_host(text: str) -> Host:
    """A name, or an IPv4 address. Raises Unreadable."""
    name = (text if text.isascii() else _to_ascii(text)).lower().removesuffix(".")
    if not name:
        raise Unreadable("it has no host")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return IPv4Address(name)
        except AddressValueError:
            raise Unreadable("its host ends in a number and is no address such as 192.0.2.1") from None
    if len(name) > HOST_CHARS_MAX or not all(map(_LABEL.fullmatch, labels)):
        raise Unreadable("its host is neither a name nor an address")
    return name


def read_address(text: str, default_port: int) -> tuple[Address, int]:
    """`address` or `address:port`, and never a name. Raises Unreadable."""
    bare = text.count(":") > 1 and not text.startswith("[")
    host, port = read_authority(f"[{text}]" if bare else text)
    if isinstance(host, str):
        raise Unreadable("it is no address")
    return host, default_port if port is None else port


def _read_ipv6(text: str) -> IPv6Address:
    if "%" in text:
        raise Unreadable("its address has a zone")
    try:
        return IPv6Address(text)
    except AddressValueError:
        raise Unreadable("what stands in brackets is no IPv6 address") from None


def _to_ascii(text: str) -> str:
    import idna  # noqa: PLC0415  (large tables, for names that are rare)

    if len(text) > HOST_CHARS_MAX:
        raise Unreadable("its host is too long")
    try:
        return idna.encode(text, uts46=True, std3_rules=True).decode("ascii")
    except idna.IDNAError:
        raise Unreadable("its host is not a name that international domain names allow") from None
