"""Files of the home that are read again when they change: a bad one leaves in force what was read before."""

import json
import os
from io import StringIO
from pathlib import Path

import pytest

from covenant.daemon.telemetry import Log, start_logging
from covenant.daemon.watched_file import FILE_BYTES_MAX, WatchedFile
from covenant.model.errors import SettingsError
from covenant.model.model_prices import NO_PRICES, ModelPrices, read_model_prices


def watched(path: Path) -> tuple[WatchedFile[ModelPrices], list[ModelPrices]]:
    file, taken = WatchedFile(path, read_model_prices, NO_PRICES, Log()), list[ModelPrices]()
    file.on_change(taken.append)
    return file, taken


def write(path: Path, text: str) -> None:
    """As an editor saves: the new file in the place of the old one."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


async def test_a_changed_file_is_read_and_a_bad_one_keeps_the_last_good_one(tmp_path: Path) -> None:
    lines, path = StringIO(), tmp_path / "prices.json"
    file, taken = watched(path)
    assert file.value is NO_PRICES
    start_logging("text", "info", lines)
    write(path, json.dumps({"currency": "EUR"}))
    await file.step()
    assert [each.currency for each in taken] == ["EUR"]
    for bad, why in (("{", "not JSON"), ('{"a": 1}', "unknown key /a"), (f'"{"x" * FILE_BYTES_MAX}"', "more than")):
        write(path, bad)
        await file.step()
        await file.step()
        assert (file.value.currency, len(taken)) == ("EUR", 1)
        assert why in file.problem
    assert lines.getvalue().count("home.file_refused") == 3
    write(path, json.dumps({"currency": "CHF"}))
    await file.step()
    assert (file.value.currency, file.problem) == ("CHF", "")
    path.unlink()
    await file.step()
    assert file.value is NO_PRICES
    assert taken[-1] is NO_PRICES


async def test_a_file_that_did_not_change_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text("{}")
    file, taken = watched(path)
    found = path.stat()
    with path.open("r+") as same:
        same.write("[]")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    await file.step()
    assert (taken, file.problem) == ([], "")


def test_a_bad_file_stops_a_start(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text('{"currency": "euro"}')
    with pytest.raises(SettingsError, match="/currency"):
        watched(path)


def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text("[" * 100_000)
    with pytest.raises(SettingsError):
        watched(path)
