"""The output of a turn: from what an agent produces to the updates of its task, the same for every kind of agent.

All text of a turn is one artifact, `<task>-text-<n>` (0 in the first turn), called "response": its first chunk begins
it, the others add to it, and an empty last chunk closes it. Files are `<task>-file-<n>`, data `<task>-data-<n>`,
counted from 0 in each turn; a later turn puts its own number before theirs, and so replaces nothing of an earlier one.
So are the uses of tools, `<task>-tool-<n>`, and the answers of other agents, `<task>-sub-<n>`, told beside the answer.
"""

from __future__ import annotations

import base64
import mimetypes
from typing import Any, Final

import msgspec

from covenant.agents.runtime.job import Job
from covenant.model.content import Content, Embedded, File, Json, Resource, ResourceLink, Text
from covenant.model.errors import WrongType
from covenant.model.task_event import ArtifactUpdate, StatusUpdate, text_artifact
from covenant.wire.json_input import TOLD_NESTING_MAX
from covenant.wire.validation import checked

RESPONSE: Final = "response"
TOOL_CALL: Final = "tool_call"
SUB_AGENT: Final = "sub_agent_response"
SUB_CHARACTERS_MAX: Final = 64 * 1024
OVERHEAD: Final = 64
"""About what an update has besides its text."""
_NO_TEXT: Final = (Text(""),)


class TurnOutput:
    """What an agent says in one turn. `text` is everything that it said in words."""

    _files = _data = _tools = _subs = 0
    """How many of each were said."""

    def __init__(self, job: Job) -> None:
        earlier = job.leased.turn - 1
        self._job = job
        self._task_id = job.task.id
        self._text_id = text_artifact(job.task.id, job.leased.turn)
        self._prefix = f"{earlier}." if earlier else ""
        self._said: list[str] = []

    def say(self, chunk: str) -> None:
        if not chunk:
            return
        size = (len(chunk) if chunk.isascii() else len(chunk.encode())) + OVERHEAD
        if self._said:
            update = ArtifactUpdate(self._text_id, (Text(chunk),), None, None, True)
        else:
            update = ArtifactUpdate(self._text_id, (Text(chunk),), RESPONSE)
            self._job.unfinished = self.close
        self._said.append(chunk)
        self._job.say(update, size)

    def say_at_once(self, text: str) -> None:
        """All there is to say: nothing was streamed, so one chunk is the first and the last."""
        if self._said:
            self.say(text)
        elif text:
            size = (len(text) if text.isascii() else len(text.encode())) + OVERHEAD
            self._said.append(text)
            self._job.say(ArtifactUpdate(self._text_id, (Text(text),), RESPONSE, last_chunk=True), size, last=True)
            self._text_id = ""

    def give(self, content: Content) -> None:
        """Anything that is not plain text is an artifact of its own."""
        if isinstance(content, Text) and content.mimeType is None and content.filename is None:
            self.say(content.text)
            return
        name: str | None
        if isinstance(content, Json):
            artifact_id, name = f"{self._task_id}-data-{self._prefix}{self._data}", content.filename or "data"
            self._data += 1
        else:
            artifact_id, name = f"{self._task_id}-file-{self._prefix}{self._files}", _name(content)
            self._files += 1
        self._job.say(ArtifactUpdate(artifact_id, (content,), name))

    def tool(self, name: str, *, ok: bool, took_ms: int = 0) -> None:
        """A tool was used, and did or did not do what it should."""
        metadata = {f"x-arbiter.{TOOL_CALL}": True, "x-arbiter.took_ms": took_ms}
        told = Json({"tool": name, "ok": ok}, metadata=metadata)
        self._job.say(ArtifactUpdate(f"{self._task_id}-tool-{self._prefix}{self._tools}", (told,), TOOL_CALL))
        self._tools += 1

    def sub(self, agent: str, depth: int, content: str) -> None:
        """Another agent answered: told whole, beside what is said here."""
        said = {"agent": agent, "depth": depth, "content": content[:SUB_CHARACTERS_MAX]}
        told = Json(said, metadata={f"x-arbiter.{SUB_AGENT}": True})
        self._job.say(ArtifactUpdate(f"{self._task_id}-sub-{self._prefix}{self._subs}", (told,), SUB_AGENT))
        self._subs += 1

    def status(self, update: StatusUpdate) -> None:
        self._job.say(update)

    @property
    def text(self) -> str:
        return "".join(self._said)

    @property
    def chunks(self) -> tuple[Text, ...]:
        """The same, as it was said."""
        return tuple(Text(chunk) for chunk in self._said)

    def close(self) -> tuple[Content, ...]:
        """Everything was said: the text artifact is closed; what the final message says."""
        if not self._said:
            return ()
        if self._text_id:
            self._job.say(ArtifactUpdate(self._text_id, _NO_TEXT, None, None, True, True), OVERHEAD)
            self._text_id = ""
            self._job.unfinished = None
        return (Text("".join(self._said)),)


def _name(content: Content) -> str | None:
    if isinstance(content, ResourceLink):
        return content.name or None
    return content.filename if isinstance(content, Resource | Text | File) else None


def file(name: str, data: bytes | None = None, *, url: str | None = None, media_type: str | None = None) -> Content:
    """Yield it: an artifact, by its bytes or by where they are. The media type follows from the name."""
    if not name:
        raise ValueError("a file needs a name")
    if (data is None) == (url is None):
        raise ValueError("a file has either its bytes or a url")
    kind = media_type or mimetypes.guess_type(name)[0]
    if url is not None:
        return ResourceLink(uri=url, name=name, mimeType=kind)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"a file's data must be bytes, not {type(data).__name__}")
    blob = base64.b64encode(data).decode("ascii")
    return Resource(Embedded(uri="", mimeType=kind or "application/octet-stream", blob=blob), filename=name)


def data(value: Any) -> Json:
    """Yield it: an artifact of anything that can be JSON."""
    try:
        plain = msgspec.to_builtins(value, str_keys=True)
    except (TypeError, ValueError, RecursionError) as wrong:
        raise WrongType("value", str(wrong)) from None
    return Json(checked("value", plain, Any, TOLD_NESTING_MAX))


def from_base64(text: str) -> bytes:
    """`ValueError` if it is not base64."""
    return base64.b64decode(text, validate=True)


def written(value: Any) -> str:
    """Data as text, for those who take nothing else."""
    return msgspec.json.encode(value).decode()
