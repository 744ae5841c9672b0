"""Settings: where each value comes from, and what refuses to start."""

from pathlib import Path

import pytest

from covenant.daemon.settings import Settings, ledger_limits
from covenant.daemon.settings_loader import FILE_NAME, SettingEntry, entries, load, rows
from covenant.model.errors import SettingsError
from covenant.model.retry_policy import RetryPolicy
from covenant.model.settings import Limits, TenantSettings
from covenant.model.settings_field import address


def value(settings: Settings, name: str) -> object:
    section, _, key = name.partition(".")
    return getattr(getattr(settings, section), key)


def refusal(tmp_path: Path, variables: dict[str, str], flags: dict[str, str | None] | None = None) -> str:
    with pytest.raises(SettingsError) as refused:
        load(flags or {}, variables, home=tmp_path)
    return str(refused.value)


def test_without_file_environment_and_flags_every_setting_has_its_default(tmp_path: Path) -> None:
    loaded = load({}, {}, home=tmp_path)
    assert {name: source for name, source in loaded.sources.items() if source != "default"} == {"home": "flag"}
    assert (loaded.settings.http.bind_addr, loaded.settings.http.port) == ("127.0.0.1", 8421)
    assert loaded.settings.http.body_bytes_max == 8 * 1024 * 1024
    assert loaded.settings.ledger.durability == "fsync"


PLACES: dict[str, tuple[str, dict[str, str], dict[str, str | None], int]] = {
    "default": ("", {}, {}, 8421),
    "file": ("[http]\nport = 1", {}, {}, 1),
    "environment": ("[http]\nport = 1", {"COVENANT_HTTP_PORT": "2"}, {"http.port": None}, 2),
    "flag": ("[http]\nport = 1", {"COVENANT_HTTP_PORT": "2"}, {"http.port": "3"}, 3),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_strongest_place_gives_the_value(tmp_path: Path, place: str) -> None:
    written, variables, flags, expected = PLACES[place]
    (tmp_path / FILE_NAME).write_text(written)
    loaded = load(flags, variables, home=tmp_path)
    assert (loaded.settings.http.port, loaded.sources["http.port"]) == (expected, place)


@pytest.mark.parametrize("entry", list(entries()), ids=lambda entry: entry.name)
def test_every_setting_can_be_set_by_its_variable_and_refuses_nonsense(tmp_path: Path, entry: SettingEntry) -> None:
    text = ",".join(entry.default) if isinstance(entry.default, tuple) else str(entry.default)
    loaded = load({}, {entry.variable: text}, home=tmp_path)
    assert (value(loaded.settings, entry.name), loaded.sources[entry.name]) == (entry.default, "environment")
    said = refusal(tmp_path, {entry.variable: "no such value: \0 %"})
    assert said.startswith(f"{entry.name}: ")
    assert f"from {entry.variable} is not allowed; give " in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((word, True) for word in ("1", "true", "yes", "on", " TRUE ", "Yes")),
        *((word, False) for word in ("0", "false", "no", "off", "OFF\t")),
    ],
)
def test_the_retry_scheduler_takes_eight_words_in_any_case(tmp_path: Path, text: str, expected: bool) -> None:
    loaded = load({}, {"COVENANT_A2A_AUTO_RETRY_SCHEDULER": text}, home=tmp_path)
    assert loaded.settings.retry.scheduler is expected


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("COVENANT_HTTP_PORT", "http"),
        ("COVENANT_HTTP_PORT", ""),
        ("COVENANT_HTTP_PORT", "-1"),
        ("COVENANT_HTTP_PORT", "65536"),
        ("COVENANT_HTTP_PORT", "80.0"),
        ("COVENANT_HTTP_PORT", "1_000"),
        ("COVENANT_HTTP_PORT", "٨٤٢١"),
        ("COVENANT_HTTP_BIND_ADDR", "localhost:80"),
        ("COVENANT_HTTP_BIND_ADDR", "256.0.0.1"),
        ("COVENANT_HTTP_BIND_ADDR", ""),
        ("COVENANT_HTTP_ORIGINS", "http://a.example/path"),
        ("COVENANT_HTTP_ORIGINS", "http://ok.example,*"),
        ("COVENANT_HTTP_ALLOWED_HOSTS", "http://a.example"),
        ("COVENANT_LEDGER_DURABILITY", "maybe"),
        ("COVENANT_A2A_AUTO_RETRY_SCHEDULER", "2"),
        ("COVENANT_A2A_AUTO_RETRY_SCHEDULER", ""),
        ("COVENANT_A2A_AUTO_RETRY_INTERVAL_MS", "0"),
        ("COVENANT_A2A_AUTO_RETRY_INTERVAL_MS", "1m"),
        ("COVENANT_A2A_AUTO_RETRY_MIN_LEASE_AGE_MS", "old"),
        ("COVENANT_A2A_AUTO_RETRY_MAX_ATTEMPTS", "-1"),
        ("COVENANT_A2A_AUTO_RETRY_MAX_REQUEUES", "many"),
        ("COVENANT_A2A_AUTO_RETRY_SCAN_LIMIT", "1e2"),
        ("COVENANT_LOG_FORMAT", "xml"),
        ("COVENANT_DAEMON_NODE", "a b"),
    ],
)
def test_a_bad_value_in_the_environment_refuses_to_start(tmp_path: Path, variable: str, text: str) -> None:
    assert f"{text!r} from {variable} is not allowed; give " in refusal(tmp_path, {variable: text})


