"""Names of settings that other systems use in the environment: honoured, and weaker than our own."""

from pathlib import Path

import pytest

from covenant.daemon.settings_loader import load
from covenant.model.errors import SettingsError


def test_port_and_bind_host_count_where_our_own_names_say_nothing(tmp_path: Path) -> None:
    theirs = {"PORT": "3000", "BIND_HOST": "0.0.0.0", "A2A_INBOUND_RATE_LIMIT_PER_MIN": "7"}
    settings = load({}, theirs, home=tmp_path).settings
    assert (settings.http.port, settings.http.bind_addr, settings.a2a.inbound_rate_per_min) == (3000, "0.0.0.0", 7)
    ours = {"COVENANT_HTTP_PORT": "4000", "COVENANT_HTTP_BIND_ADDR": "::1", "COVENANT_A2A_INBOUND_RATE_PER_MIN": "9"}
    settings = load({}, theirs | ours, home=tmp_path).settings
    assert (settings.http.port, settings.http.bind_addr, settings.a2a.inbound_rate_per_min) == (4000, "::1", 9)
    assert load({"http.port": "5000"}, theirs | ours, home=tmp_path).settings.http.port == 5000


def test_without_any_of_them_the_defaults_stay_ours(tmp_path: Path) -> None:
    settings = load({}, {}, home=tmp_path).settings
    assert (settings.http.port, settings.http.bind_addr, settings.a2a.inbound_rate_per_min) == (8421, "127.0.0.1", 5)


def test_a_value_that_cannot_be_used_is_named_by_the_name_it_came_under(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="from PORT is not allowed"):
        load({}, {"PORT": "all"}, home=tmp_path)
