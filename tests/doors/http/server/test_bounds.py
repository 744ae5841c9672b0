"""The one table of bounds: what operators set, what they read, and what the code has."""

import re
from dataclasses import fields
from pathlib import Path

from covenant.daemon.listeners import http_bounds
from covenant.daemon.settings import HttpSettings
from covenant.doors.http.server.bounds import HttpBounds

OPERATING = Path(__file__).parents[4] / "docs" / "operating.md"

TOLD = {
    "head_bytes_max": ("head of a request", "64 KiB"),
    "headers_max": ("headers of a request", "256"),
    "head_s_max": ("time for a head", "10 s"),
    "body_idle_s_max": ("pause within a body", "30 s"),
    "body_s_max": ("time for a whole body", "5 min"),
    "body_bytes_max": ("body of a request", "8 MiB"),
    "body_kept_bytes_max": ("body that its door has not read yet", "64 KiB"),
    "body_discarded_bytes_max": ("body that arrives after its answer", "64 MiB"),
    "trailer_bytes_max": ("trailers", "8 KiB"),
    "pipelined_max": ("requests that wait", "16"),
    "pipelined_bytes_max": ("requests that wait", "128 KiB"),
    "keep_alive_s_max": ("time between an answer and the next request", "75 s"),
    "backlog": ("connections that wait to be accepted", "2,048"),
    "connections_max": ("connections", "4,096"),
    "connections_per_address_max": ("connections of one address", "1,024"),
    "connections_reserved_max": ("connections above these bounds", "64"),
    "handshakes_max": ("TLS handshakes under way", "1,024"),
    "handshakes_per_address_max": ("TLS handshakes under way", "256"),
    "response_bytes_max": ("answer that its client has not read", "64 KiB"),
    "unsent_bytes_max": ("unread answers of all", "256 MiB"),
    "unsent_bytes_per_address_max": ("unread answers of one address", "64 MiB"),
    "unread_s_max": ("time without reading", "30 s"),
    "unread_stream_s_max": ("time without reading anything of a stream", "10 min"),
    "linger_s_max": ("time for a client to read why", "2 s"),
    "linger_bytes_max": ("time for a client to read why", "1 MiB"),
}
UNITS = {"KiB": 1024, "MiB": 1024 * 1024, "s": 1, "min": 60, "": 1}


def test_what_operators_set_is_what_the_table_has() -> None:
    assert http_bounds(HttpSettings()) == HttpBounds()


def test_operators_are_told_every_bound() -> None:
    section = OPERATING.read_text(encoding="utf-8").partition("## Clients that are slow")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in section.splitlines() if line.startswith("|")]
    bounds = HttpBounds()
    assert {each.name for each in fields(HttpBounds)} == set(TOLD)
    for name, (what, told) in TOLD.items():
        assert any(label.startswith(what) and told in default for label, default in rows), name
        number, unit = re.fullmatch(r"([\d,]+) ?(\w*)", told).groups()  # type: ignore[union-attr]
        assert getattr(bounds, name) == int(number.replace(",", "")) * UNITS[unit], name
