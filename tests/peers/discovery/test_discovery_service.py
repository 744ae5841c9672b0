"""Discovery as the operator has it: three ways, each switched on by settings, and none that changes a peer."""

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from covenant.daemon.settings_loader import load
from covenant.model.errors import SettingsError
from covenant.outbound.http_fetcher import TlsTrust
from covenant.peers.discovery.candidates import CandidateConflict, CandidateNote
from covenant.peers.peer_settings import PeerSettings
from covenant.wire.peers import IDENTITY_PATH
from tests.outbound.dns_server import NameServer, name_server
from tests.outbound.http_servers import (
    HERE,
    Request,
    always,
    by_path,
    http_server,
    redirect,
    reply,
    silence,
)
from tests.peers.discovery.neighbours import Neighbour, announcing, discovery, heard, of, until
from tests.peers.discovery.zones import DOMAIN, Zone
from tests.waits import BOUND_S

US, ALPHA, BETA = Neighbour(), Neighbour(), Neighbour()


@pytest.fixture
async def names() -> AsyncIterator[NameServer]:
    async with name_server() as server:
        yield server


def static(*urls: str) -> PeerSettings:
    return PeerSettings(static=urls)


async def test_with_nothing_switched_on_nothing_is_found_or_asked() -> None:
    async with discovery(PeerSettings(), US) as finding:
        assert await finding.scan() == ()
        assert [way.on for way in finding.methods()] == [False, False, False]


async def test_an_instance_in_the_settings_is_asked_who_it_is() -> None:
    async with http_server(ALPHA.shows(name="Research")) as there:
        async with discovery(static(there.url()), US) as finding:
            (found,) = await finding.scan()
        assert there.requests[0].target == IDENTITY_PATH
    assert (found.instance_id, found.fingerprint, found.name) == (ALPHA.id, ALPHA.fingerprint, "Research")
    assert (found.url, found.source, found.host) == (f"http://127.0.0.1:{there.port}", "static", HERE)
    assert (found.versions, found.conflict, found.note) == ((2, 3, 4, 5, 7), None, None)


async def test_it_is_asked_when_discovery_starts_without_being_waited_for() -> None:
    async with http_server(ALPHA.shows()) as there, discovery(static(there.url()), US) as finding:
        (before,) = finding.candidates()
        assert (before.note, before.instance_id) == (CandidateNote.NOT_ASKED, "")
        await heard(finding, ALPHA.id)


class FaultyTrust(TlsTrust):
    async def context(self) -> ssl.SSLContext:
        raise RuntimeError("the certificates could not be read")


async def test_discovery_stops_cleanly_after_a_scan_that_failed_by_a_defect() -> None:
    async with discovery(static("http://127.0.0.1:8421"), US, trust=FaultyTrust()) as finding:
        with pytest.raises(ExceptionGroup):
            await finding.scan()


async def test_another_key_at_the_address_of_a_known_peer_is_a_conflict_and_the_peer_keeps_everything() -> None:
    async with http_server(BETA.shows()) as there:
        known = {ALPHA.id: there.url()}
        async with discovery(static(there.url()), US, known=known) as finding:
            (found,) = await finding.scan()
            assert (found.instance_id, found.conflict) == (BETA.id, CandidateConflict.IDENTITY_CHANGED)
            assert known == {ALPHA.id: there.url()}


async def test_a_key_that_is_swapped_between_two_scans_is_a_conflict() -> None:
    now = ALPHA.shows()

    async def speak(request: Request, writer: asyncio.StreamWriter) -> None:
        await now(request, writer)

    async with http_server(speak) as there:
        known = {ALPHA.id: there.url()}
        async with discovery(static(there.url()), US, known=known) as finding:
            assert [(each.instance_id, each.conflict) for each in await finding.scan()] == [(ALPHA.id, None)]
            now = BETA.shows()
            assert [(each.instance_id, each.conflict) for each in await finding.scan()] == [
                (BETA.id, CandidateConflict.IDENTITY_CHANGED)
            ]
            assert known == {ALPHA.id: there.url()}


def document(who: Neighbour, **changes: object) -> bytes:
    return json.dumps({"name": "x", "keys": {**msgspec.to_builtins(who.bundle()), **changes}}).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"id": BETA.id},
        {"identityKey": BETA.identity.key},
        {"id": BETA.id, "identityKey": BETA.identity.key},
        {"expiresAtMs": 1},
        {"versions": [2, 3, 4, 5, 6, 7]},
        {"signature": "x..y"},
    ],
    ids=["another id", "another key", "both of another", "over", "versions added", "no signature"],
)
async def test_keys_that_do_not_hold_are_a_conflict(changes: dict[str, object]) -> None:
    async with (
        http_server(always(reply(200, document(ALPHA, **changes)))) as there,
        discovery(static(there.url()), US) as finding,
    ):
        (found,) = await finding.scan()
        assert (found.instance_id, found.conflict) == ("", CandidateConflict.UNVERIFIED_KEYS)


