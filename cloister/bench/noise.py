"""Noise alone: on a message of a client, and number by number."""

from functools import partial

from cloister.bench.aggregation import Arrays
from cloister.bench.clock import Action
from cloister.config.run import RunConfig
from cloister.privacy.mechanisms.discrete.sampler import DiscreteGaussian
from cloister.privacy.mechanisms.local import LocalGaussian, LocalLaplace, LocalMechanism
from cloister.privacy.mechanisms.noise import GaussianNoise

NUMBERS = 1 << 19
"""Numbers in a turn: too few for a second thread."""


def mechanisms_on_messages(config: RunConfig) -> dict[str, LocalMechanism]:
    """Return the client mechanisms for messages by name.

    The run's own mechanism has the run's parameters.

    Args:
        config: of the run.
    """
    known: dict[str, LocalMechanism] = {"gaussian": LocalGaussian(1.0, 1.0), "laplace": LocalLaplace(1.0, 1.0)}
    client = config.privacy.client
    return known if client.noise_on_update is None else known | {client.name: client.noise_on_update}


def on_a_message(mechanism: LocalMechanism, trained: Arrays, start: Arrays) -> Action:
    """Return an action that bounds a client's update and adds noise to it.

    Args:
        mechanism: of the client.
        trained, start: arrays of the model after and before training.
    """
    return lambda: lambda: mechanism.release(trained, start, GaussianNoise())


def exact_numbers() -> Action:
    """Return an action that draws exact noise on one thread, by the installed kernel."""
    return lambda: partial(DiscreteGaussian().integers, NUMBERS)
