"""A node that sends, takes, settles and drains until its standard input ends. Run by either version of the package."""

import asyncio
import json
import sys
from typing import Any

from covenant.ledger.postgres.migrations import LEVEL
from covenant.model.errors import Refusal
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.postgres_engine import PostgresEngine
from tests.ledger_contract.samples import make_task, ok, task_id

AT_ONCE = 4


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def main(url: str, name: str, number: int) -> None:
    engine = PostgresEngine(url)
    driver = LedgerDriver(await engine.join(name), engine.clock)
    say(level=LEVEL)
    end = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    sent: list[str] = []
    drained: list[str] = []
    refused: list[str] = []
    while not end.done():
        numbers = range(number, number + AT_ONCE)
        number += AT_ONCE
        try:
            await asyncio.gather(*(driver.send(make_task(each)) for each in numbers))
            sent += [task_id(each) for each in numbers]
            for leased in await driver.take(count=AT_ONCE):
                await driver.finish(leased, ok(leased.task.id))
            drained += [result.task_id for result in await driver.drain(count=AT_ONCE)]
        except Refusal as refusal:
            refused.append(f"{refusal.code}: {refusal.message}")
        say(count=len(sent))
    say(sent=sent, drained=drained, refused=refused)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
