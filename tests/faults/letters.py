"""What passes between peers, in the life of a ledger under faults: who is known, what is said and heard, what waits.

The commands are a fixed list, so that a scenario need tell no more than how far it came. What a ledger must hold
then is what another one holds that was given the same commands and was never disturbed.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.open import open_ledger
from covenant.ledger.machine.commands import Accept, Command, Starter
from covenant.ledger.machine.peer_commands import (
    ChangePeer,
    DelegationChanges,
    LearnPeer,
    MoveOutbox,
    ReceiveFromPeer,
    RemovePeer,
    RevokeToken,
    SendToPeer,
    SucceedPeer,
)
from covenant.model.errors import Refusal
from covenant.model.ids import TaskId
from covenant.model.peers.delegation import DelegationKey, DelegationRole
from covenant.model.peers.instance import KeyBundle, Trust
from covenant.model.task import Task, fingerprint
from covenant.seal.identity import InstanceIdentity
from tests.faults.facts import Told
from tests.ledger.machine.peer_commands import (
    CHALLENGE,
    add,
    begun,
    bundle_of,
    delivered,
    envelope,
    heard,
    id_of,
    key_of,
    offering,
    result_of,
    said,
    undelivered,
    verifying,
)
from tests.ledger_contract.driver import refused
from tests.ledger_contract.fake_clock import START_MS, FakeClock
from tests.ledger_contract.samples import CAROL, OPERATOR, make_task

PEERS: Final = (1, 2, 4)
SIGNATURE: Final = "s" * 86
WORK: Final[dict[TaskId, Task]] = {
    task.id: task for task in (make_task(number, recipient=CAROL) for number in (52, 54))
}
"""What peers have us do: the first is begun by the record that accepts it, and nobody takes up the second."""


def keys_of(number: int) -> KeyBundle:
    """The same in every process: of a signed one, with nothing in it that is made by chance."""
    key = InstanceIdentity(bytes([number]) * 32).key
    prekey = replace(bundle_of(number).prekeys[0], kid="pk_" + "a" * 16, public_key=key, signature=SIGNATURE)
    return replace(bundle_of(number), prekeys=(prekey,), signature=SIGNATURE)


def offered(number: int, jti: str, peer: int = 1, starter: Starter | None = None) -> ReceiveFromPeer:
    """A peer offers us work, and we begin it; with a starter in the same record."""
    key, work = key_of(number, role=DelegationRole.PROVIDER, peer=peer), make_task(50 + number, recipient=CAROL)
    return ReceiveFromPeer(
        envelope=envelope(jti, seq=1, peer=peer),
        key=key,
        begin=begun(key, work=work.id),
        transitions=("offer", "accept"),
        messages=(said("delegation_accept"),),
        accept=Accept(task=work, digest=fingerprint(work)[0], starter=starter),
    )


def told(key: DelegationKey, *transitions: str, typ: str, latest: bool = False, **changes: Any) -> SendToPeer:
    words = (said(typ, b'{"words":"' + b"x" * 200 + b'"}', latest=latest),)
    return SendToPeer(key=key, transitions=transitions, changes=DelegationChanges(**changes), messages=words)


OURS: Final = key_of(2, role=DelegationRole.PROVIDER)
STATUS: Final = "delegation_status"
FIRST: Final[Sequence[Command[Any]]] = (
    add(1, keys=None),
    add(2, keys=None),
    LearnPeer(id=id_of(1), by=OPERATOR, keys_shown=keys_of(1), challenge=CHALLENGE),
    verifying(),
    offering(1),
    heard("accept", seq=1, delegation_id="d"),
    MoveOutbox(moves=(undelivered(1),)),
    MoveOutbox(moves=(delivered(1),)),
    offered(2, "work", starter=Starter(CAROL, "here", "boot-1")),
    told(OURS, "start", "status", typ=STATUS, latest=True, status_seq=1),
    told(OURS, "status", typ=STATUS, latest=True, status_seq=2),
    heard("status", seq=3, jti="early"),
    heard("accept", seq=1, jti="twice"),
    ReceiveFromPeer(envelope=envelope("alone")),
)
SECOND: Final[Sequence[Command[Any]]] = (
    heard("status", seq=2, status_seq=1, message="at it"),
    MoveOutbox(moves=(delivered(1, OURS), undelivered(2, OURS))),
    told(key_of(1), "cancel", typ="delegation_cancel"),
    ChangePeer(id=id_of(1), by=OPERATOR, trust=Trust.TRUSTED),
    told(OURS, "result_completed", typ="delegation_result"),
    heard("result_cancelled", seq=3, result=result_of()),
    SendToPeer(key=key_of(1), changes=DelegationChanges(result=None)),
    RevokeToken(by=OPERATOR, token_id="t1", until_ms=START_MS + 1_000),
    offered(4, "more", peer=2),
    heard("status", seq=4, jti="late"),
    SucceedPeer(by=OPERATOR, old=id_of(2), keys_shown=keys_of(4), vouched=True),
)
THIRD: Final[Sequence[Command[Any]]] = (
    MoveOutbox(moves=(delivered(3, OURS), delivered(2))),
    told(key_of(4, role=DelegationRole.PROVIDER, peer=4), "result_failed", typ="delegation_result", code="no"),
    MoveOutbox(moves=(delivered(9, key_of(4, role=DelegationRole.PROVIDER, peer=4)),)),
    RemovePeer(id=id_of(4), by=OPERATOR),
    ReceiveFromPeer(envelope=envelope("last")),
)
ALL: Final[Sequence[Command[Any]]] = (*FIRST, *SECOND, *THIRD)
TAKEN: Final = tuple((number, each.envelope) for number, each in enumerate(ALL) if isinstance(each, ReceiveFromPeer))


class Letter(NamedTuple):
    """One command that was tried. `code`: it was answered so, where it was refused; `open`: nobody knows."""

    number: int
    code: str | None = None
    open: bool = False


async def picture(ledger: Ledger) -> dict[str, Any]:
    """All that can be asked about peers."""
    return {
        "peers": tuple(ledger.peers()),
        "delegations": tuple(await ledger.delegations()),
        "live": [{each.key for each in await ledger.delegations_live(role)} for role in DelegationRole],
        "parcels": [tuple(await ledger.peer_outbox(id_of(number))) for number in PEERS],
        "addressees": sorted(await ledger.addressees()),
        "envelopes": [await ledger.envelope_taken(each.sender, each.jti) for _, each in TAKEN],
        "revoked": ledger.token_revoked("t1"),
        "usage": tuple(await ledger.peer_usage(0)),
        "log": tuple(await ledger.message_log()),
    }


async def check_letters(ledger: Ledger, told: Told) -> dict[str, Any]:
    """What is known of peers is what follows from all that was answered, with or without what was not."""
    tried = letters(told)
    found = await picture(ledger)
    wanted = await asyncio.to_thread(_possible, tried)
    assert found in wanted, f"of {len(tried)} letters: {_difference(found, wanted[0])}"
    acknowledged = {letter.number for letter in tried if not letter.open and letter.code is None}
    for number, each in TAKEN:
        if number in acknowledged and ledger.peer(each.sender) is not None:
            with refused("replayed"):
                await ledger.commit(ReceiveFromPeer(envelope=each))
    return found


def letters(told: Told) -> list[Letter]:
    """In the order in which they were tried; those that surely came to nothing are left out."""
    found: dict[int, Letter] = {}
    for fact in told.facts:
        number = fact.said.get("letter")
        if number is None:
            continue
        if fact.at == "tried":
            found[number] = Letter(number, open=True)
        elif fact.at == "acknowledged":
            found[number] = Letter(number, fact.said.get("code"))
        elif not fact.said["unknown"]:
            del found[number]
    return list(found.values())


def _possible(tried: Sequence[Letter]) -> list[dict[str, Any]]:
    """Each that agrees with what was answered."""
    choices = [((each, True), (each, False)) if each.open else ((each, True),) for each in tried]
    done = [tuple(each for each, happened in choice if happened) for choice in product(*choices)]
    found = [seen for each in done if (seen := _undisturbed(each)) is not None]
    assert found, "no order of what was tried agrees with the answers"
    return found


@cache
def _undisturbed(done: tuple[Letter, ...]) -> dict[str, Any] | None:
    async def run(home: Path) -> dict[str, Any] | None:
        ledger = await open_ledger(home, clock=FakeClock(), node="here")
        try:
            for letter in done:
                code = None
                try:
                    await ledger.commit(ALL[letter.number])
                except Refusal as refusal:
                    code = refusal.code
                if not letter.open and code != letter.code:
                    return None
            return await picture(ledger)
        finally:
            await ledger.close()

    with tempfile.TemporaryDirectory(prefix="cov-") as folder:
        return asyncio.run(run(Path(folder) / "home"))


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    return "; ".join(f"{name}: {found[name]} and not {wanted[name]}" for name in found if found[name] != wanted[name])


def work_of(number: int) -> tuple[str, tuple[TaskId, ...]]:
    """The task that a letter begins, if it does, and how this is told."""
    command = ALL[number]
    if not isinstance(command, ReceiveFromPeer) or command.accept is None:
        return "written", ()
    return "sent" if command.accept.starter is None else "started", (command.accept.task.id,)
