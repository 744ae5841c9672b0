"""The events of a record as bytes, and back. Nothing becomes a record that could not be read back from it.

`encode_events` stands before every append. It decodes what it has encoded with the decoder that opening uses, so the
check is as strict as the reader by construction (some 2 µs for a message and its lease). The decoded events are the
ones to apply: memory holds what the journal holds, whatever its caller does to a dictionary afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from covenant.ledger.machine.events import AnyEvent
from covenant.model.errors import WrongType
from covenant.wire.validation import encode, read_back

NESTING_MAX: Final = 256
"""Levels in a record. Doors stop at 64; the interpreter, and SQLite's JSON, carry some 900."""

_EVENT: Final = re.compile(r"\[(?P<index>\d+)\](?P<inside>.*)", re.DOTALL)

decode_events = msgspec.json.Decoder(list[AnyEvent]).decode


def encode_events(events: Sequence[AnyEvent]) -> tuple[bytes, list[AnyEvent]]:
    """A record's bytes, and its events as they will be read back.

    Raises `WrongType` with the field's name if the journal's decoder would refuse them, or read something else.
    """
    try:
        encoded, decoded = read_back(events, decode_events, NESTING_MAX)
    except WrongType as wrong:
        raise WrongType(_named(wrong.field, events), wrong.what) from None
    # Only what was encoded elsewhere (`msgspec.Raw`) can have a line break between its values.
    return (encode(decoded) if b"\n" in encoded else encoded), decoded


def _named(place: str, events: Sequence[AnyEvent]) -> str:
    """`[0].task.parent` as `task_sent.task.parent`."""
    found = _EVENT.match(place)
    return f"{events[int(found['index'])].__struct_config__.tag}{found['inside']}" if found else f"events{place}"
