"""Checks before a run begins: budgets of one run or of several, and noise that exceeds the signal.

Clipping bounds the distance that n clients can move the model of p parameters in T rounds: T·C, where C is the
clipping norm. Noise of standard deviation s on each parameter has the expected norm s√p in a round and s√(pT) in all.
The ratio is

    z√p/(n√T)      noise of the server: s = zC/n
    z√p/√(nT)      Gaussian noise of the clients: s = zC on the update of each
    z/√(nT)        Laplace noise of the clients: one draw has about z times the norm that the update may have
    σ√(p/S)/b      DP-SGD: S steps in all, each a sum of b clipped gradients with noise of s = σC

Updates are usually shorter than C, so that the real ratio is larger. A model may still learn at a ratio somewhat above
1, since few directions of many determine its predictions.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.serverapp import Grid

from cloister.config.calibration import calibrated, events_of_clients, smallest_multiplier
from cloister.config.privacy import SWITCHED_OFF
from cloister.config.run import RunConfig, parse
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.filters import OverflowFilter, cost, filter_for
from cloister.privacy.accounting.vocabulary import Relation
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.privacy.mechanisms.gaussian import GaussianMechanism
from cloister.privacy.mechanisms.local import LocalGaussian
from cloister.server.build import Plan, build
from cloister.server.client_claims import private_steps, shared_units, sizes_known
from cloister.server.prepare import Prepared
from cloister.server.private_strategy import PrivateStrategy
from cloister.utils.arrays import Layout
from cloister.utils.errors import BudgetExhausted, CloisterError
from cloister.utils.text import at_least, at_most, rounded_up

NOISE = "privacy.noise-multiplier"
SNR_WARN, SNR_FAIL = 1.5, 5.0
"""Ratios of noise to signal at which a model learns little, and nothing.

