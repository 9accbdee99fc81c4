"""Preview of a run, computed from the run's own objects so that it agrees with the later claims."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from flwr.app import Message

from cloister.config.io import Scalar
from cloister.config.run import RunConfig, parse
from cloister.estimate.budget import (
    Allowance,
    Within,
    allowance_of_server,
    allowances_of_node,
    within_node,
    within_server,
)
from cloister.estimate.quantities import (
    Asked,
    NoiseOnClient,
    Series,
    Sizes,
    Timing,
    Traffic,
    asked,
    configurations,
    noise_on_clients,
    series_of_clients,
    series_of_server,
    shown_rounds,
    timed,
    traffic,
)
from cloister.privacy.claims.claim import ClientClaim
from cloister.privacy.dpsgd.local_steps import Holders
from cloister.server.client_claims import client_claim, shared_units
from cloister.server.forecast import (
    Forecast,
    NoiseOnRelease,
    draft,
    first_messages,
    forecast,
    noise_on_release,
    shown_by,
)
from cloister.server.preflight import calibrated_for, low_snr_warnings
from cloister.server.prepare import Prepared, prepare
from cloister.simulation.grid import LocalGrid, explaining_failures
from cloister.simulation.simulate import refuse_other_population, refuse_too_few, refuse_what_clients_would, with_cohort
from cloister.utils import check
from cloister.utils.errors import BudgetExhausted, ConfigError


@dataclass(frozen=True)
class Options:
    """Options of a plan in addition to the run configuration.

    Attributes:
        clients: number of nodes.
        epsilon: budget for which noise and rounds are searched; 0: none.
        policy: of the sites; None: no policy.
        sizes: that sites state of their data; empty: the sizes of a simulation.
        timing: whether to time a client that trains twice.
    """

    clients: int = 4
    epsilon: float = 0.0
    policy: Path | None = None
    sizes: tuple[int, ...] = ()
    timing: bool = True


@dataclass(frozen=True)
class Preview:
    """Preview of a run whose rounds all complete.

    Attributes:
        config: of the run.
        options: of the plan.
        forecast: of the run's claims.
        noise: that the server adds; None: none.
        noise_of_clients: that clients add.
        sizes: of clients of DP-SGD; None: the run has no such clients.
        by_size: claim for clients of these sizes.
        series: ε by round.
        allowances: planned rounds that budgets cover.
        refusal: reason for which the policy refuses the run; empty if it allows it.
        within: noise and rounds for the requested budget; without one, for the run's budget if that covers no round.
        epsilon: of the budget of `within`; 0: none.
        hopeless: reasons, from public numbers only, why models would hardly learn.
        traffic: size of messages.
        timing: of messages; None: not measured.
    """

    config: RunConfig
    options: Options
    forecast: Forecast
    noise: NoiseOnRelease | None
    noise_of_clients: tuple[NoiseOnClient, ...]
    sizes: Sizes | None
    by_size: ClientClaim | None
    series: tuple[Series, ...]
    allowances: tuple[Allowance, ...]
    refusal: str
    within: tuple[Within, ...]
    epsilon: float
    hopeless: tuple[str, ...]
    traffic: Traffic
    timing: Timing | None


@explaining_failures()
def preview(settings: Mapping[str, Scalar], options: Options) -> Preview:
    """Compute the preview of a run. Nothing is sent, charged or written.

    Args:
        settings: dotted keys of the run configuration.
        options: of the plan.

    Raises:
        CloisterError: the run could not begin, or an option contradicts it.
    """
    from cloister.client.app import app
    from cloister.client.data import tell_ungrouped

    config = parse(with_cohort(settings, options.clients))
    clips = config.privacy.client.clips_gradients
    refuse_too_few(config, options.clients)
    refuse_other_population(config, options.clients)
    if options.epsilon:
        check.positive(**{"--epsilon": options.epsilon})
    if options.sizes:
        check.positive(**{"--public-size": min(options.sizes)})
        if not clips:
            raise ConfigError(
                f"--public-size {options.sizes[0]} has no effect with privacy.client = {config.privacy.client.name!r}: "
                "only 'dp-sgd' counts from it"
            )
    configured = configurations(config, options.clients, options.sizes, options.policy)
    stated = [int(node["public-size"]) for node in configured if "public-size" in node]
    config = calibrated_for(config, LocalGrid.simulated(app, {}, options.clients), stated)
    if options.timing:
        refuse_what_clients_would(config, options.clients)
    prepared = prepare(config, pretrain=False)
    grid = LocalGrid.simulated(app, config.flat(), options.clients)
    draft(prepared.plan, grid)
    try:
        messages = first_messages(prepared, grid)
    except BudgetExhausted:  # a budget ends the run before
        messages = []
    with TemporaryDirectory() as folder:
        nodes: list[Asked] = []
        if messages:
            # With DP-SGD the sizes of all nodes matter. Otherwise one node stands for all.
            nodes = asked(config, messages[0], configured if clips else configured[:1], Path(folder))
        # If clients of DP-SGD have the sizes of a simulation, the run will have the same ones.
        are_dealt = clips and all(node.node.config.partition_id is not None for node in nodes)
        shared = shared_units(prepared.plan, grid) if are_dealt else None
        if are_dealt:
            tell_ungrouped(config.for_clients.task)
        # Sites have the premises that they show when they take part.
        run = None if stated or options.policy else grid
        return _worked_out(config.flat(), options, prepared, messages, nodes, shared, run)


def _worked_out(
    settings: Mapping[str, Scalar],
    options: Options,
    prepared: Prepared,
    messages: Sequence[Message],
    nodes: list[Asked],
    shared: Collection[Holders] | None,
    grid: LocalGrid | None,
) -> Preview:
    plan, privacy = prepared.plan, prepared.plan.config.privacy
    shown = shown_rounds(plan.config.num_rounds)
    clips = privacy.client.clips_gradients
    expected = forecast(prepared, shown, [node.steps for node in nodes] if clips else [], shared, grid)
    sizes: Sizes | None = None
    by_size: ClientClaim | None = None
    named = dict(zip(["each client's"], nodes, strict=False))
    if nodes and clips:
        sizes = Sizes.of(nodes, privacy.dp_sgd.mechanism(), expected.rounds, privacy.target_delta, shared or ())
        by_size = client_claim(plan, prepared.layout, expected.rounds, list(sizes.shown), shared)
        word = plan.config.task.group or "example"
        named = {f"a client's with {steps.examples} {word}s": node for steps, node in sizes.shown.items()}
    costliest = [sizes.costliest] if sizes else None
    refusal = nodes[0].refusal if nodes else ""
    allowances = list(allowance_of_server(expected))
    for whose, node in () if refusal else named.items():
        allowances += allowances_of_node(node, whose, expected.rounds)
    found, epsilon = _within(settings, options, expected, allowances, named, shared or ())
    reached = [number for number in shown if number <= expected.rounds]
    # With secure aggregation, a single client has no peers to mask its update with.
    times = options.timing and not plan.config.secure_aggregation.enabled
    return Preview(
        plan.config,
        options,
        expected,
        noise_on_release(prepared, options.clients),
        tuple(noise_on_clients(prepared)),
        sizes,
        None if by_size is None else shown_by(by_size, grid),
        (
            *series_of_server(expected.statements),
            *series_of_clients(lambda rounds: client_claim(plan, prepared.layout, rounds, costliest, shared), reached),
        ),
        tuple(allowances),
        refusal,
        tuple(found),
        epsilon,
        tuple(
            low_snr_warnings(plan, prepared.layout, options.clients, [node.steps for node in nodes] if sizes else ())
        ),
        traffic(prepared, options.clients),
        timed(prepared, messages[0], options.clients) if times and messages else None,
    )


def _within(
    settings: Mapping[str, Scalar],
    options: Options,
    expected: Forecast,
    allowances: Sequence[Allowance],
    named: Mapping[str, Asked],
    shared: Collection[Holders],
) -> tuple[list[Within], float]:
    """Return noise and rounds for the requested budget, or for one of the run's that covers no round, and its ε."""
    prepared, epsilon, of_server = expected.prepared, options.epsilon, True
    if not epsilon and expected.stopped and not expected.rounds:
        epsilon = prepared.plan.budget.max_epsilon
    elif not epsilon:
        too_small = [found.limit for found in allowances if expected.rounds and not found.rounds]
        epsilon, of_server = min(too_small, default=0.0), False
    if not epsilon:
        return [], 0.0
    found = list(within_server(settings, prepared, epsilon)) if of_server else []
    for whose, node in named.items():
        found += within_node(settings, node, whose, epsilon, shared)
    if not found and of_server:
        privacy = prepared.plan.config.privacy
        raise ConfigError(
            f"--epsilon {epsilon:g} is a budget for noise, and there is none: privacy.server = "
            f"{privacy.server.name!r} and privacy.client = {privacy.client.name!r}"
        )
    return found, epsilon
