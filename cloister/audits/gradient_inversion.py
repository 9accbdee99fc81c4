"""Gradient inversion audit: recovery of an image from a client's message or a server's release.

The attack has the best conditions for an attacker: one image, one step, and a small network of sigmoid units in place
of the run's own model. An image protected here is protected in the run. An image recovered here may be protected in a
run with many steps on many images.

A channel leads from one training step on one image to the attacker, in units of the step's gradient. The step has a
learning rate. The attacker has the rate too, and divides the observed change by it. Every channel runs the mechanism
of a run, with fresh noise.

Source of the structural similarity index: Wang et al. (2004), IEEE Transactions on Image Processing 13(4), with a
flat window instead of a Gaussian one and unbiased covariances, as scikit-image has it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from cloister.audits.audit import Effort, FinishedRun
from cloister.audits.findings import Control, Finding, Measured, image_table
from cloister.config.run import RunConfig
from cloister.config.variants import GlobalPrivacy, MetricPrivacy
from cloister.privacy.mechanisms.local import LocalMechanism, PublishedLaplace
from cloister.privacy.mechanisms.mechanism import Contributions, Mechanism
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.tasks.keras_model import import_keras
from cloister.tasks.recipe import recipe_of
from cloister.utils.arrays import Layout, Network
from cloister.utils.cohort import Cohort
from cloister.utils.errors import DataError

if TYPE_CHECKING:
    from cloister.audits.keras_inversion import Victim


WINDOW = 7
"""Pixels per side of a window."""
K1, K2 = 0.01, 0.03


def ssim(one: NDArray, other: NDArray) -> float:
    """Return the mean structural similarity of two grey images.

    It is 1 for equal images, and about 0 for unrelated ones.

    Args:
        one: shape (height, width), each at least 7, values from 0 to 1.
        other: of the same shape.
    """
    x, y = (  # every window as a row
        sliding_window_view(image.astype(np.float64), (WINDOW, WINDOW)).reshape(-1, WINDOW**2) for image in (one, other)
    )
    mean_x, mean_y = x.mean(axis=1), y.mean(axis=1)
    unbiased = WINDOW**2 / (WINDOW**2 - 1)
    variance_x, variance_y = x.var(axis=1) * unbiased, y.var(axis=1) * unbiased
    covariance = ((x * y).mean(axis=1) - mean_x * mean_y) * unbiased
    light = (2 * mean_x * mean_y + K1**2) / (mean_x**2 + mean_y**2 + K1**2)
    structure = (2 * covariance + K2**2) / (variance_x + variance_y + K2**2)
    return float((light * structure).mean())


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


LEAKAGE, INVERTING = "deep leakage from gradients", "inverting gradients"
ORIGINAL, UNPROTECTED, DROWNED = "image", "without privacy", "under Laplace noise, ν = 30"
DROWNING = 30.0
"""ν at which the noise is so much longer than the gradient that no image can be recovered."""
RECOVERED, LOST = 0.9, 0.5
"""SSIM from which an image counts as recovered, and SSIM below which it counts as lost."""
PICTURE = "audit-inversion.png"
IMAGES = 2

Results = dict[str, dict[str, list[tuple[float, NDArray]]]]
"""By attack and channel: SSIM and recovered image, for each attacked image."""


class GradientInversion:
    """The gradient inversion audit: two attacks on a client's message and on the server's release, with controls."""

    name = "gradient-inversion"

    def misfit(self, run: FinishedRun) -> str:
        """Return the reason why the run cannot be attacked; empty if it can.

        Args:
            run: audited run.
        """
        if run.task.image_shape is None:
            return f"examples of task {run.config.task.name!r} are no images"
        if not run.task.classes:
            return f"targets of task {run.config.task.name!r} are no labels"
        if find_spec("keras") is None:
            return "the attacked network is in Keras, which is not installed: pip install 'cloister-fl[keras]'"
        return ""

    def conduct(self, run: FinishedRun, effort: Effort) -> Finding:
        """Attack the first images of the benchmark, of different classes.

        Args:
            run: audited run.
            effort: seeds the network and the searches.
        """
        import_keras()  # silences its messages before the next import loads it
        from cloister.audits.keras_inversion import Victim

        shape, train = run.task.image_shape or (0, 0), run.task.load().train
        if train.x[0].size != shape[0] * shape[1]:
            raise DataError(f"examples of task {run.config.task.name!r} are no grey images of {shape}")
        victim = Victim(shape, run.task.classes, effort.seed)
        rate = recipe_of(run.task, run.config.client, run.config.privacy).learning_rate
        steps = []
        for number in np.sort(np.unique(train.y, return_index=True)[1])[:IMAGES]:
            image, label = train.x[number].reshape(shape).astype(np.float64), int(train.y[number])
            steps.append(Step(victim.arrays, victim.gradient(image, label), image, label, rate))
        own = channels_of(run.config, run.clients, victim.model)
        answers = {UNPROTECTED: open_channel, DROWNED: published_laplace(DROWNING)}
        results = attacked(victim, steps, answers | own, effort)
        pictures = image_table(run.path / PICTURE, rows_of(steps, results))
        measured = [_measured(attack, channel, results) for attack in results for channel in own]
        return Finding(self.name, _meaning(measured), tuple(measured), tuple(_controls(results)), pictures)


def attacked(victim: "Victim", steps: Sequence[Step], channels: Mapping[str, Channel], effort: Effort) -> Results:
    """Run both attacks on every image through every channel.

    Args:
        victim: attacked network.
        steps: one for each image.
        channels: by name.
        effort: seeds the searches.
    """
    attacks = {LEAKAGE: victim.deep_leakage, INVERTING: victim.inverting}
    found: Results = {attack: {name: [] for name in channels} for attack in attacks}
    searches = len(attacks) * len(channels) * len(steps)
    effort.progress.expect(searches, "searches for an image", victim.seconds_a_search())
    for name, channel in channels.items():
        for step in steps:
            seen = channel(step)
            for attack, recover in attacks.items():
                image = recover(seen, effort.seed).image
                found[attack][name].append((ssim(step.image, image), image))
                effort.progress.step()
    return found


def _measured(attack: str, channel: str, results: Results) -> Measured:
    """Return the mean similarity over the images."""
    found = [likeness for likeness, _ in results[attack][channel]]
    return Measured(attack, "similarity", float(np.mean(found)), assumption=f"on {channel}")


def _controls(results: Results) -> Iterator[Control]:
    for attack in results:
        without, drowned = (_measured(attack, channel, results) for channel in (UNPROTECTED, DROWNED))
        yield Control(UNPROTECTED, "succeeds", without, without.value >= RECOVERED)
        yield Control(DROWNED, "fails", drowned, drowned.value < LOST)


def rows_of(steps: Sequence[Step], results: Results) -> dict[str, list[tuple[str, NDArray]]]:
    """Return a row of pictures for each attack on each image.

    The original is first, the result of every channel follows.

    Args:
        steps: with the attacked images.
        results: of `attacked`.
    """
    rows = {}
    for attack, by_channel in results.items():
        for number, step in enumerate(steps):
            found = [(f"{channel}: {each[number][0]:.2f}", each[number][1]) for channel, each in by_channel.items()]
            rows[attack if number == 0 else f"{attack}, image {number + 1}"] = [(ORIGINAL, step.image), *found]
    return rows


def _meaning(measured: Sequence[Measured]) -> str:
    best = max(measured, key=lambda item: item.value)
    told = f"{best.assumption.removeprefix('on ')} about one step on one image (SSIM {best.value:.2f})"
    if best.value >= RECOVERED:
        return f"An image can be read from {told}."
    if best.value >= LOST:
        return f"An image can be read in part from {told}."
    return f"These attacks read no image from {told}."


AUDIT = GradientInversion()
