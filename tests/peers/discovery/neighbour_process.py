"""An instance's discovery as a process of its own: `… <private key, hex> <port> <interface> <look again, s>`.

Prints `announced` when the network has heard of it, `failed` when there is none, and `heard <id> <url>` or `lost <id>`
as that changes. Ends, with a goodbye, when its input does.
"""

import asyncio
import sys

from covenant.outbound.address_guard import AddressGuard
from covenant.peers.discovery.discovery_service import Discovery
from covenant.peers.peer_settings import PeerSettings
from covenant.peers.transport.peer_client import PeerConnections
from tests.peers.discovery.neighbours import Neighbour, now_ms
from tests.waits import LOOK_S

WAITING = {"", "not started"}


async def unresolved(name: str) -> tuple[()]:
    return ()


def say(*words: str) -> None:
    print(*words, flush=True)  # noqa: T201  (what the test reads)


async def tell(found: Discovery) -> None:
    told: str | None = None
    known: set[tuple[str, str]] = set()
    while True:
        mdns = next(way for way in found.methods() if way.source == "mdns")
        state = "announced" if mdns.announced_as else "failed" if "".join(mdns.failures) not in WAITING else None
        if state not in {told, None}:
            told = state
            say(str(state))
        heard = {(each.instance_id, each.url) for each in found.candidates()}
        for each in heard - known:
            say("heard", *each)
        for each in known - heard:
            say("lost", *each)
        known = heard
        await asyncio.sleep(LOOK_S)


async def main(private_key: str, port: str, interface: str, look_again_s: str) -> None:
    us = Neighbour(bytes.fromhex(private_key))
    found = Discovery(
        PeerSettings(mdns=True, mdns_interfaces=(interface,)),
        own_id=us.id,
        known=dict,
        now_ms=now_ms,
        connections=PeerConnections(AddressGuard((), resolver=unresolved)),
        look_again_s=float(look_again_s),
        announcement=us.announces(int(port), listen_addresses=("0.0.0.0",)),
    )
    await found.start()
    telling = asyncio.create_task(tell(found))
    await asyncio.to_thread(sys.stdin.read)
    telling.cancel()
    await found.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
