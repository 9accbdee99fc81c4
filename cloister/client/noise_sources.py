"""Sources of randomness for a client's training: noise, batches and augmentation."""

import hashlib
import os

from cloister.core.errors import ConfigError
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.training.plan import TrainingPlan

SECRET_BYTES = 32


class NoiseSource:
    """Source of secret randomness, or of repeatable streams for each client and round in papers and tests.

    Args:
        seed: `privacy.noise-seed`; -1: the operating system's entropy.

    Guarantee: without a seed, all numbers of this process come from one stream without repetition. With a seed,
        clients, rounds and the server have separate streams, and a party with the seed can remove the noise.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._entropy = GaussianNoise()

    def noise(self, plan: TrainingPlan) -> GaussianNoise:
        """Return the noise of a client in a round."""
        return self._entropy if self._seed == -1 else GaussianNoise(self._derived("noise", plan))

    def batch_seed(self, plan: TrainingPlan) -> int | None:
        """Return the seed of its batches; None: the operating system's entropy."""
        return None if self._seed == -1 else self._derived("batches", plan)

    def secret(self, plan: TrainingPlan) -> bytes:
        """Return the key of augmentation in a round, unknown to the server."""
        return os.urandom(SECRET_BYTES) if self._seed == -1 else str(self._derived("changes", plan)).encode()

    def _derived(self, use: str, plan: TrainingPlan) -> int:
        """Derive a client seed of at least 2**64, disjoint from configurable seeds."""
        digest = hashlib.sha256(f"client {use} {self._seed} {plan.seed}".encode()).digest()
        return 2**64 + int.from_bytes(digest[:8])


def refuse_penalty(plan: TrainingPlan) -> None:
    """Refuse FedProx's penalty: DP-SGD uses gradients of examples only.

    Raises:
        ConfigError: the server requests one.
    """
    if plan.proximal_mu:
        raise ConfigError(
            f"strategy.proximal-mu = {plan.proximal_mu:g} cannot go with privacy.client = 'dp-sgd': the penalty is not "
            "in its steps; use strategy.name = 'fedavg'"
        )
