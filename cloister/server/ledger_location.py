"""Choice of the ledger: a shared one, or a run-local one for simulations on public data."""

import math
from pathlib import Path

from flwr.serverapp import Grid

from cloister.config.run import RunConfig
from cloister.flower.messages import is_simulation
from cloister.privacy.accounting.filters import share
from cloister.privacy.accounting.ledger import Ledger, other_names, warning
from cloister.server.build import Plan, data_identity, place_of
from cloister.server.polling_grid import PollingGrid, transport_of
from cloister.server.reports.rundir import LEDGER
from cloister.utils.arrays import Layout
from cloister.utils.errors import ConfigError, PrivacyError
from cloister.utils.text import at_least, at_most

NOT_KEPT = (
    "this run's ledger is in the run directory only: the task's data is public, and the server was given no budget"
)
KEPT_BY = "set privacy.max-epsilon, privacy.data-identity or privacy.ledger-dir for a ledger that all runs share"


CLOSING = (
    "this run leaves releases without a guarantee in the ledger of this data: from then on no run on it can keep a "
    "privacy.max-epsilon"
)
WITHOUT_SERVER = (
    "the server adds no noise, so that no later run on this data can keep the server's budget for whole clients "
    "(privacy.max-epsilon); the clients' own noise, its claim and the clients' own budgets are not concerned"
)


def use_run_local_ledger(plan: Plan, grid: Grid, directory: Path) -> None:
    """Use a ledger in the run directory if the run needs no shared one.

    Call this before any release. A node with its own data always keeps its own ledger.

    Args:
        plan: of the run.
        grid: to the clients.
        directory: of the run.
    """
    if not needs_lasting_ledger(plan, grid):
        plan.budget.ledger = Ledger(directory / LEDGER)


def needs_lasting_ledger(plan: Plan, grid: Grid) -> bool:
    """Return whether the run needs a shared ledger.

    Its settings, non-public data or real nodes require one.
    """
    privacy = plan.config.privacy
    asked = privacy.server.max_epsilon or privacy.data_identity or privacy.ledger_dir
    return bool(asked) or not vars(type(plan.task.raw)).get("public", False) or not is_simulated(grid)


def require_node_state(config: RunConfig, grid: Grid) -> None:
    """Refuse secure aggregation in a simulation that loses a round's secrets.

    SuperNodes store them in a folder. A SuperNode without one reports that in its reply.

    Raises:
        ConfigError: the simulation loses them.
    """
    if not config.secure_aggregation.enabled or not is_simulated(grid):
        return
    if not getattr(_innermost(grid), "keeps_memory", False):
        raise ConfigError(
            "secure-aggregation.enabled = true is for SuperNodes and for runs in one process (`cloister run`, "
            "`simulate`): a process of Flower's simulation has lost the secrets of the round when the next one comes"
        )


def _innermost(grid: Grid) -> Grid:
    return grid.inner if isinstance(grid, PollingGrid) else grid


def is_in_process(grid: Grid) -> bool:
    """Return whether this program runs every node, without a SuperLink."""
    return is_simulated(grid) or getattr(_innermost(grid), "keeps_memory", False)


def draws_are_seen(grid: Grid) -> bool:
    """Return whether nodes may learn who is drawn: unless one process runs them, or the SuperLink has a gate.

    Over Flower's own SuperLink, totals and names of objects reveal it.
    """
    transport = transport_of(grid)
    return not (is_in_process(grid) if transport is None else transport.gated)


def is_simulated(grid: Grid) -> bool:
    """Return whether this machine simulates every node.

    Then only the task's data exists.
    """
    inner = _innermost(grid)
    return is_simulation(inner) or bool(getattr(inner, "is_simulated", False))


def warn_of_other_names(plan: Plan, directory: Path) -> str:
    """Return a warning of other recorded names of this data; empty otherwise.

    Args:
        plan: of a run that has recorded nothing yet.
        directory: of the run.
    """
    if not is_shared_ledger(plan, directory):
        return ""
    others = other_names(plan.budget.ledger, place_of(plan.config))
    return warning(data_identity(plan.config), others, "privacy.data-identity") if others else ""


def is_shared_ledger(plan: Plan, directory: Path) -> bool:
    """Return whether the ledger of a started run lies outside its run directory.

    Args:
        plan: of the run.
        directory: of the run.
    """
    return plan.budget.ledger.path.parent != directory


