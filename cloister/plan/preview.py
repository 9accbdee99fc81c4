"""Preview of a run, computed from the run's own objects so that it agrees with the later claims."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from flwr.app import Message

from cloister.config.run import RunConfig, parse
from cloister.config.section import Scalar
from cloister.core import check
from cloister.core.errors import BudgetExhausted, ConfigError
from cloister.local.grid import LocalGrid
from cloister.local.simulation import refuse_other_population, refuse_too_few, refuse_what_clients_would
from cloister.plan import allowance, within
from cloister.plan.allowance import Allowance
from cloister.plan.estimate import Timing, Traffic, timed, traffic
from cloister.plan.nodes import Asked, asked, configurations
from cloister.plan.noise import NoiseOnClient, noise_on_clients
from cloister.plan.series import Series, series_of_clients, series_of_server, shown_rounds
from cloister.plan.sizes import Sizes
from cloister.plan.within import Within
from cloister.privacy.claims.claim import ClientClaim
from cloister.privacy.dpsgd.local_steps import Holders
from cloister.server.clients import client_claim, shared_units
from cloister.server.drowning import low_snr_warnings
from cloister.server.forecast import Forecast, NoiseOnRelease, draft, first_messages, forecast, noise_on_release
from cloister.server.prepare import Prepared, prepare


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


def preview(settings: Mapping[str, Scalar], options: Options) -> Preview:
    """Compute the preview of a run. Nothing is sent, charged or written.

    Args:
        settings: dotted keys of the run configuration.
        options: of the plan.

    Raises:
        CloisterError: the run could not begin, or an option contradicts it.
    """
    from cloister.client.app import app

    config = parse(settings)
    _check(config, options)
    prepared = prepare(config, pretrain=False)
    grid = LocalGrid.simulated(app, config.flat(), options.clients)
    draft(prepared.plan, grid)
    messages = _messages(prepared, grid)
    with TemporaryDirectory() as folder:
        nodes = _nodes(config, options, messages, Path(folder))
        are_dealt = _are_dealt(config, nodes)
        shared = shared_units(prepared.plan, grid) if are_dealt else None
        return _worked_out(settings, options, prepared, messages, nodes, shared)


def _check(config: RunConfig, options: Options) -> None:
    """Refuse settings that the run, or a client, would refuse."""
    refuse_too_few(config, options.clients)
    refuse_other_population(config, options.clients)
    if options.epsilon:
        check.positive(**{"--epsilon": options.epsilon})
    if options.sizes:
        check.positive(**{"--public-size": min(options.sizes)})
        if not config.privacy.client.clips_gradients:
            raise ConfigError(
                f"--public-size {options.sizes[0]} has no effect with privacy.client = {config.privacy.client.name!r}: "
                "only 'dp-sgd' counts from it"
            )
    if options.timing:
        refuse_what_clients_would(config, options.clients)


def _messages(prepared: Prepared, grid: LocalGrid) -> list[Message]:
    """Return the messages of the first round; none if a budget ends the run before."""
    try:
        return first_messages(prepared, grid)
    except BudgetExhausted:
        return []


def _nodes(config: RunConfig, options: Options, messages: Sequence[Message], folder: Path) -> list[Asked]:
    """Return the nodes whose sizes or policies matter.

    With DP-SGD these are all nodes, otherwise one.
    """
    if not messages:
        return []
    configured = configurations(config, options.clients, options.sizes, options.policy)
    if not config.privacy.client.clips_gradients:
        configured = configured[:1]
    return asked(config, messages[0], configured, folder)


def _worked_out(
    settings: Mapping[str, Scalar],
    options: Options,
    prepared: Prepared,
    messages: Sequence[Message],
    nodes: list[Asked],
    shared: Collection[Holders] | None,
) -> Preview:
    plan, shown = prepared.plan, shown_rounds(prepared.plan.config.num_rounds)
    expected = forecast(prepared, shown, [] if shared is None else [node.steps for node in nodes], shared)
    sizes = _sizes(prepared, nodes, expected.rounds, shared or ())
    named = _named(sizes, nodes)
    refusal = nodes[0].refusal if nodes else ""
    allowances = (*allowance.of_server(expected), *_allowances(named, expected.rounds, refusal))
    limit = _limit(options, expected, allowances)
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
        client_claim(plan, prepared.layout, expected.rounds, list(sizes.shown), shared) if sizes else None,
        (*series_of_server(expected.statements), *series_of_clients(_claims(prepared, sizes, shared), reached)),
        allowances,
        refusal,
        tuple(_within(settings, prepared, named, limit)),
        limit.epsilon,
        tuple(
            low_snr_warnings(plan, prepared.layout, options.clients, [node.steps for node in nodes] if sizes else ())
        ),
        traffic(prepared, options.clients),
        timed(prepared, messages[0], options.clients) if times and messages else None,
    )


def _claims(
    prepared: Prepared, sizes: Sizes | None, shared: Collection[Holders] | None
) -> Callable[[int], ClientClaim | None]:
    """Return a function from a number of rounds to the costliest clients' claim."""
    steps = [sizes.costliest] if sizes else None
    return lambda rounds: client_claim(prepared.plan, prepared.layout, rounds, steps, shared)


