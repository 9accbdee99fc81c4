"""Settings for DP-SGD from public rules: the number of units, the budget and the time decide, and no data is read.

| setting | rule |
|---|---|
| steps | about `STEPS`, so that training converges (De et al., 2022, §3) |
| batch | as large as the time allows, until the noise on a step hardly falls (Ponomareva et al., 2023, §5.3) |
| clip | small, with a rate in inverse proportion: then most gradients have one length, and only their product matters |
| rate | in proportion to √batch, from the value that a linear head on frozen features was measured with |
| momentum | 0.9, or ten times the rate of plain SGD, which has the same steps in the long run |

Sources: De et al. (2022), arXiv:2204.13650; Ponomareva et al. (2023), arXiv:2303.00654.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cloister.client.data import task_of
from cloister.client.trainers import model_and_trainer_of
from cloister.config.calibration import calibrated
from cloister.config.io import Scalar, as_pairs
from cloister.config.run import RunConfig, parse
from cloister.privacy.dpsgd.local_steps import MAX_BATCH, LocalSteps
from cloister.training.plan import TrainingPlan
from cloister.utils import check
from cloister.utils.errors import ConfigError

STEPS = 1000
SMALLEST_BATCH = 64
CLIP = 0.1
RATE, AT_BATCH = 1.0, 1024
"""Rate beside `CLIP` and momentum, and the batch size that it is for (docs/tasks.md, "Frozen features")."""
MOMENTUM = 0.9
GAIN = 0.95
"""A batch of twice the size is worth its time if it lowers the noise on a step to this share at most."""
NOTHING, LITTLE = 0.5, 0.2
"""Ratios of the norm of all noise to the most that clipped gradients come to, above which the user is warned.

With softmax regression on digits, suggested settings reached an accuracy of 0.77, 0.54, 0.25 and 0.15 at ratios of
0.14, 0.27, 0.64 and 1.2, where guessing gives 0.1.
"""
TIMED = 256
"""Made-up examples in a step that is timed."""


@dataclass(frozen=True)
class Pace:
    """Needs of a site's machine and model, from made-up examples.

    Attributes:
        seconds: of one example in a private step.
        parameters: number of trained weights.
        has_momentum: whether the model's optimizer has momentum; SGD in NumPy has none.
    """

    seconds: float
    parameters: int
    has_momentum: bool


@dataclass(frozen=True)
class Suggestion:
    """Settings with their reasons.

    Attributes:
        settings: for `-c`, by dotted keys.
        reasons: of each setting in a few words.
        notes: what the user should expect.
        steps: private steps of a site in the whole run.
        batch: expected units of a step.
    """

    settings: dict[str, Scalar]
    reasons: dict[str, str]
    notes: tuple[str, ...]
    steps: int
    batch: int

    def lines(self) -> Iterator[str]:
        """Yield what is printed: a line for `-c`, each setting with its reason, and the notes."""
        yield f'-c "{as_pairs(self.settings)}"'
        width = max(map(len, self.reasons))
        for key, reason in self.reasons.items():
            yield f"  {key:{width}}  {reason}"
        yield from self.notes


def measured(settings: Mapping[str, Scalar]) -> Pace:
    """Time a private step on made-up examples.

    Args:
        settings: of the run, whose task and model count.

    Raises:
        ConfigError: the model has no gradients of examples.
    """
    steps = {"client.batch-size": TIMED, "client.callbacks": False, "strategy.min-nodes": 1}
    config = parse({**settings, **PRIVATE, **steps}).for_clients
    made = model_and_trainer_of(config)
    examples = task_of(config.task).placeholders(2 * TIMED)
    if config.task.group:
        examples = replace(examples, groups=np.arange(len(examples)))
    plan = TrainingPlan(1, TIMED, 1e-6, 0.0, (0,))
    made.trainer.fit(examples, plan)  # compiles
    started = time.perf_counter()
    made.trainer.fit(examples, plan)
    seconds = (time.perf_counter() - started) / len(examples)
    parameters = sum(array.size for array in made.model.arrays().values())
    return Pace(seconds, parameters, made.model.kind not in ("numpy", "sklearn"))


PRIVATE: dict[str, Scalar] = {"privacy.server": "none", "privacy.client": "dp-sgd"}


def suggest(
    settings: Mapping[str, Scalar], units: int, epsilon: float, minutes: float, clients: int, pace: Pace
) -> Suggestion:
    """Return settings of DP-SGD for sites of one size.

    Args:
        settings: of the run; those that are suggested replace its own.
        units: public number of examples, or groups, of each site.
        epsilon: budget of a unit.
        minutes: in which a site trains, in all rounds together.
        clients: number of sites; one trains in a single round.
        pace: of a site.

    Raises:
        ConfigError: a number is out of range, no noise keeps the budget, or the time does not suffice for an epoch.
    """
    check.positive(**{"--public-size": units, "--epsilon": epsilon, "--suggest": minutes})
    epochs = math.floor(60 * minutes / (pace.seconds * units))
    if not epochs:
        needed = math.ceil(pace.seconds * units / 6) / 10
        raise ConfigError(f"--suggest {minutes:g} minutes are fewer than one epoch of {units} takes here, {needed:g}")
    why, largest = "as many as there are, or as DP-SGD takes", min(units, MAX_BATCH)
    doubled = (SMALLEST_BATCH << times for times in range(largest.bit_length()))
    smallest, *larger = (*(each for each in doubled if each < largest), largest)
    wanted = max(1, round(STEPS / math.ceil(units / smallest)))
    found = _calibrated(settings, units, smallest, min(wanted, epochs), epsilon, clients)
    noise = found[0].privacy.client.noise_multiplier / smallest
    for batch in larger:
        wanted = max(1, round(STEPS / math.ceil(units / batch)))
        if wanted > epochs:
            why = f"as large as {minutes:g} minutes allow for {STEPS} steps"
            break
        next_one = _calibrated(settings, units, batch, wanted, epsilon, clients)
        own = next_one[0].privacy.client.noise_multiplier / batch
        if own > GAIN * noise:
            why = "a larger batch hardly lowers the noise on a step"
            break
        found, noise = next_one, own
    return _explained(*found, why, pace, clients)


def _calibrated(
    settings: Mapping[str, Scalar], units: int, batch: int, epochs: int, epsilon: float, clients: int
) -> tuple[RunConfig, LocalSteps]:
    """Return the configuration with its noise, and a site's steps of a round."""
    rounds, local = (1, epochs) if clients == 1 else (epochs, 1)
    config = parse(
        {
            **settings,
            **PRIVATE,
            "num-rounds": rounds,
            **({"strategy.min-nodes": 1} if clients == 1 else {}),
            "privacy.dp-sgd-noise-multiplier": "auto",
            "privacy.dp-sgd-clipping-norm": CLIP,
            "privacy.client-max-epsilon": epsilon,
            "client.batch-size": batch,
            "client.local-epochs": local,
        }
    )
    steps = LocalSteps(units, batch, local, config.privacy.dp_sgd.batch_sampling)
    return calibrated(config, [steps]), steps


