"""DNS-SD against a real name server: what a domain lists is found, in order, within bounds, and never believed."""

import asyncio
from collections.abc import AsyncIterator
from ipaddress import ip_address

import dns.message
import dns.rcode
import pytest

from covenant.peers.discovery.candidates import Candidate, CandidateConflict
from covenant.peers.discovery.dns_sd import INSTANCES_MAX, SERVICE, DomainBrowser, DomainListing
from tests.outbound.dns_server import NameServer, name_server
from tests.peers.discovery.neighbours import Neighbour
from tests.peers.discovery.zones import DOMAIN, Zone, instance
from tests.waits import BOUND_S

NOW = 5_000
ALPHA, BETA = Neighbour(), Neighbour()


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with name_server() as opened:
        yield opened


@pytest.fixture
def zone(server: NameServer) -> Zone:
    return Zone(server)


def browser(server: NameServer, timeout_s: float = 10.0) -> DomainBrowser:
    return DomainBrowser([(ip_address("127.0.0.1"), server.port)], timeout_s=timeout_s)


async def look_up(server: NameServer, timeout_s: float = 10.0) -> DomainListing:
    async with asyncio.timeout(BOUND_S):
        return await browser(server, timeout_s).look_up(DOMAIN, NOW)


async def test_an_instance_that_the_domain_lists_is_found_with_all_that_is_said_of_it(
    server: NameServer, zone: Zone
) -> None:
    zone.lists("Research")
    zone.offers("Research", ALPHA.says(tls=True), "0 0 8443 alpha.corp.example.")
    assert await look_up(server) == DomainListing(
        candidates=(
            Candidate(
                instance_id=ALPHA.id,
                url="https://alpha.corp.example:8443",
                name="Research",
                source="dns",
                versions=(2, 3, 4, 5, 7),
                fingerprint=ALPHA.fingerprint,
                host="alpha.corp.example",
                port=8443,
                path="/.well-known/agent-card.json",
                tls=True,
                seen_at_ms=NOW,
                announced_as=f"Research.{SERVICE}.{DOMAIN}",
            ),
        )
    )


async def test_addresses_are_not_asked_for(server: NameServer, zone: Zone) -> None:
    zone.lists("a")
    zone.offers("a", ALPHA.says(), "0 0 8421 alpha.corp.example.")
    await look_up(server)
    assert {kind for _, kind in server.asked} == {"PTR", "SRV", "TXT"}


async def test_the_best_of_several_places_comes_first(server: NameServer, zone: Zone) -> None:
    zone.lists("a")
    zone.offers(
        "a",
        ALPHA.says(),
        "20 0 1003 c.example.",
        "10 5 1002 b.example.",
        "10 50 1001 a.example.",
        "0 0 0 none.example.",
    )
    (found,) = (await look_up(server)).candidates
    assert (found.url, found.host, found.port) == ("http://a.example:1001", "a.example", 1001)
    assert found.others == ("http://b.example:1002", "http://c.example:1003")


async def test_signatures_that_the_name_server_has_checked_are_noted(server: NameServer, zone: Zone) -> None:
    zone.lists("a")
    zone.offers("a", ALPHA.says(), "0 0 8421 alpha.example.")
    assert [each.authenticated for each in (await look_up(server)).candidates] == [False]
    zone.authenticated = True
    assert [each.authenticated for each in (await look_up(server)).candidates] == [True]
    assert zone.asked_with_ad == 6


async def test_one_answer_that_was_not_checked_is_enough_not_to_be_authenticated(
    server: NameServer, zone: Zone
) -> None:
    zone.lists("a")
    zone.offers("a", ALPHA.says(), "0 0 8421 alpha.example.")
    unchecked = Zone(server)
    unchecked.rrsets = zone.rrsets
    zone.authenticated = True
    server.speak[instance("a").removesuffix(".")] = unchecked._speak
    assert [each.authenticated for each in (await look_up(server)).candidates] == [False]


async def test_a_domain_that_lists_nobody_is_no_failure(server: NameServer) -> None:
    assert await look_up(server) == DomainListing()


async def test_no_more_than_the_limit_are_looked_up_and_the_rest_is_counted(server: NameServer, zone: Zone) -> None:
    labels = [f"instance-{n:03}" for n in range(INSTANCES_MAX + 7)]
    zone.lists(*labels)
    for n, label in enumerate(labels):
        zone.offers(label, ALPHA.says(), f"0 0 {8000 + n} alpha.example.")
    listed = await look_up(server)
    assert (len(listed.candidates), listed.left_out, listed.failure) == (INSTANCES_MAX, 7, None)
    assert sorted(each.name for each in listed.candidates) == labels[:INSTANCES_MAX]
    # That many names do not fit one datagram: the list itself came over TCP.
    assert server.asked[f"{SERVICE}.{DOMAIN}", "PTR"] == 2


