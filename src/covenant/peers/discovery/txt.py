"""What an announcement says besides where: the TXT record of `_friday-a2a._tcp`, written and read.

    txtvers=1  pv=2,3  id=frd1_…  fp=0123456789abcdef  path=/.well-known/agent-card.json  tls=0

Reading never fails, whatever the bytes: anybody on the network may have written them. What cannot be true is said in
`malformed`. As RFC 6763 has it, keys are told apart without regard to case, the first of a kind counts, and a key that
is not known is passed over. Nothing here is proven: the record is a hint where to ask.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from covenant.model.errors import Invalid
from covenant.model.peers.instance import VERSIONS_MAX, parse_instance_id

CARD_PATH: Final = "/.well-known/agent-card.json"
TXT_BYTES_MAX: Final = 1_300
"""What RFC 6763 says fits one packet. Ours has some 150."""
STRINGS_MAX: Final = 32
KEY_CHARS_MAX: Final = 9
PATH_CHARS_MAX: Final = 200
VERSION_MAX: Final = 1_000_000

_FINGERPRINT: Final = re.compile(r"[0-9a-f]{16}")
_PATH: Final = re.compile(r"/[A-Za-z0-9._~/%-]*")
_VERSION: Final = re.compile(r"[1-9][0-9]{0,6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """`instance_id` is empty where none could be read; `malformed` says what is wrong, in words for the operator."""

    instance_id: str = ""
    versions: tuple[int, ...] = ()
    fingerprint: str = ""
    path: str = CARD_PATH
    tls: bool = False
    malformed: str | None = None


def encode_txt(announced: Announced) -> bytes:
    """As in a packet: each string behind its length."""
    strings = (
        "txtvers=1",
        f"pv={','.join(map(str, announced.versions))}",
        f"id={announced.instance_id}",
        f"fp={announced.fingerprint}",
        f"path={announced.path}",
        f"tls={int(announced.tls)}",
    )
    return b"".join(len(text).to_bytes(1) + text.encode() for text in strings)


def decode_txt(data: bytes) -> Announced:
    """From the bytes of one record. Never raises."""
    if len(data) > TXT_BYTES_MAX:
        return Announced(malformed=f"more than {TXT_BYTES_MAX} bytes")
    strings, whole = _split(data)
    return decode_strings(strings) if whole else Announced(malformed="cut short")


def decode_strings(strings: Sequence[bytes]) -> Announced:
    """From the strings of one record. Never raises."""
    if len(strings) > STRINGS_MAX or sum(map(len, strings)) > TXT_BYTES_MAX:
        return Announced(malformed="too long")
    said = dict(_pairs(reversed(strings)))
    wrong: list[str] = []
    if said.get("txtvers") != "1":
        wrong.append("txtvers is not 1")
    return Announced(
        instance_id=_instance_id(said.get("id", ""), wrong),
        versions=_versions(said.get("pv", ""), wrong),
        fingerprint=_fingerprint(said.get("fp", ""), wrong),
        path=_path(said.get("path", CARD_PATH), wrong),
        tls=_tls(said.get("tls", "0"), wrong),
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
    """Given in reverse, so that in a dictionary of them the first of a kind stays."""
    for string in strings:
        key, _, value = string.partition(b"=")
        if key and len(key) <= KEY_CHARS_MAX and key.isascii():
            # What is not text becomes text that is no valid value of anything.
            yield key.decode("ascii").lower(), value.decode("utf-8", "replace")


def _instance_id(text: str, wrong: list[str]) -> str:
    try:
        return parse_instance_id(text)
    except Invalid:
        wrong.append("id is no instance's id")
        return ""


def _versions(text: str, wrong: list[str]) -> tuple[int, ...]:
    parts = text.split(",") if len(text) <= 8 * VERSIONS_MAX else []
    if not 0 < len(parts) <= VERSIONS_MAX or not all(map(_VERSION.fullmatch, parts)):
        wrong.append("pv is no list of versions")
        return ()
    versions = tuple(map(int, parts))
    if max(versions) > VERSION_MAX:
        wrong.append("pv is no list of versions")
        return ()
    return versions


def _fingerprint(text: str, wrong: list[str]) -> str:
    """May be left out: it is for people, and the id says more."""
    if text and not _FINGERPRINT.fullmatch(text):
        wrong.append("fp is no fingerprint")
        return ""
    return text


def _path(text: str, wrong: list[str]) -> str:
    if len(text) > PATH_CHARS_MAX or not _PATH.fullmatch(text):
        wrong.append("path is no path")
        return CARD_PATH
    return text


def _tls(text: str, wrong: list[str]) -> bool:
    if text not in {"0", "1"}:
        wrong.append("tls is neither 0 nor 1")
    return text == "1"
