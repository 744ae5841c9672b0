"""The entry point `covenant`: which commands there are, and what becomes of an error.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 no daemon to talk to, 4 not checked. Data goes to stdout, talk
to stderr. With `--json` stdout holds exactly one JSON object, also when the answer is a refusal.
"""

from __future__ import annotations

from typing import Final

import click

import covenant
from covenant.cli.lazy import LazyGroup

MODULES: Final = {
    "serve": "covenant.cli.serve",
    "a2a": "covenant.cli.a2a",
    "capabilities": "covenant.cli.capabilities",
    "audit": "covenant.cli.audit",
    "identities": "covenant.cli.identities",
    "tenants": "covenant.cli.tenants",
    "agents": "covenant.cli.agents",
    "call": "covenant.cli.call",
    "card": "covenant.cli.card",
    "peers": "covenant.cli.peers",
    "mcp": "covenant.cli.mcp",
    "settings": "covenant.cli.settings",
    "doctor": "covenant.cli.doctor",
    "passphrase": "covenant.cli.passphrase",
    "version": "covenant.cli.version",
}

MEANING: Final = """A durable agent-to-agent exchange.

`covenant serve` runs the daemon, `call` and `card` talk to other agents, and every other command talks to the daemon
over the socket in its home (--home, COVENANT_HOME, else ~/.covenant) with the operator's token (--token-file,
COVENANT_TOKEN, else operator.token in the home).
"""

command: Final = LazyGroup("covenant", MODULES, MEANING)
# Each command takes these too, where one looks for them; here they can be said once, before the command.
command.params += [
    click.Option(["--home"], metavar="FOLDER", help="The daemon's home."),
    click.Option(["--token-file"], metavar="FILE", help="Call as the holder of this token."),
]
click.version_option(covenant.__version__, prog_name="covenant", message="%(prog)s %(version)s")(command)


def main() -> None:
    command(prog_name="covenant")
