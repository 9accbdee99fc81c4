"""How a client trains in one round, put together from the run configuration, the task and the server's message."""

from dataclasses import dataclass

from cloister.client.request import TrainRequest
from cloister.tasks.base import Recipe


@dataclass(frozen=True)
class TrainingPlan:
    """Local training of one round: E epochs of minibatches of B examples at rate s, with FedProx's μ (0: without).

    Attributes:
        seed: of shuffles and dropout, never of noise.
        round: from 1 on.
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
    def of(cls, request: TrainRequest, recipe: Recipe, owner: int, public_size: int = 0) -> "TrainingPlan":
        """`client.*` where it says something, the task's recipe where it does not.

        Args:
            request: of the server.
            recipe: the task's.
            owner: which client this is, so that clients shuffle independently.
            public_size: of the node's data.
        """
        chosen = recipe.resolved(request.config.client)
        return cls(
            epochs=chosen.local_epochs,
            batch_size=chosen.batch_size,
            learning_rate=chosen.learning_rate,
            proximal_mu=request.proximal_mu,
            seed=(request.seed, request.round, owner),
            round=request.round,
            public_size=public_size,
        )
