"""A hostile name server: what it may answer, and that none of it leads inside or takes for ever."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import dns.message
import dns.rcode
import dns.rrset
import pytest

from covenant.outbound.address_guard import AddressGuard, Unresolved
from covenant.outbound.call_errors import AddressRefused
from tests.outbound.corpus import PUBLIC, PUBLIC_V6
from tests.outbound.dns_server import NameServer, add, name_server
from tests.waits import BOUND_S

Message = dns.message.Message


@pytest.fixture
async def names() -> AsyncIterator[NameServer]:
    async with name_server() as server:
        yield server


async def refusal(names: NameServer, url: str = "http://evil.example/", timeout_s: float = BOUND_S) -> AddressRefused:
    guard = AddressGuard((), resolver=names.resolver(), resolve_s=timeout_s)
    with pytest.raises(AddressRefused) as refused:
        await guard.check(url)
    return refused.value


async def test_a_name_that_leads_elsewhere_the_second_time_is_judged_again(names: NameServer) -> None:
    names.then("evil.example", [PUBLIC], ["127.0.0.1"])
    guard = AddressGuard((), resolver=names.resolver(), resolve_s=BOUND_S)
    assert [str(address) for address in (await guard.check("http://evil.example/")).addresses] == [PUBLIC]
    assert "127.0.0.1" in (await refusal(names)).detail


def follow_aliases(names: NameServer, chain: list[str], addresses: list[str]) -> None:
    """An answer that holds the aliases from each name to the next, and the last one's addresses."""

    def speak(query: Message, reply: Message, before: int) -> bytes:
        for name, alias in pairwise(chain):
            reply.answer.append(dns.rrset.from_text(f"{name}.", 0, "IN", "CNAME", f"{alias}."))
        add(reply, chain[-1], addresses)
        return reply.to_wire()

    names.speak[chain[0]] = speak


async def test_an_alias_is_judged_by_the_addresses_at_its_end(names: NameServer) -> None:
    chain = ["evil.example", "a.example", "b.example", "inside.internal"]
    follow_aliases(names, chain, ["10.0.0.1"])
    assert "evil.example leads to 10.0.0.1" in (await refusal(names)).detail
    follow_aliases(names, chain, [PUBLIC])
    target = await AddressGuard((), resolver=names.resolver(), resolve_s=BOUND_S).check("http://evil.example/")
    assert (target.host, [str(address) for address in target.addresses]) == ("evil.example", [PUBLIC])


@pytest.mark.parametrize(
    "chain",
    [
        [f"{number}.example" for number in range(40)],
        ["evil.example", "other.example", "evil.example"],
        ["evil.example", "nowhere.example"],
    ],
    ids=["long", "circle", "broken"],
)
async def test_an_alias_without_a_near_end_is_refused(names: NameServer, chain: list[str]) -> None:
    follow_aliases(names, chain, [])
    await refusal(names, f"http://{chain[0]}/")


async def test_addresses_of_another_name_in_the_answer_are_not_taken(names: NameServer) -> None:
    def speak(query: Message, reply: Message, before: int) -> bytes:
        add(reply, "other.example", [PUBLIC, PUBLIC_V6])
        return reply.to_wire()

    names.speak["evil.example"] = speak
    await refusal(names)


async def test_a_huge_answer_is_read_whole_over_tcp_and_judged_whole(names: NameServer) -> None:
    many = [f"93.184.{high}.{low}" for high in range(10) for low in range(250)]
    names.records["evil.example"] = many
    await AddressGuard((), resolver=names.resolver(), resolve_s=BOUND_S).check("http://evil.example/")
    names.records["evil.example"] = [*many, "192.168.0.1"]
    assert "192.168.0.1" in (await refusal(names)).detail


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["::1"], [PUBLIC, "::1"], ["127.0.0.1", PUBLIC_V6]], ids=str)
async def test_both_families_are_judged(names: NameServer, addresses: list[str]) -> None:
    names.records["evil.example"] = addresses
    await refusal(names)


async def test_one_family_is_enough(names: NameServer) -> None:
    names.records.update({"four.example": [PUBLIC], "six.example": [PUBLIC_V6]})
    resolver = names.resolver()
    assert [str(address) for address in await resolver("four.example")] == [PUBLIC]
    assert [str(address) for address in await resolver("six.example")] == [PUBLIC_V6]


def say(names: NameServer, rcode: dns.rcode.Rcode) -> None:
    def speak(query: Message, reply: Message, before: int) -> bytes:
        reply.set_rcode(rcode)
        return reply.to_wire()

    names.speak["evil.example"] = speak


@pytest.mark.parametrize(
    ("rcode", "transient"),
    [(dns.rcode.NXDOMAIN, False), (dns.rcode.NOERROR, False), (dns.rcode.SERVFAIL, True), (dns.rcode.REFUSED, True)],
    ids=str,
)
async def test_no_address_is_a_refusal_that_knows_whether_to_ask_again(
    names: NameServer, rcode: dns.rcode.Rcode, transient: bool
) -> None:
    say(names, rcode)
    assert (await refusal(names)).transient is transient


@pytest.mark.parametrize("wire", [b"", b"\x00", b"\xff" * 40, b"x" * 400], ids=len)
async def test_an_answer_that_is_none_is_waited_out(names: NameServer, wire: bytes) -> None:
    names.speak["evil.example"] = lambda query, reply, before: query.to_wire()[:2] + wire
    assert (await refusal(names, timeout_s=0.2)).transient


async def test_a_name_server_that_says_nothing_is_given_up_and_leaves_nothing_behind(names: NameServer) -> None:
    names.speak["evil.example"] = lambda query, reply, before: None
    before = asyncio.all_tasks()
    assert (await refusal(names, timeout_s=0.05)).transient
    assert asyncio.all_tasks() == before


async def test_a_resolver_gives_up_by_itself_too(names: NameServer) -> None:
    names.speak["evil.example"] = lambda query, reply, before: None
    with pytest.raises(Unresolved) as unresolved:
        await names.resolver(timeout_s=0.05)("evil.example")
    assert unresolved.value.transient


async def test_one_silent_name_does_not_keep_others_waiting(names: NameServer) -> None:
    names.records["good.example"] = [PUBLIC]
    names.speak["evil.example"] = lambda query, reply, before: None
    guard = AddressGuard((), resolver=names.resolver(), resolve_s=BOUND_S)
    waiting = [asyncio.create_task(guard.check("http://evil.example/")) for _ in range(50)]
    async with asyncio.timeout(BOUND_S):
        await guard.check("http://good.example/")
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
