"""`covenant peers delegate`."""

from __future__ import annotations

import time
from typing import Any, Final

import click

from covenant.cli.calling import Call, calls
from covenant.cli.failures import Failure
from covenant.cli.output import put, say, shape
from covenant.cli.peers.telling import delegation_line

ENDED: Final = frozenset({"completed", "failed", "cancelled", "timeout"})
LOOK_S: Final = 0.3


@click.command("delegate", epilog=shape("delegation", "delegation", "result?", "error?"))
@click.argument("profile")
@click.argument("task")
@click.option("--peer", metavar="PEER", help="Which peer does it. Default: here if there is such an agent, else any.")
@click.option("--context", metavar="TEXT", help="What it needs to know besides.")
@click.option("--budget", type=click.IntRange(1, 500_000), metavar="TOKENS", help="Most tokens it may use.")
@click.option("--timeout-ms", type=click.IntRange(1, 600_000), help="Longest work on it.")
@click.option("--no-wait", is_flag=True, help="Answer as soon as it is on its way.")
@calls
def command(
    call: Call,
    *,
    profile: str,
    task: str,
    peer: str | None,
    context: str | None,
    budget: int | None,
    timeout_ms: int | None,
    no_wait: bool,
) -> None:
    """Delegate a task to an agent of a peer, by the agent's name, and wait for what comes of it.

    With --no-wait, and where an agent here does it, --json answers with the kind `delegated` and the task's id.

    Ctrl-C stops the waiting, not the work: `covenant peers delegations` shows it, `covenant peers cancel` ends it.

    \b
        covenant peers delegate researcher "What changed in RFC 9180?" --peer lab
    """
    begun = call.ask(
        "delegate", profile=profile, task=task, peerId=peer, context=context, maxTokenBudget=budget, timeout=timeout_ms
    )
    if no_wait or not begun["remote"]:
        if not call.answer(begun):
            put(begun["delegationId"])
            if not begun["remote"]:
                say(f"an agent here does it; see: {call.again} a2a show {begun['delegationId']}")
        return
    try:
        answer = _ended(call, begun["delegationId"])
    except KeyboardInterrupt:
        raise Failure(
            "interrupted", f"it goes on; end it with: {call.again} peers cancel {begun['delegationId']}"
        ) from None
    _tell(call, answer)


def _ended(call: Call, delegation_id: str) -> dict[str, Any]:
    said = ""
    while True:
        answer: dict[str, Any] = call.ask("show_delegation", delegationId=delegation_id)
        found = answer["delegation"]
        line = found["message"] or found["state"]
        if line != said and not call.json:
            say(line)
            said = line
        # The task here has the result a moment after the delegation has ended.
        if found["status"] in ENDED and (answer.get("result") is not None or answer.get("error") is not None):
            return answer
        time.sleep(LOOK_S)


def _tell(call: Call, answer: dict[str, Any]) -> None:
    found = answer["delegation"]
    if call.answer(answer):
        if found["status"] != "completed":
            raise click.exceptions.Exit(1)
        return
    if found["status"] != "completed" or answer.get("error"):
        raise Failure(found["code"] or found["status"], answer.get("error") or found["reason"] or found["status"])
    put(answer.get("result") or "")
    say(delegation_line(found))
    if found["redacted"]:
        say(f"{found['redacted']} secrets were found in what was sent; see: {call.again} a2a show {found['id']}")
