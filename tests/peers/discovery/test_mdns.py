"""mDNS for real, over the loopback: hearing each other, goodbyes, lies, and a network that is not there."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from ipaddress import ip_address

import pytest
import uvloop

from covenant.model.peers.instance import SUPPORTED_VERSIONS
from covenant.peers.discovery.candidates import CandidateConflict, CandidateNote
from covenant.peers.discovery.discovery_service import Discovery
from covenant.peers.discovery.mdns import LABEL_BYTES_MAX, _host_to_call, _label, addresses_of
from covenant.peers.peer_settings import PeerSettings
from tests.outbound.http_servers import HERE
from tests.peers.discovery.neighbours import (
    LOOPBACK,
    Neighbour,
    announcing,
    discovery,
    heard,
    now_ms,
    of,
    until,
)
from tests.peers.discovery.processes import running


@pytest.fixture
def alpha() -> Neighbour:
    return Neighbour()


@pytest.fixture
def beta() -> Neighbour:
    return Neighbour()


def announced(finding: Discovery) -> str | None:
    return next(way.announced_as for way in finding.methods() if way.source == "mdns")


async def meet(alpha: Neighbour, beta: Neighbour) -> None:
    async with (
        discovery(LOOPBACK, alpha, announcement=alpha.announces(8421)) as first,
        discovery(replace(LOOPBACK, name="Operations"), beta, announcement=beta.announces(8422)) as second,
    ):
        (seen,) = await heard(first, beta.id)
        assert (seen.url, seen.fingerprint, seen.versions) == (
            "http://127.0.0.1:8422",
            beta.fingerprint,
            SUPPORTED_VERSIONS,
        )
        assert (seen.name, seen.source, seen.tls) == (f"Operations {beta.id[-12:]}", "mdns", False)
        assert (seen.conflict, seen.note) == (None, None)
        (seen,) = await heard(second, alpha.id)
        assert seen.url == "http://127.0.0.1:8421"
        await until(lambda: announced(first))
        assert of(first, alpha.id) == []


async def test_two_instances_hear_each_other_and_not_themselves(alpha: Neighbour, beta: Neighbour) -> None:
    await meet(alpha, beta)


def test_they_hear_each_other_on_the_daemons_own_loop_too(alpha: Neighbour, beta: Neighbour) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(meet(alpha, beta))


async def test_two_processes_hear_each_other_and_a_goodbye(alpha: Neighbour, beta: Neighbour) -> None:
    async with running(alpha, port=8421, interface="lo") as first, running(beta, port=8422, interface="lo") as second:
        assert (await first.says("heard", beta.id))[2] == "http://127.0.0.1:8422"
        assert (await second.says("heard", alpha.id))[2] == "http://127.0.0.1:8421"
        await second.leave()
        await first.says("lost", beta.id)


async def test_whoever_stops_says_goodbye_and_is_gone(alpha: Neighbour, beta: Neighbour) -> None:
    async with discovery(LOOPBACK, alpha) as listening:
        async with discovery(LOOPBACK, beta, announcement=beta.announces(8422)):
            await heard(listening, beta.id)
        await until(lambda: not of(listening, beta.id))


async def test_whoever_is_killed_is_gone_when_the_announcement_does_not_hold_any_more(
    alpha: Neighbour, beta: Neighbour
) -> None:
    ahead_ms = 0
    async with (
        discovery(LOOPBACK, alpha, now_ms=lambda: now_ms() + ahead_ms) as listening,
        running(beta, port=8422, interface="lo") as process,
    ):
        await heard(listening, beta.id)
        await process.kill()
        ahead_ms = 110_000
        assert len(of(listening, beta.id)) == 1
        ahead_ms = 200_000
        assert of(listening, beta.id) == []


async def test_a_listener_that_does_not_announce_is_not_heard(alpha: Neighbour, beta: Neighbour) -> None:
    async with (
        discovery(LOOPBACK, alpha) as silent,
        discovery(LOOPBACK, beta, announcement=beta.announces(8422)) as loud,
    ):
        await heard(silent, beta.id)
        assert of(loud, alpha.id) == []


async def test_a_fingerprint_that_is_not_that_of_the_id_is_shown_as_a_conflict(
    alpha: Neighbour, beta: Neighbour
) -> None:
    async with (
        discovery(LOOPBACK, alpha) as listening,
        announcing(f"spoof {beta.id[-8:]}", beta.says(fingerprint=Neighbour().fingerprint)),
    ):
        (seen,) = await heard(listening, beta.id)
        assert seen.conflict == CandidateConflict.FINGERPRINT_MISMATCH


async def test_a_second_announcement_of_one_id_is_shown_as_a_conflict_of_both(
    alpha: Neighbour, beta: Neighbour
) -> None:
    async with (
        discovery(LOOPBACK, alpha) as listening,
        discovery(LOOPBACK, beta, announcement=beta.announces(8422)),
        announcing(f"spoof {beta.id[-8:]}", beta.says(), port=6666 + 10_000),
    ):
        seen = await heard(listening, beta.id, count=2)
        assert {each.url: each.conflict for each in seen} == {
            "http://127.0.0.1:8422": CandidateConflict.ID_CLAIMED_TWICE,
            "http://127.0.0.1:16666": CandidateConflict.ID_CLAIMED_TWICE,
        }


async def test_an_impostor_of_a_known_peer_is_shown_and_changes_nothing(alpha: Neighbour, beta: Neighbour) -> None:
    known = {beta.id: "http://127.0.0.1:8422"}
    before = dict(known)
    async with (
        discovery(LOOPBACK, alpha, known=known) as listening,
        discovery(LOOPBACK, beta, announcement=beta.announces(8422)),
        announcing(f"spoof {beta.id[-8:]}", beta.says(), port=16_666),
    ):
        seen = await heard(listening, beta.id, count=2)
        assert {each.port: each.conflict for each in seen} == {8422: None, 16_666: CandidateConflict.PEER_ELSEWHERE}
        assert known == before


async def test_another_key_at_the_address_of_a_known_peer_is_shown_and_changes_nothing(
    alpha: Neighbour, beta: Neighbour
) -> None:
    known = {beta.id: "http://127.0.0.1:8422"}
    swapped = Neighbour()
    async with (
        discovery(LOOPBACK, alpha, known=known) as listening,
        discovery(LOOPBACK, swapped, announcement=swapped.announces(8422)),
    ):
        (seen,) = await heard(listening, swapped.id)
        assert seen.conflict == CandidateConflict.IDENTITY_CHANGED
        assert known == {beta.id: "http://127.0.0.1:8422"}


async def test_somebody_who_goes_by_our_own_id_is_shown(alpha: Neighbour) -> None:
    async with (
        discovery(LOOPBACK, alpha, announcement=alpha.announces(8421)) as listening,
        announcing(f"spoof {alpha.id[-8:]}", alpha.says(), port=16_666),
    ):
        (seen,) = await heard(listening, alpha.id)
        assert (seen.conflict, seen.port) == (CandidateConflict.CLAIMS_OUR_ID, 16_666)


SPOILED = [b"", b"\xff\xff\xff", b"\x09txtvers=1\x04id=x", b"\x01", b"\x09txtvers=2"]


async def test_spoiled_records_are_shown_as_malformed_and_others_are_heard(alpha: Neighbour, beta: Neighbour) -> None:
    labels = {f"spoiled {n} {beta.id[-8:]}": txt for n, txt in enumerate(SPOILED)}

    def seen() -> dict[str, tuple[CandidateConflict | None, str]]:
        return {each.name: (each.conflict, each.instance_id) for each in listening.candidates() if each.name in labels}

    async with discovery(LOOPBACK, alpha) as listening, AsyncExitStack() as stack:
        for label, txt in labels.items():
            await stack.enter_async_context(announcing(label, txt))
        await until(lambda: len(seen()) == len(labels))
        assert set(seen().values()) == {(CandidateConflict.MALFORMED, "")}
        await stack.enter_async_context(discovery(LOOPBACK, beta, announcement=beta.announces(8422)))
        await heard(listening, beta.id)


async def test_the_same_name_with_another_address_is_a_conflict_while_the_first_may_still_hold(
    alpha: Neighbour, beta: Neighbour
) -> None:
    label = f"moving {beta.id[-8:]}"
    async with discovery(LOOPBACK, alpha) as listening, announcing(label, beta.says(), port=8422):
        await heard(listening, beta.id)
        async with announcing(label, beta.says(), port=16_666):
            seen = await heard(listening, beta.id, count=2)
            assert {each.conflict for each in seen} == {CandidateConflict.ID_CLAIMED_TWICE}


ADDRESSES: list[tuple[tuple[str, ...], str, CandidateNote | None]] = [
    (("169.254.7.7",), "", CandidateNote.LINK_LOCAL_SKIPPED),
    (("fe80::7", "192.168.7.7"), "http://192.168.7.7:8421", CandidateNote.LINK_LOCAL_SKIPPED),
    (("fd00::7", "10.7.7.7"), "http://10.7.7.7:8421", None),
    (("fd00::7",), "http://[fd00::7]:8421", None),
    (("169.254.169.254",), "", CandidateNote.LINK_LOCAL_SKIPPED),
    (("100.100.100.200", "224.0.0.9", "0.0.0.0"), "", CandidateNote.NO_USABLE_ADDRESS),
]


async def test_only_addresses_that_an_instance_may_have_are_taken(alpha: Neighbour) -> None:
    expected = {Neighbour(): row for row in ADDRESSES}

    def seen() -> list[list[tuple[str, CandidateNote | None]]]:
        return [[(each.url, each.note) for each in of(listening, who.id)] for who in expected]

    async with discovery(LOOPBACK, alpha) as listening, AsyncExitStack() as stack:
        for who, (addresses, _, _) in expected.items():
            await stack.enter_async_context(announcing(f"odd {who.id[-8:]}", who.says(), addresses=addresses))
        await until(lambda: all(seen()))
        assert seen() == [[(url, note)] for _, url, note in ADDRESSES]


def test_the_loopback_of_somebody_else_is_not_ours_to_call() -> None:
    assert _host_to_call("beta.local", ["127.0.0.1"], loopback=False) == (None, CandidateNote.NO_USABLE_ADDRESS)
    assert _host_to_call("beta.local", ["127.0.0.1"], loopback=True) == ("127.0.0.1", None)


async def test_a_host_with_a_name_of_its_own_is_left_to_dns(alpha: Neighbour, beta: Neighbour) -> None:
    async with (
        discovery(LOOPBACK, alpha) as listening,
        announcing(f"named {beta.id[-8:]}", beta.says(tls=True), server="beta.corp.example.", port=8443),
    ):
        (seen,) = await heard(listening, beta.id)
        assert (seen.url, seen.host) == ("https://beta.corp.example:8443", "beta.corp.example")


async def test_an_interface_that_is_not_there_is_shown_and_stops_nothing(alpha: Neighbour) -> None:
    settings = PeerSettings(mdns=True, mdns_interfaces=("no-such-interface",))
    async with discovery(settings, alpha, announcement=alpha.announces(8421)) as finding:
        await until(lambda: "interface" in "".join(failures(finding)))
        assert finding.candidates() == ()


async def test_a_door_that_listens_elsewhere_is_not_announced(alpha: Neighbour) -> None:
    async with discovery(
        LOOPBACK, alpha, announcement=alpha.announces(8421, listen_addresses=("10.9.9.9",))
    ) as finding:
        await until(lambda: "not announced" in "".join(failures(finding)))
        assert announced(finding) is None


def failures(finding: Discovery) -> tuple[str, ...]:
    return next(way.failures for way in finding.methods() if way.source == "mdns")


async def test_starting_waits_for_nothing(alpha: Neighbour) -> None:
    async with discovery(LOOPBACK, alpha, announcement=alpha.announces(8421)) as finding:
        assert announced(finding) is None
        assert failures(finding) == ("not started",)
        await until(lambda: announced(finding))
        assert failures(finding) == ()


def test_the_loopback_counts_only_if_it_was_named() -> None:
    assert ip_address(HERE) not in addresses_of(())
    assert addresses_of((HERE,)) == [ip_address(HERE)]
    assert ip_address(HERE) in addresses_of(("lo",))
    assert addresses_of(("no-such-interface",)) == []


@pytest.mark.parametrize("name", ["Research", "a.b.c", "ü" * 60, "", "\x1b[31m", "x" * 200])
def test_the_name_of_a_service_fits_and_is_one_label(name: str) -> None:
    label = _label(name, "abcdefghijkl")
    assert len(label.encode()) <= LABEL_BYTES_MAX
    assert "." not in label
    assert label.isprintable()
    assert label.endswith(" abcdefghijkl")