Logistic regression on digits has 50 % accuracy at 2, and one in six at 8."""


def refuse_impossible_budget(prepared: Prepared) -> None:
    """Refuse a server budget that does not cover one round.

    Raises:
        BudgetExhausted: with the cost of one round, the remaining budget, and the noise at which all rounds fit.
    """
    plan = prepared.plan
    budget, events = plan.budget, plan.strategy.events(prepared.layout)
    if not budget.max_epsilon:
        return
    each, spent = sum(map(budget.cost, events)), budget.spent()
    if spent + each <= budget.limit:
        return
    if math.isinf(spent):
        budget.require(())  # raises the error for releases without a guarantee
    left = f", and earlier runs have left {at_least(100 * max(0.0, 1 - budget.share()))} %" if spent else ""

    def minimum() -> float:
        config = parse({**prepared.plan.config.flat(), NOISE: "auto", **SWITCHED_OFF})
        claim = build(config).strategy.calibrated(prepared.layout, config.num_rounds).claim()
        return float(claim.parameters[NOISE])

    raise BudgetExhausted(
        f"not one round fits privacy.max-epsilon = {budget.max_epsilon:g} at privacy.target-delta = {budget.delta:g}: "
        f"one takes {at_most(100 * each / budget.limit)} % of it{left}; use a larger budget"
        f"{_more_noise(NOISE, minimum, plan.config.num_rounds)}"
    )


def calibrated_for(config: RunConfig, grid: Grid, stated: Sequence[int] = ()) -> RunConfig:
    """Return the configuration with a number in place of `'auto'` for the noise of the clients.

    The sizes of simulated clients, and the units that several of them hold, follow from the partition. A seed that is
    drawn for it becomes that of the run.

    Args:
        config: of the run.
        grid: to the clients.
        stated: numbers of examples or groups that sites state; empty: those of the grid.

    Raises:
        ConfigError: as `calibrated`.
    """
    if not config.privacy.client.clips_gradients or not config.privacy.client.is_calibrated:
        return calibrated(config)
    # Sizes and holders of units do not depend on the noise; objects need a number.
    plan = build(parse(config.flat() | {config.privacy.client.noise_key: 1.0}))
    sizes: Sequence[LocalSteps] = [private_steps(plan, units) for units in stated]
    shared = () if sizes else shared_units(plan, grid) or ()
    return calibrated(parse(config.flat() | {"seed": plan.seed}), sizes or sizes_known(plan, grid), shared)


def refuse_idle_clients(plan: Plan, grid: Grid) -> None:
    """Refuse a client budget that covers one round for no simulated client.

    The remaining budgets of SuperNodes are unknown to the server.

    Args:
        plan: of the run.
        grid: to the clients, which have charged nothing yet.

    Raises:
        BudgetExhausted: with the cost of one round, and the noise at which all rounds fit.
    """
    privacy, rounds, limit = plan.config.privacy, plan.config.num_rounds, plan.config.privacy.client.max_epsilon
    if not limit:
        return
    sizes, kept = sizes_known(plan, grid), filter_for("renyi", limit, privacy.target_delta)
    draws = OverflowFilter()  # refuses a δ that does not cover the steps of one round, at any noise
    dear = [sum(cost(draws, event) for event in at) for at in events_of_clients(privacy, sizes, 1.0)]
    if min(dear, default=0.0) > draws.limit(limit, privacy.target_delta):
        raise BudgetExhausted(draws.refusal(0.0, min(dear), limit, privacy.target_delta, "a client of this run"))
    available = kept.limit(limit, privacy.target_delta)
    configured = events_of_clients(privacy, sizes, privacy.client.noise_multiplier)
    each = min((sum(cost(kept, event) for event in at) for at in configured), default=0.0)
    if each <= available or math.isinf(each):
        return
    remedy = _more_noise(
        privacy.client.noise_key,
        lambda: smallest_multiplier(privacy, sizes, rounds, shared_units(plan, grid) or ()),
        rounds,
    )
    raise BudgetExhausted(
        f"not one round fits privacy.client-max-epsilon = {limit:g} at privacy.target-delta = "
        f"{privacy.target_delta:g}, so that no client would train: one takes {at_most(100 * each / available)} % of "
        f"it, or more; use a larger budget{remedy}"
    )


def _more_noise(key: str, minimum: Callable[[], float], rounds: int) -> str:
    """Return a hint with the noise at which all rounds fit; empty without one."""
    try:
        found = minimum()
    except (CloisterError, KeyError):
        return ""
    return f", or {key} of {rounded_up(found):.4g} or more for {rounds} rounds"


@dataclass(frozen=True)
class _Spender:
    """Runs of one configuration: all of their rounds, and the events of each round."""

    budget: PrivacyBudget
    events: tuple[Event, ...]
    rounds: int


def share_needed(runs: Iterable[tuple[Prepared, int]]) -> float:
    """Return the largest share of a remaining budget that runs spend at most.

    Args:
        runs: each with a budget, and its number of repetitions.

    Returns:
        1: the whole remainder; 0 without runs; infinite if nothing remains, or a release has no bound.

    Guarantee: the share is at least the one that the ledger will count, for any order of the runs.
    """
    ledgers: dict[Path, list[_Spender]] = {}
    for prepared, count in runs:
        plan = prepared.plan
        events = tuple(plan.strategy.events(prepared.layout))
        spender = _Spender(plan.budget, events, count * plan.config.num_rounds)
        ledgers.setdefault(plan.budget.ledger.path, []).append(spender)
    needed = [0.0]
    for spenders in ledgers.values():
        # The first run chooses the filter of a new ledger, and the strictest relation of all runs counts. The first run
        # depends on the degree of parallelism, so that the most expensive filter is used.
        strict, budget = any(each.budget.kept_for == "replace-one" for each in spenders), spenders[0].budget
        relation: Relation = "replace-one" if strict else "add-or-remove"
        for chosen in {spender.budget.filter for spender in spenders}:
            room = chosen.limit(budget.max_epsilon, budget.delta) - budget.ledger.spent(budget.unit, chosen, relation)
            spent = sum(each.rounds * cost(chosen, event, relation) for each in spenders for event in each.events)
            needed.append(spent / room if room > 0 else math.inf)
    return max(needed)


def low_snr_warnings(plan: Plan, layout: Layout, nodes: int, sizes: Sequence[LocalSteps] = ()) -> list[str]:
    """Return one warning for each noise that exceeds the signal, and one of a batch size above every client's.

    Args:
        plan: of the run; its noise is calibrated.
        layout: of everything that the server sends.
        nodes: number of nodes.
        sizes: the private steps of each client in a round, where they are known.
    """
    cohort, parameters = plan.cohort(nodes), layout.size // max(1, plan.hypotheses)
    strategy, client, rounds = plan.strategy, plan.config.privacy.client, plan.config.num_rounds
    # Name and key of a noise, its multiplier, and the ratio of its expected norm to the largest change that clipping
    # allows the clients, over all rounds.
    noises = list[tuple[str, str, float, float]]()
    if isinstance(strategy, PrivateStrategy) and isinstance(mechanism := strategy.mechanism, GaussianMechanism):
        least = mechanism.multiplier * mechanism.scale.factors(mechanism.clip.bound, layout)[0]
        ratio = least * math.sqrt(layout.size / rounds) / max(1.0, cohort + len(strategy.canaries) / 2)
        noises.append(("the server's noise", "privacy.noise-multiplier", mechanism.multiplier, ratio))
    if client.is_on and (sizes or not client.clips_gradients):
        z, messages = client.noise_multiplier, max(1.0, cohort) * rounds
        if plan.config.secure_aggregation.enabled:
            # The noise of a step is on the sum over all clients, of q·N units each on average.
            units = max(1.0, cohort) * sum(size.rate * size.examples for size in sizes) / len(sizes)
            ratio = z * math.sqrt(parameters / rounds) / units
        elif client.clips_gradients:
            # √S/(S·b) for the average client in a round: S steps have at most b units each on average.
            steps = sum(size.count for size in sizes) / len(sizes)
            units = sum(size.count * min(size.batch_size, size.examples) for size in sizes) / len(sizes)
            ratio = z * math.sqrt(parameters / messages) * (math.sqrt(steps) / units)
        elif isinstance(client.noise_on_update, LocalGaussian):
            ratio = z * math.sqrt(parameters / messages)
        else:
            ratio = z / math.sqrt(messages)
        noises.append(("the clients' noise", client.noise_key, z, ratio))
    warnings = []
    for whose, key, multiplier, ratio in noises:
        if ratio > SNR_WARN:
            does = "drowns what the clients teach the model" if ratio > SNR_FAIL else "lets the model learn little"
            warnings.append(
                f"{whose} {does}: over {rounds} rounds its expected norm is at least {ratio:.2g} times the most that "
                f"clipped updates come to ({key} = {multiplier:.4g}, {cohort:g} clients a round, {parameters} "
                f"parameters); they would be level at {key} = {multiplier / ratio:.2g}. More clients, a smaller model, "
                "frozen layers or a larger budget help"
            )
    units, batch = max(((size.examples, size.batch_size) for size in sizes), default=(0, 0))
    if batch > units:
        word = plan.config.privacy.dp_sgd.mechanism(plan.config.task.group).word
        warnings.append(
            f"client.batch-size = {batch} is more than any client has ({units} {word}s at most): DP-SGD divides a "
            f"sum by it all the same, so that steps are {batch / units:.3g} times too short; use at most {units}"
        )
    return warnings
