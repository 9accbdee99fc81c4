"""What may be said about a run's privacy, and what not."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Claim:
    """The guarantee of one mechanism, or why there is none.

    Attributes:
        mechanism: its name, as in `privacy.server`.
        reasons: why the claim is only heuristic; empty if it is sound.
        unit: whose data the claim is about.
        relation: which cohorts count as neighbours.
        adversaries: against whom it holds.
        unprotected: what leaves without noise.
        parameters: of the mechanism, by their configuration keys.
    """

    mechanism: str
    reasons: tuple[str, ...] = ()
    unit: str = "client"
    relation: str = "add-or-remove"
    adversaries: tuple[str, ...] = ("other clients", "whoever sees the models of the run")
    unprotected: tuple[str, ...] = ()
    parameters: dict[str, float | str | bool] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """`none`, `sound` or `heuristic`."""
        if self.mechanism == "none":
            return "none"
        return "heuristic" if self.reasons else "sound"
