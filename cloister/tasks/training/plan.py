"""How a model is trained: for how long, in which steps, and in which order."""

from dataclasses import dataclass, replace

from cloister.tasks.base import Examples, Recipe
from cloister.tasks.training.augmentation import Augmentation, key_of
from cloister.tasks.training.schedule import CONSTANT, Schedule


@dataclass(frozen=True)
class TrainingPlan:
    """Training of one round: E epochs of minibatches of B examples at rate s, with FedProx's μ (0: without).

    Attributes:
        learning_rate: s; no epoch has a higher one.
        seed: of shuffles and dropout, never of noise.
        round: from 1 on; 0 before the first.
        public_size: N, the number of units (examples, or groups) that whoever sees the noise may know: the rate of
            Poisson batches and the number of private steps follow from it. 0: as many as there are.
        schedule: what share of s is in force.
        augmentation: how examples are changed at random; None: they are not.
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
        """The learning rate of an epoch of this round, from 0 on."""
        return self.learning_rate * self.schedule.share(self.round, epoch, self.epochs)

    def seen(self, examples: Examples, epoch: int) -> Examples:
        """The examples as an epoch without noise trains on them: changed at random where there is augmentation.

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
        """The plan that follows a recipe.

        Args:
            recipe: with all that the run says about training.
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
