"""Tasks that were told already: a finished task is the same object as long as it is kept, and so are its bytes."""

from __future__ import annotations

from collections import OrderedDict
from types import ModuleType
from typing import Final

import msgspec

from covenant.model.folding import TaskView

KEPT_MAX: Final = 256


class Encoded:
    """The last few finished tasks, whole, in each dialect."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[TaskView, bytes]] = OrderedDict()

    def task(self, wire: ModuleType, view: TaskView, history_length: int | None) -> bytes:
        if history_length is not None:
            told: bytes = wire.encode_task(view, history_length)
            return told
        key = (view.task.id, wire.__name__)
        kept = self._kept.get(key)
        # Not what is equal but what is the same: comparing would cost as much as encoding.
        if kept is not None and kept[0] is view:
            self._kept.move_to_end(key)
            return kept[1]
        encoded: bytes = wire.encode_task(view, None)
        if not view.state.terminal:
            return encoded
        self._kept[key] = (view, encoded)
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        return encoded


class Told(msgspec.Struct, frozen=True):
    """A task to be told, and where it may have been told before."""

    view: TaskView
    encoded: Encoded
