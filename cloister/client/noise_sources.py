"""Where a client's training takes its noise, its batches and its random changes of examples from."""

import hashlib
import os

from cloister.core.errors import ConfigError
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.training.plan import TrainingPlan

SECRET_BYTES = 32


class NoiseSource:
    """The operating system's entropy, or for papers and tests a stream for every client and round.

    Args:
        seed: `privacy.noise-seed`; -1 is the operating system.

    Guarantee: without a seed every number of this process comes from one stream that never gives a number twice. With
        one, clients, rounds and the server have streams apart; whoever knows the seed can remove the noise.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._entropy = GaussianNoise()

    def noise(self, plan: TrainingPlan) -> GaussianNoise:
        """The noise of a client in a round."""
        return self._entropy if self._seed == -1 else GaussianNoise(self._derived("noise", plan))

    def batch_seed(self, plan: TrainingPlan) -> int | None:
        """What its batches are drawn from; None is the operating system."""
        return None if self._seed == -1 else self._derived("batches", plan)

    def secret(self, plan: TrainingPlan) -> bytes:
        """The key that examples are changed at random by in a round; the server must not know it."""
        return os.urandom(SECRET_BYTES) if self._seed == -1 else str(self._derived("changes", plan)).encode()

    def _derived(self, use: str, plan: TrainingPlan) -> int:
        """A number as large as no seed that a person configures, so that no stream is the server's."""
        digest = hashlib.sha256(f"client {use} {self._seed} {plan.seed}".encode()).digest()
        return 2**64 + int.from_bytes(digest[:8])


def refuse_penalty(plan: TrainingPlan) -> None:
    """Refuse FedProx's penalty: DP-SGD here descends on gradients of single examples alone.

    Raises:
        ConfigError: the server asks for one.
    """
    if plan.proximal_mu:
        raise ConfigError(
            f"strategy.proximal-mu = {plan.proximal_mu:g} cannot go with privacy.client = 'dp-sgd': the penalty is not "
            "in its steps; use strategy.name = 'fedavg'"
        )