def _are_dealt(config: RunConfig, nodes: Sequence[Asked]) -> bool:
    """Return whether clients of DP-SGD have the sizes of a simulation.

    If so, the run will have the same sizes.
    """
    return config.privacy.client.clips_gradients and all(node.node.config.partition_id is not None for node in nodes)


def _sizes(prepared: Prepared, nodes: list[Asked], rounds: int, shared: Collection[Holders]) -> Sizes | None:
    privacy = prepared.plan.config.privacy
    if not nodes or not privacy.client.clips_gradients:
        return None
    return Sizes.of(nodes, privacy.dp_sgd.mechanism(), rounds, privacy.target_delta, shared)


def _named(sizes: Sizes | None, nodes: list[Asked]) -> dict[str, Asked]:
    """Return the representative nodes, by their descriptions."""
    if sizes is None:
        return dict(zip(["each client's"], nodes, strict=False))
    return {f"a client's with {steps.examples} {node.unit}s": node for steps, node in sizes.shown.items()}


def _allowances(named: Mapping[str, Asked], rounds: int, refusal: str) -> list[Allowance]:
    """Return the allowances of the nodes' budgets; none if the policy refuses the run."""
    if refusal:
        return []
    return [found for whose, node in named.items() for found in allowance.of_node(node, whose, rounds)]


@dataclass(frozen=True)
class _Limit:
    """Budget for which noise and rounds are searched: ε, and whether the server may own it."""

    epsilon: float
    of_server: bool = True


def _limit(options: Options, expected: Forecast, allowances: Sequence[Allowance]) -> _Limit:
    """Return the requested budget, or one of the run's that covers no round."""
    if options.epsilon:
        return _Limit(options.epsilon)
    if expected.stopped and not expected.rounds:
        return _Limit(expected.prepared.plan.budget.max_epsilon)
    too_small = [found.limit for found in allowances if expected.rounds and not found.rounds]
    return _Limit(min(too_small, default=0.0), of_server=False)


def _within(
    settings: Mapping[str, Scalar], prepared: Prepared, named: Mapping[str, Asked], limit: _Limit
) -> list[Within]:
    if not limit.epsilon:
        return []
    found = list(within.of_server(settings, prepared, limit.epsilon)) if limit.of_server else []
    for whose, node in named.items():
        found += within.of_node(settings, node, whose, limit.epsilon)
    if not found and limit.of_server:
        raise ConfigError(
            f"--epsilon {limit.epsilon:g} is a budget for noise, and there is none: privacy.server = "
            f"{prepared.plan.config.privacy.server.name!r} and privacy.client = "
            f"{prepared.plan.config.privacy.client.name!r}"
        )
    return found
