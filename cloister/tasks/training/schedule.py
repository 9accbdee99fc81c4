"""Learning rate schedule over the rounds of a run, from public numbers only, and never above the configured rate."""

import math
from dataclasses import dataclass

from cloister.tasks.base import Recipe, ScheduleName


@dataclass(frozen=True)
class Schedule:
    """Share of the learning rate in force in an epoch of a round.

    | name | after the rounds of the warm-up, until the run ends |
    |---|---|
    | `constant` | 1 |
    | `linear` | falls linearly from 1 |
    | `cosine` | falls from 1 along half a wave (Loshchilov and Hutter, 2017, arXiv:1608.03983) |

    Args:
        name: of the shape.
        rounds: R > 0, of the run.
        warmup_rounds: rounds in which the share rises linearly, epoch by epoch. The last one ends with 1.
        final_share: final value of `linear` and `cosine`, from 0 to 1.

    Guarantee: a share is from 0 to 1 for any round that a server names. It depends only on the configuration, the round
        and the epoch. It is independent of the number of a client's examples.
    """

    name: ScheduleName = "constant"
    rounds: int = 1
    warmup_rounds: int = 0
    final_share: float = 0.0

    @classmethod
    def of(cls, recipe: Recipe, rounds: int) -> "Schedule":
        """Return the schedule of a recipe.

        Args:
            recipe: with the run's training settings applied.
            rounds: of the run.
        """
        return cls(recipe.schedule, rounds, recipe.warmup_rounds, recipe.final_rate_share)

    def share(self, round: int, epoch: int, epochs: int) -> float:
        """Return the share of the learning rate in one epoch.

        Args:
            round: from 1 on; a smaller number counts as the beginning of round 1.
            epoch: of the round, from 0 to epochs - 1.
            epochs: E > 0, of each round.
        """
        begun = max(0.0, round - 1 + epoch / epochs)
        if begun < self.warmup_rounds:
            return _within((begun + 1 / epochs) / self.warmup_rounds)
        if self.name == "constant":
            return 1.0
        passed = _within((begun - self.warmup_rounds) / max(1, self.rounds - self.warmup_rounds))
        left = 1 - passed if self.name == "linear" else (1 + math.cos(math.pi * passed)) / 2
        return _within(self.final_share + (1 - self.final_share) * left)


CONSTANT = Schedule()


def _within(share: float) -> float:
    return min(1.0, max(0.0, share))
