"""Gradient inversion audit: recovery of an image from a client's message or a server's release.

The attack has the best conditions for an attacker: one image, one step, and a small network of sigmoid units in place
of the run's own model. An image protected here is protected in the run. An image recovered here may be protected in a
run with many steps on many images.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloister.audits.channels import Channel, Step, channels_of, open_channel, published_laplace
from cloister.audits.finding import Control, Finding, Measured
from cloister.audits.pictures import image_table
from cloister.audits.similarity import ssim
from cloister.audits.subject import FinishedRun
from cloister.audits.table import Effort
from cloister.core.errors import DataError
from cloister.tasks.backend import import_keras
from cloister.tasks.training.recipe import recipe_of

if TYPE_CHECKING:
    from cloister.audits.keras_inversion import Victim

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
