"""Budgets of a planned run: the rounds that fit, and a search for the noise that keeps a run within a budget."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from flwr.app import RecordDict

from cloister.client.budget import planned_charges
from cloister.client.costs import privacy_costs_of
from cloister.client.ledgers import InMemoryLeakage, InMemoryLedger
from cloister.client.noise import leakage_budget, leaked
from cloister.config.calibration import events_of_clients
from cloister.config.io import Scalar
from cloister.config.privacy import SWITCHED_OFF
from cloister.config.run import RunConfig, parse
from cloister.config.variants import PluginPrivacy
from cloister.estimate.quantities import Asked
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.filters import minimum_multiplier, share
from cloister.privacy.accounting.vocabulary import Unit
from cloister.privacy.dpsgd.local_steps import Holders
from cloister.server.build import build
from cloister.server.forecast import Forecast
from cloister.server.prepare import Prepared
from cloister.utils.errors import BudgetExhausted, ConfigError
from cloister.utils.text import rounded_up


@dataclass(frozen=True)
class Allowance:
    """Planned rounds that a budget covers.

    Attributes:
        whose: owner of the budget, in words.
        unit: of the budget.
        limit: ε; for a neighbourhood, the leakage.
        delta: at which ε is computed.
        before, after: share that is spent before the run, and after it.
        rounds: number of planned rounds that the budget covers.
        more: number of further such rounds that would fit afterwards; None: they cost nothing.
    """

    whose: str
    unit: Unit
    limit: float
    delta: float
    before: float
    after: float
    rounds: int
    more: int | None


def allowance_of_server(forecast: Forecast) -> Iterator[Allowance]:
    """Yield the allowance of `privacy.max-epsilon`, if that is set."""
    budget = forecast.prepared.plan.budget
    if forecast.before is None or forecast.after is None:
        return
    yield Allowance(
        "the server's, privacy.max-epsilon",
        budget.unit,
        budget.max_epsilon,
        budget.delta,
        forecast.before,
        forecast.after,
        forecast.rounds,
        forecast.more,
    )


def allowances_of_node(node: Asked, whose: str, rounds: int) -> Iterator[Allowance]:
    """Yield the allowances of a node's budgets.

    They are the budgets of its policy, `privacy.client-max-epsilon` and `privacy.max-leakage`.

    Args:
        node: as it is before the run.
        whose: owner of the budget, in words.
        rounds: number of rounds in which the node is asked to train.
    """
    for budget, charge in planned_charges(node.request, node.node):
        yield from _of(budget, charge.events, whose, rounds)
    if node.request.config.privacy.client.counts_leakage:
        yield from _of(leakage_budget(node.request, node.node), leaked(node.request), whose, rounds)


def _of(budget: PrivacyBudget, events: tuple[Event, ...], whose: str, rounds: int) -> Iterator[Allowance]:
    if not budget.max_epsilon:
        return
    fits, spent = budget.fits(events), budget.spent()
    covered = rounds if fits is None else min(rounds, fits)
    after = spent + covered * sum(map(budget.cost, events)) if covered else spent
    yield Allowance(
        whose,
        budget.unit,
        budget.max_epsilon,
        budget.delta,
        share(spent, budget.limit),
        share(after, budget.limit),
        covered,
        None if fits is None else fits - covered,
    )


LARGEST = 1e4
"""Largest ε of a budget that the search considers: a larger one bounds nothing."""
CLOSE = 1e-4
"""Relative tolerance of the search for the smallest budget."""


@dataclass(frozen=True)
class Within:
    """Noise and rounds that a budget allows.

    Attributes:
        unit: of the budget.
        whose: owner of the budget, in words.
        key: of the noise in the configuration; empty if no noise is configurable.
        noise: the smallest with which all rounds fit, rounded up; None: there is none, for the reason `why`.
        why: empty if there is such a noise.
        rounds: that fit with the configured noise; None: no noise is configured, or any number of rounds fits.
        smallest: if no round fits, the smallest ε of a budget for all rounds with the configured noise, rounded up.
            None: there is none up to `LARGEST`, or rounds fit.
    """

    unit: Unit
    whose: str
    key: str
    noise: float | None
    why: str
    rounds: int | None
    smallest: float | None = None

    @property
    def is_nothing(self) -> bool:
        """Return whether the budget covers no round of the configured run."""
        return self.rounds == 0 or (self.rounds is None and self.noise is None)


def within_server(settings: Mapping[str, Scalar], prepared: Prepared, epsilon: float) -> Iterator[Within]:
    """Yield the result for the server's noise under `privacy.max-epsilon`.

    It is empty if the server adds none.

    Args:
        settings: of the run.
        prepared: the run.
        epsilon: ε of the budget, which replaces `privacy.max-epsilon`.

    Raises:
        ConfigError: the mechanism has no guarantee, or ε is not above 0.
    """
    server = prepared.plan.config.privacy.server
    if not server.is_noised:
        return
    limited = {**settings, "privacy.max-epsilon": epsilon}
    fitting: tuple[int | None, float | None] = (None, None)
    if not server.is_calibrated:
        plan = build(parse(limited))
        fitting = _room(plan.budget, plan.strategy.events(prepared.layout), plan.config.num_rounds)
    if isinstance(server, PluginPrivacy):
        why = "a mechanism of another package sets its own noise"
        yield Within("client", "the server's", "", None, why, *fitting)
        return
    key = "privacy.noise-multiplier"

    def calibrated() -> float:
        config = parse({**limited, key: "auto", **SWITCHED_OFF})
        found = build(config).strategy.calibrated(prepared.layout, config.num_rounds).claim()
        return float(found.parameters[key])

    noise, why = _found(calibrated)
    yield Within("client", "the server's", key, noise, why, *fitting)


def _room(budget: PrivacyBudget, events: Sequence[Event], rounds: int) -> tuple[int | None, float | None]:
    """Return the number of rounds that fit. If that is 0, also return the smallest budget for all rounds."""
    fits = budget.fits(events)
    return fits, smallest_budget(budget, events, rounds) if fits == 0 else None


def smallest_budget(budget: PrivacyBudget, events: Sequence[Event], rounds: int) -> float | None:
    """Return the smallest ε with which a budget covers a number of rounds.

    It is rounded up to four digits.

    Args:
        budget: that is too small.
        events: of a round.
        rounds: number of rounds.

    Returns:
        None if there is none up to `LARGEST`.
    """

    def has_room(epsilon: float) -> bool:
        larger = copy(budget)
        larger.max_epsilon = epsilon
        fits = larger.fits(events)
        return fits is None or fits >= rounds

    low, high = budget.max_epsilon, 2 * budget.max_epsilon
    while not has_room(high):
        low, high = high, 2 * high
        if high > LARGEST:
            return None
    while high > low * (1 + CLOSE):
        middle = (low + high) / 2
        low, high = (low, middle) if has_room(middle) else (middle, high)
    return rounded_up(high)


def within_node(
    settings: Mapping[str, Scalar], node: Asked, whose: str, epsilon: float, shared: Collection[Holders] = ()
) -> Iterator[Within]:
    """Yield the result for the noise of a client with such a budget for itself, or for each of its units.

    It is empty if clients add none. Under `laplace` the budget is one of leakage, which for a client is a pure ε.

    Args:
        settings: of the run.
        node: of the client.
        whose: owner of the budget, in words.
        epsilon: ε of the budget, or the leakage.
        shared: combinations of clients that hold data of one unit, with `dp-sgd`.
    """
    config, client = node.request.config, node.request.config.privacy.client
    if not client.is_on:
        return
    # A simulated client has spent nothing yet.
    budget: PrivacyBudget[InMemoryLedger] | PrivacyBudget[InMemoryLeakage]
    if client.counts_leakage:
        budget = PrivacyBudget(InMemoryLeakage(RecordDict()), "", "neighbourhood", max_epsilon=epsilon)
    else:
        unit: Unit = node.unit if client.clips_gradients else "client"
        budget = PrivacyBudget(
            InMemoryLedger(RecordDict()), "", unit, config.privacy.target_delta, epsilon, kind="renyi"
        )

    def costliest(config: RunConfig) -> Sequence[Event]:
        """Return the events of a round for the unit that loses most over all clients that hold data of it."""
        holders = [each for each in shared if node.steps in each]
        together = events_of_clients(config.privacy, (), config.privacy.client.noise_multiplier, holders)
        request = replace(node.request, config=config.for_clients)
        if config.privacy.client.counts_leakage:
            own = leaked(request)
        else:
            charges = privacy_costs_of(request, node.node)
            (own,) = (charge.events for charge in charges if charge.unit == budget.unit)
        found = [own, *(together if holders else ())]
        return max(found, key=lambda events: sum(map(budget.cost, events)))

    def cost(multiplier: float) -> float:
        changed = parse({**settings, client.noise_key: multiplier})
        return config.num_rounds * sum(map(budget.cost, costliest(changed)))

    noise, why = _found(lambda: minimum_multiplier(cost, budget.limit, f"a budget of {epsilon:g}"))
    yield Within(budget.unit, whose, client.noise_key, noise, why, *_room(budget, costliest(config), config.num_rounds))


def _found(calibrate: Callable[[], float]) -> tuple[float | None, str]:
    """Return the noise, or the reason why there is none."""
    try:
        return rounded_up(calibrate()), ""
    except (ConfigError, BudgetExhausted) as error:
        return None, str(error)


def for_all(found: Sequence[Within]) -> tuple[Within, ...]:
    """Return one result for clients of all sizes: the strictest noise and rounds.

    Args:
        found: of the server, and of clients of several sizes.
    """
    by_key: dict[str, list[Within]] = {}
    for each in found:
        by_key.setdefault(each.key, []).append(each)
    strictest = []
    for those in by_key.values():
        if len(those) == 1:
            strictest += those
            continue
        hardest = max(those, key=lambda each: math.inf if each.noise is None else each.noise)
        rounds = [each.rounds for each in those if each.rounds is not None]
        nothing = [each.smallest for each in those if each.is_nothing]
        smallest = None if None in nothing else max(filter(None, nothing), default=None)
        least = min(rounds, default=None)
        strictest.append(replace(hardest, whose="every client's", rounds=least, smallest=smallest))
    return tuple(strictest)
