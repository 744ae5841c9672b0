"""What can be read on the way between two real daemons: nothing of what they say."""

import base64
import socket
import threading
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.conftest import Pair
from tests.e2e.peers.peer_daemons import Node, introduce, open_peer_daemons, until

# Words that no search for secrets would take out before they leave.
TASK: Final = "pelican-under-walnut"
CONTEXT: Final = "marmalade-for-the-otter"
STATUS: Final = f"waiting for {TASK}"
WORDS: Final = (TASK, CONTEXT, STATUS, "the-context-was")

AGENT: Final = (
    AGENTS
    + """
telltale = Agent("telltale")


@telltale
async def tell(turn):
    yield turn.status(f"waiting for {turn.text}")
    await gate("go-" + turn.text)
    yield f"the-context-was {turn.metadata.get('context')} and the task {turn.text}"
"""
)


def shapes(word: str) -> set[bytes]:
    """A word as it is, and as any base64 of something that it is in would have it."""
    found = {word.encode(), word.encode().hex().encode(), word.encode("utf-16-le")}
    for before in range(3):
        whole = base64.b64encode(b"\0" * before + word.encode())
        # What its neighbours have a part in is left out at both ends.
        inner = whole[4 if before else 0 : -4]
        found |= {inner, inner.replace(b"+", b"-").replace(b"/", b"_")}
    return found


def readable(heard: bytes, *words: str) -> list[str]:
    return [word for word in words if any(shape in heard for shape in shapes(word))]


def test_a_word_is_found_in_every_shape_that_is_looked_for() -> None:
    for before in (b"", b"x", b"xy", b"xyz"):
        plain = b'{"task": "' + before + TASK.encode() + b'"}'
        for heard in (plain, base64.b64encode(plain), base64.urlsafe_b64encode(plain), plain.hex().encode()):
            assert readable(heard, TASK) == [TASK]


def test_whoever_records_both_lines_reads_nothing_of_a_delegation(pair: Pair) -> None:
    before = len(pair.to_bob.there), len(pair.to_alice.there)
    offered = pair.alice.delegate(TASK, "held", "bob", context=CONTEXT)
    until(lambda: pair.alice.delegation(offered)["delegation"]["message"], lambda said: said == STATUS)
    pair.daemons.touch(TASK)
    assert pair.alice.ended(offered)["result"] == "ended"
    shown = pair.alice.delegate(f"{TASK} again", "shower", "bob", context=CONTEXT)
    said = pair.alice.ended(shown)["result"]
    assert TASK in said
    assert CONTEXT in said, "the provider had it"
    offered_there, accepted_back = pair.to_bob.there[before[0] :], pair.to_alice.there[before[1] :]
    assert offered_there.count(b'"protected"') >= 2
    assert accepted_back.count(b'"protected"') >= 4
    assert readable(pair.heard, *WORDS) == []
    # Nor do the tokens that let alice delegate.
    assert b"cvt1." not in pair.heard


def test_what_an_agent_here_was_told_stays_here_but_for_what_it_passes_on(pair: Pair) -> None:
    private, passed = "heron-beside-lighthouse", "teapot-of-the-admiral"
    message = {
        "messageId": private,
        "role": "ROLE_USER",
        "parts": [{"text": f"finder {passed}"}],
        "metadata": {"note": private},
    }
    asked = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    task = pair.alice.ask("POST", "/v1/a2a/agents/relay", asked)["result"]["task"]
    assert task["status"]["message"]["parts"][0]["text"] == f"alice>completed: found: {passed}"
    (child,) = pair.alice.get(f"/a2a/tasks/{task['id']}/tree")["tree"]["children"]
    proof = pair.alice.get(f"/delegations/{child['task_id']}/proof")
    assert passed in str(proof)
    assert private not in str(proof)
    theirs = pair.bob.task(pair.alice.delegation(child["task_id"])["delegation"]["delegationId"])
    assert private not in str(theirs)
    assert readable(pair.heard, private, passed) == []


class Wiretap:
    """Every packet on the loopback device, until it is closed."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(0x0003))
        self._socket.setsockopt(socket.SOL_SOCKET, 33, 64 * 1024 * 1024)  # SO_RCVBUFFORCE: no packet is lost
        self._socket.bind(("lo", 0))
        self.packets: list[bytes] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            packet = self._socket.recv(0x10000)
            if not packet:
                return
            self.packets.append(packet)

    def between(self, *ports: int) -> bytes:
        """What was said in TCP over IPv4 to or from these ports."""
        wanted = {port.to_bytes(2, "big") for port in ports}
        return b"".join(
            packet[14:]
            for packet in list(self.packets)
            if packet[12:14] == b"\x08\x00" and packet[23] == 6 and {packet[34:36], packet[36:38]} & wanted
        )


def ended(node: Node, offered: str) -> str:
    """By the socket in its home: nothing of it is on the loopback device."""
    answer = until(lambda: node.cli("peers", "delegations", offered), lambda found: "result" in found)
    result: str = answer["result"]
    return result


@pytest.mark.root
def test_whoever_taps_the_wire_reads_nothing_of_a_delegation(short_path: Path) -> None:
    with open_peer_daemons(short_path) as made:
        alice, bob = made.node("alice", AGENT), made.node("bob", AGENT)
        introduce(alice, bob)
        tap = Wiretap()
        words = ("peers", "delegate", "telltale", TASK, "--peer", "bob", "--context", CONTEXT, "--no-wait")
        offered = alice.cli(*words)["delegationId"]
        until(lambda: alice.cli("peers", "delegations", offered)["delegation"]["message"], lambda said: said == STATUS)
        made.touch(f"go-{TASK}")
        assert ended(alice, offered) == f"the-context-was {CONTEXT} and the task {TASK}"
        heard = tap.between(alice.port, bob.port)
    assert heard.count(b'"protected"') >= 4, "it was on this wire"
    assert readable(heard, *WORDS) == []
