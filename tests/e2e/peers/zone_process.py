"""A name server as a process, perhaps in a network namespace: lists one instance, says its port, ends with its input.

python -m tests.e2e.peers.zone_process <label> <host> <address> <port> <instance id> <fingerprint>
"""

import asyncio
import sys

from covenant.model.peers.instance import SUPPORTED_VERSIONS
from covenant.peers.discovery.dns_sd import TxtRecord
from tests.outbound.dns_server import name_server
from tests.peers.discovery.zones import Zone


async def serve(*words: str) -> None:
    label, host, address, port, instance_id, fingerprint = words
    async with name_server({host: [address]}) as server:
        zone = Zone(server)
        zone.lists(label)
        said = TxtRecord(instance_id=instance_id, versions=SUPPORTED_VERSIONS, fingerprint=fingerprint)
        zone.offers(label, said, f"0 0 {port} {host}.")
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