def kept_budget(plan: Plan) -> str:
    """Return the active budget on a run's data and its remainder, in words.

    The text is empty if there is none. A release without a guarantee ends every budget.

    Args:
        plan: of a run that has recorded nothing yet.
    """
    ledger, unit = plan.budget.ledger, plan.budget.unit
    last = next((each for each in reversed(ledger.budgets) if each.unit == unit and each.epsilon), None)
    if last is None:
        return ""
    spent = ledger.spent(unit, last.filter, ledger.relation_of(unit, last.relation))
    if math.isinf(spent):
        return ""
    left = 1 - share(spent, last.filter.limit(last.epsilon, last.delta))
    return (
        f"ε = {last.epsilon:g} at δ = {last.delta:g} for one {unit}, {at_least(100 * max(0.0, left), 3)} % of it "
        f"left, in {ledger.path}"
    )


def closing_refused(plan: Plan, kept: str) -> str:
    """Return why a run that would end a budget is refused; empty if allowed.

    Args:
        plan: of the run.
        kept: the result of `kept_budget`.
    """
    if not kept or plan.config.privacy.close_budget or not leaves_unguaranteed(plan):
        return ""
    why = "; ".join(plan.unprotected_releases) or f"privacy.server = {plan.claim.mechanism!r} is no guarantee"
    return (
        f"privacy.close-budget = false: a budget is kept on this data ({kept}), and this run would end it for good by "
        f"releases without a guarantee: {why}; use settings that the budget covers, or try out on other data; to end "
        "the budget on purpose, set privacy.close-budget = true"
    )


def check_budget_invalidation(plan: Plan, grid: Grid) -> None:
    """Refuse a run that would end a budget without `privacy.close-budget`.

    Args:
        plan: of a run that has recorded nothing yet.
        grid: to the clients.

    Raises:
        PrivacyError: with the budget, its remainder, and the settings that allow the run.
    """
    if needs_lasting_ledger(plan, grid) and (refusal := closing_refused(plan, kept_budget(plan))):
        raise PrivacyError(refusal)


def invalidation_warning(plan: Plan, kept: str) -> str:
    """Return a warning that no later run can keep a budget of the server on the same data.

    Args:
        plan: of the run.
        kept: the budget that the run ends; empty: there is none.
    """
    privacy = plan.config.privacy
    of_clients = privacy.client.is_on and not privacy.server.is_noised and not plan.config.evaluates_on_clients
    closing = WITHOUT_SERVER if of_clients else CLOSING
    return f"{closing}; that ends the budget which is kept there: {kept}" if kept else closing


def render_budget(plan: Plan, layout: Layout, directory: Path) -> list[str]:
    """Return lines on the budget that the run uses or ends; empty without.

    Args:
        plan: of a run that has recorded nothing yet.
        layout: of everything that the server sends.
        directory: of the run.
    """
    if is_shared_ledger(plan, directory) and leaves_unguaranteed(plan):
        return [f"budget         {invalidation_warning(plan, kept_budget(plan))}"]
    return [f"budget         {budget_summary(plan, layout)}"] if plan.budget.max_epsilon else []


def budget_summary(plan: Plan, layout: Layout) -> str:
    """Return the share of the budget that a run uses, and further such rounds.

    Args:
        plan: of a run with a budget that has recorded nothing yet.
        layout: of everything that the server sends.
    """
    budget, rounds, events = plan.budget, plan.config.num_rounds, plan.strategy.events(layout)
    each, fits = sum(map(budget.cost, events)), budget.fits(events)
    covered = rounds if fits is None else min(rounds, fits)
    after = share(budget.spent() + covered * each, budget.limit)
    left = "any number of such rounds fit" if fits is None else f"{fits - covered} more such rounds fit"
    ends = f"; it ends this run after {covered} of {rounds} rounds" if covered < rounds else ""
    return (
        f"ε = {budget.max_epsilon:g} at δ = {budget.delta:g} over all runs on this data: "
        f"{at_most(100 * budget.share(), 3)} % spent before this run, {at_most(100 * after, 3)} % after it; "
        f"then {left}{ends}"
    )


def leaves_unguaranteed(plan: Plan) -> bool:
    """Return whether a run makes a release that no budget can cover."""
    return not plan.is_accounted or bool(plan.unprotected_releases)


def render_ledger(plan: Plan, directory: Path) -> list[str]:
    """Return lines on a run-local ledger; empty for a shared one."""
    return [] if is_shared_ledger(plan, directory) else [NOT_KEPT, f"  {KEPT_BY}"]
