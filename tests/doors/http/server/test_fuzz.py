"""Any bytes, in any pieces: whole requests are answered in order, an error ends the connection, nothing is kept."""

import asyncio
import logging
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from covenant.doors.http.server.bounds import HttpBounds
from tests.doors.http.server.server_under_test import connected, make

BOUNDS = HttpBounds(pipelined_max=3, pipelined_bytes_max=300, body_kept_bytes_max=20, head_bytes_max=400)
TURNS_MAX = 150
"""Within so many turns of the loop, everything that can be answered is."""
REFUSED = (b"400", b"431", b"501", b"505")


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path and the body, after a turn or two."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    await asyncio.sleep(0)
    said = scope["raw_path"] + b" " + body
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
    await send({"type": "http.response.body", "body": said})


class Failures(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


@dataclass(frozen=True)
class Heard:
    """What a client heard: the status and the body of each answer, and whether the connection was closed."""

    answers: tuple[tuple[bytes, bytes], ...]
    closed: bool

    @property
    def done(self) -> list[bytes]:
        return [body for status, body in self.answers if status == b"200"]


def answers_in(said: bytes) -> tuple[tuple[bytes, bytes], ...]:
    found = []
    while said:
        head, _, rest = said.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert head.startswith(b"HTTP/1.1 ")
        assert len(rest) >= length, "an answer is whole"
        found.append((head.split()[1], rest[:length]))
        said = rest[length:]
    return tuple(found)


async def heard(pieces: list[bytes]) -> Heard:
    server = make(echo, BOUNDS)
    connection, transport = connected(server=server)

    for piece in pieces:
        for _ in range(TURNS_MAX):
            if not transport.paused:
                break
            await asyncio.sleep(0)
        assert not transport.paused, "reading goes on when what was read is answered"
        if transport.closed:
            break
        connection.data_received(piece)
        assert len(connection._queue) <= BOUNDS.pipelined_max + 1
    for _ in range(TURNS_MAX):
        await asyncio.sleep(0)
    result = Heard(answers_in(b"".join(transport.writes)), transport.closed)
    connection.connection_lost(None)
    for _ in range(TURNS_MAX):
        await asyncio.sleep(0)
    assert not server.tasks
    assert not server._connections
    assert connection._current is None
    assert [*connection._queue, *connection._writes, connection._unread] == [b""]
    return result


def hear(pieces: list[bytes]) -> Heard:
    failures = Failures()
    logging.getLogger().addHandler(failures)
    try:
        result = asyncio.run(heard(pieces))
    finally:
        logging.getLogger().removeHandler(failures)
    assert failures.records == []
    statuses = [status for status, _ in result.answers]
    assert set(statuses[:-1]) <= {b"200"}, "nothing is answered after an error"
    if statuses and statuses[-1] != b"200":
        assert statuses[-1] in REFUSED
        assert result.closed
    return result


@dataclass(frozen=True)
class Asked:
    wire: bytes
    path: bytes
    body: bytes


bodies = st.binary(max_size=60) | st.sampled_from([b"\r\n\r\n" * 9, b"GET /x HTTP/1.1\r\n\r\n", b"0\r\n\r\n"])
headers = st.sampled_from([b"", b"x: y\r\n", b"Connection: keep-alive\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    path = b"/%d" % draw(st.integers(0, 99))
    more = draw(headers)
    framing = draw(st.sampled_from(["none", "length", "chunked"]))
    if framing == "none":
        return Asked(b"GET %b HTTP/1.1\r\n%b\r\n" % (path, more), path, b"")
    body = draw(bodies)
    if framing == "length":
        return Asked(b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (path, more, len(body), body), path, body)
    size = draw(st.integers(1, 30))
    extension = draw(st.sampled_from([b"", b";a=b"]))
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    coded = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    trailer = draw(st.sampled_from([b"", b"a: b\r\n", b"host: evil\r\nauthorization: x\r\n"]))
    head = b"POST %b HTTP/1.1\r\n%btransfer-encoding: chunked\r\n\r\n" % (path, more)
    return Asked(head + coded + b"0\r\n" + trailer + b"\r\n", path, body)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[start:end] for start, end in pairwise(places) if end > start]


cuts = st.lists(st.integers(0, 10_000), max_size=12)


@given(asked=st.lists(requests(), min_size=1, max_size=12), cuts=cuts)
def test_whole_requests_are_answered_in_order_in_whatever_pieces_they_arrive(
    asked: list[Asked], cuts: list[int]
) -> None:
    result = hear(split(b"".join(each.wire for each in asked), cuts))
    assert result.answers == tuple((b"200", each.path + b" " + each.body) for each in asked)
    assert not result.closed


@given(asked=st.lists(requests(), max_size=4), last=requests(), share=st.floats(0, 0.999), cuts=cuts)
def test_a_request_without_its_end_has_no_answer(
    asked: list[Asked], last: Asked, share: float, cuts: list[int]
) -> None:
    part = last.wire[: int(len(last.wire) * share)]
    result = hear(split(b"".join(each.wire for each in asked) + part, cuts))
    assert result.answers == tuple((b"200", each.path + b" " + each.body) for each in asked)


mutations = st.lists(
    st.tuples(
        st.integers(0, 10_000),
        st.sampled_from(["replace", "insert", "delete"]),
        st.binary(min_size=1, max_size=3)
        | st.sampled_from([b"\r\n", b"\n", b"\r\n\r\n", b"0\r\n\r\n", b": ", b"content-length: 9\r\n", b"host: a\r\n"]),
    ),
    min_size=1,
    max_size=4,
)


def mutated(data: bytes, changes: list[tuple[int, str, bytes]]) -> bytes:
    for place, how, what in changes:
        at = place % (len(data) + 1)
        kept = at + len(what) if how in ("replace", "delete") else at
        data = data[:at] + (b"" if how == "delete" else what) + data[kept:]
    return data


@given(asked=st.lists(requests(), min_size=1, max_size=8), changes=mutations, cuts=cuts)
@example(asked=[Asked(b"GET / HTTP/1.1\r\n\r\n", b"/", b"")], changes=[(0, "insert", b"\xff")], cuts=[])
def test_damaged_requests_are_read_alike_in_whatever_pieces_they_arrive(
    asked: list[Asked], changes: list[tuple[int, str, bytes]], cuts: list[int]
) -> None:
    data = mutated(b"".join(each.wire for each in asked), changes)
    in_pieces, at_once = hear(split(data, cuts)), hear([data])
    assert in_pieces.done == at_once.done
    # Of two things that are wrong, the parser may see either first.
    assert len(in_pieces.answers) == len(at_once.answers)
    assert in_pieces.closed == at_once.closed


@given(data=st.binary(max_size=2_000), cuts=cuts)
def test_any_bytes_are_answered_or_waited_for(data: bytes, cuts: list[int]) -> None:
    hear(split(data, cuts))
