"""The format pages say what the code does: every route, kind, answer and audit row is on them, and nothing else is."""

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

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


AUDITING: Final = ("ledger/machine", "ledger/postgres", "ledger/transfer", "exchange", "daemon", "peers")
"""The packages that write to the audit. `doors` writes by a function of `exchange`."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class RowWriter(NamedTuple):
    """A function that writes a row of the type that its caller names: `kind` is that parameter."""

    parameters: list[str]
    kind: str
    fields: set[str]


def functions_in(package: str) -> Iterator[Function]:
    for path in sorted((ROOT / "src" / "covenant" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Function):
                yield node


def row_of(node: ast.AST) -> tuple[ast.expr, set[str]] | None:
    """The type and the fields, if this is the literal of a row."""
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else "" for key in node.keys]
        if keys[:1] == ["type"]:
            return node.values[0], set(map(str, keys[1:])) - {""}
    return None


def row_writers() -> dict[str, RowWriter]:
    found = {}
    for function in chain.from_iterable(map(functions_in, AUDITING)):
        parameters = [each.arg for each in function.args.args if each.arg != "self"]
        for row in filter(None, map(row_of, ast.walk(function))):
            if isinstance(row[0], ast.Name) and row[0].id in parameters:
                found[function.name] = RowWriter(parameters, row[0].id, row[1])
    return found


def values_of(value: ast.expr, function: Function) -> list[ast.expr]:
    """What this expression may be: one value or another, or what the function has assigned to a name."""
    if isinstance(value, ast.IfExp):
        return [value.body, value.orelse]
    if not isinstance(value, ast.Name):
        return [value]
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, assigned = node.targets[0], node.value
            both = isinstance(target, ast.Tuple) and isinstance(assigned, ast.Tuple)
            pairs = zip(target.elts, assigned.elts, strict=True) if both else [(target, assigned)]  # type: ignore[attr-defined]
            for name, each in pairs:
                if isinstance(name, ast.Name) and name.id == value.id:
                    return values_of(each, function)
    return []


def called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def keywords_of(call: ast.Call, function: Function, everything: list[Function]) -> set[str]:
    """The names of the call's keywords, with those of a dict or of the caller's own keywords that it passes on."""
    names = {each.arg for each in call.keywords if each.arg is not None}
    for passed in (each.value for each in call.keywords if each.arg is None):
        for value in values_of(passed, function):
            names |= {str(key.value) for key in getattr(value, "keys", ()) if isinstance(key, ast.Constant)}
        if function.args.kwarg is not None and getattr(passed, "id", "") == function.args.kwarg.arg:
            for caller in everything:
                calls = [each for each in ast.walk(caller) if called(each) == function.name]
                names |= {word.arg for each in calls for word in each.keywords if word.arg}  # type: ignore[attr-defined]
    return names


def audit_rows_in_source() -> dict[str, set[str]]:
    """The type and fields of each row that is written as a literal, or by a function that is given its type."""
    found: dict[str, set[str]] = {}
    writers = row_writers()
    auditing = [*chain.from_iterable(map(functions_in, AUDITING))]
    everything = [*auditing, *functions_in("doors")]
    literals = set(map(id, auditing))

    def add(kinds: Iterable[ast.expr], fields: set[str]) -> None:
        for kind in (str(each.value) for each in kinds if isinstance(each, ast.Constant)):
            # What servers and applications tell each other begins so as well, and so do events.
            if not kind.startswith("http") and kind not in TASK_EVENT_TAGS:
                found.setdefault(kind, set()).update(fields)

    for function in everything:
        for node in ast.walk(function):
            if id(function) in literals and (row := row_of(node)) is not None:
                add(values_of(row[0], function), row[1])
            elif isinstance(node, ast.Call) and (writer := writers.get(called(node))) is not None:
                given = dict(zip(writer.parameters, node.args, strict=False))
                kind = given.get(writer.kind)
                fields = keywords_of(node, function, everything) - set(writer.parameters)
                add(values_of(kind, function) if kind is not None else (), writer.fields | fields)
    return found


def test_the_audit_page_lists_every_row_with_its_fields() -> None:
    documented = {}
    for row in rows("audit.md", columns=2):
        # Braces and brackets hold what a field is made of, or when it has which value.
        fields = re.sub(r"\[[^\]]*\]|\{[^}]*\}|\([^)]*\)", "", row[1])
        documented[kind_of(row[0])] = set(fields_of(fields))
    assert documented == audit_rows_in_source()
