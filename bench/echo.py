"""The daemon's HTTP server with nothing behind it: `python -m bench.echo` answers JSON with the same JSON.

What it costs is what any request costs here before Covenant does anything: the measure for what Covenant adds. With
`--plain` it is uvicorn as it comes, for comparison. Prints its address and serves until SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Final

import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from bench.workload import run
from covenant.daemon.listeners import bound, make_server, url_of
from covenant.daemon.settings import HttpSettings
from covenant.doors.http.server.http_exchange import HttpExchange

PLAIN: Final = "--plain"

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class AsgiDoor:
    """An ASGI application behind the server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def serve(self, exchange: HttpExchange) -> None:
        await self._app(exchange.scope, exchange.receive, exchange)


async def echo(_: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    body: bytes = message["body"]
    while message["more_body"]:
        message = await receive()
        body += message["body"]
    answer = _encode(_decode(body))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


async def main() -> None:
    settings = HttpSettings(port=0)
    with bound(settings) as listener:
        if PLAIN in sys.argv:
            print(url_of(listener), flush=True)
            config = uvicorn.Config(echo, http="httptools", ws="none", lifespan="off", log_config=None)
            listener.listen()
            await uvicorn.Server(config).serve(sockets=[listener])
            return
        server, stop = make_server(AsgiDoor(echo), settings), asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await server.start(listener)
        print(url_of(listener), flush=True)
        await stop.wait()
        await server.stop(1)


if __name__ == "__main__":
    run(main())
