"""Sizes of the clients of DP-SGD, and the sizes for which figures are given."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cloister.plan.nodes import Asked
from cloister.privacy.claims.end_to_end import costliest_of, standing_for_all
from cloister.privacy.dpsgd.local_steps import Holders, LocalDpSgd, LocalSteps


@dataclass(frozen=True)
class Sizes:
    """Clients of several sizes.

    Attributes:
        counts: number of clients for each number and rate of private steps in a round.
        shown: one client of each size with figures: the smallest, the middle, the largest and the costliest.
        costliest: the size whose units have the largest cost in a run.
    """

    counts: Counter[LocalSteps]
    shown: dict[LocalSteps, Asked]
    costliest: LocalSteps

    @property
    def are_dealt(self) -> bool:
        """Return whether all sizes come from a simulation's partition, by the run's seed."""
        return all(asked.node.config.partition_id is not None for asked in self.shown.values())

    @classmethod
    def of(
        cls,
        nodes: Sequence[Asked],
        mechanism: LocalDpSgd,
        rounds: int,
        delta: float,
        shared: Collection[Holders] = (),
    ) -> "Sizes":
        """Return the sizes of these nodes.

        Args:
            nodes: at least one.
            mechanism: of the run.
            rounds: in which all of them train.
            delta: at which ε is computed.
            shared: as in `dp_sgd_claim`.
        """
        by_steps = {node.steps: node for node in nodes}
        shown = standing_for_all(by_steps, mechanism, rounds, delta, shared)
        costliest = costliest_of(shown, mechanism, rounds, delta, shared)
        return cls(Counter(node.steps for node in nodes), {steps: by_steps[steps] for steps in shown}, costliest)
