"""How a client trains in one round, put together from the run configuration, the task and the server's message."""

from dataclasses import dataclass

from flwr.app import ConfigRecord

from cloister.core.config import ClientConfig
from cloister.core.errors import FederationError
from cloister.core.wire import PROXIMAL_MU, ROUND, SEED
from cloister.tasks.base import Recipe


@dataclass(frozen=True)
class PublicSettings:
    """What the server tells every client of a round: the round, the run's seed, and FedProx's μ."""

    round: int
    seed: int
    proximal_mu: float

    @classmethod
    def of(cls, record: ConfigRecord) -> "PublicSettings":
        """Read them from a message.

        Raises:
            FederationError: one is missing or is not a number of its kind.
        """
        found = {ROUND: record.get(ROUND), SEED: record.get(SEED), PROXIMAL_MU: record.get(PROXIMAL_MU, 0.0)}
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise FederationError(f"the server's message must carry {name!r} as a number of at least 0")
        return cls(int(found[ROUND]), int(found[SEED]), float(found[PROXIMAL_MU]))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TrainingPlan:
    """Local training of one round: E epochs of minibatches of B examples at rate s, with FedProx's μ (0: without).

    `round` counts from 1; `seed` is of shuffles and dropout, never of noise.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    proximal_mu: float
    seed: tuple[int, ...]
    round: int = 1

    @classmethod
    def of(cls, client: ClientConfig, recipe: Recipe, public: PublicSettings, owner: int) -> "TrainingPlan":
        """`client.*` where it says something, the task's recipe where it does not.

        Args:
            client: the run's `client.*`.
            recipe: the task's.
            public: what the server said.
            owner: which client this is, so that clients shuffle independently.
        """
        return cls(
            epochs=recipe.local_epochs if client.local_epochs == "auto" else client.local_epochs,
            batch_size=batch_size_of(client, recipe),
            learning_rate=recipe.learning_rate if client.learning_rate == "auto" else client.learning_rate,
            proximal_mu=public.proximal_mu,
            seed=(public.seed, public.round, owner),
            round=public.round,
        )


def batch_size_of(client: ClientConfig, recipe: Recipe) -> int:
    """`client.batch-size`, or the recipe's."""
    return recipe.batch_size if client.batch_size == "auto" else client.batch_size