def test_a_refused_url_is_shown_without_its_password(tmp_path: Path) -> None:
    said = refusal(tmp_path, {"COVENANT_LEDGER_URL": "mysql://covenant:hunter2@db.example/covenant"})
    assert "'mysql://covenant:***@db.example/covenant' from COVENANT_LEDGER_URL is not allowed; give " in said


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[http]\nprot = 1", "http.prot: unknown setting; did you mean http.port?"),
        ("[htpp]\nport = 1", "htpp: unknown setting; did you mean http?"),
        ("port = 1", "port: unknown setting"),
        ("http = 3", "http: unknown setting"),
        ("[zzz]\nx = 1", "zzz: unknown setting; `covenant settings show` lists them all"),
        ("[http]\nport = '1'\nport = 2", "not TOML"),
        ("[http]\nport = true", "http.port: True from"),
        ("[http]\nport = 1.5", "http.port: 1.5 from"),
        ("[http]\norigins = [1]", "http.origins: [1] from"),
        ("[retry]\nscheduler = 1", "retry.scheduler: 1 from"),
        ("[retry]\nscheduler = 'maybe'", "retry.scheduler: 'maybe' from"),
    ],
)
def test_a_file_with_anything_wrong_refuses_to_start(tmp_path: Path, written: str, said: str) -> None:
    (tmp_path / FILE_NAME).write_text(written)
    message = refusal(tmp_path, {})
    assert said in message
    assert str(tmp_path / FILE_NAME) in message


def test_a_file_that_is_no_text_refuses_to_start(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"\xff")
    assert "cannot be read" in refusal(tmp_path, {})


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("[http]\nprot = 1\nport = -1\n")
    said = refusal(tmp_path, {"COVENANT_HTTP_BIND_ADDR": "here"}, {"log.format": "xml"})
    for part in ("http.prot: unknown", "http.port: -1", "http.bind_addr: 'here'", "'xml' from --log-format"):
        assert part in said
    assert len(said.splitlines()) == 4


def test_lists_are_lists_in_the_file_and_commas_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('[http]\norigins = ["http://a.example", "https://b.example:8443"]')
    expected = ("http://a.example", "https://b.example:8443")
    assert load({}, {}, home=tmp_path).settings.http.origins == expected
    variables = {"COVENANT_HTTP_ORIGINS": " http://a.example , https://b.example:8443,"}
    assert load({}, variables, home=tmp_path).settings.http.origins == expected


def test_a_task_that_no_body_could_carry_is_a_contradiction(tmp_path: Path) -> None:
    said = refusal(tmp_path, {"COVENANT_LIMITS_TASK_BYTES_MAX": str(9 * 1024 * 1024)})
    assert said.startswith("limits.task_bytes_max (9437184) is over http.body_bytes_max (8388608)")


@pytest.mark.parametrize(
    ("name", "mib"), [("LIMITS_RESULT_BYTES_MAX", 8), ("LIMITS_BATCH_BYTES_MAX", 4), ("IPC_FRAME_BYTES_MAX", 6)]
)
def test_an_answer_that_no_frame_could_carry_is_a_contradiction(tmp_path: Path, name: str, mib: int) -> None:
    said = refusal(tmp_path, {f"COVENANT_{name}": str(mib * 1024 * 1024)})
    assert "over ipc.frame_bytes_max" in said


