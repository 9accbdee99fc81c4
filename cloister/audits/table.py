"""The audits that `cloister audit` knows, by name."""

from dataclasses import dataclass, field
from typing import Protocol

from cloister.audits.finding import Finding
from cloister.audits.progress import Progress
from cloister.audits.subject import FinishedRun
from cloister.core.errors import ConfigError
from cloister.core.registry import Registry

OF_SHADOWS = "rounds of the attacker's own federations"
"""What those audits count that run federations."""
FEWEST = 4
"""Runs of its own from which an attack can learn anything."""


@dataclass(frozen=True)
class Effort:
    """How much an audit may do.

    Attributes:
        shadows: how many runs of the attacker's own an attack learns from.
        seed: of the attacker's draws: whom a shadow run leaves out, where an optimisation begins. Never of noise.
        progress: takes note of how far the audit is; audits say what they are going to do, and what of it is done.
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
        """Why this audit has nothing to say about a run; empty if it has."""

    def conduct(self, run: FinishedRun, effort: Effort) -> Finding:
        """Attack the run, and the controls.

        Args:
            run: that it fits. Pictures are written into its directory.
            effort: how much may be done.
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
"""Every audit, built in or installed beside Cloister: "module:object", and the object is an `Audit`."""
