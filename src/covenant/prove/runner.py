"""Tries rows one after the other, each against its own server on an empty home."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from covenant.prove.a2a_client import Client, ServerUnreachable
from covenant.prove.protocol import Binding, Interface, ServerRefused, Unreadable, Version, read_interfaces
from covenant.prove.sender_rows import SENDER_ROWS
from covenant.prove.server import ServerUnderTest, StartFailed
from covenant.prove.stream_rows import STREAM_ROWS
from covenant.prove.task_rows import TASK_ROWS
from covenant.prove.trial import Broken, Extent, NotChecked, NotOffered, Outcome, Row, Trial
from covenant.prove.webhook_rows import PUSH_ROWS

ROWS: Final = (*TASK_ROWS, *STREAM_ROWS, *PUSH_ROWS, *SENDER_ROWS)


class Target(msgspec.Struct, frozen=True):
    """The server under test: its command, its card and its credentials. `{port}` and `{home}` are filled in."""

    command: str
    card: str
    name: str | None = None
    token_file: str | None = None
    version: Version | None = None
    binding: Binding | None = None
    start_s: float = 60.0


class Finding(msgspec.Struct, frozen=True):
    row: str
    promise: str
    how: str
    verdict: Outcome
    why: str
    evidence: list[str]
    seconds: float


class Report(msgspec.Struct, frozen=True, tag_field="kind", tag="durability"):
    server: str
    version: str
    speaks: str
    command: str
    card: str
    extent: Extent
    began: str
    seconds: float
    findings: list[Finding]

    @property
    def exit_code(self) -> int:
        """1 if a promise was broken, 4 if a row could not be tried, else 0."""
        verdicts = {finding.verdict for finding in self.findings}
        return 1 if "broken" in verdicts else 4 if "not checked" in verdicts else 0


async def prove(
    target: Target, rows: list[Row], extent: Extent, *, began: str, row_s: float, report: Callable[[Finding], None]
) -> Report:
    """Tries the rows and calls `report` after each one. Every started process is ended in any case."""
    begun_s = time.monotonic()
    findings: list[Finding] = []
    name, version, speaks = target.name or "", "", ""
    for row in rows:
        with tempfile.TemporaryDirectory(prefix="prove-") as folder:
            finding, trial = await _try(target, row, extent, Path(folder), row_s)
        if trial is not None and not speaks:
            name = target.name or str(trial.card.get("name", ""))
            version, speaks = str(trial.card.get("version", "")), str(trial.client.interface)
        findings.append(finding)
        report(finding)
    return Report(
        server=name,
        version=version,
        speaks=speaks,
        command=target.command,
        card=target.card,
        extent=extent,
        began=began,
        seconds=round(time.monotonic() - begun_s, 1),
        findings=findings,
    )


async def _try(target: Target, row: Row, extent: Extent, folder: Path, row_s: float) -> tuple[Finding, Trial | None]:
    begun_s = time.monotonic()
    trial: Trial | None = None
    verdict: Outcome = "not checked"
    why = ""
    server = ServerUnderTest(
        target.command,
        target.card,
        folder,
        token_file=target.token_file,
        start_s=target.start_s,
    )
    try:
        card = await server.start()
        async with Client(choose_interface(target, card), server.headers(), extent.bound_s) as client:
            trial = Trial(server, client, card, extent)
            async with asyncio.timeout(row_s):
                await row.check(trial)
            verdict = "kept"
    except Broken as broken:
        verdict, why = "broken", str(broken)
    except NotOffered as lacking:
        verdict, why = "not offered", str(lacking)
    except StartFailed as failed:
        verdict, why = "not checked" if server.starts < 2 else "broken", f"the server did not start: {failed}"
    except ServerUnreachable as gone:
        verdict, why = "broken", f"the server, which nobody had killed, did not answer: {gone}"
    except Unreadable as odd:
        verdict, why = "broken", str(odd)
    except (NotChecked, ServerRefused) as unclear:
        why = str(unclear)
    except TimeoutError:
        why = f"the row took more than {row_s:g} s"
    except Exception as error:  # noqa: BLE001  (a fault of the kit costs this row, and not what was found before)
        why = f"the kit itself failed: {type(error).__name__} {error}"
    finally:
        await server.end()
    finding = Finding(
        row=row.name,
        promise=row.promise,
        how=row.how,
        verdict=verdict,
        why=why,
        evidence=trial.evidence if trial is not None else [],
        seconds=round(time.monotonic() - begun_s, 1),
    )
    return finding, trial


def choose_interface(target: Target, card: dict[str, Any]) -> Interface:
    offered = [
        each
        for each in read_interfaces(card)
        if target.version in {None, each.version} and target.binding in {None, each.binding}
    ]
    if not offered:
        raise NotChecked(f"the card offers no such way to speak: {read_interfaces(card)}")
    # The newest version first; within it the card's own order.
    return max(offered, key=lambda each: each.version)
