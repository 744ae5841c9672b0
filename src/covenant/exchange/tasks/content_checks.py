"""What others put into the mailbox, checked so that every door can tell it: each block can be read back, and nothing
that a client must find is missing. What agents inside the daemon say is made by code of ours, and is good already.
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence
from typing import Any, Final

from covenant.model.content import Audio, Content, Image, Resource
from covenant.model.errors import Invalid
from covenant.model.sanitizer import file_name_of, is_file_name, name_of
from covenant.model.task_event import ArtifactUpdate, MessageUpdate, Update
from covenant.wire.json_input import TOLD_NESTING_MAX, deeper_than

ID_LENGTH_MAX: Final = 256


def check_blocks(blocks: Sequence[Content], where: str) -> None:
    """Bytes are base64 and data is not too deep, or no client could read the task; files have names and no paths."""
    check_depth(blocks, where)
    for place, block in enumerate(blocks):
        check_name(name_of(block), f"{where}[{place}]")
        if isinstance(block, Image | Audio):
            data = block.data
        elif isinstance(block, Resource) and block.resource.blob is not None:
            data = block.resource.blob
        else:
            continue
        try:
            binascii.a2b_base64(data, strict_mode=True)
        except ValueError:
            raise Invalid("invalid_content", f"{where}[{place}]: its bytes are not base64") from None


def check_name(name: str | None, where: str) -> None:
    if name and not is_file_name(name):
        raise Invalid("invalid_content", f"{where}: name the file {file_name_of(name)!r}, without a path")


def check_depth(value: Any, where: str) -> None:
    if deeper_than(value, TOLD_NESTING_MAX):
        raise Invalid("invalid_content", f"{where}: nested more than {TOLD_NESTING_MAX} levels deep")


def check_update(update: Update) -> None:
    """Refuse an update that no door could show: an artifact without an id, or an empty artifact or message."""
    check_blocks(update.parts, "update.parts")
    if update.metadata is not None:
        check_depth(update.metadata, "update.metadata")
    if isinstance(update, ArtifactUpdate) and not 0 < len(update.artifact_id) <= ID_LENGTH_MAX:
        raise Invalid("invalid_update", f"update.artifact_id must have 1 to {ID_LENGTH_MAX} characters")
    if isinstance(update, ArtifactUpdate):
        check_name(update.name, "update.name")
    if isinstance(update, ArtifactUpdate | MessageUpdate) and not update.parts:
        raise Invalid("invalid_update", "update.parts must have a block; an empty text is one")
    if isinstance(update, MessageUpdate) and update.role != "agent":
        raise Invalid("invalid_update", 'update.role must be "agent": who works on a task speaks for nobody else')
