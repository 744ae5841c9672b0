"""Frames carry their generation as id, and a client's last id says where to go on."""

import pytest

from covenant.model.errors import InvalidParams
from covenant.wire import jsonrpc, sse


def test_a_frame_has_its_generation_and_its_payload() -> None:
    assert sse.SseFormat().frame(7, b'{"a":1}') == b'id: 7\ndata: {"a":1}\n\n'
    assert sse.SseFormat(named=True).frame(7, b"{}") == b"id: 7\nevent: message\ndata: {}\n\n"


def test_a_frame_of_a_call_is_its_response() -> None:
    framing = sse.SseFormat(*jsonrpc.result_frame(b'"100%d"'))
    assert framing.frame(3, b"{}") == b'id: 3\ndata: {"jsonrpc":"2.0","id":"100%d","result":{}}\n\n'


def test_several_frames_are_one_write() -> None:
    framing = sse.SseFormat()
    assert framing.frames([(1, b"a"), (2, b"b")]) == framing.frame(1, b"a") + framing.frame(2, b"b")
    assert framing.frames([]) == b""


def test_a_comment_stays_a_comment_whatever_it_says() -> None:
    assert sse.comment("bye\ndata: no") == b": bye\n: data: no\n\n"
    assert sse.comment("") == b": \n\n"
    assert sse.KEEP_ALIVE.startswith(b":")
    assert sse.KEEP_ALIVE.endswith(b"\n\n")


@pytest.mark.parametrize(("header", "after"), [(None, None), ("", None), ("  ", None), ("0", 0), (" 42 ", 42)])
def test_the_last_event_id_is_a_generation(header: str | None, after: int | None) -> None:
    assert sse.last_event_id(header) == after


@pytest.mark.parametrize("header", ["abc", "-1", "1.5", "+1", "1_0", "٣", "9" * 30])
def test_a_last_event_id_that_is_no_number_is_refused(header: str) -> None:
    with pytest.raises(InvalidParams, match="Last-Event-ID: "):
        sse.last_event_id(header)
