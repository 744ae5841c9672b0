"""Candidates: instances that were announced or configured, and whether the announcements can be true.

A candidate is not a peer: nothing is sent to it, and no announcement changes a peer. An announcement that cannot be
true, or that contradicts another one, is shown with a `conflict`. Which of two announcements is true is not guessed,
since only an instance's key proves its id. Conflicts are decided when the candidates are listed, without a clock or any
call. At most `CANDIDATES_MAX` are kept. When there are more, the one on the local network that was silent for longest
goes.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from covenant.model.peers.instance import InstanceId, parse_instance_id
from covenant.outbound.urls import InvalidUrl
from covenant.peers.peer_settings import root_of
from covenant.seal.identity import fingerprint_of

CANDIDATES_MAX: Final = 500
MOVED_MS: Final = 120_000
"""How long an announcement is still shown beside the one that replaced it under the same name: as long as the
addresses of a host live in mDNS. An instance that moved conflicts with itself meanwhile, as an impostor would."""
NAME_CHARS_MAX: Final = 64

Source = Literal["static", "mdns", "dns"]
FIRST_TO_GO: Final[tuple[Source, ...]] = ("mdns", "dns", "static")

replace = msgspec.structs.replace


class CandidateConflict(enum.StrEnum):
    """Why an announcement is not believed. The first reason that applies is named."""

    MALFORMED = "malformed"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    UNVERIFIED_KEYS = "unverified_keys"
    """The instance was asked for its keys, and those that it showed are not valid."""
    CLAIMS_OUR_ID = "claims_our_id"
    PEER_ELSEWHERE = "peer_elsewhere"
    IDENTITY_CHANGED = "identity_changed"
    ID_CLAIMED_TWICE = "id_claimed_twice"


CONFLICT_DETAILS: Final[Mapping[CandidateConflict, str]] = {
    CandidateConflict.FINGERPRINT_MISMATCH: "no key with this id has this fingerprint",
    CandidateConflict.CLAIMS_OUR_ID: "this is our own id, and another instance announces it",
    CandidateConflict.PEER_ELSEWHERE: "a peer has this id, at another address, where it stays",
    CandidateConflict.IDENTITY_CHANGED: "a peer with another id has this address, and keeps its keys and its trust",
    CandidateConflict.ID_CLAIMED_TWICE: "this id is announced at several addresses; ask each for its keys",
}


class CandidateNote(enum.StrEnum):
    """A remark on a candidate that is no conflict."""

    OURSELVES = "ourselves"
    LINK_LOCAL_SKIPPED = "link_local_skipped"
    """The candidate has link-local addresses, too, which are never called."""
    NO_USABLE_ADDRESS = "no_usable_address"
    NOT_ASKED = "not_asked"
    """The candidate is from the settings, and was not asked for its keys yet."""
    NO_ANSWER = "no_answer"
    NOT_ALLOWED = "not_allowed"
    VERSION_NOT_SUPPORTED = "version_not_supported"


class Candidate(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    instance_id: str
    """The id that was announced; empty if it cannot be an id."""
    url: str
    """The address at which the candidate would be called; empty if there is none."""
    name: str
    """The name in the announcement, for people. Two candidates may have the same."""
    source: Source
    versions: tuple[int, ...] = ()
    fingerprint: str = ""
    host: str = ""
    port: int = 0
    path: str = ""
    """The path of its agent card, below `url`."""
    tls: bool = False
    seen_at_ms: int
    conflict: CandidateConflict | None = None
    note: CandidateNote | None = None
    detail: str = ""
    """Explains the note or the conflict to the operator."""
    announced_as: str = ""
    """Where the candidate came from: the service's name, the domain's entry, or the line of the setting."""
    authenticated: bool = False
    """For DNS: whether the name server says that it has checked the zone's signatures."""
    others: tuple[str, ...] = ()
    """For DNS: other places to call the candidate, the best first."""


@dataclass(slots=True)
class _Entry:
    candidate: Candidate
    group: str
    until_ms: int | None


