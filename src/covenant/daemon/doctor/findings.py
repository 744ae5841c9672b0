"""What a checkup of a home says: findings, each with its way out, and what can be done about a damaged ledger."""

from __future__ import annotations

from typing import Final, NamedTuple

from covenant.daemon.doctor.ledger_repair import Salvage

BACKUP: Final = "put it back from a backup"


class CheckFinding(NamedTuple):
    """`way_out` is empty where all is well."""

    what: str
    well: bool = True
    way_out: str = ""


class Checkup(NamedTuple):
    """`salvage` is there when the ledger is damaged and something can be done about it.

    `rebuild`: the archive can be made to agree with the journal again, without a loss.
    """

    findings: tuple[CheckFinding, ...]
    salvage: Salvage | None = None
    rebuild: bool = False

    @property
    def well(self) -> bool:
        return all(finding.well for finding in self.findings)
