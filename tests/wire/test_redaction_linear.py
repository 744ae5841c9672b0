"""What a search for secrets costs: four times the text takes four times as long, whatever the text is made of."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from covenant.wire.redaction import OVERLAP_CHARS, WINDOW_CHARS, SecretSpan, find_secrets, redact
from covenant.wire.redaction_patterns import PATTERNS, name_hint
from tests.matrices import first_of, first_rows_of
from tests.wire.redaction_reference import reference_secrets_in
from tests.wire.test_redaction import JWT, ORDINARY, PEM_BODY, RANDOM, SECRETS, pem

GROWTH_MAX: Final = 6.0
"""Times as long for four times as much: linear is 4, square is 16."""
SMALL_CHARS: Final = 2 * WINDOW_CHARS
JOINTS: Final = ("", "-", " ", ".", '"', "='", "\n", "!")
CLASSES: Final = (
    "a",
    "A",
    "0",
    "_",
    "-",
    "=",
    "/",
    ".",
    " ",
    "\n",
    "'",
    '"',
    ":",
    "%",
    "\\",
    "é",
    "İ",
    "aB3",
    "A_",
    "a.",
)
PREFIXES: Final = (
    "-----BEGIN A-----",
    "-----BEGIN PRIVATE KEY-----",
    "-----END A-----",
    "-----BEGIN A-----!",
    "data:;base64,",
    "data:a;",
    "sha1-",
    "sha256:" + RANDOM,
    "password=",
    'token="',
    "secret:='",
    "max_token:",
    "api key = ",
    "a_a_a_a_a_atoken",
    "key: ${",
    "password    =    ",
)


def repeated(unit: str) -> Callable[[int], str]:
    return lambda size: (unit * (size // len(unit) + 1))[:size]


def hostile_units() -> Iterator[str]:
    """Of each pattern: its prefix, and its secrets cut off at several places, joined in several ways."""
    needles = {needle for shape in PATTERNS for needle in shape.needles}
    cuts = {text[: len(text) * part // 8] for _, text in SECRETS for part in (2, 4, 6, 7, 8)}
    seen: set[str] = set()
    for unit, joint in itertools.product([*CLASSES, *PREFIXES, *sorted(needles | cuts)], JOINTS):
        if unit and (whole := joint + unit) not in seen:
            seen.add(whole)
            yield whole


FAMILIES: Final[dict[str, Callable[[int], Any]]] = {
    "labels without an end": lambda size: "".join(f"-----BEGIN {n:06}-----!" for n in range(size // 23)),
    "labels with ends elsewhere": lambda size: (
        "".join(f"-----BEGIN {n:06}-----!" for n in range(size // 46))
        + "".join(f"-----END {n:06}-----!" for n in range(size // 46))
    ),
    "a first part of a JWT without an end": lambda size: f"eyJ{'a' * 8}" + repeated("-eyJ")(size),
    "two parts of a JWT": lambda size: "eyJ" + repeated("-eyJ")(size // 2) + ".eyJ" + repeated("-eyJ")(size // 2),
    "many tails of one JWT": lambda size: repeated("-eyJaaaaaaaa")(size // 2) + "." + repeated("eyJ-")(size // 2),
    "a long name of a long list": lambda size: {"a" * (size // 2): [""] * (size // 6)},
    "a long secret name of a long list": lambda size: {"a_" * (size // 4) + "password": ["hunter2!"] * (size // 20)},
    "long names of numbers": lambda size: {"k" * (size // 2): list(range(size // 8))},
    "many names": lambda size: {f"password{n}": "hunter2!" for n in range(size // 24)},
    "a random run": repeated(RANDOM),
    "a random run behind a mark": lambda size: "sha256-" + repeated(RANDOM)(size),
    "random words": repeated(RANDOM + " "),
    "a file of text": lambda size: {"mimeType": "text/plain", "data": repeated("cGFzc3dvcmQ9")(size)},
    "an open quote": lambda size: 'password="' + repeated("token='x key=")(size),
    "a password of one value": lambda size: "password=" + "a1" * (size // 2),
    "a URL without an end": lambda size: "https://" + repeated("a:")(size),
    "many URLs": repeated("https://aaaaaaaaaaaaaaaaaaaaaaaaa:"),
}


def seconds(value: Any, times: int) -> float:
    """Of processor time, in the best of several runs: what the search takes when nobody disturbs it."""
    best = float("inf")
    for _ in range(times):
        before = time.process_time()
        redact(value, "redact")
        best = min(best, time.process_time() - before)
    return best


def growth(made: Callable[[int], Any], *, attempts: int = 4) -> float:
    """The smallest that is seen: a busy machine makes it greater, never smaller."""
    least = float("inf")
    small, large = made(SMALL_CHARS), made(4 * SMALL_CHARS)
    for attempt in range(1, attempts + 1):
        least = min(least, seconds(large, attempt) / seconds(small, 2 * attempt))
        if least <= GROWTH_MAX:
            break
    return least


@pytest.mark.parametrize("name", first_of(FAMILIES, 8))
def test_four_times_the_text_takes_at_most_six_times_as_long(name: str) -> None:
    assert growth(FAMILIES[name]) <= GROWTH_MAX


UNITS: Final = sorted(hostile_units())


@pytest.mark.parametrize("part", first_of(range(8), 2))
def test_any_repetition_takes_time_that_grows_with_it_and_no_faster(part: int) -> None:
    """A sample of them; all are in the next test."""
    slow = {unit: found for unit in UNITS[part::320] if (found := growth(repeated(unit))) > GROWTH_MAX}
    assert not slow


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_every_repetition_takes_time_that_grows_with_it_and_no_faster(part: int) -> None:
    slow = {unit: found for unit in UNITS[part::16] if (found := growth(repeated(unit))) > GROWTH_MAX}
    assert not slow


def test_every_pattern_has_a_secret_among_the_examples() -> None:
    assert {shape.kind for shape in PATTERNS} <= {kind for kind, _ in SECRETS}


# A window's border, and a thread beside others


@pytest.mark.parametrize(
    ("kind", "text"), first_rows_of(SECRETS, 12), ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(SECRETS)]
)
def test_a_secret_across_the_border_of_a_window_is_found_whole(kind: str, text: str) -> None:
    for part in range(1, 8):
        before = "x " * ((WINDOW_CHARS - len(text) * part // 8) // 2)
        found = redact(f"{before}{text} and {'y ' * OVERLAP_CHARS}", "redact")
        assert kind in {each.kind for each in found.findings}
        assert RANDOM not in found.value
        assert "MIIEvQ" not in found.value


@pytest.mark.parametrize(
    "text",
    [
        "sk-ant-" + RANDOM * 4_000,
        f"eyJ{RANDOM}.eyJ{RANDOM * 4_000}.{RANDOM * 10}",
        f"-----BEGIN PRIVATE KEY-----\n{PEM_BODY * 3_000}\n-----END PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{PEM_BODY * 3_000}",
        f"Bearer {RANDOM * 4_000}",
        f"password={RANDOM * 4_000}!",
        RANDOM * 4_000,
    ],
    ids=["one run", "JWT", "PEM", "PEM without its end", "bearer", "assigned", "random"],
)
def test_a_secret_longer_than_any_window_is_taken_out_whole(text: str) -> None:
    found = redact(f"see {text} !there", "redact")
    assert len(found.value) < 100
    assert found.value.startswith("see ")
    assert found.value.endswith("!there")


@pytest.mark.parametrize(
    "text", ["-eyJ" * 2_400_000, "password" * 600_000, "A" * 9_500_000, 'token="' * 40_000], ids=lambda text: text[:8]
)
def test_a_search_in_a_thread_lets_others_run(text: str) -> None:
    """Without that, one call into the interpreter's core would stop the loop for as long as it takes."""
    longest_s = 0.0
    for _ in range(10):
        longest_s = _longest_stop_s(text)
        if longest_s < 0.1:
            break
    assert longest_s < 0.1


