"""Covenant with its ledger on PostgreSQL, for `covenant prove`: makes a database for the home, and serves."""

import asyncio
import os
import sys
from pathlib import Path

import asyncpg

port, home, server = sys.argv[1:]
name = "prove_" + "".join(character if character.isalnum() else "_" for character in home).lower()


async def make_database() -> None:
    connection = await asyncpg.connect(server)
    try:
        if not await connection.fetchval("SELECT true FROM pg_database WHERE datname = $1", name):
            await connection.execute(f'CREATE DATABASE "{name}"')
    finally:
        await connection.close()


asyncio.run(make_database())
covenant = str(Path(sys.executable).with_name("covenant"))
agents = str(Path(__file__).with_name("covenant_agent.py"))
ledger = server.replace("/postgres?", f"/{name}?")
serve = ["serve", agents, "--home", home, "--http-port", port, "--ledger", ledger]
os.execv(covenant, [covenant, *serve])  # noqa: S606  # the kit kills this very process
