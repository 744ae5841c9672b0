"""A server that speaks as OpenAI's does, in a process of its own: `model_server.py LOG`. Prints its port.

Each question is a line in the log, written before anything is answered. The words of the user say what is answered:
`slow` begins an answer that never ends, `use NAME {…}` calls a tool once, and anything else is answered with `done`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Model(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = asked["messages"]
        words = next(str(each["content"]) for each in reversed(said) if each["role"] == "user")
        with Path(sys.argv[1]).open("a") as log:
            log.write(f"{words}\n")
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        if words == "slow":
            self._chunk({"role": "assistant", "content": "half "})
            time.sleep(3_600)
        if words.startswith("use ") and said[-1]["role"] == "user":
            _, name, arguments = words.split(" ", 2)
            call = {"index": 0, "id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
            self._chunk({"role": "assistant", "content": None, "tool_calls": [call]})
            self._chunk({}, "tool_calls")
        else:
            self._chunk({"role": "assistant", "content": "done"})
            self._chunk({}, "stop")
        self.wfile.write(b"data: [DONE]\n\n")

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        made = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        self.wfile.write(b"data: " + json.dumps(made).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def model_server(log: Path) -> Iterator[str]:
    """Its URL."""
    process = subprocess.Popen([sys.executable, __file__, str(log)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        print(server.server_address[1], flush=True)  # noqa: T201  (whoever started it reads this)
        server.serve_forever()


if __name__ == "__main__":
    main()
