"""One setting: its default, its meaning in one line, and the reader of its values.

`read` takes text from the environment or a flag, or a TOML value from the file, and returns the value or raises
ValueError. `allowed` describes the accepted values; errors and docs/settings.md show it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, TypeVar

T = TypeVar("T")

_KEY: Final = "setting"
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_ORIGIN: Final = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]+")
_HOST: Final = re.compile(r"\*|[A-Za-z0-9._\-]+|\[[0-9A-Fa-f:.]+\]")

COUNT_MAX: Final = 2**53
"""Above this, JSON readers cannot tell whole numbers apart."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of values: its reader, and a description of the accepted values."""

    read: Callable[[object], Any]
    allowed: str


@dataclass(frozen=True, slots=True)
class Setting:
    """`alias` is a second name in the environment, weaker than its own; `flag` is a second flag."""

    meaning: str
    kind: Kind
    alias: str | None = None
    flag: str | None = None


def setting(default: T, kind: Kind, meaning: str, *, alias: str | None = None, flag: str | None = None) -> T:
    """Returns a dataclass field that is a setting, typed as its value, as `dataclasses.field` is."""
    found: T = field(default=default, metadata={_KEY: Setting(meaning, kind, alias, flag)})
    return found


def setting_of(metadata: Any) -> Setting:
    found = metadata[_KEY]
    assert isinstance(found, Setting)
    return found


def _wrong() -> NoReturn:
    raise ValueError


def whole(least: int, most: int = COUNT_MAX) -> Kind:
    def read(raw: object) -> int:
        if isinstance(raw, bool):
            _wrong()
        if isinstance(raw, str):
            text = raw.strip()
            # int() also accepts "1_000", "+1" and digits of other scripts; a setting does not.
            raw = int(text) if re.fullmatch(r"-?[0-9]{1,20}", text) else _wrong()
        if not isinstance(raw, int) or not least <= raw <= most:
            _wrong()
        return raw

    words = f"a whole number from {least} to {most}" if most < COUNT_MAX else f"a whole number, at least {least}"
    return Kind(read, words)


def _read_switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str):
        word = raw.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    _wrong()


switch: Final = Kind(_read_switch, "1, true, yes or on; 0, false, no or off")


def _read_auto(raw: object) -> str:
    if isinstance(raw, str) and raw.strip().lower() == "auto":
        return "auto"
    return "on" if _read_switch(raw) else "off"


auto_switch: Final = Kind(_read_auto, f"auto; {switch.allowed}")
"""Read as `auto`, `on` or `off`."""


def choice(*words: str) -> Kind:
    def read(raw: object) -> str:
        word = raw.strip().lower() if isinstance(raw, str) else ""
        return word if word in words else _wrong()

    return Kind(read, " or ".join(words))


def _read_address(raw: object) -> str:
    if not isinstance(raw, str):
        _wrong()
    return str(ipaddress.ip_address(raw.strip()))


address: Final = Kind(_read_address, "an IP address, such as 127.0.0.1, 0.0.0.0 or ::1")


def several(is_valid: Callable[[str], bool], most: int = COUNT_MAX) -> Callable[[object], tuple[str, ...]]:
    def read(raw: object) -> tuple[str, ...]:
        if isinstance(raw, str):
            items = [item.strip() for item in raw.split(",") if item.strip()]
        elif isinstance(raw, list) and all(isinstance(item, str) for item in raw):
            items = raw
        else:
            _wrong()
        return tuple(items) if len(items) <= most and all(is_valid(item) for item in items) else _wrong()

    return read


origins: Final = Kind(
    several(lambda item: _ORIGIN.fullmatch(item) is not None),
    "origins such as http://localhost:3000, separated by commas (a list in the file); no path, no `*`",
)
hosts: Final = Kind(
    several(lambda item: _HOST.fullmatch(item) is not None),
    "host names and addresses without port, separated by commas (a list in the file); `*` for any",
)