@pytest.mark.parametrize(
    ("body", "note"),
    [
        (b"", CandidateNote.NO_ANSWER),
        (b"[]", CandidateNote.NO_ANSWER),
        (b'{"id": 7}', CandidateNote.NO_ANSWER),
        (b"\xff", CandidateNote.NO_ANSWER),
        (b"[" * 50_000, CandidateNote.NO_ANSWER),
        (document(ALPHA, unknown=1), CandidateNote.NO_ANSWER),
        (document(ALPHA, versions=[9]), CandidateNote.VERSION_NOT_SUPPORTED),
    ],
    ids=["empty", "a list", "of other types", "no text", "deep", "unknown field", "another version"],
)
async def test_what_is_no_identity_is_noted(body: bytes, note: CandidateNote) -> None:
    async with http_server(always(reply(200, body))) as there, discovery(static(there.url()), US) as finding:
        (found,) = await finding.scan()
        assert (found.instance_id, found.note, found.conflict) == ("", note, None)
        assert found.detail


async def test_an_address_where_nobody_answers_is_noted_within_the_time_given() -> None:
    async with http_server(silence) as there, http_server(always(reply(404))) as other:
        nobody = "http://127.0.0.1:1024"
        async with discovery(static(there.url(), other.url(), nobody), US) as finding, asyncio.timeout(BOUND_S):
            found = await finding.scan(0.5)
    assert {each.note for each in found} == {CandidateNote.NO_ANSWER}
    assert len(found) == 3


async def test_an_instance_that_sends_on_to_another_is_not_followed() -> None:
    async with http_server(ALPHA.shows()) as other, http_server(redirect(other.url(IDENTITY_PATH))) as there:
        async with discovery(static(there.url()), US) as finding:
            (found,) = await finding.scan()
        assert (found.note, found.instance_id, other.requests) == (CandidateNote.NO_ANSWER, "", [])


async def test_an_identity_that_is_shown_in_another_place_is_none() -> None:
    answers = {IDENTITY_PATH.strip("/"): redirect("/another"), "another": ALPHA.shows()}
    async with http_server(by_path(**answers)) as there, discovery(static(there.url()), US) as finding:
        (found,) = await finding.scan()
        assert (found.note, found.instance_id) == (CandidateNote.NO_ANSWER, "")


@pytest.mark.parametrize("host", ["169.254.169.254", "[fe80::1]", "100.100.100.200", "[fd00:ec2::254]", "0.0.0.0"])
async def test_link_local_and_metadata_are_not_called_even_if_they_are_in_the_settings(host: str) -> None:
    async with discovery(static(f"http://{host}:8421"), US) as finding:
        (found,) = await finding.scan()
        assert found.note == CandidateNote.NOT_ALLOWED


async def test_a_domain_is_asked_at_each_scan_and_what_it_does_not_list_any_more_is_gone(names: NameServer) -> None:
    zone = Zone(names)
    zone.lists("a", "b")
    zone.offers("a", ALPHA.says(), "0 0 8421 alpha.example.")
    zone.offers("b", BETA.says(), "0 0 8421 beta.example.")
    settings = PeerSettings(dns_domains=(DOMAIN,), dns_servers=(f"127.0.0.1:{names.port}",))
    async with discovery(settings, US) as finding:
        assert {each.instance_id for each in await finding.scan()} == {ALPHA.id, BETA.id}
        zone.lists("a")
        assert [each.instance_id for each in await finding.scan()] == [ALPHA.id]


async def test_a_name_server_that_fails_is_shown_and_what_was_known_stays(names: NameServer) -> None:
    zone = Zone(names)
    zone.lists("a")
    zone.offers("a", ALPHA.says(), "0 0 8421 alpha.example.")
    settings = PeerSettings(dns_domains=(DOMAIN,), dns_servers=(f"127.0.0.1:{names.port}",))
    async with discovery(settings, US) as finding:
        await finding.scan()
        names.speak.clear()
        names.speak[f"_friday-a2a._tcp.{DOMAIN}"] = lambda query, reply, before: None
        assert [each.instance_id for each in await finding.scan(0.3)] == [ALPHA.id]
        assert [way.failures for way in finding.methods() if way.source == "dns"] == [(f"{DOMAIN}: no answer in time",)]


