"""Where each setting's value comes from: default < `settings.toml` in the home < environment < flag.

Unknown keys in the file and values that are not allowed are errors. All errors are reported at once, each with the
setting, the source of its value, and the allowed values.

A setting `section.name` is the key `name` under `[section]` in the file, and `COVENANT_<SECTION>_<NAME>` in the
environment; those of `retry` are called `COVENANT_A2A_AUTO_RETRY_<NAME>`.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_type_hints

from covenant.daemon.environment import HOME_VARIABLE, find_home
from covenant.daemon.settings import Settings
from covenant.model.errors import SettingsError
from covenant.model.settings_field import Setting, setting_of

FILE_NAME: Final = "settings.toml"
FRAME_OVERHEAD_BYTES: Final = 64 * 1024
"""The bytes of a frame beside its tasks and results."""
HOME_MEANING: Final = "The home is the folder that holds the ledger, the keys, the socket and `settings.toml`."
FILE_WIDTH: Final = 110
FILE_HEAD: Final = """\
# Settings of this daemon. Each key has its default. To change it, remove the `#` before section and key.
# A variable of the environment or a flag of `covenant serve` takes precedence. `covenant settings show` prints the
# settings in force and their sources.
"""

Source = Literal["default", "file", "environment", "flag"]
_NAMES: Final = r"[\w.-]*(?:password|passwd|passphrase|secret|token|credential|api[-_]?key|access[-_]?key|auth)[\w.-]*"
_MASKED: Final = (
    re.compile(r"(://[^:/@\s]*:)[^/\s]*(?=@)"),  # the password in a URL
    re.compile(r"(https?://)[^:/@\s]{8,}(?=@)"),  # a token in its place
    re.compile(rf"([?&]{_NAMES}=)[^&\s]*", re.IGNORECASE),
    re.compile(rf"(\b{_NAMES}=)(?!\{{)[^\s&'\"]+", re.IGNORECASE),  # a variable or an option with its value
    re.compile(rf"(\s--?{_NAMES}\s+)(?!\{{)[^\s'\"]+", re.IGNORECASE),
    re.compile(r"((?:^|\s)(?:-u|--user)[\s=]+[^\s:]+:)[^\s'\"]+"),
    re.compile(
        r"((?:authorization|x-[\w-]*key|[\w-]*token):\s*(?:(?:bearer|basic|token)\s+)?)[^\s'\"]+", re.IGNORECASE
    ),
)
"""Patterns of secrets in a URL or a command: the text before the secret, then the secret."""


class Loaded(NamedTuple):
    """`unknown_variables`: variables with the prefix of a section that name no setting.

    They cause only a warning, since other programs share the environment.
    """

    settings: Settings
    sources: Mapping[str, Source]
    unknown_variables: tuple[str, ...] = ()


class SettingEntry(NamedTuple):
    section: str
    key: str
    default: Any
    setting: Setting

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    @property
    def variable(self) -> str:
        return _prefix(self.section) + self.key.upper()

    @property
    def variables(self) -> tuple[str, ...]:
        alias = self.setting.alias
        return (self.variable, alias) if alias is not None else (self.variable,)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace(".", "-").replace("_", "-")


def _prefix(section: str) -> str:
    return "COVENANT_A2A_AUTO_RETRY_" if section == "retry" else f"COVENANT_{section.upper()}_"


@cache
def sections() -> Mapping[str, type[Any]]:
    hints = get_type_hints(Settings)
    return {part.name: hints[part.name] for part in fields(Settings) if part.name != "home"}


def entries(section: str | None = None) -> Iterator[SettingEntry]:
    for name, kind in sections().items():
        if section in (None, name):
            for part in fields(kind):
                if part.metadata:
                    yield SettingEntry(name, part.name, part.default, setting_of(part.metadata))


def load(flags: Mapping[str, str | None], variables: Mapping[str, str], *, home: str | Path | None = None) -> Loaded:
    """Reads all sources and builds the tree. `flags` are by the names of settings; a None counts as no flag."""
    folder, home_source = find_home(home, variables)
    path = folder / FILE_NAME
    problems: list[str] = []
    written = _read_file(path, problems)
    values: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    sources: dict[str, Source] = {"home": home_source}
    for entry in entries():
        raw, source, where = _value_in_force(entry, flags, variables, written, path)
        sources[entry.name] = source
        if source != "default":
            try:
                values[entry.section][entry.key] = entry.setting.kind.read(raw)
            except ValueError:
                allowed = entry.setting.kind.allowed
                problems.append(f"{entry.name}: {masked(raw)!r} from {where} is not allowed; give {allowed}")
    if problems:
        raise SettingsError("\n".join(problems))
    settings = Settings(home=folder, **{name: kind(**values[name]) for name, kind in sections().items()})
    _check_consistent(settings)
    return Loaded(settings, sources, tuple(_unknown_variables(variables)))


def _value_in_force(
    entry: SettingEntry,
    flags: Mapping[str, str | None],
    variables: Mapping[str, str],
    written: Mapping[str, Mapping[str, object]],
    path: Path,
) -> tuple[object, Source, str]:
    flag = flags.get(entry.name)
    if flag is not None:
        return flag, "flag", entry.flag
    for variable in entry.variables:
        if variable in variables:
            return variables[variable], "environment", variable
    if entry.key in written.get(entry.section, {}):
        return written[entry.section][entry.key], "file", str(path)
    return entry.default, "default", "default"


def _read_file(path: Path, problems: list[str]) -> dict[str, dict[str, object]]:
    """The sections of the file that are known; everything else is a problem."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except NotADirectoryError:
        problems.append(f"{path.parent} is not a folder, and the home must be one; choose another with --home")
        return {}
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return {}
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{path}: not TOML: {error}")
        return {}
    known: dict[str, dict[str, object]] = {}
    for section, table in tables.items():
        if section not in sections() or not isinstance(table, dict):
            problems.append(f"{path}: {section}: unknown setting{_suggestion(section)}")
            continue
        names = {entry.key for entry in entries(section)}
        problems += [
            f"{path}: {section}.{key}: unknown setting{_suggestion(f'{section}.{key}')}"
            for key in table
            if key not in names
        ]
        known[section] = table
    return known


