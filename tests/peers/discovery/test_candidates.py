"""Candidates: what contradicts is shown as such, nothing grows without bound, and nothing touches what is known."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.peers.instance import InstanceId
from covenant.peers.discovery.candidates import (
    CANDIDATES_MAX,
    MOVED_MS,
    Candidate,
    CandidateConflict,
    CandidateNote,
    Candidates,
    shown_name,
)
from covenant.seal.identity import fingerprint_of
from tests.peers.discovery.neighbours import Neighbour

US, ALPHA, BETA = Neighbour(), Neighbour(), Neighbour()
HERE, THERE = "http://10.0.0.1:8421", "http://10.0.0.2:8421"
NOW = 2_000


def register(*seen: Candidate, **more: Any) -> Candidates:
    candidates = Candidates(US.id, **more)
    for each in seen:
        candidates.add(each, group=f"{each.announced_as}{each.source}{each.url}{each.instance_id}")
    return candidates


def conflicts(
    candidates: Candidates, known: dict[InstanceId, str | None] | None = None
) -> dict[str, CandidateConflict | None]:
    return {each.url: each.conflict for each in candidates.listed(NOW, known or {})}


def test_an_id_says_which_fingerprint_its_key_has() -> None:
    assert fingerprint_of(ALPHA.id) == ALPHA.fingerprint


def test_an_announcement_that_contradicts_nothing_has_no_conflict() -> None:
    candidates = register(ALPHA.candidate(HERE), BETA.candidate(THERE))
    assert conflicts(candidates) == {HERE: None, THERE: None}


def test_a_fingerprint_of_another_key_is_a_conflict() -> None:
    candidates = register(ALPHA.candidate(HERE, fingerprint=BETA.fingerprint))
    assert conflicts(candidates) == {HERE: CandidateConflict.FINGERPRINT_MISMATCH}


def test_one_id_at_two_addresses_is_a_conflict_of_both() -> None:
    candidates = register(ALPHA.candidate(HERE), ALPHA.candidate(THERE))
    assert conflicts(candidates) == {
        HERE: CandidateConflict.ID_CLAIMED_TWICE,
        THERE: CandidateConflict.ID_CLAIMED_TWICE,
    }


def test_one_id_found_in_two_ways_is_no_conflict() -> None:
    candidates = register(ALPHA.candidate(HERE), ALPHA.candidate("https://alpha.example", source="dns"))
    assert set(conflicts(candidates).values()) == {None}


def test_what_is_refuted_by_itself_refutes_nobody_else() -> None:
    candidates = register(ALPHA.candidate(HERE), ALPHA.candidate(THERE, fingerprint=BETA.fingerprint))
    assert conflicts(candidates) == {HERE: None, THERE: CandidateConflict.FINGERPRINT_MISMATCH}


def test_a_peer_that_is_announced_elsewhere_is_a_conflict_there_alone() -> None:
    candidates = register(ALPHA.candidate(HERE), ALPHA.candidate(THERE))
    assert conflicts(candidates, {ALPHA.id: HERE + "/"}) == {HERE: None, THERE: CandidateConflict.PEER_ELSEWHERE}


def test_another_id_at_the_address_of_a_peer_is_a_conflict() -> None:
    assert conflicts(register(BETA.candidate(HERE)), {ALPHA.id: HERE}) == {HERE: CandidateConflict.IDENTITY_CHANGED}


def test_two_peers_may_share_an_address() -> None:
    candidates = register(ALPHA.candidate(HERE), BETA.candidate(HERE))
    known: dict[InstanceId, str | None] = {ALPHA.id: HERE, BETA.id: HERE}
    assert [each.conflict for each in candidates.listed(NOW, known)] == [None, None]


def test_a_peer_without_an_address_contradicts_no_announcement() -> None:
    assert conflicts(register(ALPHA.candidate(HERE)), {ALPHA.id: None}) == {HERE: None}


def test_our_own_id_on_the_local_network_is_a_conflict_and_elsewhere_a_note() -> None:
    candidates = register(US.candidate(HERE), US.candidate("https://us.example", source="dns"))
    listed = {each.source: each for each in candidates.listed(NOW, {})}
    assert listed["mdns"].conflict == CandidateConflict.CLAIMS_OUR_ID
    assert (listed["dns"].conflict, listed["dns"].note) == (None, CandidateNote.OURSELVES)


def test_what_is_malformed_is_shown_as_that_whatever_else_is_wrong() -> None:
    spoiled = ALPHA.candidate(HERE, conflict=CandidateConflict.MALFORMED, fingerprint=BETA.fingerprint)
    assert conflicts(register(spoiled), {BETA.id: HERE}) == {HERE: CandidateConflict.MALFORMED}


def test_candidates_without_an_id_do_not_claim_the_same_one() -> None:
    empty = {"instance_id": "", "fingerprint": "", "source": "static"}
    candidates = register(ALPHA.candidate(HERE, **empty), ALPHA.candidate(THERE, **empty))
    assert conflicts(candidates) == {HERE: None, THERE: None}


def test_the_last_seen_comes_first() -> None:
    candidates = register(ALPHA.candidate(HERE, seen_at_ms=1), BETA.candidate(THERE, seen_at_ms=2))
    candidates.add(ALPHA.candidate(HERE, seen_at_ms=3), group="alpha")
    assert [each.instance_id for each in candidates.listed(NOW, {})] == [ALPHA.id, BETA.id]


def test_a_goodbye_removes_what_was_announced_under_that_name() -> None:
    candidates = Candidates(US.id)
    candidates.add(ALPHA.candidate(HERE), group="alpha")
    candidates.add(BETA.candidate(THERE), group="beta")
    candidates.remove_group("alpha")
    assert list(conflicts(candidates)) == [THERE]


def test_an_announcement_holds_as_long_as_it_said() -> None:
    candidates = Candidates(US.id)
    candidates.add(ALPHA.candidate(HERE), group="alpha", until_ms=NOW + 1)
    assert len(candidates.listed(NOW, {})) == 1
    assert candidates.listed(NOW + 1, {}) == ()


def test_another_address_under_the_same_name_does_not_quietly_take_the_place_of_the_first() -> None:
    candidates = Candidates(US.id)
    candidates.add(ALPHA.candidate(HERE, seen_at_ms=NOW), group="alpha", until_ms=NOW + 10 * MOVED_MS)
    candidates.add(ALPHA.candidate(THERE, seen_at_ms=NOW), group="alpha", until_ms=NOW + 10 * MOVED_MS)
    assert set(conflicts(candidates).values()) == {CandidateConflict.ID_CLAIMED_TWICE}
    assert [(each.url, each.conflict) for each in candidates.listed(NOW + MOVED_MS, {})] == [(THERE, None)]


def test_a_whole_look_up_replaces_what_the_last_one_found_and_a_partial_one_does_not() -> None:
    candidates = Candidates(US.id)
    candidates.add_found([ALPHA.candidate(HERE), BETA.candidate(THERE)], group="a", whole=True)
    candidates.add_found([ALPHA.candidate(HERE)], group="a", whole=False)
    assert len(candidates) == 2
    candidates.add_found([ALPHA.candidate(HERE)], group="a", whole=True)
    assert list(conflicts(candidates)) == [HERE]


def test_a_flood_on_the_local_network_is_bounded_and_displaces_nothing_else() -> None:
    static = BETA.candidate("https://beta.example", source="static", seen_at_ms=0)
    candidates = register(static, BETA.candidate("https://b.example", source="dns", seen_at_ms=0))
    for n in range(CANDIDATES_MAX + 100):
        candidates.add(ALPHA.candidate(f"http://10.0.{n // 250}.{n % 250}:8421", seen_at_ms=n), group=str(n))
    listed = candidates.listed(NOW, {})
    assert len(listed) == CANDIDATES_MAX
    assert {each.source for each in listed} == {"static", "dns", "mdns"}
    assert listed[0].seen_at_ms == CANDIDATES_MAX + 99


@given(st.text())
def test_a_name_is_one_bounded_line_whatever_somebody_announced(text: str) -> None:
    name = shown_name(text)
    assert len(name) <= 64
    assert name.isprintable()


CLAIMS = st.builds(
    lambda who, url, source, lie, broken: who.candidate(
        url,
        source=source,
        fingerprint=BETA.fingerprint if lie else who.fingerprint,
        conflict=CandidateConflict.MALFORMED if broken else None,
    ),
    st.sampled_from([US, ALPHA, BETA]),
    st.sampled_from([HERE, THERE, "https://alpha.example", ""]),
    st.sampled_from(["static", "mdns", "dns"]),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(CLAIMS, max_size=30), st.integers(1, 8))
def test_whatever_is_announced_the_register_is_bounded_and_knows_no_peer_anew(seen: list[Candidate], most: int) -> None:
    known: dict[InstanceId, str | None] = {ALPHA.id: HERE}
    listed = register(*seen, candidates_max=most).listed(NOW, known)
    assert known == {ALPHA.id: HERE}
    assert len(listed) <= most
    for each in listed:
        if each.instance_id == ALPHA.id and each.url != HERE:
            assert each.conflict is not None
        if each.url == HERE and each.instance_id != ALPHA.id:
            assert each.conflict is not None


@pytest.mark.parametrize("conflict", CandidateConflict)
def test_a_conflict_is_its_machine_code(conflict: CandidateConflict) -> None:
    assert conflict == conflict.value == str(conflict)
