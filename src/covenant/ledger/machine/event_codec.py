"""The encoding of events: the bytes of a record, and its events as they are read back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from covenant.ledger.machine.events import AnyEvent
from covenant.model.errors import WrongType
from covenant.wire.validation import encode, read_back

NESTING_MAX: Final = 512
"""The deepest nesting in a record. Doors stop at 64; the interpreter, and the JSON of databases, support some 900."""

_EVENT: Final = re.compile(r"\[(?P<index>\d+)\](?P<inside>.*)", re.DOTALL)

_LINE_BREAK: Final = ord("\n")
"""A byte is searched by its number: `in` with a bytes object takes ten times as long."""

decode_events = msgspec.json.Decoder(list[AnyEvent]).decode


def encode_events(events: Sequence[AnyEvent]) -> tuple[bytes, list[AnyEvent]]:
    """A record's bytes, and its events as they will be decoded. Called before every write: nothing is stored that could
    not be decoded, and memory holds the stored values, even if the caller changes a dictionary afterwards.

    Raises `WrongType` with the field's name if the decoder would refuse them, or return other values.
    """
    try:
        encoded = encode(events)
        decoded = decode_events(encoded)
        # A level takes two brackets: so few bytes cannot be nested too deeply, and counting takes longer than decoding.
        shallow = len(encoded) <= 2 * NESTING_MAX or encoded.count(b"{") + encoded.count(b"[") <= NESTING_MAX
        # A line break can only come from a part that was encoded elsewhere (`msgspec.Raw`).
        if shallow and decoded == events and _LINE_BREAK not in encoded:
            return encoded, decoded
    except Exception:  # noqa: BLE001, S110  objects of all kinds are encoded here: `read_back` says what is wrong
        pass
    try:
        encoded, decoded = read_back(events, decode_events, NESTING_MAX)
    except WrongType as wrong:
        raise WrongType(_field_name(wrong.field, events), wrong.what) from None
    return (encode(decoded) if _LINE_BREAK in encoded else encoded), decoded


def _field_name(place: str, events: Sequence[AnyEvent]) -> str:
    """`[0].task.parent` as `task_sent.task.parent`."""
    found = _EVENT.match(place)
    return f"{events[int(found['index'])].__struct_config__.tag}{found['inside']}" if found else f"events{place}"
