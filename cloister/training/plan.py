"""Parameters of one round of local training: number, size and order of steps, and the learning rate's schedule."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cloister.config.io import Scalar
from cloister.tasks.base import Examples, RateShape, Recipe, ScheduleName
from cloister.tasks.recipe import Augmentation, key_of
from cloister.utils.errors import ConfigError
from cloister.utils.text import suggestion


@dataclass(frozen=True)
class Schedule:
    """Share of the learning rate in force in an epoch of a round.

    | name | after the rounds of the warm-up, until the run ends |
    |---|---|
    | `constant` | 1 |
    | `linear` | falls linearly from 1 |
    | `cosine` | falls from 1 along half a wave (Loshchilov and Hutter, 2017, arXiv:1608.03983) |
    | a function | its value, for the passed share of these rounds |

    Args:
        name: of the shape, or a function.
        rounds: R > 0, of the run.
        warmup_rounds: rounds in which the share rises linearly, epoch by epoch. The last one ends with 1.
        final_share: value of `linear`, `cosine` or the function in place of 0, from 0 to 1.

    Guarantee: a share is from 0 to 1 for any round that a server names. It depends only on the configuration, the round
        and the epoch. It is independent of the number of a client's examples.
    """

    name: ScheduleName | RateShape = "constant"
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
        if callable(self.name):
            left = _within(self.name(passed))
        else:
            left = 1 - passed if self.name == "linear" else (1 + math.cos(math.pi * passed)) / 2
        return _within(self.final_share + (1 - self.final_share) * left)


CONSTANT = Schedule()


def _within(share: float) -> float:
    return min(1.0, max(0.0, share))


@dataclass(frozen=True)
class TrainingPlan:
    """Training of one round: E epochs of minibatches of B examples at rate s, with FedProx's μ (0: without).

    Attributes:
        learning_rate: s, the largest rate of any epoch.
        seed: of shuffles and dropout, never of noise.
        round: from 1 on; 0 before the first.
        public_size: N, the number of units (examples, or groups) that parties who see the noise may know. The rate of
            Poisson batches and the number of private steps follow from it. 0: the true number of units.
        schedule: gives the share of s in force.
        augmentation: random changes of examples; None: no changes.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    proximal_mu: float
    seed: tuple[int, ...]
    round: int = 1
    public_size: int = 0
    schedule: Schedule = CONSTANT
    augmentation: Augmentation | None = None

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch of this round, counted from 0."""
        return self.learning_rate * self.schedule.share(self.round, epoch, self.epochs)

    def seen(self, examples: Examples, epoch: int) -> Examples:
        """Return the examples for an epoch without noise.

        If there is augmentation, they are changed at random.

        Args:
            examples: of the client.
            epoch: of this round, from 0 on.
        """
        if self.augmentation is None:
            return examples
        return replace(examples, x=self.augmentation.changed(examples.x, key_of(self.seed, epoch)))

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        seed: tuple[int, ...],
        proximal_mu: float = 0.0,
        round: int = 1,
        public_size: int = 0,
        schedule: Schedule = CONSTANT,
        augmentation: Augmentation | None = None,
    ) -> "TrainingPlan":
        """Return the plan that follows a recipe.

        Args:
            recipe: with the run's training settings applied.
            seed: see `TrainingPlan`, as for the other arguments.
        """
        return cls(
            epochs=recipe.local_epochs,
            batch_size=recipe.batch_size,
            learning_rate=recipe.learning_rate,
            proximal_mu=proximal_mu,
            seed=seed,
            round=round,
            public_size=public_size,
            schedule=schedule,
            augmentation=augmentation,
        )


def check_optimizer_options(
    name: str, options: Mapping[str, Scalar], defaults: Mapping[str, object], elsewhere: Mapping[str, str]
) -> None:
    """Refuse an option that an optimizer does not have, or a value of another type than its default.

    Args:
        name: of the optimizer.
        options: of the recipe, or of the run.
        defaults: options of the optimizer, with their default values.
        elsewhere: options without effect in a client's training, with the reason.

    Raises:
        ConfigError: naming the option.
    """
    for option, value in options.items():
        if option in elsewhere:
            raise ConfigError(f"client.optimizer-options: {option} has no effect, as {elsewhere[option]}")
        if option not in defaults:
            raise ConfigError(
                f"client.optimizer-options: {name!r} has no option {option!r}; it has {', '.join(defaults)}"
                f"{suggestion(option, list(defaults))}"
            )
        if isinstance(value, str) or isinstance(value, bool) != isinstance(defaults[option], bool):
            kind = "true or false" if isinstance(defaults[option], bool) else "a number"
            raise ConfigError(f"client.optimizer-options: {option} = {value!r} is not valid: it must be {kind}")
