"""Which part of the package may import what, checked on source text: nothing is imported to be judged.

Imports point down only; packages on one level never import each other. A pure package needs nothing that
could fail, wait or differ between two runs. Imports count wherever they stand: inside a function, under
`TYPE_CHECKING`, or spelled as a string for `import_module`.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGE: Final = "covenant"

# Lowest first. Modules directly in the package (the public names) join things, as the daemon does.
LEVELS: Final = (
    {"model", "prove"},
    {"wire", "seal"},
    {"ledger"},
    {"exchange", "outbound"},
    {"doors", "agents", "peers"},
    {"dashboard"},
    {"daemon"},
    {"cli"},
)
LEVEL: Final = {name: level for level, names in enumerate(LEVELS) for name in names}
TOP: Final = "daemon"

PURE: Final = ("model", "wire", "ledger.machine")
# An allow-list, since a list of what does IO would never be complete.
PURE_NEEDS: Final = frozenset(
    """
    __future__ abc array base64 binascii bisect collections contextlib copy dataclasses decimal difflib enum
    fractions functools hashlib heapq hmac ipaddress itertools json keyword math msgspec numbers operator
    re reprlib string struct textwrap types typing typing_extensions unicodedata urllib.parse uuid.UUID
    zlib datetime.UTC datetime.datetime datetime.timedelta
    """.split()
)

IO_BUILTINS: Final = frozenset({"open", "print", "input", "breakpoint"})

SEAL: Final = "seal"
CRYPTO: Final = frozenset(
    """
    authlib biscuit_auth bcrypt argon2 Crypto Cryptodome cryptography ecdsa ed25519 hpke jose joserfc
    jwcrypto jwt nacl OpenSSL pyhpke rfc8785
    """.split()
)
# Besides those, and what pure packages may need: a length of time, which is no clock.
SEAL_NEEDS: Final = frozenset({"datetime.timedelta"})
# Keys and tokens come from the crypto library alone.
CHANCE: Final = ("random", "secrets", "uuid", "os.urandom", "os.getrandom", "ssl.RAND_bytes")

# The durability kit is a stranger to the rest: it could be a distribution of its own.
KIT: Final = "prove"
KIT_NEEDS: Final = sys.stdlib_module_names | {"httpx2", "httpcore2", "msgspec"}
KIT_USER: Final = "cli"

DAEMON: Final = "daemon"
ENVIRONMENT: Final = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
# How the command-line library would read the environment by itself.
ENVIRONMENT_OPTIONS: Final = frozenset({"envvar", "auto_envvar_prefix"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    file: str
    line: int
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One module: its dotted name inside the package ("" for the package itself) and what it mentions."""

    file: str
    name: str
    is_package: bool
    tree: ast.Module

    @property
    def part(self) -> str:
        head, _, rest = self.name.partition(".")
        return head if rest or self.is_package else ""


def violations(src: Path) -> list[Violation]:
    """Everything under `src/covenant` that breaks a rule, in reading order."""
    found: list[Violation] = []
    for source in sources(src):
        if source.part and source.part not in LEVEL:
            found.append(Violation(file=source.file, line=1, rule="no level", detail=source.part))
            continue
        mentions = sorted(set(mentioned(source)))
        found += _upward(source, mentions)
        found += _impure(source, mentions)
        found += _sealed(source, mentions)
        found += _environment(source, mentions)
        found += _kit(source, mentions)
    return found


def sources(src: Path) -> Iterator[Source]:
    root = src / PACKAGE
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        yield Source(
            file=path.relative_to(src).as_posix(),
            name=".".join(parts[:-1] if is_package else parts),
            is_package=is_package,
            tree=ast.parse(path.read_text(encoding="utf-8"), filename=str(path)),
        )


def mentioned(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import, and of each attribute reached through an imported name."""
    bound: dict[str, str] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                head = alias.name.partition(".")[0]
                bound[alias.asname or head] = alias.name if alias.asname else head
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(source, node)
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
                bound[alias.asname or alias.name] = f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and _is_import_call(node.func) and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound:
            yield node.lineno, f"{bound[node.value.id]}.{node.attr}"


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = [PACKAGE, *filter(None, source.name.split("."))]
    parts = parts[: len(parts) - node.level + source.is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def _is_import_call(function: ast.expr) -> bool:
    match function:
        case ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"):
            return True
        case _:
            return False


def _within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def _ours(mention: str) -> str | None:
    """The name inside our package, or nothing for somebody else's."""
    head, _, rest = mention.partition(".")
    return rest if head == PACKAGE else None


def _upward(source: Source, mentions: list[tuple[int, str]]) -> Iterator[Violation]:
    here = source.part or TOP
    for line, mention in mentions:
        name = _ours(mention)
        if name is None:
            continue
        head = name.partition(".")[0]
        there = head if head in LEVEL else TOP
        if here == there or LEVEL[there] < LEVEL[here]:
            continue
        detail = f"{here} imports {mention}"
        yield Violation(file=source.file, line=line, rule="upward import", detail=detail)


def _impure(source: Source, mentions: list[tuple[int, str]]) -> Iterator[Violation]:
    if not _within(source.name, PURE):
        return
    for line, mention in mentions:
        name = _ours(mention)
        allowed = _within(mention, tuple(PURE_NEEDS)) if name is None else _within(name, PURE)
        if not allowed:
            yield Violation(file=source.file, line=line, rule="impure import", detail=mention)
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in IO_BUILTINS:
                yield Violation(file=source.file, line=node.lineno, rule="impure call", detail=f"{name}()")


def _sealed(source: Source, mentions: list[tuple[int, str]]) -> Iterator[Violation]:
    for line, mention in mentions:
        if mention.partition(".")[0] in CRYPTO and source.part != SEAL:
            yield Violation(file=source.file, line=line, rule="crypto outside seal", detail=mention)
        if source.part != SEAL or _ours(mention) is not None:
            continue
        if _within(mention, CHANCE):
            yield Violation(file=source.file, line=line, rule="chance in seal", detail=mention)
        elif not _within(mention, tuple(PURE_NEEDS | CRYPTO | SEAL_NEEDS)):
            yield Violation(file=source.file, line=line, rule="impure import", detail=mention)


def _kit(source: Source, mentions: list[tuple[int, str]]) -> Iterator[Violation]:
    for line, mention in mentions:
        name = _ours(mention)
        if source.part == KIT:
            wrong = name is None and mention.partition(".")[0] not in KIT_NEEDS
        else:
            wrong = name is not None and _within(name, (KIT,)) and source.part != KIT_USER
        if wrong:
            yield Violation(file=source.file, line=line, rule="kit apart", detail=mention)


def _environment(source: Source, mentions: list[tuple[int, str]]) -> Iterator[Violation]:
    if source.part == DAEMON:
        return
    for line, mention in mentions:
        if _within(mention, ENVIRONMENT):
            yield Violation(file=source.file, line=line, rule="environment outside daemon", detail=mention)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.keyword) and node.arg in ENVIRONMENT_OPTIONS:
            detail = f"{node.arg}="
            yield Violation(file=source.file, line=node.lineno, rule="environment outside daemon", detail=detail)
