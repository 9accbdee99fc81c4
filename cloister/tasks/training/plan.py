"""How a model is trained: for how long, in which steps, and in which order."""

from dataclasses import dataclass

from cloister.tasks.base import Recipe


@dataclass(frozen=True)
class TrainingPlan:
    """Training of one round: E epochs of minibatches of B examples at rate s, with FedProx's μ (0: without).

    Attributes:
        seed: of shuffles and dropout, never of noise.
        round: from 1 on; 0 before the first.
        public_size: N, the number of units (examples, or groups) that whoever sees the noise may know: the rate of
            Poisson batches and the number of private steps follow from it. 0: as many as there are.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    proximal_mu: float
    seed: tuple[int, ...]
    round: int = 1
    public_size: int = 0

    @classmethod
    def of(
        cls, recipe: Recipe, seed: tuple[int, ...], proximal_mu: float = 0.0, round: int = 1, public_size: int = 0
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
        )
