"""The daemon's HTTP server with an echo behind it, plain and sealed: `python -m bench.sealed_echo`.

`/plain` and `/sealed` read JSON and write the same JSON back. The sealed one checks the envelope's signature, opens it,
and seals what it answers to the caller, whose keys it is told at `/meet`. Prints its address and serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from bench.echo import AsgiDoor
from bench.workload import run
from covenant.daemon.listeners import bound, make_server, url_of
from covenant.daemon.settings import HttpSettings
from covenant.model.peers.instance import InstanceId, KeyBundle, Prekey
from covenant.seal.envelope import check, open_checked, seal
from covenant.seal.identity import InstanceIdentity, PrivatePrekey, new_prekey, prekey_to_use, sign_bundle
from covenant.seal.keys import new_private_key

TYPE: Final = "capability_query"

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def now_ms() -> int:
    return int(time.time() * 1000)


class Party:
    """One of two that talk: its keys, and what it knows of the other."""

    def __init__(self) -> None:
        private_key = new_private_key()
        self.identity = InstanceIdentity(private_key)
        self._prekey: PrivatePrekey = new_prekey(private_key, now_ms())
        self.bundle = sign_bundle(private_key, [self._prekey.prekey], now_ms())
        self.other: KeyBundle | None = None
        self._to: Prekey | None = None
        self._count = 0

    def meet(self, other: KeyBundle) -> None:
        self.other, self._to = other, prekey_to_use(other.prekeys, now_ms())

    def seal(self, body: bytes) -> bytes:
        assert self.other is not None
        assert self._to is not None
        self._count += 1
        return seal(
            body,
            typ=TYPE,
            sender=self.identity,
            to=InstanceId(self.other.id),
            prekey=self._to,
            jti=f"j{self._count}",
            now_ms=now_ms(),
        )

    def open(self, envelope: bytes) -> bytes:
        now = now_ms()
        checked = check(envelope, us=self.identity.id, now_ms=now, known=lambda _: True)
        return open_checked(checked, self._prekey, now_ms=now)


class Echo:
    def __init__(self) -> None:
        self._party = Party()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        body: bytes = message["body"]
        while message["more_body"]:
            message = await receive()
            body += message["body"]
        answer = self._answer(scope["path"], body)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def _answer(self, path: str, body: bytes) -> bytes:
        if path == "/plain":
            return _encode(_decode(body))
        if path == "/sealed":
            return self._party.seal(_encode(_decode(self._party.open(body))))
        self._party.meet(msgspec.json.decode(body, type=KeyBundle))
        return _encode(self._party.bundle)


async def main() -> None:
    settings = HttpSettings(port=0)
    with bound(settings) as listener:
        server, stop = make_server(AsgiDoor(Echo()), settings), asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await server.start(listener)
        print(url_of(listener), flush=True)
        await stop.wait()
        await server.stop(1)


if __name__ == "__main__":
    run(main())
