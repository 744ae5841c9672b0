"""Failures of durable steps: how an exception is written to the ledger, and how it is raised again.

The ledger has the name of the exception's class, its text, and as much of its arguments and attributes as JSON can
hold. The function gets an exception made from that, in the run in which the step fails and in each replay, so that an
`except` means the same in all of them. The class is looked up by name among the imported modules; if it is not there,
or cannot be made without its constructor, a `StepFailed` is raised instead.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Final

import msgspec

from covenant.model.errors import CovenantError
from covenant.model.task_event import StepFailure
from covenant.wire.json_input import A2A_NESTING_MAX
from covenant.wire.validation import checked

MESSAGE_CHARS_MAX: Final = 4_096
CONTENT_BYTES_MAX: Final = 16 * 1024
"""The most bytes of an exception's arguments, and of each attribute; larger ones are left out."""
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class StepFailed(CovenantError):
    """A step has failed with an exception whose class cannot be made again. `type` is its name."""

    def __init__(self, type: str, message: str) -> None:  # noqa: A002  (as the ledger calls it)
        super().__init__(f"{type}: {message}" if message else type)
        self.type = type
        self.message = message


def failure_of(error: BaseException) -> StepFailure:
    message = _text(error)
    args = [*error.args, error.filename] if isinstance(error, OSError) and error.filename else list(error.args)
    return StepFailure(
        type=_name(type(error)),
        message=message,
        args=tuple(args) if _is_plain(args) else (message,),
        attributes={name: value for name, value in vars(error).items() if _is_plain(value)},
    )


def exception_of(failure: StepFailure) -> Exception:
    found = _class_of(failure.type)
    if found is not None:
        with contextlib.suppress(Exception):  # a class may need its constructor
            made = found.__new__(found, *failure.args)
            vars(made).update(failure.attributes)
            if str(made) == failure.message:
                return made
    return StepFailed(failure.type, failure.message)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}:{kind.__qualname__}"


def _class_of(name: str) -> type[Exception] | None:
    module, _, path = name.rpartition(":")
    found: Any = sys.modules.get(module or "builtins")
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Exception) and _name(found) == name else None


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (its author's)
        text = ""
    return text[:MESSAGE_CHARS_MAX].encode(errors="replace").decode()


def _is_plain(value: Any) -> bool:
    """Whether the value survives being written as JSON and read again, and is small."""
    try:
        written = _encode(checked("value", value, Any, A2A_NESTING_MAX))
        return len(written) <= CONTENT_BYTES_MAX and bool(_decode(written) == value)
    except Exception:  # noqa: BLE001  (its author's: it may not even be comparable)
        return False
