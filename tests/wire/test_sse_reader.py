"""Reading server-sent events: however they are cut into pieces, and whatever ends their lines."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.wire.sse import KEEP_ALIVE, EventReader, EventTooLarge, ServerSentEvent, SseFormat


def read(*pieces: bytes, bytes_max: int = 1_000) -> list[ServerSentEvent]:
    reader = EventReader(bytes_max)
    return [event for piece in pieces for event in reader.feed(piece)]


@given(
    cuts=st.lists(st.integers(0, 400), max_size=8),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    texts=st.lists(st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"").replace(b"\r", b"")), max_size=6),
)
def test_pieces_and_line_ends_make_no_difference(cuts: list[int], end: bytes, texts: list[bytes]) -> None:
    frames = b"".join(b"id: %d\ndata: x%b\n\n" % numbered for numbered in enumerate(texts))
    # The last line's end may be the first half of a longer one: one more line settles it.
    stream = frames.replace(b"\n", end) + b":" + end
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:stop] for start, stop in pairwise(places)]
    assert read(*pieces) == [ServerSentEvent(b"x" + text, str(at)) for at, text in enumerate(texts)]


def test_what_our_door_writes_is_read_as_it_was_meant() -> None:
    framing = SseFormat(b'{"result":', b"}", named=True)
    assert read(framing.frame(7, b"{}") + KEEP_ALIVE + framing.frame(8, b"[]")) == [
        ServerSentEvent(b'{"result":{}}', "7"),
        ServerSentEvent(b'{"result":[]}', "8"),
    ]


def test_lines_of_data_belong_together_and_a_number_stays() -> None:
    assert read(b"id: 5\ndata: a\ndata:b\n\n: hello\n\ndata: c\nretry: 5\nevent: x\n\n") == [
        ServerSentEvent(b"a\nb", "5"),
        ServerSentEvent(b"c", "5"),
    ]


def test_half_an_event_is_none() -> None:
    assert read(b"data: a\n") == []
    assert read(b"id: 4\n\n") == []


@pytest.mark.parametrize("stream", [b"data: " + b"x" * 2_000, b"data: " + b"x" * 500 + b"\n" + b"data: " + b"y" * 600])
def test_an_event_that_has_no_end_is_given_up(stream: bytes) -> None:
    with pytest.raises(EventTooLarge):
        read(*(stream[at : at + 100] for at in range(0, len(stream), 100)))
