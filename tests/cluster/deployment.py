"""Three daemons as processes, each behind a proxy of its own before one PostgreSQL, which has a synchronous standby."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg

from covenant.daemon.home import TOKEN_NAME, read_token
from tests.cli.daemons import Daemon, DaemonDidNotStart
from tests.ledger_contract.postgres_proxy import PostgresProxy, proxy_before
from tests.ledger_contract.postgres_server import OPTIONS, Server, programs
from tests.outbound.http_servers import HERE
from tests.places import free_port
from tests.waits import BOUND_S

NODES: Final = ("a", "b", "c")
LEASE_MS: Final = 2_000
STANDBY: Final = "standby"
ROLE: Final = "daemons"
"""The daemons' own, which is no superuser: it can be refused."""
SKEWS_S: Final = {"a": 0, "b": 600, "c": -600}
"""How far each node's clock is from the right one."""

AGENTS: Final = """
import asyncio, os
from covenant import Agent

worker = Agent("worker", concurrency=64, default_project="cluster")

@worker
async def work(turn):
    place = os.open({done!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(place, f"{{turn.task_id}}\\n".encode())
    os.close(place)
    await asyncio.sleep(0.005)
    return f"did {{turn.text}}"
"""


class Deployment:
    def __init__(self, folder: Path, before: Path | None = None) -> None:
        """`before`: the tree of the version that is run at first, if not this one."""
        self.folder = folder
        self.trees: dict[str, Path | None] = dict.fromkeys(NODES, before)
        self.done = folder / "done"
        """A line for each time that an agent began: the id of its task."""
        self.primary = self._server("primary")
        self.standby = self._server("standby")
        self.url = ""
        self.proxies: dict[str, PostgresProxy] = {}
        self.daemons: dict[str, Daemon] = {}
        self.promoted = False
        self.grpc_ports = {node: free_port() for node in NODES}

    def _server(self, name: str) -> Server:
        folder = self.folder / name
        folder.mkdir()
        return Server(folder, programs(), (*OPTIONS, "wal_receiver_status_interval=1s"))

    @property
    def server(self) -> Server:
        return self.standby if self.promoted else self.primary

    @property
    def token(self) -> str:
        return read_token(self.folder / NODES[0] / TOKEN_NAME)

    async def open(self, stack: AsyncExitStack) -> None:
        await asyncio.to_thread(self._open_database)
        self.url = self.primary.url("covenant")
        for node in NODES:
            as_role = self.url.replace(f"//{urlsplit(self.url).username}@", f"//{ROLE}@")
            self.proxies[node] = await stack.enter_async_context(proxy_before(as_role))
        (self.folder / "agents.py").write_text(AGENTS.format(done=str(self.done)))
        for node in NODES:
            await self.start(node)

    def _open_database(self) -> None:
        self.primary.prepare()
        self.primary.start()
        made = (f"CREATE ROLE {ROLE} LOGIN", f"CREATE DATABASE covenant OWNER {ROLE}")
        asyncio.run(self._execute(self.primary.url("postgres"), *made))
        self.primary.copy_to(self.standby, STANDBY)
        self.standby.start()
        synchronous = f"ALTER SYSTEM SET synchronous_standby_names = '{STANDBY}'"
        asyncio.run(self._execute(self.primary.url("postgres"), synchronous, "SELECT pg_reload_conf()"))

    async def execute(self, *texts: str) -> None:
        """As somebody who may do anything in the database."""
        await self._execute(self.url, *texts)

    async def level(self) -> int:
        """Of the schema."""
        level: int = await self.value("SELECT level FROM ledger_level")
        return level

    async def value(self, text: str) -> Any:
        connection = await asyncpg.connect(self.url)
        try:
            return await connection.fetchval(text)
        finally:
            await connection.close()

    @staticmethod
    async def _execute(url: str, *texts: str) -> None:
        connection = await asyncpg.connect(url)
        try:
            for text in texts:
                await connection.execute(text)
        finally:
            await connection.close()

    async def start(self, node: str) -> None:
        """As whatever supervises a daemon does: again, while the start is refused."""
        begun_s = time.monotonic()
        while True:
            try:
                self.daemons[node] = await asyncio.to_thread(self._start, node)
                return
            except DaemonDidNotStart as refused:
                if (after_s := time.monotonic() - begun_s) > BOUND_S:
                    raise DaemonDidNotStart(f"{node} was refused for {after_s:.0f} s: {refused}") from None

    def _start(self, node: str) -> Daemon:
        variables = {
            "COVENANT_LEDGER_URL": self.proxies[node].url,
            "COVENANT_LEDGER_DURABILITY": "os",
            "COVENANT_LEDGER_NODE_LEASE_MS": str(LEASE_MS),
            "COVENANT_PASSPHRASE": "open sesame",
            "COVENANT_DAEMON_NODE": node,
            "COVENANT_A2A_PUSH_NOTIFICATIONS": "true",
            "COVENANT_OUTBOUND_ALLOW": HERE,
            "COVENANT_PUSH_PAUSE_MS": "50",
            "COVENANT_PUSH_PAUSE_MS_MAX": "500",
            "COVENANT_PUSH_ATTEMPTS_MAX": "100",
            "COVENANT_A2A_INBOUND_RATE_PER_MIN": "0",
            "COVENANT_GRPC_ENABLED": "true",
            "COVENANT_GRPC_PORT": str(self.grpc_ports[node]),
        }
        if (tree := self.trees[node]) is not None:
            variables["PYTHONPATH"] = str(tree / "src")
        skewed = Path(__file__).with_name("skewed_clock.py")
        inside = (sys.executable, str(skewed), str(SKEWS_S[node]))
        return Daemon(self.folder / node, str(self.folder / "agents.py"), env=variables, inside=inside)

    async def kill(self, node: str) -> None:
        await asyncio.to_thread(self.daemons[node].stop, signal.SIGKILL)

    async def stop(self, node: str) -> None:
        await asyncio.to_thread(self.daemons[node].stop)

    async def restart_database(self) -> None:
        await asyncio.to_thread(self.server.kill)
        await asyncio.to_thread(self.server.start)

    async def promote(self) -> None:
        """The primary is gone, and the standby has all that was acknowledged."""
        await asyncio.to_thread(self.primary.kill)
        await self._execute(self.standby.url("postgres"), "SELECT pg_promote(true)")
        self.promoted = True
        self.url = self.standby.url("covenant")
        for proxy in self.proxies.values():
            proxy.lead_to(self.url)

    async def terminate_backends(self) -> None:
        await self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = 'covenant' AND pid <> pg_backend_pid()",
        )

    async def close(self) -> None:
        for daemon in self.daemons.values():
            if daemon.process.poll() is None:
                await asyncio.to_thread(daemon.stop, signal.SIGKILL)
        for server in (self.standby, self.primary):
            if server.running:
                await asyncio.to_thread(server.stop)


@asynccontextmanager
async def deployed(folder: Path, before: Path | None = None) -> AsyncIterator[Deployment]:
    folder.chmod(0o755)
    if os.geteuid() == 0:
        for each in folder.parents:
            if each.stat().st_uid == 0 and not each.stat().st_mode & 0o001:
                each.chmod(each.stat().st_mode | 0o011)
    deployment = Deployment(folder, before)
    async with AsyncExitStack() as stack:
        try:
            await deployment.open(stack)
            yield deployment
        finally:
            async with asyncio.timeout(BOUND_S):
                await deployment.close()
