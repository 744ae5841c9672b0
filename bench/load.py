"""The load: one process, many keep-alive connections, the next request as soon as the answer is there.

    python -m bench.load < spec.json

As little work a request as Python allows, since it shares the machine with what it measures: requests are joined from
prepared bytes, and of an answer only the status and the length are read. Talks to loopback only.
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from functools import partial
from typing import Final, cast

import msgspec

from bench import machine
from bench.workload import WARM_S, run

LOOPBACK: Final = "127.0.0.1"
_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length: "
_OK: Final = b"HTTP/1.1 200"
_LAST: Final = b"0\r\n\r\n"


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """`{}` in a body stands for a new id; connections take turns with the bodies."""

    port: int
    path: str
    token: str
    bodies: tuple[str, ...]
    connections: int
    seconds: float
    server_pid: int
    round_no: int
    headers: dict[str, str] = {}
    streams: bool = False
    """Whether answers are streams of events, each read to its end."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    longest_ms: float
    server_cpu_s: float
    load_cpu_s: float
    events: int = 0
    failed: str = ""
    """The first answer that was not 200."""

    @property
    def per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def events_per_s(self) -> float:
        return self.events / self.seconds

    @property
    def cpu_us(self) -> float:
        return self.server_cpu_s / max(1, self.requests) * 1e6


class Tally:
    def __init__(self) -> None:
        self.took_s = array("d")
        self.events = 0
        self.measuring = False
        self.stopped = False
        self.failed = ""


class Caller(asyncio.Protocol):
    def __init__(self, spec: Spec, number: int, tally: Tally) -> None:
        body = spec.bodies[number % len(spec.bodies)]
        before, after = (part.encode() for part in body.split("{}"))
        more = "".join(f"{name}: {value}\r\n" for name, value in spec.headers.items())
        head = (
            f"POST {spec.path} HTTP/1.1\r\nhost: {LOOPBACK}\r\nauthorization: Bearer {spec.token}\r\n{more}"
            f"content-type: application/json\r\ncontent-length: {len(before) + 36 + len(after)}\r\n\r\n"
        )
        self._before = head.encode() + before + b"%08x-%04x-4000-8000-" % (spec.round_no, number)
        self._after = after
        self._tally = tally
        self._number = 0
        self._received = b""
        self._sent_s = 0.0
        self.gone = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's do not inherit it
        self._send()

    def _send(self) -> None:
        self._number = number = self._number + 1
        self._sent_s = time.perf_counter()
        self._transport.write(b"%b%012x%b" % (self._before, number, self._after))

    def data_received(self, data: bytes) -> None:
        if self._received:
            data = self._received + data
        end = data.find(_END)
        length_at = data.find(_LENGTH, 0, end) + len(_LENGTH)
        if end < 0 or len(data) < end + 4 + int(data[length_at : data.index(b"\r", length_at)]):
            self._received = data
            return
        self._received = b""
        self._answered(data)

    def _answered(self, data: bytes) -> None:
        tally = self._tally
        if tally.measuring:
            tally.took_s.append(time.perf_counter() - self._sent_s)
        if not data.startswith(_OK):
            tally.failed = tally.failed or data.decode(errors="replace")
            tally.stopped = True
        if tally.stopped:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._tally.stopped:
            self._tally.failed = self._tally.failed or f"the connection was lost: {error}"
            self._tally.stopped = True
        if not self.gone.done():
            self.gone.set_result(None)


class Reader(Caller):
    """Reads each answer as a stream of events, to its last chunk."""

    def data_received(self, data: bytes) -> None:
        if self._tally.measuring:
            self._tally.events += data.count(b"data: {")
        # Kept: the status line, and enough to see the last chunk whole.
        self._received = (self._received or data[:16]) if not data.endswith(_LAST) else b""
        if data.endswith(_LAST):
            self._answered(_OK)
        elif not self._received.startswith(_OK):
            self._answered(data)


def _same(caller: Caller) -> Caller:
    return caller


async def main(spec: Spec) -> Loaded:
    loop = asyncio.get_running_loop()
    tally = Tally()
    kind = Reader if spec.streams else Caller
    callers = [kind(spec, number, tally) for number in range(spec.connections)]
    for caller in callers:
        await loop.create_connection(partial(_same, caller), LOOPBACK, spec.port)
    await asyncio.sleep(WARM_S)
    tally.measuring = True
    begun, load_cpu_s, server_cpu_s = time.perf_counter(), time.process_time(), machine.cpu_s(spec.server_pid)
    await asyncio.sleep(spec.seconds)
    tally.measuring = False
    seconds = time.perf_counter() - begun
    load_cpu_s, server_cpu_s = time.process_time() - load_cpu_s, machine.cpu_s(spec.server_pid) - server_cpu_s
    tally.stopped = True
    async with asyncio.timeout(10):
        await asyncio.gather(*(caller.gone for caller in callers))
    took_ms = sorted(one * 1e3 for one in tally.took_s) or [0.0]
    return Loaded(
        requests=len(tally.took_s),
        seconds=seconds,
        p50_ms=took_ms[len(took_ms) // 2],
        p99_ms=took_ms[len(took_ms) * 99 // 100],
        longest_ms=took_ms[-1],
        server_cpu_s=server_cpu_s,
        load_cpu_s=load_cpu_s,
        events=tally.events,
        failed=tally.failed,
    )


if __name__ == "__main__":
    found = run(main(msgspec.json.decode(sys.stdin.buffer.read(), type=Spec)))
    print(msgspec.json.encode(found).decode())
