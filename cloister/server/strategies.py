"""The strategy that a configuration names: its options, and how it draws nodes."""

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
    """The strategy that `strategy.name` names, with its options and its sampling.

    One that takes no draws of ours, such as Flower's own, samples by itself; it is given what its arguments ask for.

    Args:
        config: of the run.
        draws: whether its draws are asked for; one that only aggregates draws as few nodes as it can.
        held_out: deals out the roles; None: one is made if the configuration holds nodes out.

    Raises:
        ConfigError: it has no such options, or samples by itself where a draw of ours is configured.
    """
    factory = STRATEGIES.load(config.strategy.name)
    shared = [key.removeprefix("strategy.") for key in known_keys() if key.startswith("strategy.")]
    options = options_of(factory, config.strategy.options, "strategy", config.strategy.name, shared)
    if _takes_draws(factory):
        sampling = _draws(config, draws, held_out or held_out_of(config))
    else:
        sampling = _own_sampling(factory, config)
    try:
        return factory(**{**sampling, **options})
    except TypeError as error:
        raise ConfigError(f"strategy {config.strategy.name!r} does not take these options: {error}") from error


def _takes_draws(factory: Callable[..., Strategy]) -> bool:
    """Whether a strategy is told by us how nodes are drawn."""
    if isinstance(factory, type) and issubclass(factory, Sampled):
        return True
    return {"train", "evaluate"} <= set(inspect.signature(factory).parameters)


def _draws(config: RunConfig, draws: bool, held_out: HeldOut | None) -> dict[str, Any]:
    """How nodes are drawn to train and to score."""
    fraction = config.strategy.fraction_train if draws else 1e-9
    train = _sampling(config, "train", fraction, config.strategy.sampling)
    evaluate = _sampling(config, "evaluate", config.strategy.fraction_evaluate, "fixed")
    # Scores are worth no pause: whoever is connected gives them.
    evaluate = replace(evaluate, quorum=0, population=0, held_out=held_out, from_held_out=held_out is not None)
    return {
        "train": replace(train, held_out=held_out),
        "evaluate": evaluate if config.evaluates_on_clients else None,
    }


def _own_sampling(factory: Callable[..., Strategy], config: RunConfig) -> dict[str, Any]:
    """The arguments of Flower's strategies that mean what keys of ours mean, as far as this one has them.

    Raises:
        ConfigError: a key asks for a draw that only a strategy with our sampling makes.
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
    # Amplification relies on a secret draw: `poisson` is never seeded.
    rng = _rng(config, use) if kind == "fixed" else random.SystemRandom()
    strategy, population = config.strategy, config.privacy.server.population
    return Sampling(
        fraction, strategy.min_nodes, kind, config.node_timeout, rng, population, quorum=later_quorum(config)
    )


def held_out_of(config: RunConfig) -> HeldOut | None:
    """Who never trains, decided by the run's seed: which of them it is is no secret."""
    fraction = config.evaluation.held_out_clients
    return HeldOut(fraction, _rng(config, "held out")) if fraction else None


def _rng(config: RunConfig, use: str) -> random.Random:
    """Each use of a seed has a stream of its own."""
    return random.SystemRandom() if config.seed == -1 else random.Random(f"{config.seed} {use}")