def test_a_variable_that_looks_like_a_setting_is_pointed_out(tmp_path: Path) -> None:
    loaded = load({}, {"COVENANT_HTTP_PROT": "1", "COVENANT_TOKEN": "x", "PATH": "/bin"}, home=tmp_path)
    assert loaded.unknown_variables == ("COVENANT_HTTP_PROT; did you mean COVENANT_HTTP_PORT?",)


@pytest.mark.parametrize(
    ("flag", "variables", "folder", "source"),
    [
        ("one", {"COVENANT_HOME": "two"}, "one", "flag"),
        (None, {"COVENANT_HOME": "two"}, "two", "environment"),
        (None, {"COVENANT_HOME": ""}, str(Path("~/.covenant").expanduser()), "default"),
        (None, {}, str(Path("~/.covenant").expanduser()), "default"),
    ],
)
def test_the_home_is_named_by_flag_environment_or_default(
    flag: str | None, variables: dict[str, str], folder: str, source: str
) -> None:
    loaded = load({}, variables, home=flag)
    assert (loaded.settings.home, loaded.sources["home"]) == (Path(folder).absolute(), source)


def test_the_ledger_has_the_limits_that_are_set_and_those_of_tenants_for_accounts(tmp_path: Path) -> None:
    given = {"COVENANT_LIMITS_BATCH_MAX": "9", "COVENANT_TENANTS_LIVE_TASKS": "7", "COVENANT_TENANTS_QUEUED_BYTES": "8"}
    set_to = ledger_limits(load({}, given, home=tmp_path).settings)
    assert set_to == Limits(batch_max=9, live_tasks_max=7, queued_bytes_max=8)


def test_the_limits_without_settings_are_the_defaults_of_the_settings(tmp_path: Path) -> None:
    assert ledger_limits(load({}, {}, home=tmp_path).settings) == Limits()
    defaults = Limits(), TenantSettings()
    assert (defaults[0].live_tasks_max, defaults[0].queued_bytes_max) == (
        defaults[1].live_tasks,
        defaults[1].queued_bytes,
    )


def test_the_retry_policy_has_the_same_defaults_as_its_settings(tmp_path: Path) -> None:
    retry = load({}, {}, home=tmp_path).settings.retry
    policy = RetryPolicy()
    assert {
        name: getattr(retry, name) for name in ("min_lease_age_ms", "max_attempts", "max_requeues", "scan_limit")
    } == {name: getattr(policy, name) for name in ("min_lease_age_ms", "max_attempts", "max_requeues", "scan_limit")}


def test_rows_tell_value_source_and_meaning_of_every_setting(tmp_path: Path) -> None:
    told = {row.name: row for row in rows(load({"http.port": "1"}, {}, home=tmp_path))}
    assert told.keys() == {"home", *(entry.name for entry in entries())}
    assert (told["http.port"].value, told["http.port"].source) == (1, "flag")
    assert all(row.meaning.endswith((".", "…")) for row in told.values())


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("postgresql://me:s3cret@host/db", "postgresql://me:***@host/db"),
        ("postgresql://host/db?password=s3cret&user=me", "postgresql://host/db?password=***&user=me"),
    ],
)
def test_rows_leave_out_the_password_of_the_database(tmp_path: Path, given: str, shown: str) -> None:
    loaded = load({}, {"COVENANT_LEDGER_URL": given}, home=str(tmp_path))
    (row,) = (row for row in rows(loaded) if row.name == "ledger.url")
    assert (loaded.settings.ledger.url, row.value) == (given, shown)