def _explained(config: RunConfig, steps: LocalSteps, why: str, pace: Pace, clients: int) -> Suggestion:
    rounds, batch, noise = config.num_rounds, steps.batch_size, config.privacy.client.noise_multiplier
    total, delta, limit = rounds * steps.count, config.privacy.target_delta, config.privacy.client.max_epsilon
    rate = RATE * math.sqrt(batch / AT_BATCH) / (1 if pace.has_momentum else 1 - MOMENTUM)
    word = f"{config.task.group or 'example'}s"
    told: dict[str, tuple[Scalar, str]] = {
        "privacy.server": ("none", "clients add the noise"),
        "privacy.client": ("dp-sgd", "noise while training"),
        "privacy.client-max-epsilon": (limit, f"the budget, at δ = {delta:g}"),
        "privacy.dp-sgd-noise-multiplier": (noise, f"the least for {total} steps of {steps.rate:.2%} of the {word}"),
        "privacy.dp-sgd-clipping-norm": (CLIP, "small: most gradients then have one length"),
        "client.batch-size": (batch, why),
        "client.learning-rate": (float(f"{rate:.2g}"), "in proportion to √batch / clipping norm"),
    }
    if pace.has_momentum:
        told["client.optimizer"] = ("sgd", "with momentum, noise averages out")
        told["client.optimizer-options"] = (f"momentum={MOMENTUM}", "the usual value")
    told["num-rounds"] = (rounds, "one site averages with none" if clients == 1 else "each averages the sites' noise")
    told["client.local-epochs"] = (steps.epochs, f"{total} steps in all; about {STEPS} let training converge")
    if clients == 1:
        told["strategy.min-nodes"] = (1, "there is one site")
    minutes = total * batch * pace.seconds / 60
    notes = [f"a site trains about {minutes:.2g} minutes on a machine like this one, by made-up {word}"]
    ratio = noise * math.sqrt(pace.parameters / (clients * total)) / batch
    if ratio > NOTHING:
        notes.append(
            f"nothing is likely learnt: noise is {ratio:.2g} times the most that gradients come to; {steps.examples} "
            f"{word} are too few for ε = {limit:g} and {pace.parameters} trained weights"
        )
    elif ratio > LITTLE:
        notes.append(f"little is likely learnt: noise is {ratio:.2g} times the most that gradients come to")
    if delta * steps.examples > 1 / 10:
        notes.append(f"δ = {delta:g} is large for {steps.examples} {word}; use at most {0.1 / steps.examples:.1g}")
    settings = {key: value for key, (value, _) in told.items()} | {"privacy.target-delta": delta}
    return Suggestion(settings, {key: reason for key, (_, reason) in told.items()}, tuple(notes), total, batch)
