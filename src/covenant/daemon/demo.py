"""A try-out: a home of its own, agents to call by mail and over A2A, a worker to play, and commands to copy.

Everything is found as it was left if it is started again, and nothing of it is part of an ordinary daemon.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from covenant.agents.agent_loader import LoadedAgent, load_agent
from covenant.agents.api import Agent, Turn
from covenant.daemon.home import save_secret
from covenant.daemon.telemetry import Log
from covenant.daemon.wiring.daemon import Daemon
from covenant.exchange.access.identities import IdentityAdmin
from covenant.exchange.access.principals import Principal
from covenant.exchange.mailbox import MailboxExchange
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.disk import open_private
from covenant.ledger.machine.commands import LeasedTask, Take
from covenant.model.content import Text
from covenant.model.errors import Refusal
from covenant.model.ids import AgentId
from covenant.model.task import Result, ResultStatus

HOME_NAME: Final = ".demo"
ECHO: Final = "echo@local"
WORKER: Final = "bob@local"
WAIT_MS: Final = 1_000

counter = Agent("counter", description="Counts the words of a text", skills=["count"])
clerk = Agent("clerk", description="Has a text looked at by the counter, and reports what it found")


@counter
async def count(turn: Turn) -> str:
    return f"{len(turn.text.split())} words"


@clerk
async def report(turn: Turn) -> str:
    found = await turn.call("counter", turn.text)
    return f"The counter found {found.text}."


def demo_agents() -> list[LoadedAgent]:
    return [LoadedAgent(*load_agent(agent), Path(__file__)) for agent in (counter, clerk)]


def make_demo_home(folder: Path) -> Path:
    """The demo's home below `folder`, which git is told to leave alone."""
    home = folder / HOME_NAME
    home.mkdir(mode=0o700, exist_ok=True)
    with open(home / ".gitignore", "w", encoding="ascii", opener=open_private) as file:
        file.write("*\n")
    return home


async def open_echo(daemon: Daemon) -> Echo:
    """The worker that answers `echo@local`, once the demo's identities and grants are there."""
    base = daemon.base
    storage, access = base.storage, base.access
    me = await enroll_demo(base.settings.home, storage.ledger, access.identity_admin, storage.operator)
    return Echo(storage.ledger, access.mailbox, me, base.telemetry.log)


async def enroll_demo(home: Path, ledger: Ledger, registry: IdentityAdmin, operator: Principal) -> Principal:
    """See to it that the demo's identities and grants are there; the echo agent as a principal."""
    echo = Principal(AgentId("", operator.agent.pubkey), operator=False, token_sha256="")
    for display in (ECHO, WORKER):
        live = [i for i in await ledger.identities() if i.agent.display == display and i.revoked_at_ms is None]
        if live:
            identity = live[0]
        else:
            enrolled = await registry.enroll(operator, display, actions=(f"a2a.respond.{operator.agent.display}",))
            save_secret(home / f"{display.partition('@')[0]}.token", enrolled.token)
            identity = enrolled.identity
        if display == ECHO:
            echo = Principal(identity.agent, operator=False, token_sha256=identity.token_sha256)
    await _grant(ledger, registry, operator)
    return echo


async def _grant(ledger: Ledger, registry: IdentityAdmin, operator: Principal) -> None:
    held = {
        grant.action
        for grant in await ledger.grants()
        if grant.subject.pubkey == operator.agent.pubkey and grant.live(ledger.now_ms())
    }
    for action in (f"a2a.send.{ECHO}", f"a2a.send.{WORKER}", "a2a.repair.requeue", "a2a.compact"):
        if action not in held:
            await registry.grant(operator, action)


class Echo:
    """Leases the tasks sent to it, one at a time, and answers with what they said."""

    def __init__(self, ledger: Ledger, exchange: MailboxExchange, me: Principal, log: Log) -> None:
        self._ledger = ledger
        self._exchange = exchange
        self._me = me
        self._log = log
        self._stopping = False

    def stop(self) -> None:
        """Take nothing new; what is leased is finished."""
        self._stopping = True

    async def run(self) -> None:
        ledger, agent = self._ledger, self._me.agent
        take = Take(holder=agent, recipient=agent.pubkey, node=ledger.node, boot=ledger.boot)
        while not self._stopping:
            try:
                with ledger.task_waiter(agent.pubkey) as waiter:
                    leased = await ledger.commit(take)
                    if not leased.tasks and await waiter.wait(WAIT_MS):
                        leased = await ledger.commit(take)
                    if leased.tasks:
                        waiter.served()
                for each in leased.tasks:
                    await self._answer(each)
            except Refusal as refusal:
                self._log.warning("echo.refused", code=refusal.code, reason=refusal.message)
                await asyncio.sleep(WAIT_MS / 1000)

    async def _answer(self, leased: LeasedTask) -> None:
        said = Text(f"echo: {leased.task.intent_text}")
        result = Result(task_id=leased.task.id, status=ResultStatus.OK, content=(said,))
        await self._exchange.settle(self._me, result, leased.lease.lease_id)


def suggestions(program: str, home: str, url: str) -> str:
    """What to try next. What follows a `$` can be copied as it is, and a test runs each of them."""
    calls = f"{program} --home {home} --token-file {home}/operator.token"
    return f"""
Try this in another terminal, from the same folder:

  an agent that answers by itself
    $ {program} --home {home} a2a send --to {ECHO} --wait "hello"

  call an agent over A2A, as any client can: this one calls another; then let the master pick who does it
    $ {calls} call {url}/v1/a2a/agents/clerk "count these four words"
    $ {calls} call {url}/v1/a2a/agents/index "how many words, counter?"
    $ {calls} card get {url}/v1/a2a/agents/clerk

  be a worker: send it a task, lease the task, and look at the lease
    $ {program} --home {home} a2a send --to {WORKER} "count the stars"
    $ {program} --home {home} --token-file {home}/bob.token a2a next
    $ {program} --home {home} a2a status

  what happened, and that nobody changed the record of it
    $ {program} --home {home} audit recent -n 5
    $ {program} --home {home} audit verify

  the same over HTTP; {url}/docs lists the routes
    $ curl -sS -H "Authorization: Bearer $(cat {home}/operator.token)" {url}/a2a/queue
"""
