"""The format pages say what the code does: every route, kind, answer and audit row is on them, and nothing else is."""

import ast
import re
from pathlib import Path

import msgspec

from covenant.doors.http.app import PAGES
from covenant.doors.operator_api.operation_table import OPERATIONS
from covenant.ledger.machine.events import TASK_EVENTS

ROOT = Path(__file__).parents[2]
FORMATS = ROOT / "docs" / "formats"
TASK_EVENT_TAGS = {str(event.__struct_config__.tag) for event in TASK_EVENTS}


def rows(page: str, *, columns: int) -> list[list[str]]:
    """The cells of the page's tables with that many columns, without their heads."""
    lines = (FORMATS / page).read_text(encoding="utf-8").splitlines()
    table = [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if not after.startswith("|---")]
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in table if line.startswith("| `")]
    return [row for row in cells if len(row) == columns]


def kind_of(cell: str) -> str:
    found = re.match(r"`(\w+)", cell)
    assert found is not None, cell
    return found[1]


def fields_of(cell: str) -> list[str]:
    return re.findall(r"`(\w+)", cell)


def test_the_http_page_lists_every_route_with_its_answer() -> None:
    pages = [*rows("mailbox-http.md", columns=3), *rows("peers-http.md", columns=3)]
    documented = {row[0].strip("`"): kind_of(row[2]) for row in pages if "/" in row[0]}
    served = {f"{each.method} {each.path}": str(each.answer.__struct_config__.tag) for each in OPERATIONS}
    assert documented == served


def test_the_http_page_names_every_open_route() -> None:
    text = (FORMATS / "mailbox-http.md").read_text(encoding="utf-8").partition("## Without a token")[2]
    assert {page.path for page in PAGES} == set(re.findall(r"`(?:GET )?(/[\w.]*)`", text))


def test_the_ipc_page_lists_every_kind_with_its_fields_and_answer() -> None:
    documented = {kind_of(row[0]): (set(fields_of(row[1])), kind_of(row[2])) for row in rows("ipc.md", columns=3)}
    served = {}
    for each in OPERATIONS:
        fields = {field.encode_name for field in msgspec.structs.fields(each.frame or each.request)}
        served[each.kind] = (fields, str(each.answer.__struct_config__.tag))
    assert documented == served


def types_of(value: ast.expr | None) -> list[str]:
    """Of a literal, or of one literal or another."""
    either = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    return [str(each.value) for each in either if isinstance(each, ast.Constant)]


def audit_rows_in_source() -> dict[str, set[str]]:
    """The type and fields of each literal row in the packages that write to the audit."""
    found: dict[str, set[str]] = {}
    for package in ("ledger/machine", "ledger/postgres", "ledger/transfer", "exchange", "daemon", "peers"):
        for path in sorted((ROOT / "src" / "covenant" / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Dict):
                    keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                    for kind in types_of(node.values[0]) if keys[:1] == ["type"] else ():
                        # What servers and applications tell each other begins so as well, and so do events.
                        if not kind.startswith("http") and kind not in TASK_EVENT_TAGS:
                            found.setdefault(kind, set()).update(map(str, keys[1:]))
    return found


def test_the_audit_page_lists_every_row_with_its_fields() -> None:
    documented = {}
    for row in rows("audit.md", columns=2):
        # Braces and brackets hold what a field is made of, or when it has which value.
        fields = re.sub(r"\[[^\]]*\]|\{[^}]*\}|\([^)]*\)", "", row[1])
        documented[kind_of(row[0])] = set(fields_of(fields))
    assert documented == audit_rows_in_source()
