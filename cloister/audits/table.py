"""Registry of the audits that `cloister audit` runs, by name."""

from dataclasses import dataclass, field
from typing import Protocol

from cloister.audits.finding import Finding
from cloister.audits.progress import Progress
from cloister.audits.subject import FinishedRun
from cloister.core.errors import ConfigError
from cloister.core.registry import Registry

OF_SHADOWS = "rounds of the attacker's own federations"
"""Unit of progress for audits that run federations."""
FEWEST = 4
"""Fewest shadow runs for an attack."""


@dataclass(frozen=True)
class Effort:
    """Limits of an audit's work.

    Attributes:
        shadows: number of the attacker's own runs that an attack learns from.
        seed: of the attacker's draws: absent units of a shadow run, start of an optimization. Never of noise.
        progress: receives the planned and the completed work of the audit.
    """

    shadows: int = 16
    seed: int = 0
    progress: Progress = field(default_factory=Progress, compare=False)

    def __post_init__(self) -> None:
        if self.shadows < FEWEST:
            raise ConfigError(f"shadows must be at least {FEWEST}, got {self.shadows}")


class Audit(Protocol):
    """An attack with its controls, for runs that it fits.

    Attributes:
        name: as in the table.
    """

    name: str

    def misfit(self, run: FinishedRun) -> str:
        """Return the reason why this audit does not apply to a run; empty if it does."""

    def conduct(self, run: FinishedRun, effort: Effort) -> Finding:
        """Attack the run, and the controls.

        Args:
            run: a fitting run. Pictures are written into its directory.
            effort: limits of the work.
        """


AUDITS = Registry(
    "audit",
    "cloister.audits",
    {
        "canaries": "cloister.audits.canary_audit:AUDIT",
        "client-inference": "cloister.audits.client_inference:AUDIT",
        "gradient-inversion": "cloister.audits.gradient_inversion:AUDIT",
        "membership-inference": "cloister.audits.membership_inference:AUDIT",
    },
)
"""Every audit, built in or from another package: "module:object", where the object is an `Audit`."""
