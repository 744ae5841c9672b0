"""Counts what a newcomer must find a way through: modules, lines, names that stand for two things.

    python scripts/count_modules.py             # the table
    python scripts/count_modules.py --list      # and what was counted

`tests/meta/test_layout.py` holds each row to its bound.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

PACKAGE: Final = Path(__file__).parents[1] / "src" / "covenant"
FIELD_WORDS: Final = frozenset({"binding", "listing", "logging", "paging", "routing", "settings", "tracing", "wiring"})
"""Words of this field that end in -ing."""
METAPHORS: Final = frozenset(
    """abroad acquaintance acquaintances bell cast constitution correspondence courier crew desk doorkeeper estate
    flights hands heads house lanes line means moments office oversight parcel reception roster speech staff wares
    ways whereabouts window""".split()
)


APART: Final = ("covenant.ledger.postgres", "covenant.ledger.transfer", "covenant.dashboard", "covenant.prove")
"""Packages beside the tree that the bounds of modules, lines and single importers were set for: a second engine
and the move into it, the pages, the durability kit. A reader of the rest need not know them. Names are counted over
all packages."""


class Module(NamedTuple):
    name: str
    """Dotted, from the package on."""
    path: Path
    lines: int
    classes: tuple[str, ...]
    """Public ones."""
    imports: frozenset[str]
    """Dotted names of modules of the package."""

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[2]


class Row(NamedTuple):
    what: str
    found: int
    bound: int
    members: tuple[str, ...] = ()


def modules(package: Path = PACKAGE) -> list[Module]:
    known = {_dotted(path, package): path for path in sorted(package.rglob("*.py"))}
    return [_read(name, path, known) for name, path in known.items()]


def _dotted(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read(name: str, path: Path, known: dict[str, Path]) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    classes = tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    return Module(name, path, text.count("\n"), classes, frozenset(_imports(tree, known)) - {name})


def _imports(tree: ast.Module, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in known else node.module


def count(everything: list[Module]) -> list[Row]:
    found = [module for module in everything if not module.name.startswith(APART)]
    named = [module for module in everything if module.path.stem != "__init__"]
    return [
        Row("modules", len(found), 374),
        Row("lines", sum(module.lines for module in found), 87_100),
        _repeated("module names in several packages", ((module.stem, module.name) for module in named), 12),
        _repeated(
            "public class names defined several times",
            ((name, f"{module.name}.{name}") for module in everything for name in module.classes),
            15,
        ),
        _listed("modules named by a gerund or a metaphor", filter(_is_unclear, everything), 0),
        _listed("modules with one importer, outside the CLI", _with_one_importer(found), 40),
        _listed("modules of the CLI", (module for module in found if _is_cli(module)), 19),
    ]


def _repeated(what: str, names: Iterator[tuple[str, str]], bound: int) -> Row:
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    repeated = {name: at for name, at in places.items() if len(at) > 1}
    return Row(what, len(repeated), bound, tuple(f"{name}: {', '.join(at)}" for name, at in sorted(repeated.items())))


def _listed(what: str, chosen: Iterator[Module], bound: int) -> Row:
    names = tuple(module.name for module in chosen)
    return Row(what, len(names), bound, names)


def _is_unclear(module: Module) -> bool:
    words = module.stem.split("_")
    return any(word in METAPHORS for word in words) or (words[-1].endswith("ing") and words[-1] not in FIELD_WORDS)


def _is_cli(module: Module) -> bool:
    return module.name.split(".")[1:2] == ["cli"]


def _with_one_importer(found: list[Module]) -> Iterator[Module]:
    importers: dict[str, set[str]] = defaultdict(set)
    for module in found:
        for imported in module.imports:
            importers[imported].add(module.name)
    for module in found:
        if module.path.stem != "__init__" and not _is_cli(module) and len(importers[module.name]) == 1:
            yield module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="show what was counted, too")
    shows = parser.parse_args().list
    for row in count(modules()):
        print(f"{row.what:45} {row.found:7,}   at most {row.bound:,}{'' if row.found <= row.bound else '   above'}")
        if shows:
            print("".join(f"    {member}\n" for member in row.members), end="")


if __name__ == "__main__":
    main()
