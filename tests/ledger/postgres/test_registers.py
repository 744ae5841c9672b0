"""The registers of a node, as rows of other nodes change them."""

from __future__ import annotations

from covenant.ledger.postgres.registers import PEER, RegisterRow, Registers
from covenant.model.peers.delegation import Peer
from covenant.model.peers.instance import InstanceId

ANNA, BERT = InstanceId("a" * 32), InstanceId("b" * 32)


def row(peer_id: InstanceId, name: str | None) -> RegisterRow:
    return RegisterRow(PEER, peer_id, None if name is None else Peer(id=peer_id, name=name))


def test_a_peer_that_took_the_former_name_of_another_keeps_it_in_whatever_order_the_rows_come() -> None:
    registers = Registers()
    registers.put([row(ANNA, "north"), row(BERT, "south")])
    # "north" became "east", and then "south" became "north"; later "east" was changed once more.
    registers.put([row(BERT, "north"), row(ANNA, "east")])
    named = {name: peer.id for name in ("north", "south", "east") if (peer := registers.peer_named(name)) is not None}
    assert named == {"north": BERT, "east": ANNA}
    registers.put([row(BERT, None)])
    assert registers.peer_named("north") is None
    assert registers.peer(BERT) is None
