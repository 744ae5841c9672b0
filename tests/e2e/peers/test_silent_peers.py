"""Peers that take a connection and say nothing hold up nobody else's introduction."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import pytest

from covenant.seal.identity import instance_id
from covenant.seal.keys import new_private_key, public_key
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.peer_daemons import open_peer_daemons, until
from tests.places import short_folder

SILENT: Final = 24


class Silence:
    """Listens, and counts who hung up."""

    def __init__(self) -> None:
        self.hung_up = 0
        self.callers = 0
        self._server = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            self.callers += 1
            threading.Thread(target=self._listen, args=(caller,), daemon=True).start()

    def _listen(self, caller: socket.socket) -> None:
        with caller, suppress(OSError):
            while caller.recv(65_536):
                pass
        self.hung_up += 1

    def close(self) -> None:
        # On Linux, closing alone does not wake whoever accepts.
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def silence() -> Iterator[Silence]:
    made = Silence()
    yield made
    made.close()


def test_a_live_peer_is_verified_while_many_others_are_silent(silence: Silence) -> None:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        bob = made.node("bob", AGENTS)
        strangers = [instance_id(public_key(new_private_key())) for _ in range(SILENT)]
        quiet = [f"{each}@http://127.0.0.1:{silence.port}/{n}" for n, each in enumerate(strangers)]
        alice = made.node("alice", AGENTS, static=",".join([*quiet, f"bob={bob.url}"]))
        bob.add(alice.url, "alice")

        def trust() -> str | None:
            answer = alice.call("GET", "/peers/bob")
            return str(answer.body["peer"]["trustLevel"]) if answer.status == 200 else None

        until(trust, lambda found: found == "verified")
        # Nobody had to give up on a silent peer first.
        assert silence.hung_up == 0, (silence.hung_up, silence.callers)
        assert alice.ended(alice.delegate("among the silent", "echo", "bob"))["result"] == "echo among the silent"
