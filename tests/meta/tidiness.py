"""What a reader may expect of every file here: bounded sizes, telling names, no trace of one machine.

Each check takes the root of a tree and yields what is wrong with it, so that it can be shown a bad tree.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MODULE_LINES_MAX: Final = 500
FUNCTION_LINES_MAX: Final = 70

# Names that say where code was put, not what it is.
EMPTY_NAMES: Final = frozenset("util common helper shared base manager handler processor v2".split())

# Spelled in pieces, so that this file is not the first to name them.
REGISTRIES: Final = tuple(
    ".".join(pieces)
    for pieces in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
        ("yarnpkg", "com"),
        ("crates", "io"),
        ("rubygems", "org"),
        ("anaconda", "org"),
    )
)
HOMES: Final = tuple(f"/{place}/" for place in ("home", "Users", "root", "work", "workspace", "builds"))
# Only where a path can start: after a space, quote, bracket, equals sign or colon.
MACHINE_PATH: Final = re.compile(rf"(?:^|[\s\"'`(=:])(?:{'|'.join(HOMES)})[\w.-]+", re.MULTILINE)
INDEX_OPTION: Final = re.compile("--(?:extra-)?" + "index-url|--find" + "-links", re.IGNORECASE)

UNTRACKED: Final = frozenset({"__pycache__", "build", "dist", "node_modules", "results"})
PIN: Final = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*==[0-9][a-z0-9.]*")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def kept_files(root: Path) -> Iterator[Path]:
    """Files that belong to the repository, committed or about to be."""
    for path in sorted(root.iterdir()):
        if path.is_dir():
            hidden = path.name.startswith(".") and path.name != ".ci"
            if not hidden and path.name not in UNTRACKED and path.suffix != ".egg-info":
                yield from kept_files(path)
        elif path.is_file():
            yield path


def machine_traces(root: Path) -> Iterator[str]:
    """Registry hosts, index options and paths of somebody's machine."""
    for path in kept_files(root):
        text = path.read_bytes().decode("utf-8", errors="replace")
        name = path.relative_to(root).as_posix()
        yield from (f"{name}: {host}" for host in REGISTRIES if host in text)
        yield from (f"{name}: {match[0].strip()}" for match in MACHINE_PATH.finditer(text))
        yield from (f"{name}: {match[0]}" for match in INDEX_OPTION.finditer(text))


def lock_entries(path: Path) -> list[tuple[str, list[str]]]:
    """Each entry of a lock: what it pins, and the rest of its lines."""
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    entries = "\n".join(kept).replace(" \\\n", "\0").split("\n")
    return [(words[0], [word.strip() for word in words[1:]]) for words in (entry.split("\0") for entry in entries)]


def loose_pins(root: Path) -> Iterator[str]:
    """What locks hold but one exact version of each distribution, in order, once, with the hashes of its files."""
    for path in sorted((root / "requirements").glob("*.lock")):
        entries = lock_entries(path)
        yield from (f"{path.name}: {pin!r} is not a pin" for pin, _ in entries if not PIN.fullmatch(pin))
        for pin, hashes in entries:
            if not hashes or not all(map(HASH.fullmatch, hashes)):
                yield f"{path.name}: {pin!r} has no hashes, or something else"
        names = [pin.partition("==")[0] for pin, _ in entries]
        if names != sorted(set(names)):
            yield f"{path.name}: not sorted, or a name twice"


def oversize(root: Path) -> Iterator[str]:
    for path in sorted((root / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(root).as_posix()
        if (lines := len(text.splitlines())) > MODULE_LINES_MAX:
            yield f"{name}: {lines} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    yield f"{name}:{node.lineno}: {node.name} has {lines} lines"


def empty_names(root: Path) -> Iterator[str]:
    source = root / "src"
    for path in sorted(source.rglob("*")):
        if path.suffix == ".py" or (path.is_dir() and path.name not in UNTRACKED):
            words = {word.removesuffix("s") for word in path.stem.split("_")}
            if words & EMPTY_NAMES:
                yield path.relative_to(root).as_posix()


# A relative clause as the subject: the sentence should name the caller, the sender or the thief instead.
UNNAMED_SUBJECT: Final = re.compile(r"\bwho(?:m|so)?ever\b", re.IGNORECASE)


def unnamed_subjects(root: Path) -> Iterator[str]:
    """Sentences of documents and of the code that do not name their subject."""
    for path in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "src").rglob("*.py")]):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield from (
                f"{path.relative_to(root).as_posix()}:{number}: {said[0]}" for said in UNNAMED_SUBJECT.finditer(line)
            )


def make_targets(root: Path) -> dict[str, str]:
    """Each documented target of the Makefile, and what it says of itself."""
    text = (root / "Makefile").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z-]+):[^\n]*## (\S[^\n]*)$", text, re.MULTILINE))
