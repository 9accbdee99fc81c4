"""Construction of the configured strategy: its options and its node sampling."""

import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from flwr.serverapp.strategy import Strategy

from cloister.config.run import RunConfig, known_keys
from cloister.core.errors import ConfigError
from cloister.server.options import options_of
from cloister.server.quorum import later_quorum
from cloister.strategies import STRATEGIES as STRATEGIES
from cloister.strategies.averaging import Sampled
from cloister.strategies.sampling import HeldOut, Sampling


def named_strategy(config: RunConfig, draws: bool = True, held_out: HeldOut | None = None) -> Strategy:
    """Return the strategy `strategy.name`, with its options and sampling.

    A strategy without arguments for Cloister's sampling, such as Flower's own, samples by itself. It receives the
    settings that match its arguments.

    Args:
        config: of the run.
        draws: whether the strategy samples nodes. One that only aggregates receives the smallest sampling fraction.
        held_out: assigns the roles; None: created if the configuration holds nodes out.

    Raises:
        ConfigError: it rejects the options, or samples by itself although Cloister's sampling is configured.
    """
    factory = STRATEGIES.load(config.strategy.name)
    shared = [key.removeprefix("strategy.") for key in known_keys() if key.startswith("strategy.")]
    options = options_of(factory, config.strategy.options, "strategy", config.strategy.name, shared)
    takes_draws = isinstance(factory, type) and issubclass(factory, Sampled)
    if takes_draws or {"train", "evaluate"} <= set(inspect.signature(factory).parameters):
        held_out = held_out or held_out_of(config)
        fraction = config.strategy.fraction_train if draws else 1e-9
        train = _sampling(config, "train", fraction, config.strategy.sampling)
        evaluate = _sampling(config, "evaluate", config.strategy.fraction_evaluate, "fixed")
        # Evaluation never waits for nodes: the connected ones are enough.
        evaluate = replace(evaluate, quorum=0, population=0, held_out=held_out, from_held_out=held_out is not None)
        sampling: dict[str, Any] = {
            "train": replace(train, held_out=held_out),
            "evaluate": evaluate if config.evaluates_on_clients else None,
        }
    else:
        sampling = _own_sampling(factory, config)
    try:
        return factory(**{**sampling, **options})
    except TypeError as error:
        raise ConfigError(f"strategy {config.strategy.name!r} does not take these options: {error}") from error


def _own_sampling(factory: Callable[..., Strategy], config: RunConfig) -> dict[str, Any]:
    """Return the arguments of a Flower strategy that match Cloister's keys.

    Raises:
        ConfigError: a key requires Cloister's sampling.
    """
    for key, value, default in (
        ("strategy.sampling", config.strategy.sampling, "fixed"),
        ("privacy.population", config.privacy.server.population, 0),
        ("evaluation.held-out-clients", config.evaluation.held_out_clients, 0.0),
    ):
        if value != default:
            raise ConfigError(
                f"{key} = {value!r} has no effect with strategy.name = {config.strategy.name!r}: "
                "it draws nodes by itself; remove it, or use a strategy of Cloister"
            )
    quorum = later_quorum(config)
    means = {
        "fraction_train": config.strategy.fraction_train,
        "fraction_evaluate": config.strategy.fraction_evaluate if config.evaluates_on_clients else 0.0,
        **dict.fromkeys(("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), quorum),
    }
    return {name: value for name, value in means.items() if name in inspect.signature(factory).parameters}


def _sampling(config: RunConfig, use: str, fraction: float, kind: Literal["fixed", "poisson"]) -> Sampling:
    # Amplification relies on a secret draw, so that `poisson` is never seeded.
    rng = _rng(config, use) if kind == "fixed" else random.SystemRandom()
    strategy, population = config.strategy, config.privacy.server.population
    return Sampling(
        fraction, strategy.min_nodes, kind, config.node_timeout, rng, population, quorum=later_quorum(config)
    )


def held_out_of(config: RunConfig) -> HeldOut | None:
    """Return the roles of held-out nodes; None without any.

    They follow from the run's seed, and are public.
    """
    fraction = config.evaluation.held_out_clients
    return HeldOut(fraction, _rng(config, "held out")) if fraction else None


def _rng(config: RunConfig, use: str) -> random.Random:
    """Return an independent random stream for each use of the seed."""
    return random.SystemRandom() if config.seed == -1 else random.Random(f"{config.seed} {use}")