class Candidates:
    """One candidate for each id, source and URL. A *group* is renewed or withdrawn together."""

    def __init__(self, own_id: InstanceId, *, candidates_max: int = CANDIDATES_MAX) -> None:
        self._own_id = own_id
        self._candidates_max = candidates_max
        self._entries: dict[tuple[str, Source, str], _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, candidate: Candidate, *, group: str, until_ms: int | None = None) -> None:
        """Adds an announcement.

        If the group is known with another address or id, the earlier candidate stays for `MOVED_MS`.
        """
        key = _key(candidate)
        moved_until_ms = candidate.seen_at_ms + MOVED_MS
        for other, entry in self._entries.items():
            if entry.group == group and other != key:
                entry.until_ms = min(moved_until_ms, entry.until_ms or moved_until_ms)
        self._put(key, _Entry(candidate, group, until_ms))

    def remove_group(self, group: str) -> None:
        self._retain(lambda entry: entry.group != group)

    def remove_source(self, source: Source) -> None:
        self._retain(lambda entry: entry.candidate.source != source)

    def add_found(self, candidates: Iterable[Candidate], *, group: str, whole: bool) -> None:
        """Adds the candidates of a look-up. If the look-up was `whole`, earlier ones of the group are removed."""
        if whole:
            self.remove_group(group)
        for candidate in candidates:
            self._put(_key(candidate), _Entry(candidate, group, None))

    def listed(self, monotonic_ms: int, known: Mapping[InstanceId, str | None]) -> tuple[Candidate, ...]:
        """All candidates with their conflicts and notes, the last seen first. `known`: the peers and their addresses.

        `monotonic_ms`: the time by the clock that `until_ms` was given in.
        """
        self._retain(lambda entry: entry.until_ms is None or monotonic_ms < entry.until_ms)
        checked = _with_conflicts((entry.candidate for entry in self._entries.values()), self._own_id, known)
        return tuple(sorted(checked, key=lambda each: (-each.seen_at_ms, each.source, each.url, each.instance_id)))

    def _retain(self, wanted: Callable[[_Entry], bool]) -> None:
        self._entries = {key: entry for key, entry in self._entries.items() if wanted(entry)}

    def _put(self, key: tuple[str, Source, str], entry: _Entry) -> None:
        self._entries[key] = entry
        if len(self._entries) > self._candidates_max:
            del self._entries[min(self._entries, key=self._drop_order)]

    def _drop_order(self, key: tuple[str, Source, str]) -> tuple[int, int]:
        candidate = self._entries[key].candidate
        return FIRST_TO_GO.index(candidate.source), candidate.seen_at_ms


def shown_name(text: str) -> str:
    """An announced text made safe for a terminal and a page: one line, bounded, without control characters."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text[:NAME_CHARS_MAX]).strip()


def _key(candidate: Candidate) -> tuple[str, Source, str]:
    # Candidates without a usable id are told apart by their names.
    return candidate.instance_id or candidate.announced_as, candidate.source, candidate.url


def _with_conflicts(
    candidates: Iterable[Candidate], own_id: InstanceId, known: Mapping[InstanceId, str | None]
) -> list[Candidate]:
    addresses = {peer: _canonical_address(url) for peer, url in known.items() if url is not None}
    peers_at = {address: peer for peer, address in addresses.items()}
    checked = [
        _with_conflict(each, _conflict_in_itself(each, own_id) or _conflict_with_peers(each, addresses, peers_at))
        for each in candidates
    ]
    # An announcement that is in conflict itself does not put another one in conflict.
    claims = Counter((each.instance_id, each.source) for each in checked if _claims_address(each))
    return [
        _with_conflict(each, CandidateConflict.ID_CLAIMED_TWICE)
        # A known peer at its known address is believed, even if others claim its id.
        if _claims_address(each)
        and claims[each.instance_id, each.source] > 1
        and peers_at.get(each.url) != each.instance_id
        else _with_own_note(each, own_id)
        for each in checked
    ]


def _claims_address(candidate: Candidate) -> bool:
    return bool(candidate.conflict is None and candidate.instance_id and candidate.url)


def _conflict_in_itself(candidate: Candidate, own_id: InstanceId) -> CandidateConflict | None:
    if candidate.conflict is not None:
        return candidate.conflict
    if not candidate.instance_id:
        return None
    if candidate.fingerprint and candidate.fingerprint != fingerprint_of(parse_instance_id(candidate.instance_id)):
        return CandidateConflict.FINGERPRINT_MISMATCH
    # An entry in DNS or in the settings may mean this instance itself, which cannot be told from here. What we
    # announce on the local network ourselves is left out before.
    return CandidateConflict.CLAIMS_OUR_ID if candidate.instance_id == own_id and candidate.source == "mdns" else None


def _conflict_with_peers(
    candidate: Candidate, addresses: Mapping[InstanceId, str], peers_at: Mapping[str, InstanceId]
) -> CandidateConflict | None:
    if not candidate.instance_id:
        return None
    address = addresses.get(InstanceId(candidate.instance_id))
    if address is not None:
        return CandidateConflict.PEER_ELSEWHERE if address != candidate.url else None
    peer = peers_at.get(candidate.url)
    return CandidateConflict.IDENTITY_CHANGED if peer is not None and peer != candidate.instance_id else None


def _with_conflict(candidate: Candidate, conflict: CandidateConflict | None) -> Candidate:
    if conflict is None or candidate.conflict == conflict:
        return candidate
    return replace(candidate, conflict=conflict, detail=CONFLICT_DETAILS[conflict])


def _with_own_note(candidate: Candidate, own_id: InstanceId) -> Candidate:
    is_own = candidate.instance_id == own_id and candidate.conflict is None
    return replace(candidate, note=CandidateNote.OURSELVES) if is_own else candidate


def _canonical_address(url: str) -> str:
    try:
        return root_of(url)
    except InvalidUrl:
        return url
