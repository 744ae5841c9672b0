"""Round trips over one connection, plain and sealed in turns: `python -m bench.sealed_calls PORT SECONDS BYTES`."""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Callable
from statistics import median

import msgspec

from bench.sealed_echo import Party
from covenant.model.peers.instance import KeyBundle

IN_A_ROW = 50


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a round trip, and what a message costs here, in microseconds; CPU of one process."""

    plain_us: float
    sealed_us: float
    plain_per_s: float
    sealed_per_s: float
    seal_us: float
    open_us: float
    envelope_bytes: int


def main() -> None:
    port, seconds, size = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    party = Party()

    def post(path: str, body: bytes) -> bytes:
        connection.request("POST", path, body)
        return connection.getresponse().read()

    party.meet(msgspec.json.decode(post("/meet", msgspec.json.encode(party.bundle)), type=KeyBundle))
    body = msgspec.json.encode({"text": "x" * size})

    def plain() -> None:
        assert post("/plain", body) == body

    def sealed() -> None:
        assert party.open(post("/sealed", party.seal(body))) == body

    times: dict[Callable[[], None], list[float]] = {plain: [], sealed: []}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for call in times:
            times[call] += _timed(call, IN_A_ROW)
    other = Party()
    party.meet(other.bundle)
    envelope = party.seal(body)
    found = Called(
        plain_us=median(times[plain]),
        sealed_us=median(times[sealed]),
        plain_per_s=len(times[plain]) / sum(times[plain]) * 1e6,
        sealed_per_s=len(times[sealed]) / sum(times[sealed]) * 1e6,
        seal_us=median(_timed(lambda: party.seal(body), 500)),
        open_us=median(_timed(lambda: other.open(envelope), 500)),
        envelope_bytes=len(envelope),
    )
    sys.stdout.buffer.write(msgspec.json.encode(found))


def _timed(call: Callable[[], object], count: int) -> list[float]:
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begun) * 1e6)
    return taken


if __name__ == "__main__":
    main()