def _read_networks(raw: object) -> tuple[str, ...]:
    return tuple(str(ipaddress.ip_network(item.strip())) for item in several(bool)(raw))


networks: Final = Kind(
    _read_networks, "IP addresses and networks such as 10.0.0.0/8, separated by commas (a list in the file)"
)


def _text(pattern: str) -> Callable[[object], str]:
    matches = re.compile(pattern).fullmatch

    def read(raw: object) -> str:
        text = raw.strip() if isinstance(raw, str) else _wrong()
        return text if not text or matches(text) else _wrong()

    return read


node_name: Final = Kind(
    _text(r"[A-Za-z0-9_.\-]{1,128}"), "letters, digits, `_`, `.` and `-`, at most 128; empty for the machine's name"
)
_read_url: Final = _text(r"https?://[A-Za-z0-9.\-_~\[\]:]+(/[!-~]*)?")

url: Final = Kind(_read_url, "a URL such as https://example.com/docs; empty for none")
database_url: Final = Kind(
    _text(r"postgres(ql)?://[!-~]{1,1000}"), "a URL such as postgres://covenant@db.example/covenant; empty for none"
)
base_url: Final = Kind(
    lambda raw: _text(r"https?://[A-Za-z0-9.\-_~\[\]:]+(/[!-\"$->@-~]*)?")(raw).rstrip("/"),
    "a URL such as https://agents.example.com, without query; empty for none",
)
grpc_address: Final = Kind(
    _text(r"(https?://)?[A-Za-z0-9.\-_\[\]:]{1,300}"),
    "an address such as grpc.example.com:443, or a URL such as https://grpc.example.com; empty for none",
)
_MODEL: Final = r"[A-Za-z0-9_.\-]{1,64}(:[!-~]{1,200})?"
model_name: Final = Kind(_text(_MODEL), "a provider and a model, such as openai:gpt-5; empty for none")
model_names: Final = Kind(
    several(lambda item: re.fullmatch(_MODEL, item) is not None),
    "providers and models such as openai:gpt-5, separated by commas (a list in the file)",
)
search_place: Final = Kind(
    _text(r"mcp:[^\s.]{1,128}\.\S{1,128}|https?://[A-Za-z0-9.\-_~\[\]:]+/[!-~]*\{query\}[!-~]*"),
    "a URL such as https://search.example/?q={query}, or a tool such as mcp:web.search; empty for none",
)
bucket_url: Final = Kind(
    _text(r"s3://[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9](/[A-Za-z0-9_\-][A-Za-z0-9._\-]{0,63}){0,8}/?"),
    "a URL such as s3://bucket/prefix; empty for none",
)
region_name: Final = Kind(_text(r"[a-z0-9\-]{1,40}"), "the name of a region, such as eu-central-1")
variable: Final = Kind(_text(r"[A-Za-z_][A-Za-z0-9_]{0,127}"), "the name of a variable; empty for none")
agent_id: Final = Kind(_text(r"[A-Za-z0-9_\-]{1,64}"), "letters, digits, `_` and `-`, at most 64; empty for none")
line: Final = Kind(_text(r"[^\x00-\x1f\x7f]{1,200}"), "a line of text, at most 200 characters; empty for none")
command_line: Final = Kind(
    _text(r"[^\x00-\x1f\x7f]{1,2000}"),
    "a program and its arguments, quoted as for a shell, at most 2000 characters; empty for none",
)
words: Final = Kind(
    several(lambda item: re.fullmatch(r"[!-~]{1,255}", item) is not None),
    "words without spaces, separated by commas (a list in the file)",
)
_PLACE: Final = r"(?:frd1_[a-z2-7]{40}@|[A-Za-z0-9_.\-]{1,64}=)?https?://[A-Za-z0-9.\-_~\[\]:]+(/[!-\"$->@-~]*)?"
peer_places: Final = Kind(
    several(lambda item: re.fullmatch(_PLACE, item) is not None, 100),
    "at most 100 URLs such as https://host, after frd1_…@ or name= or not, separated by commas (a list in the file)",
)
