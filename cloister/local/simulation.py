"""Server and simulated clients in one process."""

from collections.abc import Mapping
from contextlib import suppress

from cloister.config.run import parse
from cloister.config.section import Scalar
from cloister.core.errors import ConfigError
from cloister.local.grid import LocalGrid
from cloister.privacy.accounting.leakage import leakage_report
from cloister.server.reports.console import Narrator
from cloister.server.run import Outcome, run


def simulate(
    settings: Mapping[str, Scalar] | None = None, clients: int = 4, narrator: Narrator | None = None
) -> Outcome:
    """Run a federation of simulated clients here and now.

    Args:
        settings: dotted keys of the run configuration; what is not given has its default.
        clients: how many.
        narrator: tells a person; by default on standard output.

    Raises:
        CloisterError: the run cannot start, or nobody takes part in it.

    Example:
        outcome = simulate({"strategy.name": "fedyogi", "privacy.server": "none"}, clients=8)
    """
    from cloister.client.app import app
    from cloister.client.data import local_data
    from cloister.client.workbench import workbench_of

    config = parse(settings or {})
    if clients < config.strategy.min_nodes:
        raise ConfigError(
            f"clients = {clients} is fewer than strategy.min-nodes = {config.strategy.min_nodes}; "
            "start more clients or lower strategy.min-nodes"
        )
    # What a client would refuse is refused here, before a run directory is made.
    local_data(config.task, {"partition-id": 0, "num-partitions": clients}, max(0, config.seed))
    workbench_of(config).prepare()
    grid = LocalGrid.simulated(app, config.flat(), clients)
    outcome = run(grid, config, narrator)
    with suppress(OSError):  # a run that a full disk ended has ended in order all the same
        # For whoever audits the run: with the seed, this says which examples were whose.
        outcome.directory.write_json("simulation.json", {"clients": clients})
    if config.privacy.client.counts_leakage:
        outcome.directory.write_json("leakage.json", leakage_report(grid.leakages()))
    return outcome
