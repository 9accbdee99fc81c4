"""Parameters of one round of local training: number, size and order of steps."""

from dataclasses import dataclass, replace

from cloister.tasks.base import Examples, Recipe
from cloister.tasks.training.augmentation import Augmentation, key_of
from cloister.tasks.training.schedule import CONSTANT, Schedule


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
