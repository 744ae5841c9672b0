"""Cron: which moments an expression names, also on days with 23 and with 25 hours, and what is refused."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from covenant.exchange.cron import CronTimes, check_schedules, read_times
from covenant.model.agent_definition import Schedule
from covenant.model.errors import Invalid

BERLIN = ZoneInfo("Europe/Berlin")
# Clocks go forward on 2026-03-29, from 02:00 to 03:00, and back on 2026-10-25, from 03:00 to 02:00.


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def moments(expression: str, since: str, count: int, zone: ZoneInfo = BERLIN) -> list[str]:
    times, at, found = CronTimes(expression, zone), ms(since), list[str]()
    for _ in range(count):
        after = times.after(at)
        assert after is not None
        assert after > at
        at = after
        found.append(datetime.fromtimestamp(at / 1000, zone).strftime("%d %H:%M%z"))
    return found


@pytest.mark.parametrize(
    ("expression", "since", "expected"),
    [
        ("0 9 * * *", "2026-01-01T07:59", ["01 09:00+0100", "02 09:00+0100"]),
        ("0 9 * * *", "2026-01-01T08:00", ["02 09:00+0100"]),
        (
            "*/20 9-10 * * mon-fri",
            "2026-01-02T08:45",
            ["02 10:00+0100", "02 10:20+0100", "02 10:40+0100", "05 09:00+0100"],
        ),
        ("0 0 13 * fri", "2026-02-01T00:00", ["06 00:00+0100", "13 00:00+0100"]),
        ("30 12 1,15 jan *", "2026-01-02T00:00", ["15 12:30+0100", "01 12:30+0100"]),
        ("0 0 29 2 *", "2026-01-01T00:00", ["29 00:00+0100"]),
        ("5/15 0 * * 7", "2026-01-03T20:00", ["04 00:05+0100", "04 00:20+0100"]),
    ],
)
def test_an_expression_names_its_moments(expression: str, since: str, expected: list[str]) -> None:
    assert moments(expression, since, len(expected)) == expected


def test_a_day_with_23_hours_has_each_run_once() -> None:
    assert moments("30 2 * * *", "2026-03-28T00:00", 3) == ["28 02:30+0100", "29 03:30+0200", "30 02:30+0200"]
    assert moments("0 * * * *", "2026-03-29T00:00", 3) == ["29 03:00+0200", "29 04:00+0200", "29 05:00+0200"]
    assert len({*moments("0 * * * *", "2026-03-28T22:59", 23)}) == 23


def test_a_day_with_25_hours_has_a_daily_run_once_and_an_hourly_run_each_hour() -> None:
    assert moments("30 2 * * *", "2026-10-24T00:00", 4) == [
        "24 02:30+0200",
        "25 02:30+0200",
        "26 02:30+0100",
        "27 02:30+0100",
    ]
    for hours in ("*", "*/1", "0-23"):
        found = moments(f"30 {hours} * * *", "2026-10-24T23:45", 3)
        assert found == ["25 02:30+0200", "25 02:30+0100", "25 03:30+0100"], hours


def test_every_so_many_seconds_is_the_same_for_everybody() -> None:
    after = read_times(Schedule(id="often", every_s=90))
    assert after(0) == 90_000
    assert after(90_000) == 180_000
    assert after(100_000) == 180_000


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "",
            "* * * *",
            "60 * * * *",
            "* 24 * * *",
            "* * 0 * *",
            "* * * 13 *",
            "* * * * 8",
            "a * * * *",
            "*/0 * * * *",
            "*/1_0 * * * *",
            "*/+5 * * * *",
            "*/-5 * * * *",
        ),
        *("5-1 * * * *", "-5 * * * *", "1,,2 * * * *", "٣ * * * *", "0 0 30 2 *", "* * * * * *", "1/x * * * *"),
    ],
)
def test_an_expression_that_makes_no_sense_is_refused(expression: str) -> None:
    with pytest.raises(Invalid, match="cron"):
        read_times(Schedule(id="s", cron=expression))


@pytest.mark.parametrize(
    "zone",
    [
        "Mars/Olympus",
        "",
        "../etc/passwd",
        "/etc/localtime",
        "a\x00b",
        "localtime",
        "posixrules",
        "right/UTC",
        "posix/UTC",
        "Factory",
    ],
)
def test_a_time_zone_that_does_not_exist_is_refused(zone: str) -> None:
    with pytest.raises(Invalid, match="time_zone"):
        read_times(Schedule(id="s", cron="0 9 * * *", time_zone=zone))


def test_a_schedule_has_one_way_to_say_when_and_an_id_of_its_own() -> None:
    with pytest.raises(Invalid, match="either"):
        read_times(Schedule(id="s", cron="0 9 * * *", every_s=5))
    with pytest.raises(Invalid, match="at least 1"):
        read_times(Schedule(id="s", every_s=0))
    with pytest.raises(Invalid, match="the id"):
        check_schedules([Schedule(id="s", every_s=5), Schedule(id="s", every_s=6)])
