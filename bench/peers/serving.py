"""Serves an application on a free port of loopback, as quickly as uvicorn can, and says where."""

import socket
from typing import Any

import uvicorn


def serve(application: Any) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1_024)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(application, loop="uvloop", http="httptools", access_log=False, log_level="error")
    uvicorn.Server(config).run(sockets=[listener])
