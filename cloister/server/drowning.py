"""Whether the noise of a run drowns what clients teach the model: worked out before the run, from public numbers alone.

Clips bound how far n clients can move the model of p parameters in T rounds: by T·C, where C is the clip. Noise of
standard deviation s on each parameter has the expected norm s√p in a round, and s√(pT) in all of them. The ratio is

    z√p/(n√T)      noise of the server: s = zC/n
    z√p/√(nT)      Gaussian noise of the clients: s = zC on the update of each
    z/√(nT)        Laplace noise of the clients: one draw has about z times the norm that the update may have
    σ√(p/S)/b      DP-SGD: S steps in all, each a sum of b clipped gradients with noise of s = σC

Updates are rarely as long as they may be, so that a model learns less than the ratio tells. It may still learn where
the noise is somewhat longer than they are, as few directions of many decide what it says.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cloister.aggregation import PrivateStrategy
from cloister.core.arrays import Layout
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.privacy.mechanisms.gaussian import GaussianMechanism
from cloister.privacy.mechanisms.local import LocalGaussian
from cloister.server.build import Plan

LOUD, DROWNED = 1.5, 5.0
"""Noise so many times as long as what it hides harms a model, or hides all that is taught: of digits by regression
half are right at 2, and one in six at 8."""


@dataclass(frozen=True)
class _Noise:
    """The noise of one mechanism.

    Attributes:
        whose: it is, in words.
        key: of its multiplier in the configuration.
        multiplier: in force.
        ratio: of its expected norm to what the clips let clients do, over all rounds.
    """

    whose: str
    key: str
    multiplier: float
    ratio: float


def drowned(plan: Plan, layout: Layout, nodes: int, sizes: Sequence[LocalSteps] = ()) -> list[str]:
    """What lets a model learn little or nothing, in a sentence each; nothing where the noise is short.

    Args:
        plan: of the run; its noise is calibrated.
        layout: of everything that the server sends.
        nodes: how many there are.
        sizes: the private steps in a round of each client, where they are known.
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
    """√S/(S·b) of an average client in a round: S steps, each of b units at most on average."""
    steps = sum(size.count for size in sizes) / len(sizes)
    units = sum(size.count * min(size.batch_size, size.examples) for size in sizes) / len(sizes)
    return math.sqrt(steps) / units


def _batches(plan: Plan, sizes: Sequence[LocalSteps]) -> Iterator[str]:
    """That batches are larger than all that any client has: DP-SGD divides by their size all the same."""
    batch, largest = plan.recipe.batch_size, max((size.examples for size in sizes), default=0)
    if largest and batch > largest:
        unit = plan.config.privacy.dp_sgd.mechanism(grouped=bool(plan.config.task.group)).unit
        yield (
            f"client.batch-size = {batch} is more than any client has ({largest} {unit}s at most): DP-SGD divides a "
            f"sum by it all the same, so that steps are {batch / largest:.3g} times too short; use at most {largest}"
        )
