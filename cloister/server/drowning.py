"""Comparison of a run's noise with the clients' signal, before the run and from public numbers alone.

Clipping bounds the distance that n clients can move the model of p parameters in T rounds: T·C, where C is the clipping
norm. Noise of standard deviation s on each parameter has the expected norm s√p in a round and s√(pT) in all. The ratio
is

    z√p/(n√T)      noise of the server: s = zC/n
    z√p/√(nT)      Gaussian noise of the clients: s = zC on the update of each
    z/√(nT)        Laplace noise of the clients: one draw has about z times the norm that the update may have
    σ√(p/S)/b      DP-SGD: S steps in all, each a sum of b clipped gradients with noise of s = σC

Updates are usually shorter than C, so that the real ratio is larger. A model may still learn at a ratio somewhat above
1, since few directions of many determine its predictions.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cloister.aggregation.private_strategy import PrivateStrategy
from cloister.core.arrays import Layout
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.privacy.mechanisms.gaussian import GaussianMechanism
from cloister.privacy.mechanisms.local import LocalGaussian
from cloister.server.build import Plan

LOUD, DROWNED = 1.5, 5.0
"""Ratios of noise to signal at which a model learns little, and nothing.

Logistic regression on digits has 50 % accuracy at 2, and one in six at 8."""


@dataclass(frozen=True)
class _Noise:
    """Noise of one mechanism.

    Attributes:
        whose: the subject of the warning, in words.
        key: of its multiplier in the configuration.
        multiplier: in force.
        ratio: of its expected norm to the largest change that clipping allows the clients, over all rounds.
    """

    whose: str
    key: str
    multiplier: float
    ratio: float


def drowned(plan: Plan, layout: Layout, nodes: int, sizes: Sequence[LocalSteps] = ()) -> list[str]:
    """Return one warning for each noise that exceeds the signal.

    Args:
        plan: of the run; its noise is calibrated.
        layout: of everything that the server sends.
        nodes: number of nodes.
        sizes: the private steps of each client in a round, where they are known.
    """
    cohort, parameters = plan.cohort(nodes), layout.size // max(1, plan.hypotheses)
    noises = (*_of_server(plan, layout, cohort), *_of_clients(plan, parameters, cohort, sizes))
    told = [_told(plan, noise, parameters, cohort) for noise in noises if noise.ratio > LOUD]
    return [*told, *_batches(plan, sizes)]


def _told(plan: Plan, noise: _Noise, parameters: int, cohort: float) -> str:
    least = noise.multiplier / noise.ratio
    does = "drowns what the clients teach the model" if noise.ratio > DROWNED else "lets the model learn little"
    return (
        f"{noise.whose} {does}: over {plan.config.num_rounds} rounds its expected "
        f"norm is at least {noise.ratio:.2g} times the most that clipped updates come to ({noise.key} = "
        f"{noise.multiplier:.4g}, {cohort:g} clients a round, {parameters} parameters); they would be level at "
        f"{noise.key} = {least:.2g}. More clients, a smaller model, frozen layers or a larger budget help"
    )


def _of_server(plan: Plan, layout: Layout, cohort: float) -> Iterator[_Noise]:
    strategy = plan.strategy
    if not isinstance(strategy, PrivateStrategy) or not isinstance(strategy.mechanism, GaussianMechanism):
        return
    mechanism = strategy.mechanism
    least = mechanism.multiplier * mechanism.scale.factors(mechanism.clip.bound, layout)[0]
    ratio = least * math.sqrt(layout.size / plan.config.num_rounds) / max(1.0, cohort + len(strategy.canaries) / 2)
    yield _Noise("the server's noise", "privacy.noise-multiplier", mechanism.multiplier, ratio)


def _of_clients(plan: Plan, parameters: int, cohort: float, sizes: Sequence[LocalSteps]) -> Iterator[_Noise]:
    client = plan.config.privacy.client
    if not client.is_on or (client.clips_gradients and not sizes):
        return
    z, messages = client.noise_multiplier, max(1.0, cohort) * plan.config.num_rounds
    if client.clips_gradients:
        ratio = z * math.sqrt(parameters / messages) * _of_steps(sizes)
    elif isinstance(client.noise_on_update, LocalGaussian):
        ratio = z * math.sqrt(parameters / messages)
    else:
        ratio = z / math.sqrt(messages)
    yield _Noise("the clients' noise", "privacy.client-noise-multiplier", z, ratio)


def _of_steps(sizes: Sequence[LocalSteps]) -> float:
    """Return √S/(S·b) for the average client in a round.

    S steps have at most b units each on average.
    """
    steps = sum(size.count for size in sizes) / len(sizes)
    units = sum(size.count * min(size.batch_size, size.examples) for size in sizes) / len(sizes)
    return math.sqrt(steps) / units


def _batches(plan: Plan, sizes: Sequence[LocalSteps]) -> Iterator[str]:
    """Warn of a batch size above every client's size; DP-SGD divides by it."""
    batch, largest = plan.recipe.batch_size, max((size.examples for size in sizes), default=0)
    if largest and batch > largest:
        unit = plan.config.privacy.dp_sgd.mechanism(grouped=bool(plan.config.task.group)).unit
        yield (
            f"client.batch-size = {batch} is more than any client has ({largest} {unit}s at most): DP-SGD divides a "
            f"sum by it all the same, so that steps are {batch / largest:.3g} times too short; use at most {largest}"
        )
