"""TXT records: what we write can be read, and whatever anybody writes is read without harm."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.peers.instance import SUPPORTED_VERSIONS
from covenant.peers.discovery.dns_sd import (
    CARD_PATH,
    KEY_CHARS_MAX,
    TXT_BYTES_MAX,
    TxtRecord,
    decode_strings,
    decode_txt,
    encode_txt,
)
from tests.peers.discovery.neighbours import Neighbour

US = Neighbour()
STRINGS = [
    b"txtvers=1",
    b"pv=2,3,4,5,7",
    b"id=" + US.id.encode(),
    b"fp=" + US.fingerprint.encode(),
    b"path=/.well-known/agent-card.json",
    b"tls=0",
]


def packed(strings: list[bytes]) -> bytes:
    return b"".join(len(each).to_bytes(1) + each for each in strings)


def test_the_record_has_the_keys_that_others_look_for_and_its_version_comes_first() -> None:
    assert encode_txt(US.says()) == packed(STRINGS)
    assert encode_txt(US.says(tls=True, versions=(2, 3, 4))) == packed(
        [STRINGS[0], b"pv=2,3,4", *STRINGS[2:5], b"tls=1"]
    )


def test_the_record_is_small_and_its_keys_are_short() -> None:
    record = encode_txt(US.says(versions=tuple(range(100, 116))))
    assert len(record) < 300
    assert all(len(each.partition(b"=")[0]) <= KEY_CHARS_MAX for each in STRINGS)


@given(
    versions=st.lists(st.integers(1, 1_000_000), min_size=1, max_size=16).map(tuple),
    tls=st.booleans(),
    path=st.from_regex(r"/[a-z0-9./-]{0,100}", fullmatch=True),
)
def test_what_is_written_is_read_again(versions: tuple[int, ...], tls: bool, path: str) -> None:
    said = US.says(versions=versions, tls=tls, path=path)
    assert decode_txt(encode_txt(said)) == said


def check(announced: TxtRecord) -> None:
    """Whatever was read, what is passed on can be used without another look at it."""
    assert announced.instance_id == "" or re.fullmatch(r"frd1_[a-z2-7]{40}", announced.instance_id)
    assert len(announced.versions) <= 16
    assert all(1 <= version <= 1_000_000 for version in announced.versions)
    assert re.fullmatch(r"[0-9a-f]{0,16}", announced.fingerprint)
    assert re.fullmatch(r"/[\x21-\x7e]*", announced.path)
    assert announced.malformed is None or announced.malformed.isprintable()
    assert announced.malformed or (announced.instance_id and announced.versions)


@given(st.binary(max_size=2_000))
def test_no_bytes_make_reading_fail(data: bytes) -> None:
    check(decode_txt(data))


@given(st.lists(st.sampled_from(STRINGS) | st.binary(max_size=255), max_size=40))
def test_no_strings_make_reading_fail(strings: list[bytes]) -> None:
    check(decode_strings(strings))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"txtvers", b"pv", b"id", b"fp", b"path", b"tls", b"ID", b""]), st.binary(max_size=60)
        ),
        max_size=12,
    )
)
def test_no_values_make_reading_fail(pairs: list[tuple[bytes, bytes]]) -> None:
    check(decode_txt(packed([key + b"=" + value for key, value in pairs])))


@given(st.integers(0, len(packed(STRINGS))), st.binary(max_size=20))
def test_a_damaged_record_does_not_make_reading_fail(at: int, piece: bytes) -> None:
    record = packed(STRINGS)
    check(decode_txt(record[:at] + piece + record[at + len(piece) :]))


def test_the_first_of_a_kind_counts() -> None:
    other = Neighbour()
    said = decode_strings([*STRINGS, b"id=" + other.id.encode(), b"tls=1"])
    assert said == US.says()


def test_unknown_keys_case_and_order_do_not_matter() -> None:
    strings = [
        b"colour=red",
        b"averyveryverylongkey=1",
        b"flag",
        b"=odd",
        b"\xff\xfe=1",
        b"note=\xff",
        *reversed(STRINGS),
    ]
    assert decode_strings([each.replace(b"id=", b"ID=") for each in strings]) == US.says()


def test_what_may_be_left_out_has_the_value_that_it_most_likely_has() -> None:
    said = decode_strings(STRINGS[:3])
    assert (said.malformed, said.fingerprint, said.path, said.tls) == (None, "", CARD_PATH, False)
    assert said.versions == SUPPORTED_VERSIONS


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (0, b"txtvers=2"),
        (0, b"txtvers"),
        (0, b"colour=red"),
        (1, b"pv="),
        (1, b"pv=two"),
        (1, b"pv=0"),
        (1, b"pv=2,"),
        (1, b"pv=1000001"),
        (1, b"pv=" + b",".join([b"1"] * 17)),
        (2, b"id=frd1_short"),
        (2, b"id="),
        (2, b"id=\xff\xff"),
        (3, b"fp=XYZ"),
        (3, b"fp=0123"),
        (4, b"path=card.json"),
        (4, b"path=/a b"),
        (4, b"path=/" + b"a" * 200),
        (5, b"tls=yes"),
        (5, b"tls="),
    ],
)
def test_a_value_that_cannot_be_true_is_malformed(at: int, text: bytes) -> None:
    said = decode_strings([*STRINGS[:at], text, *STRINGS[at + 1 :]])
    assert said.malformed
    check(said)


@pytest.mark.parametrize("data", [packed(STRINGS)[:-1], b"\xff", b"\x05abc", packed([b"a" * 200] * 7), b""])
def test_a_record_that_is_cut_short_too_long_or_empty_is_malformed(data: bytes) -> None:
    assert decode_txt(data).malformed
    assert len(packed([b"a" * 200] * 7)) > TXT_BYTES_MAX
