"""Cursors that only their reader can give back, and that tell nothing."""

import pytest

from covenant.seal.keys import BAD_CURSOR, CursorSeal, base64url, from_base64url, new_private_key

CURSORS = ("1", "18bcfe568d1-2a", "a place \N{GREEK SMALL LETTER ALPHA}", "x" * 500)


@pytest.mark.parametrize("cursor", CURSORS)
def test_a_cursor_is_itself_again_for_its_reader_alone(cursor: str) -> None:
    seal = CursorSeal(new_private_key())
    sealed = seal.seal("acme", cursor)
    if len(cursor) > 4:  # a shorter one is in random bytes now and then
        assert cursor.encode() not in from_base64url(sealed)
    assert (seal.open("acme", sealed), seal.seal("acme", cursor)) == (cursor, sealed)
    assert seal.open("other", sealed) == BAD_CURSOR
    assert CursorSeal(new_private_key()).open("acme", sealed) == BAD_CURSOR


def test_the_first_page_has_no_cursor_and_the_last_one_none_to_the_next() -> None:
    seal = CursorSeal(new_private_key())
    assert (seal.seal("acme", ""), seal.open("acme", "")) == ("", "")


@pytest.mark.parametrize("given", ["!", "1", "18bcfe568d1-2a", "\N{GREEK SMALL LETTER ALPHA}", "\ud800", "A" * 10_000])
def test_a_text_that_is_no_sealed_cursor_is_a_bad_one(given: str) -> None:
    assert CursorSeal(new_private_key()).open("acme", given) == BAD_CURSOR


def test_a_changed_byte_makes_a_bad_cursor() -> None:
    seal = CursorSeal(new_private_key())
    data = from_base64url(seal.seal("acme", "18bcfe568d1-2a"))
    for number in range(len(data)):
        changed = bytearray(data)
        changed[number] ^= 1
        assert seal.open("acme", base64url(bytes(changed))) == BAD_CURSOR
