"""Refusal of budgets that do not cover one round, with the noise at which they cover all rounds."""

import math
from collections.abc import Callable, Sequence

from flwr.serverapp import Grid

from cloister.config.run import parse
from cloister.config.secure import SWITCHED_OFF
from cloister.core.digits import at_least, at_most, rounded_up
from cloister.core.errors import BudgetExhausted, CloisterError
from cloister.privacy.accounting.events import Event, Gaussian, Pure
from cloister.privacy.accounting.filters import OverflowFilter, cost, filter_for, minimum_multiplier
from cloister.privacy.dpsgd.local_steps import LocalSteps
from cloister.privacy.mechanisms.local import LocalGaussian
from cloister.server.build import Plan, build
from cloister.server.clients import sizes_known
from cloister.server.prepare import Prepared

NOISE, CLIENT_NOISE = "privacy.noise-multiplier", "privacy.client-noise-multiplier"


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
    dear = [sum(cost(draws, event) for event in at) for at in _events_of_clients(plan, sizes, 1.0)]
    if min(dear, default=0.0) > draws.limit(limit, privacy.target_delta):
        raise BudgetExhausted(draws.refusal(0.0, min(dear), limit, privacy.target_delta, "a client of this run"))
    available = kept.limit(limit, privacy.target_delta)

    def dearest(multiplier: float) -> list[float]:
        return [
            sum(cost(kept, event, "add-or-remove") for event in at)
            for at in _events_of_clients(plan, sizes, multiplier)
        ]

    each = min(dearest(privacy.client.noise_multiplier), default=0.0)
    if each <= available or math.isinf(each):
        return
    remedy = _more_noise(
        CLIENT_NOISE,
        lambda: minimum_multiplier(lambda z: rounds * max(dearest(z)), available, f"ε = {limit:g}"),
        rounds,
    )
    raise BudgetExhausted(
        f"not one round fits privacy.client-max-epsilon = {limit:g} at privacy.target-delta = "
        f"{privacy.target_delta:g}, so that no client would train: one takes {at_most(100 * each / available)} % of "
        f"it, or more; use a larger budget{remedy}"
    )


def _events_of_clients(plan: Plan, sizes: Sequence[LocalSteps], multiplier: float) -> list[list[Event]]:
    """Return the events of one round for each known client size.

    With noise on the update, one entry stands for every client. The list is empty if the events are unknown.
    """
    privacy = plan.config.privacy
    choice: list[Event] = [Pure(privacy.choice_epsilon)] if privacy.chooses_privately else []
    if privacy.client.clips_gradients:
        return [[steps.event(multiplier), *choice] for steps in sizes]
    return [[Gaussian(multiplier), *choice]] if isinstance(privacy.client.noise_on_update, LocalGaussian) else []


def _more_noise(key: str, minimum: Callable[[], float], rounds: int) -> str:
    """Return a hint with the noise at which all rounds fit; empty without one."""
    try:
        found = minimum()
    except (CloisterError, KeyError):
        return ""
    return f", or {key} of {rounded_up(found):.4g} or more for {rounds} rounds"
