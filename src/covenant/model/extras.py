"""The distribution's name on package indexes, and the error text for an extra that is not installed.

The import package and the command are called `covenant`; the distribution `covenant` belongs to somebody else.
"""

from __future__ import annotations

from typing import Final, Literal

from covenant.model.errors import SettingsError

DISTRIBUTION: Final = "covenant-a2a"

Extra = Literal["grpc", "mcp", "model", "otel", "peers", "postgres"]


def install_command(extra: Extra) -> str:
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def not_installed(setting: str, extra: Extra, package: str | None) -> SettingsError:
    return SettingsError(f"{setting} needs the package {package}, which is not installed: {install_command(extra)}")
