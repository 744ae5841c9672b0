"""Formats a report: as a table for people, as JSON and as JUnit."""

from __future__ import annotations

import textwrap
from typing import Final
from xml.etree import ElementTree as ET

from covenant.prove.runner import Finding, Report
from covenant.prove.trial import Outcome

COLUMNS: Final = 80
COLOURS: Final[dict[Outcome, str]] = {"kept": "32", "broken": "31;1", "not offered": "33", "not checked": "35"}
_VERDICT_WIDTH: Final = 12
_ROW_WIDTH: Final = 16


def finding_lines(finding: Finding, *, colour: bool, evidence: bool) -> str:
    verdict = f"{finding.verdict:{_VERDICT_WIDTH}}"
    if colour:
        verdict = f"\x1b[{COLOURS[finding.verdict]}m{verdict}\x1b[0m"
    indent = " " * (_VERDICT_WIDTH + _ROW_WIDTH)
    promise = textwrap.wrap(finding.promise, COLUMNS - len(indent))
    lines = [f"{verdict}{finding.row:{_ROW_WIDTH}}{promise[0]}", *(indent + more for more in promise[1:])]
    if finding.why:
        lines += textwrap.wrap(finding.why, COLUMNS, initial_indent=indent, subsequent_indent=indent)
    if evidence:
        for line in finding.evidence:
            lines += textwrap.wrap(line, COLUMNS, initial_indent="    ", subsequent_indent=" " * 16)
    return "\n".join(lines)


def summary(report: Report) -> str:
    counts = {verdict: sum(1 for each in report.findings if each.verdict == verdict) for verdict in COLOURS}
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    who = " ".join(filter(None, (report.server, report.version)))
    return f"{who or 'the server'}, {report.speaks or 'not reached'}: {verdicts}; {report.seconds:g} s"


def junit(report: Report) -> bytes:
    """Encodes a report as JUnit: `not offered` is skipped, `not checked` an error."""
    suite = ET.Element(
        "testsuite",
        name=f"covenant prove: {report.server}",
        tests=str(len(report.findings)),
        failures=str(sum(each.verdict == "broken" for each in report.findings)),
        skipped=str(sum(each.verdict == "not offered" for each in report.findings)),
        errors=str(sum(each.verdict == "not checked" for each in report.findings)),
        time=str(report.seconds),
        timestamp=report.began,
    )
    kinds: dict[Outcome, str] = {"broken": "failure", "not offered": "skipped", "not checked": "error"}
    for each in report.findings:
        case = ET.SubElement(suite, "testcase", classname="covenant.prove", name=each.row, time=str(each.seconds))
        if each.verdict in kinds:
            ET.SubElement(case, kinds[each.verdict], message=_printable(each.why))
        ET.SubElement(case, "system-out").text = _printable("\n".join([each.promise, each.how, *each.evidence]))
    ET.indent(suite)
    written: bytes = ET.tostring(suite, encoding="utf-8", xml_declaration=True)
    return written


def _printable(text: str) -> str:
    """Replaces control characters that XML forbids."""
    return "".join(letter if letter >= " " or letter in "\n\t" else "�" for letter in text)
