"""The root of every event, for its encoding alone."""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, gc=False, tag_field="type", omit_defaults=True):
    pass
