"""Channels from one training step on one image to an attacker, in units of the step's gradient.

The step has a learning rate. The attacker has the rate too, and divides the observed change by it. Every channel runs
the mechanism of a run, with fresh noise.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloister.config.run import RunConfig
from cloister.config.variants import GlobalPrivacy, MetricPrivacy
from cloister.core.arrays import Layout
from cloister.core.cohort import Cohort
from cloister.core.tensors import Network
from cloister.privacy.mechanisms.local import LocalMechanism, PublishedLaplace
from cloister.privacy.mechanisms.mechanism import Contributions, Mechanism
from cloister.privacy.mechanisms.noise import GaussianNoise

Arrays = Mapping[str, NDArray]
SENT, RELEASED = "what a client sends", "what the server releases"


@dataclass(frozen=True)
class Step:
    """One step of training on one image.

    Attributes:
        start: weights before the step, by path.
        gradient: of the loss of the image, by path.
        image: shape (height, width).
        label: of its class.
        rate: of the step.
    """

    start: Arrays
    gradient: Arrays
    image: NDArray
    label: int
    rate: float

    @property
    def trained(self) -> dict[str, NDArray]:
        """Return the weights after the step, in their own dtype."""
        return {
            name: (array - self.rate * self.gradient[name]).astype(array.dtype) for name, array in self.start.items()
        }

    def seen(self, sent: Arrays) -> dict[str, NDArray]:
        """Compute the gradient that an attacker derives from received weights.

        Args:
            sent: weights received in place of the trained ones.
        """
        return {
            name: (array.astype(np.float64) - sent[name].astype(np.float64)) / self.rate
            for name, array in self.start.items()
        }


Channel = Callable[[Step], Arrays]
"""Function from a step to the gradient that an attacker sees."""


def open_channel(step: Step) -> Arrays:
    """Send the trained model without protection.

    Args:
        step: of a client.
    """
    return step.seen(step.trained)


def locally_noised(mechanism: LocalMechanism) -> Channel:
    """Return the channel of a client that noises its update.

    Args:
        mechanism: of the client.
    """
    return lambda step: step.seen(mechanism.release(step.trained, dict(step.start), GaussianNoise()))


def published_laplace(multiplier: float, per_layer: bool = False) -> Channel:
    """Return the channel with Laplace noise of ν times the update's length, as published.

    Args:
        multiplier: ν.
        per_layer: True for a separate radius and draw per array.
    """
    return locally_noised(PublishedLaplace(multiplier, per_layer))


def with_dp_sgd(noise_multiplier: float, clipping_norm: float, model: Network) -> Channel:
    """Return the channel of a DP-SGD step on a batch of one.

    The gradient is clipped and noised.

    Args:
        noise_multiplier: σ.
        clipping_norm: S.
        model: the Keras model that trains; its weights are restored.
    """
    from cloister.audits.keras_inversion import private_gradient

    return lambda step: private_gradient(model, step.image, step.label, noise_multiplier, clipping_norm)


def released_by(mechanism: Mechanism, clients: int) -> Channel:
    """Return the channel of the server's noised mean.

    The attacker subtracts all other clients' updates from it.

    Args:
        mechanism: of the server.
        clients: n in the mean.
    """

    def channel(step: Step) -> Arrays:
        layout = Layout.of(step.start)
        rows = (layout.rows(step.trained), *[layout.rows(step.start)] * (clients - 1))
        cohort = Cohort.of(layout, layout.rows(step.start), rows)
        given = Contributions(cohort, (1.0,) * clients, clients, float(clients), GaussianNoise(), 1)
        (mean,) = mechanism.release(given).models
        found = step.seen(layout.named(mean))
        return {name: clients * array for name, array in found.items()}

    return channel


def channels_of(config: RunConfig, clients: int, model: Network) -> dict[str, Channel]:
    """Return the channels of a run, by name.

    They are the server's view of a client's step, or an observer's view of the server's release.

    Args:
        config: of the run.
        clients: number of clients.
        model: the Keras model that a client trains.
    """
    client, server = config.privacy.client, config.privacy.server
    found: dict[str, Channel] = {SENT: open_channel}
    if client.noise_on_update is not None:
        found[SENT] = locally_noised(client.noise_on_update)
    elif client.clips_gradients:
        found[SENT] = with_dp_sgd(client.noise_multiplier, client.bound, model)
    elif isinstance(server, GlobalPrivacy | MetricPrivacy):
        mechanism = server.mechanism()
        if mechanism.is_calibrated and not mechanism.noises_output:
            found[RELEASED] = released_by(mechanism, max(1, clients))
    return found
