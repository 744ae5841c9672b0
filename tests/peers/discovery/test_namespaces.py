"""mDNS between two machines, as far as the kernel is concerned: two network namespaces and a cable between them."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.peers.discovery.neighbours import Neighbour
from tests.peers.discovery.processes import running
from tests.waits import BOUND_S

pytestmark = pytest.mark.root


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=BOUND_S)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    one, two = (f"cov{os.getpid()}{letter}" for letter in "ab")
    made = []
    try:
        for name in (one, two):
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "cable", "netns", one, "type", "veth", "peer", "name", "cable", "netns", two)
        for name, address in ((one, "10.77.0.1/24"), (two, "10.77.0.2/24")):
            ip("-n", name, "address", "add", address, "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield one, two
    finally:
        for name in made:
            ip("netns", "delete", name)


async def test_instances_on_two_machines_hear_each_other_and_a_goodbye(machines: tuple[str, str]) -> None:
    alpha, beta = Neighbour(), Neighbour()
    async with (
        running(alpha, port=8421, interface="cable", namespace=machines[0]) as first,
        running(beta, port=8421, interface="10.77.0.2", namespace=machines[1]) as second,
    ):
        assert await first.says("heard") == ["heard", beta.id, "http://10.77.0.2:8421"]
        assert await second.says("heard") == ["heard", alpha.id, "http://10.77.0.1:8421"]
        await first.leave()
        assert await second.says("lost") == ["lost", alpha.id, "http://10.77.0.1:8421"]


async def test_a_network_that_comes_later_is_found(machines: tuple[str, str]) -> None:
    alpha, beta = Neighbour(), Neighbour()
    ip("-n", machines[1], "address", "flush", "dev", "cable")
    async with (
        running(alpha, port=8421, interface="cable", namespace=machines[0]) as first,
        running(beta, port=8421, interface="cable", namespace=machines[1]) as second,
    ):
        await first.says("announced")
        await second.says("failed")
        ip("-n", machines[1], "address", "add", "10.77.0.2/24", "dev", "cable")
        assert await second.says("heard") == ["heard", alpha.id, "http://10.77.0.1:8421"]
        assert await first.says("heard") == ["heard", beta.id, "http://10.77.0.2:8421"]


async def test_a_machine_that_gets_another_address_is_announced_there(machines: tuple[str, str]) -> None:
    alpha, beta = Neighbour(), Neighbour()
    async with (
        running(alpha, port=8421, interface="cable", namespace=machines[0]) as first,
        running(beta, port=8421, interface="cable", namespace=machines[1], look_again_s=0.2),
    ):
        await first.says("heard", beta.id, "http://10.77.0.2:8421")
        ip("-n", machines[1], "address", "delete", "10.77.0.2/24", "dev", "cable")
        ip("-n", machines[1], "address", "add", "10.77.0.3/24", "dev", "cable")
        await first.says("heard", beta.id, "http://10.77.0.3:8421")
