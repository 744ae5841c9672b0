"""A name server on loopback that says what a test makes it say, true to DNS or not."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, ip_address

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from covenant.outbound.address_guard import NameServerResolver
from tests.waits import BOUND_S

Records = Sequence[str]
"""Addresses."""
Speak = Callable[[dns.message.Message, dns.message.Message, int], bytes | None]
"""From a question, an empty answer to it and how often it was asked before, to the bytes to send; None for silence."""
Converse = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
UDP_BYTES = 512


class NameServer:
    """`records` are asked first, by name; `speak` takes over whatever it is given for."""

    def __init__(self, records: dict[str, Records]) -> None:
        self.records = records
        self.speak: dict[str, Speak] = {}
        self.asked: Counter[tuple[str, str]] = Counter()
        self.port = 0

    def resolver(self, timeout_s: float = BOUND_S) -> NameServerResolver:
        return NameServerResolver([(ip_address("127.0.0.1"), self.port)], timeout_s=timeout_s)

    def then(self, name: str, *answers: Records) -> None:
        """A name that leads elsewhere each time it is looked up; the last answer stays."""

        def speak(query: dns.message.Message, reply: dns.message.Message, before: int) -> bytes:
            add(reply, name, answers[min(before, len(answers) - 1)])
            return reply.to_wire()

        self.speak[name] = speak

    def answer(self, wire: bytes) -> bytes | None:
        query = dns.message.from_wire(wire)
        name = query.question[0].name.to_text(omit_final_dot=True).lower()
        kind = dns.rdatatype.to_text(query.question[0].rdtype)
        before = self.asked[name, kind]
        self.asked[name, kind] += 1
        reply = dns.message.make_response(query)
        reply.flags |= dns.flags.RA
        if name in self.speak:
            return self.speak[name](query, reply, before)
        if name in self.records:
            add(reply, name, self.records[name])
        else:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        return reply.to_wire()


def add(reply: dns.message.Message, name: str, addresses: Records) -> None:
    """Those of the asked type. A record lives for no time at all, as a rebinding one does."""
    kind = dns.rdatatype.to_text(reply.question[0].rdtype)
    mine = [text for text in addresses if (kind == "A") == isinstance(ip_address(text), IPv4Address)]
    if mine:
        reply.answer.append(dns.rrset.from_text_list(f"{name}.", 0, "IN", kind, mine))


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]  # typeshed's
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        reply = self._server.answer(data)
        if reply is not None and len(reply) > UDP_BYTES:
            cut = dns.message.make_response(dns.message.from_wire(data))
            cut.flags |= dns.flags.TC
            reply = cut.to_wire()
        if reply is not None:
            self._transport.sendto(reply, addr)


async def _listen(server: NameServer, converse: Converse) -> tuple[asyncio.Server, asyncio.DatagramTransport]:
    """One port for both, which may take several tries: what is free for one may be taken for the other."""
    loop = asyncio.get_running_loop()
    while True:
        tcp = await asyncio.start_server(converse, "127.0.0.1", 0)
        address = tcp.sockets[0].getsockname()
        try:
            transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(server), local_addr=address)
        except OSError:
            tcp.close()
            await tcp.wait_closed()
        else:
            return tcp, transport


@asynccontextmanager
async def name_server(records: dict[str, Records] | None = None) -> AsyncIterator[NameServer]:
    """Over UDP and, for what does not fit, TCP on the same port."""
    server = NameServer(records or {})

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(2))
        reply = server.answer(await reader.readexactly(size))
        if reply is not None:
            writer.write(len(reply).to_bytes(2) + reply)
        writer.close()

    tcp, transport = await _listen(server, converse)
    server.port = tcp.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        transport.close()
        tcp.close()
        await tcp.wait_closed()
