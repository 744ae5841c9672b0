"""A process that removes a tenant, and dies at a durable step if it is told to.

    python -m tests.e2e.removal_process <home> fill|remove [<point> <hit>]

It prints how often it came by each point.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Final

from covenant.daemon.keystore import admit_operator
from covenant.daemon.tenant_files import HomeFiles
from covenant.exchange.access.identities import operator_agent
from covenant.exchange.access.principals import Principal
from covenant.exchange.catalogue import Catalogue
from covenant.exchange.task_logs import TaskLogs
from covenant.exchange.tenant_removal import RemovalReport, TenantRemovals
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.open import open_ledger
from covenant.model.tenants import DEFAULT
from tests.ledger_contract import fault_plans
from tests.ledger_contract.driver import LedgerDriver
from tests.ledger_contract.fake_clock import FakeClock
from tests.ledger_contract.fault_plans import Plan, kill
from tests.ledger_contract.samples import ALICE, make_task, ok
from tests.ledger_contract.tenants import add_tenant, put_agent
from tests.waits import BOUND_S

KEY: Final = bytes(range(32))
NAME: Final = "acme"
TASKS: Final = 5


async def opened(home: Path, clock: FakeClock) -> Ledger:
    return await open_ledger(home, clock=clock, segment_bytes=2_000, node="here")


async def removals_of(ledger: Ledger, home: Path) -> tuple[TenantRemovals, Principal, Catalogue]:
    operator = operator_agent("operator@local", KEY)
    principal = await admit_operator(ledger, operator, "1" * 43, lambda _: None)
    catalogue = Catalogue(ledger, KEY)
    logs = TaskLogs(ledger.now_ms)
    return TenantRemovals(ledger, catalogue, logs, HomeFiles(home), operator), principal, catalogue


async def fill(home: Path) -> None:
    clock = FakeClock()
    ledger = await opened(home, clock)
    driver = LedgerDriver(ledger, clock)
    _, _, catalogue = await removals_of(ledger, home)
    for name, first in ((DEFAULT, 100), (NAME, 1)):
        await add_tenant(driver, name)
        await put_agent(driver, name, "helper")
        client, helper = catalogue.client(name), catalogue.identity(name, "helper")
        for number in range(first, first + TASKS):
            task = make_task(number, sender=client, recipient=helper, tenant=name, origin="a2a")
            await driver.finish(await driver.taken(task), ok(task.id, f"secret of {name}"))
        await driver.send(make_task(first + TASKS, sender=client, recipient=helper, tenant=name, origin="a2a"))
        await driver.send(make_task(first + TASKS + 1, sender=ALICE, recipient=helper, tenant=name, origin="a2a"))
    notes = home / "memory" / NAME
    notes.mkdir(parents=True)
    (notes / "helper.json").write_text("{}")
    await ledger.close()


async def remove(home: Path) -> RemovalReport:
    """Begin it, or go on with it; until it is done."""
    ledger = await opened(home, FakeClock())
    removals, operator, _ = await removals_of(ledger, home)
    running = asyncio.create_task(removals.run())
    try:
        await removals.begin(operator, NAME, "it is over", cancel_live=True)
        return await removals.report(operator, NAME, BOUND_S)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await ledger.close()


def main(home: str, what: str, *at: str) -> None:
    if what == "fill":
        asyncio.run(fill(Path(home)))
        return
    plan = Plan(at[0], kill, nth=int(at[1])) if at else Plan()
    with fault_plans.armed(plan):
        report = asyncio.run(remove(Path(home)))
    assert report.done, report
    sys.stdout.write(json.dumps(plan.hits))


if __name__ == "__main__":
    main(*sys.argv[1:])
