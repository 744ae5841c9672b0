"""HTML as text: what a person would read, at a cost that grows with the page and no faster."""

import time

import pytest

from covenant.agents.model.web_fetch import html_to_text
from tests.matrices import first_of

HOSTILE = (
    "<!-- <a </ < <! <? <a\tb=' <script> <![CDATA[ & &# &#9 <a\thref= </a <style>a</ <p> <svg/ <a'\" --!> ]]> &amp "
    "<script>a</script> <template> </template> <a\"b'> </script \u0130 &#x1"
).split(" ")


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<h1>News</h1><script>if (a<b) '</p>'</script><p>It <b>rains</b>.</p>", "News\nIt rains."),
        ("<html><head><title>t</title></head><body>a<br>b<br/>c</body>", "a\nb\nc"),
        ("<p class='a>b' id=\"<p>\">x < y &amp; z &lt;tag&gt;</p>", "x < y & z <tag>"),
        ("a<!-- <p>hidden</p> -->b<!doctype html><?xml?>c", "abc"),
        ("<SVG><text>no</text></SVG>yes<svg/>too<Script>no</sCRIPT >!", "yestoo!"),
        ("<style>p{}</style><noscript>no</noscript>1 &lt 2", "1 < 2"),
        ("a<!-- never closed", "a"),
        ("a<script>never closed", "a"),
        ("a<p class='never closed", "a"),
        ("</template></template>seen", "seen"),
        ("&#65;&#x42;&#99999999999999999999;&#" + "9" * 5_000 + ";", "AB\ufffd\ufffd"),
        ("  spaces \t and \n\n lines ", "spaces and\nlines"),
        ("", ""),
    ],
)
def test_a_page_is_read_as_a_person_would(html: str, text: str) -> None:
    assert html_to_text(html) == text


@pytest.mark.parametrize("unit", first_of(HOSTILE, 8))
def test_four_times_the_page_takes_at_most_six_times_as_long(unit: str) -> None:
    def seconds(size: int) -> float:
        page, best = unit * (size // len(unit)), float("inf")
        for _ in range(3):
            before = time.process_time()
            html_to_text(page)
            best = min(best, time.process_time() - before)
        return max(best, 0.0005)

    assert min(seconds(200_000) / seconds(50_000) for _ in range(3)) <= 6
