"""Write docs/cli.md and docs/settings.md from the code that they describe. `make docs` runs it; a test compares."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import click

from covenant.cli.main import command as covenant
from covenant.daemon.environment import HOME_DEFAULT, HOME_VARIABLE
from covenant.daemon.settings_loader import HOME_MEANING, entries, sections

ROOT: Final = Path(__file__).parents[1]
WIDTH: Final = 100

CLI_INTRO: Final = """# The command line

<!-- Written by `make docs` from src/covenant/cli. Do not edit. -->

A command talks to a running daemon over the socket in its home, except: `serve`, `init`, `settings`, `doctor`,
`passphrase` and `restore`; `ledger init`, `migrate`, `move` and `restored`; `peers rotate-identity`, `revocation` and
`verify-proof`; `call`, `card` and `prove`, which talk to any A2A server; `version` and `completion`. `backup` talks to
a daemon if one runs. Data goes to stdout, messages to stderr. `--json` gives exactly one JSON object on stdout, also
for a refusal and for wrong usage: `{"kind": "error", "code": …, "message": …}`. In the shapes below, a field that
ends in `?` is left out when it is empty; all others are always there, `null` included.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | refused or failed; stderr says why, and what to do |
| 2 | wrong usage |
| 3 | no daemon answers |
| 4 | not checked: `peers verify-proof` lacked the offer or the result, or `prove` could not try a row |
"""

SETTINGS_INTRO: Final = f"""# Settings

<!-- Written by `make docs` from src/covenant/daemon/settings.py. Do not edit. -->

A setting takes its value from the first of these places that has one: a flag of `covenant serve` (`--http-port 9000`),
then the environment, then `settings.toml` in the home, then the default. A value that is not allowed, or a key that
does not exist, prevents the start, with an error. `covenant settings show` prints the settings in force in the running
daemon and their sources; `--files` prints those of the next start.

```toml
# ~/.covenant/settings.toml
[http]
port = 9000

[retry]
scheduler = true
```

`--home` or `{HOME_VARIABLE}` names the home, else it is `{HOME_DEFAULT}`. {HOME_MEANING}
"""


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with the words that call it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, (*path, name))
        else:
            yield (*path, name), command


def cli() -> str:
    parts = [CLI_INTRO]
    for path, command in leaves(covenant):
        context = click.Context(command, info_name=" ".join(("covenant", *path)), terminal_width=WIDTH)
        parts.append(f"## covenant {' '.join(path)}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def settings() -> str:
    parts = [SETTINGS_INTRO]
    for section, kind in sections().items():
        rows = [
            f"| {'<br>'.join(f'`{name}`' for name in (entry.name, *entry.variables))} | {shown(entry.default)} "
            f"| {entry.setting.kind.allowed} "
            f"| {entry.setting.meaning} |"
            for entry in entries(section)
        ]
        table = ["| setting | default | allowed | meaning |", "|---|---|---|---|", *rows]
        parts.append(f"## {section}\n\n{(kind.__doc__ or '').strip()}\n\n" + "\n".join(table) + "\n")
    return "\n".join(parts)


def shown(value: object) -> str:
    match value:
        case bool():
            return f"`{str(value).lower()}`"
        case tuple():
            return f"`{','.join(value)}`" if value else "none"
        case "":
            return "empty"
        case _:
            return f"`{value}`"


DOCUMENTS: Final[dict[str, Callable[[], str]]] = {"docs/cli.md": cli, "docs/settings.md": settings}


def main() -> None:
    for name, render in DOCUMENTS.items():
        (ROOT / name).write_text(render(), encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
