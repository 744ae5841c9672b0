"""What is known of peers survives: in the journal, and in a snapshot in its place."""

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from covenant.ledger.contract.ledger import Ledger
from covenant.ledger.embedded.journal import snapshot
from covenant.ledger.embedded.state import LedgerState
from covenant.ledger.machine.events import TokenRevoked
from covenant.model.errors import Refusal
from covenant.model.ids import AgentId, PublicKey
from covenant.model.peers.delegation import DelegationRole
from covenant.model.peers.instance import InstanceId
from covenant.model.settings import Limits
from tests.ledger.machine.peer_commands import add, heard, held, id_of, offered, offering, peer_commands
from tests.ledger.machine.pure import Pure
from tests.ledger_contract.embedded_engine import EmbeddedEngine


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(tmp_path, segment_bytes=4_096)
    yield engine
    await engine.close()


async def everything_happens(ledger: Ledger) -> None:
    for command in peer_commands():
        with suppress(Refusal):
            await ledger.commit(command)


async def known(ledger: Ledger) -> dict[str, Any]:
    """All that can be asked about peers."""
    everybody = [id_of(number) for number in range(1, 10)]
    delegations = await ledger.delegations()
    return {
        "peers": ledger.peers(),
        "named": [ledger.peer_named(peer.name) for peer in ledger.peers()],
        "delegations": delegations,
        "of task": [await ledger.delegation_of(each.task_id) for each in delegations],
        "live": [await ledger.delegations_live(role, peer) for role in DelegationRole for peer in [None, *everybody]],
        "parcels": [(peer, await ledger.peer_outbox(peer)) for peer in everybody],
        "addressees": sorted(await ledger.addressees()),
        "envelopes": [await ledger.envelope_taken(peer, f"j{number}") for peer in everybody for number in range(9)],
        "revoked": [ledger.token_revoked(f"t{number}") for number in range(3)],
        "usage": await ledger.peer_usage(0),
        "log": await ledger.message_log(),
    }


async def test_what_is_known_of_peers_is_the_same_after_a_crash_and_after_a_stop(engine: EmbeddedEngine) -> None:
    ledger = await engine.open()
    await everything_happens(ledger)
    before = await known(ledger)
    assert all(before[question] for question in ("peers", "delegations", "addressees", "usage", "log"))
    ledger = await engine.crash_and_reopen(ledger)
    assert await known(ledger) == before
    ledger = await engine.close_and_reopen(ledger)
    assert await known(ledger) == before


async def test_what_is_known_of_peers_is_the_same_after_the_journal_was_compacted(engine: EmbeddedEngine) -> None:
    ledger = await engine.open()
    await everything_happens(ledger)
    before = await known(ledger)
    await ledger.compact()
    assert await known(ledger) == before
    ledger = await engine.close_and_reopen(ledger)
    assert await known(ledger) == before


async def test_listeners_hear_whose_affairs_have_changed(engine: EmbeddedEngine) -> None:
    ledger = await engine.open()
    told: list[list[InstanceId]] = [[], []]
    for listener in told:
        ledger.on_peer(listener.append)
    await ledger.commit(add(1))
    await ledger.commit(offering(1))
    await ledger.durable()
    assert told[0] == told[1]
    assert set(told[0]) == {id_of(1)}


def test_a_snapshot_holds_all_that_is_known_of_peers(tmp_path: Path) -> None:
    pure = Pure()
    for command in [*peer_commands(), offering(7), offered(8, jti="o8"), heard("reject", seq=1, jti="r", number=7)]:
        with suppress(Refusal):
            pure.do(command)
    written = snapshot.write(tmp_path, 1, pure.state)
    restored = LedgerState(Limits())
    snapshot.load(written, restored)
    assert held(restored) == held(pure.state)
    for state in (restored, pure.state):
        state.forget_envelopes(1 << 50)
        assert list(state.all_envelopes()) == []


def test_a_clock_that_runs_ahead_for_a_week_brings_no_revoked_token_back() -> None:
    start_ms, week_ms = 1_700_000_000_000, 7 * 24 * 3_600_000
    by = AgentId("operator@local", PublicKey("key"))
    state = LedgerState(Limits())

    def revoke(token_id: str, now_ms: int) -> None:
        state.apply([TokenRevoked(token_id, by, now_ms, now_ms + 1_000)], now_ms, 1)

    revoke("t1", start_ms)
    revoke("t2", start_ms + week_ms)
    assert state.token_revoked("t1")
    revoke("t3", start_ms + 6 * week_ms)
    assert not state.token_revoked("t1"), "revocations do not pile up for ever"
