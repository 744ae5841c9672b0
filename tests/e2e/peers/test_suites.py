"""Real daemons of both suites: which one an envelope between them has, and what a line that takes keys away gets."""

import base64
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from covenant.model.peers.instance import HYBRID_SUITE, HYBRID_VERSIONS, SUITE, SUPPORTED_VERSIONS
from tests.e2e.peers.agents import AGENTS
from tests.e2e.peers.peer_daemons import Node, call, introduce, open_peer_daemons, until
from tests.e2e.peers.proxy import Proxy
from tests.matrices import first_rows_of
from tests.places import short_folder

IDENTITY = "/api/v1/a2a/identity"


def suites(*lines: Proxy) -> set[str]:
    """Of all envelopes that went over these lines, both ways."""
    heard = b"".join(part for line in lines for part in (line.there, line.back))
    headers = re.findall(rb'"protected":"([A-Za-z0-9_-]+)"', heard)
    assert headers
    return {json.loads(base64.urlsafe_b64decode(each + b"=" * (-len(each) % 4)))["suite"] for each in headers}


@pytest.mark.parametrize(
    ("ours", "theirs", "suite"),
    first_rows_of([("hybrid", "classic", SUITE), ("hybrid", "hybrid", HYBRID_SUITE), ("classic", "hybrid", SUITE)]),
)
def test_work_goes_there_and_back_in_the_suite_that_both_have(ours: str, theirs: str, suite: str) -> None:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        ann, ben = made.node("ann", AGENTS, suite=ours), made.node("ben", AGENTS, suite=theirs)
        to_ann, to_ben = made.proxy(ann), made.proxy(ben)
        introduce(ann, ben, a_calls=to_ben.url, b_calls=to_ann.url)
        assert ann.ended(ann.delegate("hello", "echo", "ben"))["result"] == "echo hello"
        ann.kill()
        ann.start()
        assert ann.ended(ann.delegate("again", "echo", "ben"))["result"] == "echo again"
        assert ben.ended(ben.delegate("back", "echo", "ann"))["result"] == "echo back"
        assert suites(to_ann, to_ben) == {suite}


def test_one_that_only_calls_out_fetches_in_the_hybrid_suite() -> None:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        ann, ben = made.node("ann", AGENTS), made.node("ben", AGENTS, poll="*", poll_wait_ms=500)
        to_ann = made.proxy(ann)
        ann.post("/peers", {"id": ben.id, "name": "ben"})
        ben.add(to_ann.url, "ann")
        for node, other in ((ann, "ben"), (ben, "ann")):
            until(lambda node=node, other=other: node.peer(other)["trustLevel"], lambda trust: trust == "verified")  # type: ignore[misc]
        assert ann.ended(ann.delegate("hello", "echo", "ben"))["result"] == "echo hello"
        assert suites(to_ann) == {HYBRID_SUITE}


def test_a_daemon_that_becomes_classic_is_spoken_to_as_such_and_back() -> None:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        ann, ben = made.node("ann", AGENTS), made.node("ben", AGENTS)
        introduce(ann, ben)
        for suite, versions in (("classic", SUPPORTED_VERSIONS), ("hybrid", HYBRID_VERSIONS)):
            ben.again(suite=suite)
            shown = call(ben.port, "GET", IDENTITY).body
            assert ("hybridPrekey" in shown, tuple(shown["keys"]["versions"])) == (suite == "hybrid", versions)
            assert ann.ended(ann.delegate(suite, "echo", "ben"))["result"] == f"echo {suite}"


class Line:
    """Somebody on the way to a node, who may change how it introduces itself."""

    def __init__(self, node: Node) -> None:
        self.alter: Callable[[dict[str, Any]], None] = lambda shown: None
        self.posted = 0
        line = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                shown = call(node.port, "GET", self.path).body
                line.alter(shown)
                self._answer(200, json.dumps(shown).encode())

            def do_POST(self) -> None:
                line.posted += self.path.endswith("/receive")
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = call(node.port, "POST", self.path, body)
                self._answer(answer.status, answer.raw)

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def line_to(node: Node) -> Iterator[Line]:
    line = Line(node)
    thread = threading.Thread(target=line.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield line
    finally:
        line.server.shutdown()
        line.server.server_close()


def talked_down(shown: dict[str, Any]) -> None:
    """As if the node were of an earlier release."""
    del shown["hybridPrekey"]
    shown["keys"]["versions"] = list(SUPPORTED_VERSIONS)


def test_a_line_that_takes_the_hybrid_key_away_hears_nothing() -> None:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        ann, ben = made.node("ann", AGENTS), made.node("ben", AGENTS)
        ben.add(ann.url, "ann")
        with line_to(ben) as line:
            line.alter = lambda shown: shown.pop("hybridPrekey")
            added = ann.add(line.url, "ben")
            assert added["trustLevel"] == "peer"
            refused = ann.call("POST", "/peers/ben/verify", {})
            assert (refused.status, refused.code) == (503, "no_hybrid_keys")
            line.alter = talked_down
            refused = ann.call("POST", "/peers/ben/verify", {})
            assert (refused.status, line.posted) == (503, 0)
            line.alter = lambda shown: None
            assert ann.post("/peers/ben/verify")["peer"]["trustLevel"] == "verified"
            assert line.posted > 0
            assert ann.ended(ann.delegate("hello", "echo", "ben"))["result"] == "echo hello"


WITHOUT_MLKEM = """
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import mlkem


class MLKEM768PrivateKey:
    '''As of a library whose OpenSSL does not know it.'''

    @classmethod
    def generate(cls):
        raise UnsupportedAlgorithm("ML-KEM-768 is not supported by this backend.")


mlkem.MLKEM768PrivateKey = MLKEM768PrivateKey
"""


def test_where_the_crypto_library_has_no_ml_kem_the_classic_suite_is_spoken() -> None:
    with short_folder() as folder, open_peer_daemons(folder) as made:
        (folder / "sitecustomize.py").write_text(WITHOUT_MLKEM)
        ann = made.node("ann", AGENTS)
        ben = made.node("ben", AGENTS, env={"PYTHONPATH": str(folder)})
        to_ann, to_ben = made.proxy(ann), made.proxy(ben)
        shown = call(ben.port, "GET", IDENTITY).body
        assert (tuple(shown["keys"]["versions"]), "hybridPrekey" in shown) == (SUPPORTED_VERSIONS, False)
        introduce(ann, ben, a_calls=to_ben.url, b_calls=to_ann.url)
        assert ann.ended(ann.delegate("hello", "echo", "ben"))["result"] == "echo hello"
        assert ben.ended(ben.delegate("back", "echo", "ann"))["result"] == "echo back"
        assert suites(to_ann, to_ben) == {SUITE}
        # A library that has it again is used again, with the keys that are there.
        ben.env = {}
        ben.stop()
        ben.start()
        assert ben.ended(ben.delegate("now with it", "echo", "ann"))["result"] == "echo now with it"
        assert suites(to_ann, to_ben) == {SUITE, HYBRID_SUITE}
