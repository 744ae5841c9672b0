"""The demo: a home of its own, agents to call by mailbox and over A2A, an identity to try as a worker, and commands to
copy.

A later start keeps everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from covenant.agents.agent_loader import LoadedAgent, load_agent
from covenant.agents.api import Agent, Turn
from covenant.agents.function_agent import FunctionAgent
from covenant.daemon.home import save_secret
from covenant.daemon.wiring.daemon import Daemon
from covenant.exchange.access.identities import IdentityAdmin
from covenant.exchange.access.principals import Principal
from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.disk import open_private

HOME_NAME: Final = ".demo"
ECHO: Final = "echo@local"
WORKER: Final = "bob@local"

counter = Agent("counter", description="Counts the words of a text", skills=["count"])
clerk = Agent("clerk", description="Has a text looked at by the counter, and reports what it found")

echo = Agent("echo", idempotent=True)


@counter
async def count(turn: Turn) -> str:
    return f"{len(turn.text.split())} words"


@echo
async def answer(turn: Turn) -> str:
    return f"echo: {turn.text}"


@clerk
async def report(turn: Turn) -> str:
    found = await turn.call("counter", turn.text)
    return f"The counter found {found.text}."


def demo_agents() -> list[LoadedAgent]:
    return [LoadedAgent(*load_agent(agent), Path(__file__)) for agent in (counter, clerk)]


def make_demo_home(folder: Path) -> Path:
    """The demo's home below `folder`, with a file that makes git ignore it."""
    home = folder / HOME_NAME
    home.mkdir(mode=0o700, exist_ok=True)
    with open(home / ".gitignore", "w", encoding="ascii", opener=open_private) as file:
        file.write("*\n")
    return home


async def open_demo(daemon: Daemon) -> None:
    """Enrolls the demo's identities, and registers the agent that answers as `echo@local`."""
    base = daemon.base
    ledger, registry, operator = base.storage.ledger, base.access.identity_admin, base.storage.operator
    for display in (ECHO, WORKER):
        live = [i for i in await ledger.identities() if i.agent.display == display and i.revoked_at_ms is None]
        if live:
            identity = live[0]
        else:
            enrolled = await registry.enroll(operator, display, actions=(f"a2a.respond.{operator.agent.display}",))
            save_secret(base.settings.home / f"{display.partition('@')[0]}.token", enrolled.token)
            identity = enrolled.identity
        if display == ECHO:
            daemon.agents.workers.register(identity.agent, FunctionAgent(echo))
    await _grant(ledger, registry, operator)


async def _grant(ledger: Ledger, registry: IdentityAdmin, operator: Principal) -> None:
    held = {
        grant.action
        for grant in await ledger.grants()
        if grant.subject.pubkey == operator.agent.pubkey and grant.live(ledger.now_ms())
    }
    for action in (f"a2a.send.{ECHO}", f"a2a.send.{WORKER}", "a2a.repair.requeue", "a2a.compact"):
        if action not in held:
            await registry.grant(operator, action)


def suggestions(program: str, home: str, url: str) -> str:
    """What to try next. A test runs every line that begins with `$`."""
    return f"""
Try this in another terminal, from the same folder:

  an agent that answers by itself
    $ {program} --home {home} a2a send --to {ECHO} --wait "hello"

  call an agent over A2A, as any client can: the clerk calls another agent, the index chooses one, a card describes one
    $ {program} --home {home} call clerk "count these four words"
    $ {program} --home {home} call index "how many words, counter?"
    $ {program} --home {home} card get clerk

  be a worker: send it a task, lease the task, and look at the lease
    $ {program} --home {home} a2a send --to {WORKER} "count the stars"
    $ {program} --home {home} --token-file {home}/bob.token a2a next
    $ {program} --home {home} a2a status

  the audit, and a check that nobody changed it
    $ {program} --home {home} audit recent -n 5
    $ {program} --home {home} audit verify

  the same over HTTP; {url}/docs lists the routes
    $ curl -sS -H "Authorization: Bearer $(cat {home}/operator.token)" {url}/a2a/queue
"""
