"""Which runs are about data that is to be remembered: all, but simulations on data that anybody can have."""

import sys
from pathlib import Path

from flwr.serverapp import Grid

from cloister.config.run import RunConfig
from cloister.core.errors import ConfigError
from cloister.privacy.accounting.ledger import Ledger
from cloister.server.build import Plan
from cloister.server.stragglers import PatientGrid

NOT_KEPT = (
    "this run's ledger is in the run directory only: the task's data is public, and the server was given no budget"
)
KEPT_BY = "set privacy.max-epsilon, privacy.data-identity or privacy.ledger-dir for a ledger that all runs share"


CLOSING = (
    "this run leaves releases without a guarantee in the ledger of this data: from then on no run on it can keep a "
    "privacy.max-epsilon"
)


def confine_ledger(plan: Plan, grid: Grid, directory: Path) -> None:
    """Keep the ledger of a run that needs no lasting one in its directory, before anything is released.

    A node with data of its own keeps its own ledger whatever the server does.

    Args:
        plan: of the run.
        grid: to the clients.
        directory: of the run.
    """
    if not needs_lasting_ledger(plan, grid):
        plan.budget.ledger = Ledger(directory / "ledger.jsonl")


def needs_lasting_ledger(plan: Plan, grid: Grid) -> bool:
    """Whether later runs are to know of this one: its data is not known to be public, or its settings ask for it."""
    privacy = plan.config.privacy
    asked = privacy.server.max_epsilon or privacy.data_identity or privacy.ledger_dir
    return bool(asked) or not vars(type(plan.task)).get("public", False) or not is_simulated(grid)


def refuse_forgetful_nodes(config: RunConfig, grid: Grid) -> None:
    """Refuse secure aggregation in a simulation that would lose the secrets of a round between two of its messages.

    SuperNodes have a folder for them; one that has none says so when it is asked.

    Raises:
        ConfigError: it would.
    """
    if not config.secure_aggregation.enabled or not is_simulated(grid):
        return
    if not getattr(_innermost(grid), "keeps_memory", False):
        raise ConfigError(
            "secure-aggregation.enabled = true is for SuperNodes and for runs in one process (`cloister run`, "
            "`simulate`): a process of Flower's simulation has lost the secrets of the round when the next one comes"
        )


def _innermost(grid: Grid) -> Grid:
    return grid.inner if isinstance(grid, PatientGrid) else grid


def is_simulated(grid: Grid) -> bool:
    """Whether this machine plays every node, so that there is no data but the task's."""
    inner = _innermost(grid)
    # Flower's simulation has imported its grid; elsewhere nobody waits a second for that import.
    flower = sys.modules.get("flwr.superlink.grid.inmemory_grid")
    if flower is not None and isinstance(inner, flower.InMemoryGrid):
        return True
    return bool(getattr(inner, "is_simulated", False))


def is_lasting(plan: Plan, directory: Path) -> bool:
    """Whether the ledger of a run that has begun is that of other runs on its data too.

    Args:
        plan: of the run.
        directory: of the run.
    """
    return plan.budget.ledger.path.parent != directory


def render_closing(plan: Plan, directory: Path) -> list[str]:
    """That no later run can keep a budget on the same data, where this one sees to that.

    Args:
        plan: of a run that has begun.
        directory: of the run.
    """
    return [f"budget         {CLOSING}"] if is_lasting(plan, directory) and leaves_unguaranteed(plan) else []


def leaves_unguaranteed(plan: Plan) -> bool:
    """Whether a run releases something that no budget can cover."""
    return not plan.is_accounted or bool(plan.unprotected_releases)


def render_ledger(plan: Plan, directory: Path) -> list[str]:
    """Where the ledger is, if no later run will find it."""
    return [] if is_lasting(plan, directory) else [NOT_KEPT, f"  {KEPT_BY}"]