def _suggestion(name: str) -> str:
    names = [*sections(), *(entry.name for entry in entries())]
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else "; `covenant settings show` lists them all"


def _check_consistent(settings: Settings) -> None:
    """Raises SettingsError for values that contradict each other."""
    limits, body_max, frame_max = settings.limits, settings.http.body_bytes_max, settings.ipc.frame_bytes_max
    if limits.task_bytes_max > body_max:
        raise SettingsError(
            f"limits.task_bytes_max ({limits.task_bytes_max}) is over http.body_bytes_max ({body_max}): "
            "no such task could be sent; raise the second or lower the first"
        )
    if settings.a2a.publish_anonymous == "loopback":
        _check_no_proxy(settings)
    # An answer with several entries repeats the first one; an answer with one entry need not.
    answer_max = max(limits.task_bytes_max, limits.result_bytes_max, 2 * limits.batch_bytes_max) + FRAME_OVERHEAD_BYTES
    if answer_max > frame_max:
        raise SettingsError(
            f"an answer could have {answer_max} bytes, over ipc.frame_bytes_max ({frame_max}): raise that, or lower "
            f"limits.task_bytes_max, limits.result_bytes_max ({limits.result_bytes_max}) or "
            f"limits.batch_bytes_max ({limits.batch_bytes_max})"
        )


def _check_no_proxy(settings: Settings) -> None:
    """Behind a proxy that adds no header, every caller seems to be on this machine."""
    http = settings.http
    for name, value in (
        ("public_base_url", http.public_base_url),
        ("trusted_proxies", ", ".join(http.trusted_proxies)),
    ):
        if value:
            raise SettingsError(
                f"a2a.publish_anonymous is loopback and http.{name} is {value}: behind a proxy, callers from anywhere "
                f"look like callers on this machine. Set a2a.publish_anonymous to never, or to anywhere if everybody "
                f"may call without a token; or clear http.{name}"
            )


def _unknown_variables(variables: Mapping[str, str]) -> Iterator[str]:
    known = {variable for entry in entries() for variable in entry.variables}
    prefixes = tuple(_prefix(section) for section in sections())
    for name in sorted(variables):
        if name.startswith(prefixes) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            yield f"{name}; did you mean {near[0]}?" if near else name


def masked(value: Any) -> Any:
    """A setting's value as it is shown, without passwords, tokens and keys."""
    if isinstance(value, tuple | list):
        return type(value)(masked(each) for each in value)
    if not isinstance(value, str):
        return value
    for secret in _MASKED:
        value = secret.sub(r"\1***", value)
    return value


class Row(NamedTuple):
    name: str
    value: Any
    default: Any
    source: Source
    variable: str
    meaning: str


def rows(loaded: Loaded) -> Iterator[Row]:
    source = loaded.sources.get("home", "default")
    yield Row("home", str(loaded.settings.home), "", source, HOME_VARIABLE, HOME_MEANING)
    for entry in entries():
        value = getattr(getattr(loaded.settings, entry.section), entry.key)
        yield Row(
            entry.name,
            masked(value),
            entry.default,
            loaded.sources.get(entry.name, "default"),
            entry.variable,
            entry.setting.meaning,
        )


def settings_text() -> str:
    """The settings file that `covenant init` writes: every key with its default, and every line commented out."""
    sections = itertools.groupby(entries(), key=lambda entry: entry.section)
    return FILE_HEAD + "".join(f"\n# [{name}]\n" + "".join(map(_lines, found)) for name, found in sections)


def _lines(entry: SettingEntry) -> str:
    meaning = textwrap.wrap(entry.setting.meaning, FILE_WIDTH, initial_indent="## ", subsequent_indent="## ")
    return "\n".join([*meaning, f"# {entry.key} = {_toml(entry.default)}", ""])


def _toml(value: Any) -> str:
    """The JSON of these values is valid TOML."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
