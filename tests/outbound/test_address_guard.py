"""Which URLs may be called: a table of spellings, what the operator allows, and what a refusal gives away."""

from collections.abc import AsyncIterator
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.model.errors import Invalid, Refusal
from covenant.outbound.address_guard import (
    ADDRESSES_TRIED_MAX,
    LOGGED_MAX,
    AddressGuard,
    AllowList,
    SystemResolver,
    Unresolved,
)
from covenant.outbound.call_errors import AddressRefused
from covenant.outbound.urls import InvalidUrl, read_url, special_use
from tests.outbound.corpus import CALLABLE, PUBLIC, PUBLIC_V6, REFUSED, ZONE
from tests.outbound.dns_server import NameServer, name_server

NAT64 = IPv6Network("64:ff9b::/96")


@pytest.fixture
async def names() -> AsyncIterator[NameServer]:
    async with name_server(dict(ZONE)) as server:
        yield server


async def refusal(guard: AddressGuard, url: str) -> AddressRefused:
    with pytest.raises(AddressRefused) as refused:
        await guard.check(url)
    return refused.value


@pytest.mark.parametrize("url", CALLABLE)
async def test_a_public_url_may_be_called_and_has_one_spelling(names: NameServer, url: str) -> None:
    target = await AddressGuard((), resolver=names.resolver()).check(url)
    assert target.url == CALLABLE[url]
    assert target.addresses
    assert all(special_use(address) is None for address in target.addresses)


@pytest.mark.parametrize("url", REFUSED, ids=lambda url: ascii(url)[1:60])
async def test_a_url_that_leads_inside_or_nowhere_is_refused(names: NameServer, url: str) -> None:
    refused = await refusal(AddressGuard((), resolver=names.resolver()), url)
    assert isinstance(refused, Invalid)
    assert (refused.code, refused.status) == ("address_refused", 400)


async def test_a_target_tells_what_to_connect_to_and_under_which_name(names: NameServer) -> None:
    target = await AddressGuard((), resolver=names.resolver()).check("https://both.example/x")
    assert (target.scheme, target.host, target.port) == ("https", "both.example", 443)
    assert set(target.addresses) == {ip_address(PUBLIC), ip_address(PUBLIC_V6)}


ALLOWING: list[tuple[str, str, bool]] = [
    ("private.example", "http://private.example/", True),
    ("PRIVATE.example.", "http://private.example:8080/", True),
    ("private.example", "http://private.example:25/", False),
    ("private.example:25", "http://private.example:25/", True),
    ("private.example:25", "http://private.example/", False),
    ("private.example", "http://db.internal/", False),
    ("private.example", "http://10.1.2.3/", False),
    ("example", "http://private.example/", False),
    ("10.1.2.3", "http://private.example/", True),
    ("10.1.2.3", "http://10.1.2.3/", True),
    ("10.1.2.3", "http://10.1.2.3:22/", False),
    ("10.1.2.3:22", "http://10.1.2.3:22/", True),
    ("10.1.2.3:22", "http://private.example:22/", True),
    ("10.1.2.3:22", "http://good.example:22/", False),
    ("10.1.2.3:22", "http://10.1.2.3/", False),
    ("10.0.0.0/8", "http://mixed.example/", True),
    ("10.0.0.0/8", "http://dns64-private.example/", False),
    ("10.0.0.0/8", "http://[::ffff:10.1.2.3]/", False),
    ("0.0.0.0/0", "http://169.254.169.254/", True),
    ("0.0.0.0/0", "http://127.1/", False),
    ("169.254.0.0/16", "http://metadata.google.internal/", True),
    ("metadata.google.internal", "http://metadata.google.internal/", False),
    ("zero.example", "http://zero.example/", False),
    ("mapped.example", "http://mapped.example/", False),
    ("mixed.example", "http://mixed.example/", True),
    ("localhost", "http://localhost:8421/", True),
    ("localhost", "http://127.0.0.1:8421/", False),
    ("127.0.0.1", "http://localhost:8421/", False),
    ("a.localhost", "http://a.localhost/", True),
    ("[::1]:9000", "http://[::1]:9000/", True),
    ("::1", "http://[::1]:9000/", True),
    ("fd00::/8", "http://[fd00::1]/", True),
    ("fd00::/8", "http://[fc00::1]/", False),
    ("good.example:25", "http://good.example:25/", True),
    ("bücher.example:25", "http://xn--bcher-kva.example:25/", True),
    ("nowhere.example", "http://nowhere.example/", False),
    ("private.example", "http://user@private.example/", False),
    ("private.example", "ftp://private.example/", False),
]


@pytest.mark.parametrize(("entry", "url", "allowed"), ALLOWING)
async def test_the_operator_allows_what_is_listed_and_no_more(
    names: NameServer, entry: str, url: str, allowed: bool
) -> None:
    guard = AddressGuard((entry,), resolver=names.resolver())
    if allowed:
        await guard.check(url)
    else:
        await refusal(guard, url)


