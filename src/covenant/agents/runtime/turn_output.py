"""The output of a turn: the updates that an agent's output becomes.

All text of a turn is one artifact, `<task>-text-<n>` (0 in the first turn), called "response": its first chunk begins
it, the others add to it, and an empty last chunk closes it. Files are `<task>-file-<n>`, data `<task>-data-<n>`,
counted from 0 in each turn; a later turn puts its own number before theirs, and so replaces nothing of an earlier one.
The same holds for uses of tools, `<task>-tool-<n>`, and answers of other agents, `<task>-sub-<n>`. Output of a model
after it asked a person also has the number of its round (`<task>-file-0.1.0`, `<task>-text-0.1`): it replaces nothing
of the output before the question.
"""

from __future__ import annotations

from typing import Final

from covenant.agents.runtime.job_buffer import JobBuffer
from covenant.model.content import Content, File, Json, Resource, ResourceLink, Text
from covenant.model.task_event import TEXT_ARTIFACT, ArtifactUpdate, StatusUpdate

NEXT_ATTEMPT: Final = "covenant.next_attempt"
"""Key in the metadata of the status between two attempts: the number of the `attempt`, and `at_ms`, when it begins."""

RESPONSE: Final = "response"
TOOL_CALL: Final = "tool_call"
SUB_AGENT: Final = "sub_agent_response"
SUB_CHARACTERS_MAX: Final = 64 * 1024
OVERHEAD: Final = 64
"""The approximate bytes of an update besides its text."""
_NO_TEXT: Final = (Text(""),)
_UNITS: Final = (("d", 86_400), ("h", 3_600), ("min", 60))


class TurnOutput:
    """An agent's output in one turn. `text` is all of its text."""

    _files = _data = _tools = _subs = 0
    """How many of each were written."""

    def __init__(self, job: JobBuffer) -> None:
        earlier = job.leased.turn - 1
        self._job = job
        self._task_id = job.task.id
        self._text_id = TEXT_ARTIFACT % (job.task.id, earlier)
        self._earlier = earlier
        self._prefix = f"{earlier}." if earlier else ""
        self._chunks: list[str] = []

    def begin_round(self, no: int) -> None:
        """Begins the round after a question: a model does not repeat its output from before the question."""
        if no > 1 and self._prefix != f"{self._earlier}.{no - 1}.":
            self._prefix = f"{self._earlier}.{no - 1}."
            self._text_id = f"{self._task_id}-text-{self._earlier}.{no - 1}"
            self._chunks = []
            self._files = self._data = self._tools = self._subs = 0

    def write_text(self, chunk: str) -> None:
        if not chunk:
            return
        size = (len(chunk) if chunk.isascii() else len(chunk.encode())) + OVERHEAD
        if self._chunks:
            update = ArtifactUpdate(self._text_id, (Text(chunk),), None, None, True)
        else:
            update = ArtifactUpdate(self._text_id, (Text(chunk),), RESPONSE)
            self._job.unfinished = self.close
        self._chunks.append(chunk)
        self._job.add_update(update, size)

    def write_whole_text(self, text: str) -> None:
        """Writes the whole text: nothing was streamed, so one chunk is the first and the last."""
        if self._chunks:
            self.write_text(text)
        elif text:
            size = (len(text) if text.isascii() else len(text.encode())) + OVERHEAD
            self._chunks.append(text)
            self._job.add_update(
                ArtifactUpdate(self._text_id, (Text(text),), RESPONSE, last_chunk=True), size, last=True
            )
            self._text_id = ""

    def write_content(self, content: Content) -> None:
        """Writes a part. Anything but plain text is an artifact of its own."""
        if isinstance(content, Text) and content.mimeType is None and content.filename is None:
            self.write_text(content.text)
            return
        name: str | None
        if isinstance(content, Json):
            artifact_id, name = f"{self._task_id}-data-{self._prefix}{self._data}", content.filename or "data"
            self._data += 1
        else:
            artifact_id, name = f"{self._task_id}-file-{self._prefix}{self._files}", _name(content)
            self._files += 1
        self._job.add_update(ArtifactUpdate(artifact_id, (content,), name))

    def record_tool(self, name: str, *, ok: bool, took_ms: int = 0) -> None:
        """Records that a tool was used, and whether it succeeded."""
        metadata = {f"x-arbiter.{TOOL_CALL}": True, "x-arbiter.took_ms": took_ms}
        part = Json({"tool": name, "ok": ok}, metadata=metadata)
        self._job.add_update(ArtifactUpdate(f"{self._task_id}-tool-{self._prefix}{self._tools}", (part,), TOOL_CALL))
        self._tools += 1

    def record_answer(self, agent: str, depth: int, content: str) -> None:
        """Records another agent's answer, beside the output of this one. A longer answer is cut."""
        value = {"agent": agent, "depth": depth, "content": content[:SUB_CHARACTERS_MAX]}
        part = Json(value, metadata={f"x-arbiter.{SUB_AGENT}": True})
        self._job.add_update(ArtifactUpdate(f"{self._task_id}-sub-{self._prefix}{self._subs}", (part,), SUB_AGENT))
        self._subs += 1

    def write_status(self, update: StatusUpdate) -> None:
        self._job.add_update(update)

    @property
    def text(self) -> str:
        return "".join(self._chunks)

    @property
    def chunks(self) -> tuple[Text, ...]:
        """The text in its original chunks."""
        return tuple(Text(chunk) for chunk in self._chunks)

    def close(self) -> tuple[Content, ...]:
        """Closes the text artifact; returns the content of the final message."""
        if not self._chunks:
            return ()
        if self._text_id:
            self._job.add_update(ArtifactUpdate(self._text_id, _NO_TEXT, None, None, True, True), OVERHEAD)
            self._text_id = ""
            self._job.unfinished = None
        return (Text("".join(self._chunks)),)


def _name(content: Content) -> str | None:
    if isinstance(content, ResourceLink):
        return content.name or None
    return content.filename if isinstance(content, Resource | Text | File) else None


def announce_attempt(text: str, attempt: int, after_s: float, now_ms: int) -> StatusUpdate:
    """The status between two attempts. `text` says how the first one ended."""
    unit, size = next(((unit, size) for unit, size in _UNITS if after_s >= 2 * size), ("s", 1))
    pause = f"{after_s:.3g} s" if size == 1 else f"{round(after_s / size, 1):g} {unit}"
    about = {"attempt": attempt, "at_ms": now_ms + round(after_s * 1000)}
    return StatusUpdate(f"{text}; attempt {attempt} begins in {pause}", metadata={NEXT_ATTEMPT: about})