async def test_a_lie_in_dns_is_shown_as_one(names: NameServer) -> None:
    zone = Zone(names)
    zone.lists("a", "b", "c")
    zone.offers("a", ALPHA.says(fingerprint=BETA.fingerprint), "0 0 8421 alpha.example.")
    zone.offers("b", BETA.says(), "0 0 8421 beta.example.")
    zone.offers("c", BETA.says(), "0 0 8421 evil.example.")
    settings = PeerSettings(dns_domains=(DOMAIN,), dns_servers=(f"127.0.0.1:{names.port}",))
    async with discovery(settings, US) as finding:
        assert {each.host: each.conflict for each in await finding.scan()} == {
            "alpha.example": CandidateConflict.FINGERPRINT_MISMATCH,
            "beta.example": CandidateConflict.ID_CLAIMED_TWICE,
            "evil.example": CandidateConflict.ID_CLAIMED_TWICE,
        }


async def test_a_scan_tells_what_all_ways_have_found(names: NameServer) -> None:
    zone = Zone(names)
    zone.lists("a")
    zone.offers("a", ALPHA.says(), "0 0 8421 alpha.example.")
    near, far = Neighbour(), Neighbour()
    async with http_server(far.shows()) as there:
        settings = PeerSettings(
            static=(there.url(),),
            mdns=True,
            mdns_interfaces=(HERE,),
            dns_domains=(DOMAIN,),
            dns_servers=(f"127.0.0.1:{names.port}",),
        )
        async with discovery(settings, US) as finding, announcing(f"near {near.id[-8:]}", near.says()):
            await heard(finding, near.id)
            found = {(each.source, each.instance_id) for each in await finding.scan()}
            assert {("static", far.id), ("dns", ALPHA.id), ("mdns", near.id)} <= found
            assert [way.on for way in finding.methods()] == [True, True, True]


async def test_two_scans_at_once_are_one() -> None:
    async with http_server(ALPHA.shows()) as there:
        async with discovery(static(there.url()), US) as finding:
            await until(lambda: of(finding, ALPHA.id))
            await asyncio.gather(*(finding.scan() for _ in range(20)))
        assert len(there.requests) <= 2


async def test_a_scan_that_is_given_up_by_one_goes_on_for_the_other() -> None:
    async with http_server(ALPHA.shows()) as there, discovery(static(there.url()), US) as finding:
        impatient, patient = asyncio.ensure_future(finding.scan()), asyncio.ensure_future(finding.scan())
        await there.asked.wait()
        impatient.cancel()
        assert [each.instance_id for each in await patient] == [ALPHA.id]


async def test_a_scan_without_time_asks_nobody_and_tells_what_is_known() -> None:
    async with http_server(ALPHA.shows()) as there, discovery(static(there.url()), US) as finding:
        await heard(finding, ALPHA.id)
        asked = len(there.requests)
        assert [each.instance_id for each in await finding.scan(0)] == [ALPHA.id]
        assert len(there.requests) == asked


async def test_stopping_tells_whoever_waits_for_a_scan_what_is_known() -> None:
    async with http_server(silence) as there:
        async with discovery(static(there.url()), US) as finding:
            waiting = asyncio.ensure_future(finding.scan())
            await there.asked.wait()
        async with asyncio.timeout(BOUND_S):
            assert [each.note for each in await waiting] == [CandidateNote.NOT_ASKED]


async def test_stopping_while_a_scan_waits_ends_it() -> None:
    async with http_server(silence) as there:
        async with discovery(static(there.url()), US):
            await there.asked.wait()
        async with asyncio.timeout(BOUND_S):
            await there.closed.wait()


@pytest.mark.parametrize(
    "given",
    [
        {"static": ("ftp://host",)},
        {"static": ("host",)},
        {"static": ("http://host/?q=1",)},
        {"static": ("http://host",) * 101},
        {"dns_domains": ("10.0.0.1",)},
        {"dns_domains": ("a b",)},
        {"dns_domains": ("office.local",)},
        {"dns_servers": ("ns.example",)},
        {"mdns_interfaces": ("x" * 65,)},
        {"mdns_interfaces": ("eth 0",)},
        {"name": "a\nb"},
        {"name": "x" * 201},
    ],
    ids=lambda given: str(given)[:40],
)
def test_a_setting_that_cannot_be_used_is_refused_by_name(tmp_path: Path, given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    variable = f"COVENANT_PEERS_{name.upper()}"
    with pytest.raises(SettingsError, match=f"peers.{name}|{variable}"):
        load({}, {variable: ",".join(value) if isinstance(value, tuple) else value}, home=tmp_path)


def test_nothing_large_is_imported_before_it_is_needed() -> None:
    program = (
        "import sys, covenant.peers.discovery.discovery_service; "
        "sys.exit(', '.join({'zeroconf', 'ifaddr', 'dns', 'httpx2'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=BOUND_S)
