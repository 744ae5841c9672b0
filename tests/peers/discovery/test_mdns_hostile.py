"""Packets that no honest program sends, on the loopback's real mDNS: nothing ends, and honest neighbours are heard."""

import asyncio
import socket
import struct
from collections.abc import Iterator

import dns.flags
import dns.message
import dns.name
import dns.rrset
import pytest

from covenant.peers.discovery.discovery_service import Discovery
from covenant.peers.discovery.mdns import SERVICE_TYPE, SERVICES_MAX
from tests.outbound.http_servers import HERE
from tests.peers.discovery.neighbours import LOOPBACK, Neighbour, announcing, discovery, heard, of, until

GROUP = ("224.0.0.251", 5353)
SERVICE = dns.name.from_text(SERVICE_TYPE)


@pytest.fixture
def sender() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(HERE))
        opened.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        opened.bind((HERE, 5353))
        yield opened


def pointer(*targets: dns.name.Name) -> dns.rrset.RRset:
    return dns.rrset.from_text_list(SERVICE, 4500, "IN", "PTR", [target.to_text() for target in targets])


def packet(*answers: dns.rrset.RRset) -> bytes:
    message = dns.message.Message(id=0)
    message.flags = dns.flags.Flag(dns.flags.QR | dns.flags.AA)
    message.answer.extend(answers)
    return message.to_wire(max_size=9_000)


def named(label: bytes) -> dns.name.Name:
    return dns.name.Name((label, *SERVICE.labels))


def mdns_failures(finding: Discovery) -> tuple[str, ...]:
    return next(way.failures for way in finding.methods() if way.source == "mdns")


async def listening(finding: Discovery) -> None:
    await until(lambda: mdns_failures(finding) == ())


async def test_a_flood_of_names_that_lead_nowhere_keeps_nobody_from_being_heard(sender: socket.socket) -> None:
    us, honest = Neighbour(), Neighbour()
    async with discovery(LOOPBACK, us) as finding:
        await listening(finding)
        for first in range(0, 2 * SERVICES_MAX, 50):
            sender.sendto(packet(pointer(*(named(b"nobody-%d" % n) for n in range(first, first + 50)))), GROUP)
            await asyncio.sleep(0)
        async with announcing(f"honest {honest.id[-8:]}", honest.says()):
            await heard(finding, honest.id)
        await until(lambda: not of(finding, honest.id))
        assert mdns_failures(finding) == ()


async def test_names_and_records_that_cannot_be_are_survived(sender: socket.socket) -> None:
    us, honest = Neighbour(), Neighbour()
    odd = [b"\xff" * 63, b"a.b\x00c\\", b"\x1b]0;x\x07", b" ", b"\xe2\x80\xae" * 20]
    places = [dns.rrset.from_text(named(each), 120, "IN", "SRV", f"0 0 0 {named(each).to_text()}") for each in odd]
    texts = [dns.rrset.from_text(named(each), 120, "IN", "TXT", '"\\255\\001" "" "id="') for each in odd]
    async with discovery(LOOPBACK, us) as finding:
        await listening(finding)
        sender.sendto(packet(pointer(*map(named, odd), dns.name.from_text("elsewhere.example."), SERVICE)), GROUP)
        sender.sendto(packet(*places, *texts), GROUP)
        whole = packet(pointer(*map(named, odd)), *places, *texts)
        for cut in range(0, len(whole), 7):
            sender.sendto(whole[:cut] + struct.pack("!H", 0xC000 | cut) + whole[cut + 2 :], GROUP)
        async with announcing(f"honest {honest.id[-8:]}", honest.says()):
            await heard(finding, honest.id)
        assert mdns_failures(finding) == ()
        assert all(each.name.isprintable() and each.announced_as.isprintable() for each in finding.candidates())
