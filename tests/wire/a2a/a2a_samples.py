"""One task from its first word to its last, for every test of the A2A wire."""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from covenant.model.content import Content, Embedded, Json, Resource, ResourceLink, Text
from covenant.model.ids import AgentId, PublicKey, TaskId
from covenant.model.sanitizer import file_name_of
from covenant.model.task import Ending, Result, ResultStatus, Task
from covenant.model.task_event import (
    ArtifactUpdate,
    Began,
    Continued,
    Ended,
    MessageUpdate,
    Started,
    StatusUpdate,
    Step,
    StepContent,
)
from covenant.model.task_view import TaskView, fold

TASK_ID = TaskId("123e4567-e89b-42d3-a456-426614174000")
CONTEXT = "ctx-1"
AT = 1_761_647_400_000  # 2025-10-28T10:30:00.000Z
TASK = Task(
    id=TASK_ID,
    sender=AgentId("client@default", PublicKey("c")),
    recipient=AgentId("echo@default", PublicKey("e")),
    intent_text="hello",
    parts=(Text("hello"),),
    context_id=CONTEXT,
    tenant="default",
    origin="a2a",
    message_id="m-1",
)
USAGE = {"input_tokens": 3, "output_tokens": 5, "stop_reason": "end_turn"}
USED = {"input_tokens": 3, "output_tokens": 5, "tokens": 8}
"""The same, as a client is told."""
DONE = msgspec.structs.replace(Result.ok(TASK_ID, "hello back"), metadata=USAGE)
FAILED = Result(task_id=TASK_ID, status=ResultStatus.ERROR, error_message="it broke")

STORY: tuple[StepContent, ...] = (
    Began(TASK),
    Started(),
    StatusUpdate("looking", metadata={"step": 1}),
    MessageUpdate(parts=(Text("by the way"),), message_id="m-2"),
    ArtifactUpdate(f"{TASK_ID}-text-0", (Text("hel"),), name="response"),
    ArtifactUpdate(f"{TASK_ID}-text-0", (Text("lo"),), append=True),
    ArtifactUpdate(f"{TASK_ID}-text-0", (Text(""),), append=True, last_chunk=True),
    StatusUpdate("which language?", state="input-required"),
    Continued(MessageUpdate(role="user", parts=(Text("French"),), message_id="m-3")),
    Ended(Ending.COMPLETED, DONE),
)


def steps(*story: StepContent) -> list[Step]:
    """One a millisecond."""
    return [Step(at, AT + at, what) for at, what in enumerate(story or STORY, start=1)]


def folded(story: Sequence[StepContent] = STORY) -> TaskView:
    view = fold(steps(*story))
    assert view is not None
    return view


def json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def read(data: bytes) -> Any:
    return msgspec.json.decode(data)


# What an A2A part can hold. Words, so that no key of metadata happens to be one of ours.
_words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
_some = st.none() | _words.filter(bool)
_file_name = _words.filter(bool).map(file_name_of)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(-1e9, 1e9) | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=6,
)
_metadata = st.none() | st.dictionaries(_words.filter(bool), _json, min_size=1, max_size=3)
_blob = st.binary(max_size=40).map(lambda data: b64encode(data).decode())

contents: st.SearchStrategy[Content] = st.one_of(
    st.builds(Text, _words, _some, st.none() | _file_name, _metadata),
    st.builds(Json, _json, _some, st.none() | _file_name, _metadata),
    st.builds(
        lambda blob, media, filename, metadata: Resource(Embedded("", media, blob=blob), filename, metadata),
        _blob,
        _some,
        st.none() | _file_name,
        _metadata,
    ),
    st.builds(
        lambda uri, name, media, metadata: ResourceLink(uri, name, media, metadata=metadata),
        _words.filter(bool),
        st.just("") | _file_name,
        _some,
        _metadata,
    ),
)
