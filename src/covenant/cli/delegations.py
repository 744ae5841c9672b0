"""`covenant peers delegate`, `delegations`, `cancel`, `proof` and others: work that peers do, and its proofs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any, Final, get_args

import click

from covenant.cli.daemon_client import ANSWER_S, Answer, Invocation, connect, daemon_command
from covenant.cli.options import CommandGroup, given_home, home_option, limit_option, local_command
from covenant.cli.task_tables import REMOTE_MARK
from covenant.cli.terminal import ExitCode, Failure, Output, ago, brief, print_table, put, say
from covenant.model.errors import CovenantError
from covenant.model.peers.delegation import ENDED as ENDED_STATES
from covenant.model.peers.delegation import LOST, DelegationState
from covenant.model.peers.delegation_messages import DelegationOutcome, DelegationStatus

RUNNING_STATES: Final = tuple(state.value for state in DelegationState if state not in ENDED_STATES)
STYLES: Final = {
    "completed": "green",
    "failed": "red",
    "rejected": "red",
    "timeout": "red",
    "lost": "bold red",
    "cancelled": "dim",
}
ENDED: Final = get_args(DelegationOutcome)
STATUSES: Final = (*get_args(DelegationStatus), LOST.value)
WAIT_MS: Final = 10_000

delegation_argument: Final = click.argument("delegation")

delegations: Final = CommandGroup("peers")
"""Added to the group `peers`."""
PROOF_BYTES_MAX: Final = 64 * 1024 * 1024
PROVEN: Final = frozenset({"offer", "result"})
"""What a proof covers. The conversation may stay with the provider; the rest of the proof can still be checked."""


@daemon_command(delegations, "delegate", "delegation", "delegation", "result?", "error?")
@click.argument("profile")
@click.argument("task")
@click.option(
    "--peer", metavar="PEER", help="The peer that does the task. Default: a local agent if there is one, else any peer."
)
@click.option("--context", metavar="TEXT", help="Further text that the agent needs to know.")
@click.option("--budget", type=click.IntRange(1, 500_000), metavar="TOKENS", help="Most tokens that the task may use.")
@click.option("--timeout-ms", type=click.IntRange(1, 600_000), help="Longest time for the work.")
@click.option("--no-wait", is_flag=True, help="Return as soon as the task is accepted here.")
def delegate(
    call: Invocation,
    *,
    profile: str,
    task: str,
    peer: str | None,
    context: str | None,
    budget: int | None,
    timeout_ms: int | None,
    no_wait: bool,
) -> None:
    """Delegate a task to an agent of a peer, by the agent's name, and wait for its result.

    With --no-wait, or if an agent of this instance does it, --json answers with the kind `delegated` and the task id.

    Ctrl-C stops the waiting, not the work: `covenant peers delegations` shows it, `covenant peers cancel` ends it.

    \b
        covenant peers delegate researcher "What changed in RFC 9180?" --peer lab
    """
    begun = call.ask(
        "delegate", profile=profile, task=task, peerId=peer, context=context, maxTokenBudget=budget, timeout=timeout_ms
    )
    delegation_id = begun["delegationId"]
    if no_wait or not begun["remote"]:
        if not call.answer(begun, kind="delegated"):
            put(delegation_id)
            if not begun["remote"]:
                say(f"an agent of this daemon does the work; see: {call.program} a2a show {delegation_id}")
        return
    try:
        answer = _wait_for_outcome(call, delegation_id)
    except KeyboardInterrupt:
        raise Failure(
            "interrupted", f"the delegation goes on; end it with: {call.program} peers cancel {delegation_id}"
        ) from None
    _show_outcome(call, answer)


@daemon_command(delegations, "delegations", "delegations", "delegations", "total")
@click.argument("delegation", required=False)
@click.option("--peer", metavar="PEER", help="Only delegations with this peer.")
@click.option("--status", type=click.Choice(STATUSES), help="Only delegations with this status.")
@click.option(
    "--role",
    type=click.Choice(["requester", "provider"]),
    help="Only delegations that this instance asked for, or works on.",
)
@limit_option(20, 100)
def list_delegations(
    call: Invocation, *, delegation: str | None, peer: str | None, status: str | None, role: str | None, limit: int
) -> None:
    """List delegations to and from peers, lost ones first; or show one, by the id of its task."""
    if delegation is not None:
        _show_delegation(call, delegation)
        return
    answer = call.ask("list_delegations", peerId=peer, status=status, role=role, limit=limit)
    if call.answer(answer):
        return
    columns = ("state", "task", "with", "profile", "tokens", "moved", "")
    print_table(columns, map(_delegation_row, answer["delegations"]))
    if any("question" in each for each in answer["delegations"]):
        say(_how_to_answer(call, "ID"))
    if any(each["state"] == "lost" for each in answer["delegations"]):
        say(f"lost ones wait for you: {call.program} peers offer-again ID, or force-error ID --reason WHY")


@daemon_command(delegations, "cancel", "delegation", "delegation")
@delegation_argument
@click.option("--reason", default="", help="The reason, for the provider.")
def cancel(call: Invocation, *, delegation: str, reason: str) -> None:
    """Cancel a delegation. The daemon tells the provider as soon as it can, and the provider stops."""
    answer = call.ask("cancel_delegation", delegationId=delegation, reason=reason)
    call.show(answer, _delegation_line(answer["delegation"]))


@daemon_command(delegations, "offer-again", "delegation", "delegation")
@delegation_argument
def offer_again(call: Invocation, *, delegation: str) -> None:
    """Offer a lost delegation again, under the same id: a provider that has it does not begin it twice."""
    answer = call.ask("offer_again", delegationId=delegation)
    call.show(answer, _delegation_line(answer["delegation"]))


@daemon_command(delegations, "force-error", "delegation", "delegation")
@delegation_argument
@click.option("--reason", required=True, help="The reason, for the audit.")
def force_error(call: Invocation, *, delegation: str, reason: str) -> None:
    """Give up a lost delegation: its task fails with `provider_lost`. A later result of the provider is not used."""
    answer = call.ask("force_delegation", delegationId=delegation, reason=reason)
    call.show(answer, _delegation_line(answer["delegation"]))


@daemon_command(delegations, "proof", "delegation_proof", "offer", "result", "transcript", "proof")
@delegation_argument
@click.option("--line", type=click.IntRange(1), metavar="N", help="Show only this line of the conversation.")
def proof(call: Invocation, *, delegation: str, line: int | None) -> None:
    """Write everything that proves a delegation's result, for `covenant peers verify-proof` or for somebody else.

    \b
        covenant peers proof ID > proof.json
    """
    answer = call.ask("delegation_proof", delegationId=delegation)
    if line is not None:
        from covenant.seal.proofs import show_line

        try:
            answer = {**answer, "transcript": None, "line": show_line(answer["transcript"], line - 1)}
        except (IndexError, ValueError):
            raise Failure(
                "no_line", f"this daemon does not have the conversation, or the conversation has no line {line}"
            ) from None
    call.show(answer, json.dumps(answer, ensure_ascii=False, indent=2))


@local_command(delegations, "verify-proof", "proof_verified", "holds", "checks", "unchecked")
@click.argument("file", type=click.File("rb"))
@click.option("--provider", metavar="ID", help="The instance that must have signed the result.")
@click.option("--requester", metavar="ID", help="The instance that must have asked for the work.")
@click.option("--budget", type=click.IntRange(1), metavar="TOKENS", help="The most tokens that the work may have used.")
@home_option("The home of a daemon that has the delegation in its ledger.")
def verify_proof(output: Output, *, file: IO[bytes], home: str | None, **expected: Any) -> None:
    """Check the proof of a peer's result. FILE is the output of `covenant peers proof`; - reads it from stdin.

    The check fails if a line of the conversation was changed, moved or left out, or the offer, the result or the usage
    was changed.

    Anybody can sign a result. --provider names the instance that must have signed it. Without --provider the command
    asks the home's daemon which peer it delegated the task to; if no daemon runs or knows the task, the command only
    names the signer.

    Exits with 0 if FILE has the offer and the result, the provider is known and everything is valid, with 1 if
    something is invalid, and with 4 if the offer or the result is missing from FILE, or the provider is not known.
    """
    from covenant.seal.proofs import verify_evidence

    data = file.read(PROOF_BYTES_MAX + 1)
    if len(data) > PROOF_BYTES_MAX:
        raise Failure("too_large", f"a proof has at most {PROOF_BYTES_MAX} bytes")
    try:
        if expected["provider"] is None:
            expected |= _peer_in_ledger(given_home(home), data)
        report = verify_evidence(data, **expected)
    except ValueError as wrong:
        raise Failure("no_proof", f"this is no proof: {wrong}") from None
    checks = [{"name": check.name, "holds": check.holds, "detail": check.detail} for check in report.checks]
    if not output.answer({"holds": report.holds, "checks": checks, "unchecked": list(report.unchecked)}):
        for check in report.checks:
            put(f"{'holds ' if check.holds else 'BROKEN'}  {check.name}  {check.detail}".rstrip())
        for name in report.unchecked:
            put(f"not checked  {name}")
    if not report.holds:
        raise click.exceptions.Exit(ExitCode.REFUSED)
    if "provider" in report.unchecked:
        signed = next(check.detail for check in report.checks if check.name == "signature")
        say(f"covenant: this is {signed}; give --provider, the id that you expect, to have that checked")
    if not PROVEN.isdisjoint(report.unchecked):
        say("covenant: the offer or the result is not in this file, so nothing that was asked or answered is proven")
    if not (PROVEN | {"provider"}).isdisjoint(report.unchecked):
        raise click.exceptions.Exit(ExitCode.UNCHECKED)


def _peer_in_ledger(home: Path, data: bytes) -> dict[str, Any]:
    """The peer to which the daemon of this home delegated the task, by its ledger.

    Empty if no daemon runs, or if it did not delegate the task.
    """
    from covenant.seal.proofs import read_evidence

    named = read_evidence(data).proof.delegation_id
    if not (home / "operator.token").exists():
        return {}
    try:
        with connect(home) as client:
            ours = client.ask("show_delegation", delegationId=named)["delegation"]
            peer = client.ask("show_peer", peerId=ours["peerId"])["peer"]
    except (Failure, CovenantError, OSError):
        return {}
    if ours["role"] != "requester":
        return {}
    return {"provider": peer["id"], "former_ids": peer["formerIds"]}


def _wait_for_outcome(call: Invocation, delegation_id: str) -> Answer:
    """Waits for the outcome of a delegation, and shows its progress meanwhile."""
    shown, since_ms = "", 0
    while True:
        answer = call.ask(
            "show_delegation",
            delegationId=delegation_id,
            waitMs=WAIT_MS,
            sinceMs=since_ms,
            within_s=ANSWER_S + WAIT_MS / 1000,
        )
        found = answer["delegation"]
        line = found["message"] or found["state"]
        if line != shown and not call.json:
            say(line)
            shown = line
            if "question" in found:
                say(_how_to_answer(call, found["id"]))
        # The local task has the result a moment after the delegation has ended.
        if found["status"] in ENDED and (answer.get("result") is not None or answer.get("error") is not None):
            return answer
        since_ms = max(found["movedAtMs"], found["heardAtMs"])


def _show_outcome(call: Invocation, answer: Answer) -> None:
    found = answer["delegation"]
    if call.answer(answer):
        if found["status"] != "completed":
            raise click.exceptions.Exit(ExitCode.REFUSED)
        return
    if found["status"] != "completed" or answer.get("error"):
        raise Failure(found["code"] or found["status"], answer.get("error") or found["reason"] or found["status"])
    put(answer.get("result") or "")
    say(_delegation_line(found))
    if found["redacted"]:
        say(f"{found['redacted']} secrets were found in what was sent; see: {call.program} a2a show {found['id']}")


def _show_delegation(call: Invocation, delegation: str) -> None:
    answer = call.ask("show_delegation", delegationId=delegation)
    if call.answer(answer, kind="delegation"):
        return
    found = answer["delegation"]
    put(_delegation_line(found))
    put(f"{_spent(found)} tokens, {'proven' if found['proven'] else 'not proven'}")
    if "question" in found:
        put(found["question"])
        say(_how_to_answer(call, found["id"]))
    for line in (found["reason"], answer.get("error"), answer.get("result")):
        if line:
            put(line)


def _delegation_line(delegation: dict[str, Any]) -> str:
    way = f"{REMOTE_MARK} to" if delegation["role"] == "requester" else "from"
    text = f"{_state_text(delegation)} {delegation['id']} {way} {delegation['peer']}/{brief(delegation['profile'], 64)}"
    return f"{text} {delegation['code'] or ''}".rstrip()


def _state_text(delegation: dict[str, Any]) -> str:
    """The delegation's state, with a note if it asks a question, or if its task has ended and the result is missing."""
    state, status = delegation["state"], delegation["status"]
    is_over = status not in ("pending", "running")
    if "question" in delegation:
        return f"{state} (asks)"
    return f"{status} ({state})" if is_over and state in RUNNING_STATES else state


def _how_to_answer(call: Invocation, delegation_id: str) -> str:
    return f"it waits for an answer: {call.program} a2a answer {delegation_id} TEXT"


def _spent(delegation: dict[str, Any]) -> str:
    used = delegation["tokenUsage"]["total"]
    return f"{used} of {delegation['maxTokenBudget']}" + (" overspent" if delegation["overspent"] else "")


def _delegation_row(found: dict[str, Any]) -> tuple[str, ...]:
    style, profile, moved = STYLES.get(found["state"], ""), brief(found["profile"], 64), ago(found["movedAtMs"])
    way = f"{REMOTE_MARK} {found['peer']}" if found["role"] == "requester" else f"from {found['peer']}"
    about = brief(found["reason"] or found["message"] or "", 60)
    return style, _state_text(found), found["id"], way, profile, _spent(found), moved, about