def _longest_stop_s(text: str) -> float:
    """How long the search computes at most before another thread runs: its own time, whatever else the machine does."""
    searching = threading.Thread(target=redact, args=(text, "redact"))
    searching.start()
    assert searching.ident is not None
    clock = time.pthread_getcpuclockid(searching.ident)
    longest_s, last_s = 0.0, time.clock_gettime(clock)
    while searching.is_alive():
        searching.join(0.001)
        try:
            now_s = time.clock_gettime(clock)
        except OSError:
            break  # it has ended
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s


# What is found, against the simplest search


PIECES: Final = st.sampled_from(
    [text for _, text in SECRETS]
    + [text for text in ORDINARY if text]
    + [unit for unit in UNITS if len(unit) < 40][::7]
    + [JWT, pem("CERTIFICATE"), "max_", "next", "my.", "://", "@", "[", "(", "é", "İ", "${X}", "<x>", "====", "0" * 30]
)
CHARACTERS: Final = st.text(alphabet="aAbZ09_-.:=/+@\"' \n(", max_size=30)


@st.composite
def texts(draw: st.DrawFn) -> str:
    pieces = draw(st.lists(PIECES | CHARACTERS, max_size=6))
    cut = [piece[: draw(st.integers(0, len(piece)))] if draw(st.booleans()) else piece for piece in pieces]
    return draw(st.sampled_from(JOINTS)).join(cut)


def covered(spans: list[SecretSpan] | list[Any]) -> set[int]:
    return {at for span in spans for at in range(span.start, span.end)}


@settings(max_examples=300)
@given(texts(), st.sampled_from(["", "api_key", "publicKey", "max_tokens", "note", "sessionId", "dbPassword"]))
@example("eyJaaaaaaaaa.eyJbbbbbbbbb-eyJccccccccc.eyJddddddddd.e", "")
@example("SG.aaaaaaaaaaaaaaaaaaaaa-SG.aaaaaaaaaaaaaaaaaaaaa.aaaaaaaaaaaaaaaaaaaaaaa", "")
def test_whatever_the_simplest_search_finds_is_found(text: str, name: str) -> None:
    missed = covered(reference_secrets_in(text, name)) - covered(find_secrets(text, name_hint(name)))
    assert not missed, "".join(text[at] for at in sorted(missed))


KEY_WITHOUT_END: Final = pem("PRIVATE KEY").partition("-----END")[0].rstrip()


@settings(max_examples=300)
@given(texts())
@example(f"{KEY_WITHOUT_END}authToken: 'zx81-spectrum-48k'")
def test_nothing_is_found_that_the_simplest_search_does_not_find(text: str) -> None:
    """But what is joined to a secret, as a value may be by its quote, and a JWT whose end was cut off."""
    expected = covered(reference_secrets_in(text))
    more = [
        span
        for span in find_secrets(text)
        if not expected.intersection(range(span.start - 2, span.end)) and span.kind != "jwt"
    ]
    assert not more, [text[span.start : span.end] for span in more]