@pytest.mark.parametrize(
    "entry",
    ["", "*", "*.example", "http://x", "a b", "10.0.0.1/8", "10.0.0.0/33", "127.1", "x:0", "x:y", "[::1", "a@b"],
)
def test_an_entry_that_allows_nothing_known_is_an_error(entry: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        AllowList([entry])


async def test_a_stranger_cannot_tell_inside_names_from_names_that_do_not_exist(names: NameServer) -> None:
    guard = AddressGuard(("10.1.2.3:9999",), resolver=names.resolver())
    hosts = ["private.example", "nowhere.example", "mixed.example", "metadata.google.internal", "10.0.0.1", "[::1]"]
    told = {str(await refusal(guard, f"http://{host}/")) for host in hosts}
    assert len(told) == 1
    assert "outbound.allow" in told.pop()


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("http://private.example/", ["private.example leads to 10.1.2.3", "private)", "add private.example to"]),
        ("http://10.9.9.9/", ["10.9.9.9 (private)", "add 10.9.9.9 to"]),
        ("http://metadata.google.internal/", ["169.254.169.254", "metadata", "add 169.254.169.254 to"]),
        ("http://[fe80::1]/", ["link-local", "add [fe80::1] to"]),
        ("http://mixed.example/", ["10.1.2.3"]),
        ("http://nowhere.example/", ["nowhere.example", "does not exist"]),
    ],
)
async def test_the_operator_is_told_where_it_led_and_what_to_allow(
    names: NameServer, url: str, parts: list[str]
) -> None:
    refused = await refusal(AddressGuard((), resolver=names.resolver()), url)
    assert all(part in refused.detail for part in [*parts, *(["outbound.allow"] if "add" in parts[-1] else [])])


async def test_what_is_refused_is_logged_for_the_operator_and_repeating_it_logs_nothing_more(
    names: NameServer, caplog: pytest.LogCaptureFixture
) -> None:
    guard = AddressGuard((), resolver=names.resolver())
    for _ in range(3):
        await refusal(guard, "http://private.example/secret-path?token=s3cret")
    await refusal(guard, "http://private.example:8080/")
    assert [record.getMessage() for record in caplog.records] == ["outbound.refused"] * 2
    said = caplog.records[0].__dict__
    assert (said["host"], said["port"]) == ("private.example", 80)
    assert "10.1.2.3" in said["reason"]
    assert "s3cret" not in str(said)
    for number in range(LOGGED_MAX):
        await refusal(guard, f"http://10.0.{number // 256}.{number % 256}/")
    assert len(guard._logged) == LOGGED_MAX


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://good.example/", "only http and https"),
        ("http://user:s3cret@good.example/", "user name or password"),
        ("http://127.1/", "ends in a number"),
        ("http://[fe80::1%25eth0]/", "zone"),
        ("http://good.example:99999/", "port"),
        ("http://good.example/ ", "spaces"),
        ("good.example", "absolute URL"),
    ],
)
async def test_what_is_wrong_with_the_text_is_told_without_repeating_it(url: str, why: str) -> None:
    refused = await refusal(AddressGuard((), resolver=SystemResolver()), url)
    assert why in refused.message
    assert "s3cret" not in refused.message + refused.detail


async def test_a_refused_port_names_the_entry_that_would_open_it(names: NameServer) -> None:
    refused = await refusal(AddressGuard((), resolver=names.resolver()), "http://good.example:25/")
    assert "good.example:25 to the setting outbound.allow" in refused.message


async def test_a_name_is_looked_up_once_for_each_time_it_is_vetted(names: NameServer) -> None:
    guard = AddressGuard((), resolver=names.resolver())
    await guard.check("http://good.example/")
    assert names.asked == {("good.example", "A"): 1, ("good.example", "AAAA"): 1}


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "a.b.localhost", "10.0.0.1"])
async def test_nobody_is_asked_about_addresses_and_the_loopback(names: NameServer, host: str) -> None:
    await refusal(AddressGuard((), resolver=names.resolver()), f"http://{host}/")
    assert not names.asked


async def test_the_system_is_asked_unless_the_operator_names_other_servers() -> None:
    resolver = SystemResolver()
    try:
        assert all(address.is_loopback for address in await resolver("localhost"))
        with pytest.raises(Unresolved):
            await resolver("a" * 64)
    finally:
        resolver.close()


@given(st.ip_addresses())
def test_what_is_public_here_is_global_to_the_standard_library(address: IPv4Address | IPv6Address) -> None:
    if special_use(address) is None:
        assert address.is_global or address in NAT64


@given(st.ip_addresses(v=4), st.sampled_from(["{:d}", "0x{:x}", "0{:o}"]))
def test_an_address_as_one_number_is_never_a_host(address: IPv4Address, form: str) -> None:
    with pytest.raises(InvalidUrl):
        read_url(f"http://{form.format(int(address))}/")


@given(st.ip_addresses(v=4), st.lists(st.sampled_from(["{:d}", "0x{:x}", "0{:o}", "{:03d}"]), min_size=4, max_size=4))
def test_an_address_in_mixed_spellings_is_the_ordinary_one_or_none(address: IPv4Address, forms: list[str]) -> None:
    spelled = ".".join(form.format(byte) for form, byte in zip(forms, address.packed, strict=True))
    try:
        assert str(read_url(f"http://{spelled}/").host) == str(address) == spelled
    except InvalidUrl:
        assert spelled != str(address)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_is_a_readable_url_or_refused_and_reading_it_again_changes_nothing(text: str) -> None:
    for url in (text, f"http://{text}", f"http://good.example/{text}"):
        try:
            found = read_url(url)
        except InvalidUrl:
            continue
        assert found.url.isascii()
        assert read_url(found.url) == found


async def test_many_addresses_are_all_judged_and_a_few_of_them_tried(names: NameServer) -> None:
    guard = AddressGuard((), resolver=names.resolver())
    names.records["many.example"] = [f"93.184.{high}.{low}" for high in range(4) for low in range(100)]
    assert len((await guard.check("http://many.example/")).addresses) == ADDRESSES_TRIED_MAX
    names.records["many.example"] = [*names.records["many.example"], "10.0.0.1"]
    assert isinstance(await refusal(guard, "http://many.example/"), Refusal)
