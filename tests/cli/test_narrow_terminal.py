"""Tables in 80 columns: no line is longer, and a value, an address or a count is not cut."""

import pytest

from covenant.cli.peers import _usage_row
from covenant.cli.terminal import print_table
from covenant.model.peers.usage_by_day import COUNTED
from tests.cli.daemons import Daemon, covenant


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_a_long_setting_is_shown_whole(daemon: Daemon) -> None:
    allowed = ",".join(f"10.0.{number}.0/24" for number in range(9))
    env = {"COLUMNS": "80", "COVENANT_OUTBOUND_ALLOW": allowed}
    ran = covenant("--home", str(daemon.home), "settings", "show", "--files", env=env)
    assert max(map(len, ran.out.splitlines())) <= 80
    rows = ran.out.splitlines()
    first = next(at for at, row in enumerate(rows) if row.startswith("outbound.allow "))
    begins = rows[0].index("value")
    cells = [rows[first][begins:], *(row[begins:] for row in rows[first + 1 : first + 12] if row.startswith(" "))]
    assert allowed in "".join(cell.split("  ")[0].strip() for cell in cells)


def test_usage_names_its_counts_in_one_cell(capsys: pytest.CaptureFixture[str]) -> None:
    counts = dict.fromkeys(COUNTED, 0) | {"offers": 12, "accepted": 11, "tokens": 123456}
    row = {"day": "2026-11-19", "role": "requester", "peer": "laboratory", "profile": "researcher", **counts}
    print_table(("day", "as", "peer", "profile", "counts"), [_usage_row(row)])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "12 offers, 11 accepted," in out
    assert "rejected" not in out


def test_usage_that_is_kept_without_its_peer_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"day": "2026-11-19", "role": "requester", "peer": "laboratory", "profile": None, **dict.fromkeys(COUNTED, 1)}
    print_table(("day", "as", "peer", "profile", "counts"), [_usage_row(row)])
    assert "laboratory  -" in capsys.readouterr().out
