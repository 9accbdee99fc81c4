"""Server and simulated clients in one process."""

from collections.abc import Mapping
from pathlib import Path

from cloister.config.io import Scalar
from cloister.config.privacy import ENABLED, NODES, SWITCHED_OFF
from cloister.config.run import RunConfig, parse
from cloister.privacy.claims.report import leakage_report
from cloister.privacy.mechanisms.distributed.shares import COLLUDING, THRESHOLD
from cloister.server.build import build
from cloister.server.checkpoint import clients_of, settings_of
from cloister.server.preflight import calibrated_for, refuse_idle_clients
from cloister.server.reports.console import ConsoleReporter
from cloister.server.reports.rundir import refuse_name
from cloister.server.run import Outcome, run
from cloister.simulation.grid import LocalGrid, explaining_failures
from cloister.utils.errors import ConfigError

CLIENTS = 4
"""Default number of simulated clients."""


@explaining_failures()
def simulate(
    settings: Mapping[str, Scalar] | None = None, clients: int | None = None, narrator: ConsoleReporter | None = None
) -> Outcome:
    """Run a federation of simulated clients in this process.

    Args:
        settings: dotted keys of the run configuration. Other keys have their defaults or, with `resume`, the values of
            the resumed run.
        clients: number of clients; None: 4, or as many as the resumed run has.
        narrator: reports to the user; by default on standard output.

    Raises:
        CloisterError: the run cannot start, or no client takes part in it.

    Example:
        outcome = simulate({"strategy.name": "fedyogi", "privacy.server": "none"}, clients=8)
    """
    from cloister.client.app import app

    settings = dict(settings or {})
    if earlier := str(settings.get("resume", "")):
        settings = settings_of(Path(earlier)) | settings
        clients = clients_of(Path(earlier)) or CLIENTS if clients is None else clients
    clients = CLIENTS if clients is None else clients
    config = parse(with_cohort(settings, clients))
    refuse_name(config)
    refuse_too_few(config, clients)
    config = calibrated_for(config, LocalGrid.simulated(app, {}, clients))
    refuse_what_clients_would(config, clients)
    grid = LocalGrid.simulated(app, config.flat(), clients)
    if not config.resume:
        refuse_idle_clients(build(config), grid)
    outcome = run(grid, config, narrator, clients)
    # A client's leakage reveals how often it was in the cohort.
    if config.privacy.client.counts_leakage and not outcome.plan.strategy.has_secret_cohorts:
        outcome.directory.write_json("leakage.json", leakage_report(grid.leakages()))
    return outcome


def with_cohort(settings: Mapping[str, Scalar], clients: int) -> dict[str, Scalar]:
    """Return the settings, with the cohort's size if t and c of a secure aggregation follow from it.

    Args:
        settings: dotted keys of the run configuration.
        clients: number of simulated clients, all of which are connected.

    Raises:
        ConfigError: the configuration contradicts itself without secure aggregation.
    """
    if settings.get(ENABLED) is not True or settings.get(THRESHOLD) or settings.get(COLLUDING):
        return dict(settings)
    plan = build(parse({**settings, **SWITCHED_OFF}))
    return {**settings, NODES: max(int(plan.cohort(clients)), plan.config.strategy.min_nodes)}


def refuse_too_few(config: RunConfig, clients: int) -> None:
    """Raise ConfigError if the first round needs more simulated clients."""
    if clients < config.strategy.min_nodes:
        raise ConfigError(
            f"clients = {clients} is fewer than strategy.min-nodes = {config.strategy.min_nodes}; "
            "start more clients or lower strategy.min-nodes"
        )


def refuse_other_population(config: RunConfig, clients: int) -> None:
    """Raise ConfigError if the registered population is not the number of clients."""
    population = config.privacy.server.population
    if population and population != clients:
        raise ConfigError(
            f"privacy.population = {population} registers the nodes of a run, and there are --clients {clients}; make "
            "them the same"
        )


def refuse_what_clients_would(config: RunConfig, clients: int) -> None:
    """Refuse, before a run directory is made, settings that a client would refuse.

    Args:
        config: of the run.
        clients: number of clients.

    Raises:
        CloisterError: of its data, its optimizer or its model.
    """
    from cloister.client.data import benchmark_of, local_data, task_of, tell_ungrouped
    from cloister.client.node import node_of
    from cloister.client.trainers import model_and_trainer_of
    from cloister.tasks.faults import refuse_faulty, refuse_faulty_data

    config = config.for_clients
    refuse_faulty_data(task_of(config.task), benchmark_of(config.task).train)
    if config.privacy.client.clips_gradients:
        tell_ungrouped(config.task)
    local_data(config.task, node_of({"partition-id": 0, "num-partitions": clients}), max(0, config.seed))
    workbench = model_and_trainer_of(config)
    workbench.model.initialise(max(0, config.seed))  # it may hold what an earlier run has left
    refuse_faulty(task_of(config.task), workbench.model, benchmark_of(config.task).train)
    workbench.prepare()
