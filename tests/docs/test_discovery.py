"""The page on finding instances says what the code does."""

import re
from pathlib import Path

import msgspec

from covenant.peers.discovery.candidates import CANDIDATES_MAX, Candidate, CandidateConflict, CandidateNote
from covenant.peers.discovery.dns_sd import CARD_PATH, INSTANCES_MAX, SERVICE, TXT_BYTES_MAX
from covenant.peers.discovery.mdns import SERVICE_TYPE

PAGE = (Path(__file__).parents[2] / "docs" / "discovery.md").read_text(encoding="utf-8")


def rows(heading: str) -> set[str]:
    """What stands in backquotes in the first column of the table under this heading."""
    table = re.search(rf"^\| {heading} \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert table is not None
    first = [line.split("|")[1] for line in table[0].splitlines()[2:] if line]
    return {name for cell in first for name in re.findall(r"`([^`]+)`", cell)}


def test_every_conflict_and_note_is_explained_and_no_other() -> None:
    assert rows("conflict") == set(CandidateConflict)
    assert rows("note") == set(CandidateNote)


def test_every_field_of_a_candidate_is_explained_and_no_other() -> None:
    assert rows("field") == {field.encode_name for field in msgspec.structs.fields(Candidate)}


def test_names_and_limits_are_those_of_the_code() -> None:
    assert f"`{SERVICE}`" in PAGE
    assert SERVICE_TYPE.removesuffix(".local.") == SERVICE
    assert f"path={CARD_PATH}" in PAGE
    for phrase in (
        f"at most {CANDIDATES_MAX}",
        f"more than {TXT_BYTES_MAX} bytes",
        f"At most {INSTANCES_MAX} instances",
    ):
        assert phrase in PAGE