@pytest.mark.parametrize(
    "said",
    [
        '"txtvers=1"',
        '"colour=red"',
        '"\\255\\254\\253"',
        '"txtvers=1" "pv=2" "id=frd1_nobody"',
        '"txtvers=9" "pv=2"',
    ],
)
async def test_a_spoiled_txt_record_is_shown_as_malformed(server: NameServer, zone: Zone, said: str) -> None:
    zone.lists("a")
    zone.offers("a", said, "0 0 8421 alpha.example.")
    (found,) = (await look_up(server)).candidates
    assert (found.conflict, found.instance_id, found.url) == (
        CandidateConflict.MALFORMED,
        "",
        "http://alpha.example:8421",
    )
    assert found.detail


async def test_an_instance_without_a_place_or_without_txt_is_shown_as_malformed(server: NameServer, zone: Zone) -> None:
    zone.lists("nowhere", "silent", "odd")
    zone.offers("nowhere", ALPHA.says())
    zone.add(instance("silent"), "SRV", "0 0 8421 beta.example.")
    zone.offers("odd", BETA.says(), "0 0 8421 a\\032b.example.")
    found = (await look_up(server)).candidates
    assert {each.name: each.conflict for each in found} == dict.fromkeys(
        ["nowhere", "silent", "odd"], CandidateConflict.MALFORMED
    )
    assert {each.name: each.url for each in found} == {
        "nowhere": "",
        "silent": "http://beta.example:8421",
        "odd": "",
    }


async def test_a_service_that_is_decidedly_not_offered_is_none(server: NameServer, zone: Zone) -> None:
    zone.lists("a")
    zone.offers("a", ALPHA.says(), "0 0 0 .")
    assert await look_up(server) == DomainListing()


async def test_a_name_that_is_no_text_is_shown_as_one_line(server: NameServer, zone: Zone) -> None:
    zone.lists("evil\\027\\091\\010name\\255")
    zone.offers("evil\\027\\091\\010name\\255", ALPHA.says(), "0 0 8421 alpha.example.")
    (found,) = (await look_up(server)).candidates
    assert found.name == "evil\ufffd[\ufffdname\ufffd"
    assert found.announced_as.isprintable()


def silent(query: dns.message.Message, reply: dns.message.Message, before: int) -> None:
    """Says nothing."""


async def test_a_name_server_that_says_nothing_is_a_failure_in_bounded_time(server: NameServer) -> None:
    server.speak[f"{SERVICE}.{DOMAIN}"] = silent
    listed = await look_up(server, timeout_s=0.3)
    assert (listed.candidates, listed.failure is not None) == ((), True)


async def test_what_was_found_before_time_ran_out_is_kept(server: NameServer, zone: Zone) -> None:
    zone.lists("a", "b")
    zone.offers("a", ALPHA.says(), "0 0 8421 alpha.example.")
    server.speak[instance("b").removesuffix(".")] = silent
    listed = await look_up(server, timeout_s=1.0)
    assert [each.instance_id for each in listed.candidates] == [ALPHA.id]
    assert listed.failure == "1 of 2 instances could not be looked up"


@pytest.mark.parametrize("garbage", [b"", b"\x00", b"\xff" * 40])
async def test_a_name_server_that_talks_nonsense_is_a_failure(server: NameServer, garbage: bytes) -> None:
    server.speak[f"{SERVICE}.{DOMAIN}"] = lambda query, reply, before: reply.to_wire()[:2] + garbage
    assert (await look_up(server, timeout_s=0.5)).failure


async def test_a_name_server_that_refuses_is_a_failure(server: NameServer) -> None:
    def refuse(query: dns.message.Message, reply: dns.message.Message, before: int) -> bytes:
        reply.set_rcode(dns.rcode.REFUSED)
        return reply.to_wire()

    server.speak[f"{SERVICE}.{DOMAIN}"] = refuse
    assert (await look_up(server, timeout_s=2.0)).failure


async def test_an_international_domain_is_asked_for_in_its_ascii_form(server: NameServer) -> None:
    await browser(server).look_up("bücher.example", NOW)
    assert (f"{SERVICE}.xn--bcher-kva.example", "PTR") in server.asked
