"""A queue in SQL as pgmq has it: send, read (invisible for 30 s) and archive. It keeps no history and no leases."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import asyncpg  # type: ignore[import-not-found,import-untyped,unused-ignore]  # also in the separate environment
from async_rounds import Opening, run  # type: ignore[import-not-found]  # a script's neighbour
from rounds import PAYLOAD  # type: ignore[import-not-found]

TABLES = """
CREATE TABLE IF NOT EXISTS q (
    msg_id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY, read_ct integer NOT NULL DEFAULT 0,
    enqueued_at timestamptz NOT NULL DEFAULT now(), vt timestamptz NOT NULL, message jsonb
);
CREATE INDEX IF NOT EXISTS q_vt ON q (vt);
CREATE TABLE IF NOT EXISTS a (
    msg_id bigint PRIMARY KEY, read_ct integer NOT NULL, enqueued_at timestamptz NOT NULL,
    archived_at timestamptz NOT NULL DEFAULT now(), vt timestamptz NOT NULL, message jsonb
);
"""
SEND = "INSERT INTO q (vt, message) VALUES (clock_timestamp(), $1) RETURNING msg_id"
READ = """
WITH c AS (
    SELECT msg_id FROM q WHERE vt <= clock_timestamp() ORDER BY msg_id LIMIT 1 FOR UPDATE SKIP LOCKED
)
UPDATE q SET vt = clock_timestamp() + interval '30 seconds', read_ct = read_ct + 1 FROM c WHERE q.msg_id = c.msg_id
RETURNING q.msg_id, q.message
"""
ARCHIVE = """
WITH gone AS (DELETE FROM q WHERE msg_id = $1 RETURNING msg_id, vt, read_ct, enqueued_at, message)
INSERT INTO a (msg_id, vt, read_ct, enqueued_at, message)
SELECT msg_id, vt, read_ct, enqueued_at, message FROM gone
"""


@asynccontextmanager
async def open_queue(url: str, callers: int) -> Opening:
    message = json.dumps({"text": PAYLOAD})
    async with asyncpg.create_pool(url, min_size=callers, max_size=callers) as pool:
        await pool.execute(TABLES)

        async def cycle() -> None:
            await pool.fetchval(SEND, message)
            row = await pool.fetchrow(READ)
            if row is not None:
                await pool.execute(ARCHIVE, row["msg_id"])

        yield cycle


run(open_queue)
