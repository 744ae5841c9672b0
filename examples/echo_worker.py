"""A worker in forty lines: leases tasks over HTTP, answers each, and needs nothing but the standard library.

    covenant identities enroll echo@host --grant a2a.respond.operator@local > echo.token
    covenant capabilities grant a2a.send.echo@host
    python examples/echo_worker.py --token-file echo.token
    covenant a2a send --to echo@host --wait "hello"

A lease never expires and is never given to anybody else behind one's back: a worker that dies leaves its task in flight
for the operator to decide about. The lease's id goes back with the result, so that an answer which comes too late
changes nothing. `request_id` makes a lost reply harmless: asking again under the same id gives the same lease.
"""

import argparse
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from uuid import uuid4


def call(url: str, token: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)  # noqa: S310  (the operator names the address)
    with urllib.request.urlopen(request, timeout=90) as response:  # noqa: S310
        answer: dict[str, Any] = json.load(response)
        return answer


def work(url: str, token: str, tasks_max: int | None) -> None:
    done = 0
    while tasks_max is None or done < tasks_max:
        leased = call(f"{url}/a2a/tasks/next?wait_ms=30000&request_id={uuid4()}", token)
        if leased["task"] is None:
            continue
        task, lease = leased["task"], leased["lease"]
        print(f"{task['id']} attempt {lease['attempt']}: {task['intent_text']}", flush=True)
        said = [{"type": "text", "text": f"echo: {task['intent_text']}"}]
        result = {"task_id": task["id"], "lease_id": lease["lease_id"], "status": "ok", "content": said}
        try:
            call(f"{url}/a2a/results", token, result)
        except urllib.error.HTTPError as refused:  # canceled, repaired or not ours any more: the answer says which
            print(f"{task['id']} refused: {json.load(refused)['message']}", flush=True)
        done += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answer every task with its own words.")
    parser.add_argument("--url", default="http://127.0.0.1:8421")
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--tasks-max", type=int, help="end after this many tasks")
    given = parser.parse_args()
    work(given.url, given.token_file.read_text().strip(), given.tasks_max)