@pytest.mark.parametrize("entry", [entry for entry in entries() if entry.setting.alias], ids=lambda entry: entry.name)
def test_a_second_name_in_the_environment_counts_where_the_first_is_not_set(
    tmp_path: Path, entry: SettingEntry
) -> None:
    alias = entry.setting.alias
    assert alias is not None
    given, stronger = ("61", "62") if isinstance(entry.default, int) else ("http://one", "http://two")
    if isinstance(entry.default, str) and entry.setting.kind is address:
        given, stronger = "127.0.0.2", "127.0.0.3"
    loaded = load({}, {alias: given}, home=tmp_path)
    assert (str(value(loaded.settings, entry.name)), loaded.unknown_variables) == (given, ())
    loaded = load({}, {alias: given, entry.variable: stronger}, home=tmp_path)
    assert str(value(loaded.settings, entry.name)) == stronger


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("https://agents.example.com///", "https://agents.example.com"),
        ("https://agents.example.com/under/a/path/", "https://agents.example.com/under/a/path"),
        ("http://[::1]:8421", "http://[::1]:8421"),
        ("", ""),
    ],
)
def test_a_public_base_url_is_kept_without_slashes_at_its_end(tmp_path: Path, given: str, kept: str) -> None:
    assert load({"http.public_base_url": given}, {}, home=tmp_path).settings.http.public_base_url == kept


@pytest.mark.parametrize(
    "given", ["agents.example.com", "ftp://x", "https://x/?q", "https://x/#f", "https://u@x", "https://x y"]
)
def test_a_public_base_url_that_is_none_is_refused(tmp_path: Path, given: str) -> None:
    assert "http.public_base_url" in refusal(tmp_path, {"COVENANT_PUBLIC_BASE_URL": given})


@pytest.mark.parametrize(
    ("name", "given"), [("PUBLIC_BASE_URL", "https://agents.example"), ("TRUSTED_PROXIES", "127.0.0.1")]
)
def test_callers_on_this_machine_are_not_told_apart_behind_a_proxy(tmp_path: Path, name: str, given: str) -> None:
    proxied = {f"COVENANT_HTTP_{name}": given}
    said = refusal(tmp_path, {**proxied, "COVENANT_A2A_PUBLISH_ANONYMOUS": "loopback"})
    assert "a2a.publish_anonymous" in said
    assert f"http.{name.lower()}" in said
    assert "never" in said, "the fix is named"
    for mode in ("never", "anywhere"):
        assert load({}, {**proxied, "COVENANT_A2A_PUBLISH_ANONYMOUS": mode}, home=tmp_path)


def test_trusted_proxies_are_addresses_and_networks(tmp_path: Path) -> None:
    loaded = load({"http.trusted_proxies": "10.0.0.0/8, ::1"}, {}, home=tmp_path)
    assert loaded.settings.http.trusted_proxies == ("10.0.0.0/8", "::1/128")
    assert "http.trusted_proxies" in refusal(tmp_path, {"COVENANT_HTTP_TRUSTED_PROXIES": "10.0.0.1/8"})


@pytest.mark.parametrize(
    "given",
    [
        "s3cmd --secret_key s3cr3tvalue put {path} s3://b/{name}",
        "env AWS_SECRET_ACCESS_KEY=s3cr3tvalue aws s3 cp {path} s3://b/{name}",
        "curl -u me:s3cr3tvalue -T {path} https://host/{name}",
        "curl -H 'Authorization: Bearer s3cr3tvalue' -T {path} https://host/{name}",
        "curl -H 'X-Api-Key: s3cr3tvalue' -T {path} https://host/{name}",
        "curl -T {path} https://me:s3cr3tvalue@host/{name}",
        "curl -T {path} https://s3cr3tvalue@host/{name}",
        "curl -T {path} https://host/{name}?access_token=s3cr3tvalue&x=1",
        "ship --password=s3cr3tvalue {path} {name}",
        "ship --token s3cr3tvalue {path} {name}",
    ],
)
def test_rows_leave_out_what_a_command_or_a_url_keeps_secret(tmp_path: Path, given: str) -> None:
    loaded = load({"backup.command": given}, {}, home=str(tmp_path))
    shown = {row.name: row.value for row in rows(loaded)}
    assert "s3cr3tvalue" not in str(shown)
    assert "***" in shown["backup.command"]
    assert "{path}" in shown["backup.command"]
    assert "{name}" in shown["backup.command"]


def test_rows_show_a_command_without_a_secret_as_it_is(tmp_path: Path) -> None:
    given = "rsync --partial {path} backup@host:/srv/{incarnation}/{name}"
    shown = {row.name: row.value for row in rows(load({"backup.command": given}, {}, home=str(tmp_path)))}
    assert shown["backup.command"] == given
