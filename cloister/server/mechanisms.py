"""Construction of the configured mechanism around a strategy."""

from collections.abc import Callable

from flwr.serverapp.strategy import Strategy

from cloister.aggregation.canaries import Canaries
from cloister.aggregation.clustering import LaplaceClustering
from cloister.aggregation.decorator import Decorator, Screened
from cloister.aggregation.private_strategy import PrivateStrategy
from cloister.aggregation.secure_sum import SecureSum
from cloister.config import variants
from cloister.config.errors import suggestion
from cloister.config.run import RunConfig
from cloister.config.secure import shared_mean
from cloister.core.errors import ConfigError, PluginError
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.mechanisms import MECHANISMS
from cloister.privacy.mechanisms.mechanism import Mechanism
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.options import options_of


def decorate(strategy: Strategy, config: RunConfig, budget: PrivacyBudget, copy: Callable[[], Strategy]) -> Decorator:
    """Return the strategy inside the mechanism that `privacy.server` names.

    Args:
        strategy: samples the nodes and aggregates.
        config: of the run.
        budget: that releases are charged to.
        copy: returns another strategy of the same kind, for each hypothesis.

    Raises:
        ConfigError: the mechanism rejects the options, or is incompatible with the strategy.
        PluginError: the name of the mechanism is unknown.
    """
    server, seed = config.privacy.server, config.privacy.noise_seed
    if isinstance(server, variants.ClusteringPrivacy):
        return LaplaceClustering(strategy, copy, server.hypotheses, config.privacy.split_round)
    if isinstance(server, variants.NoServerPrivacy):
        return Screened(strategy, by_examples=config.weights_by_examples)
    if config.secure_aggregation.enabled:
        return SecureSum(strategy, shared_mean(config), budget=budget)
    own = None if seed == -1 else seed
    noise, canaries = GaussianNoise(own), Canaries.drawn(server.canaries, own)
    return PrivateStrategy(strategy, mechanism_of(server), budget=budget, noise=noise, canaries=canaries)


def mechanism_of(server: variants.GlobalPrivacy | variants.MetricPrivacy | variants.PluginPrivacy) -> Mechanism:
    """Return the mechanism that `privacy.server` names, with its options.

    Args:
        server: the section of the configuration.

    Raises:
        ConfigError: the mechanism rejects the options, or is a client mechanism.
        PluginError: the name is unknown.
    """
    if not isinstance(server, variants.PluginPrivacy):
        return server.mechanism()
    if server.name not in MECHANISMS.names():
        if server.name in variants.BY_NAME["client"]:
            raise ConfigError(
                f"privacy.server = {server.name!r} is a mechanism of the clients: use privacy.client = {server.name!r} "
                "and privacy.server = 'none'"
            )
        known = sorted({*MECHANISMS.names(), *variants.BY_NAME["server"]})
        raise PluginError(
            f"unknown mechanism privacy.server = {server.name!r}{suggestion(server.name, known)}; "
            f"known: {', '.join(known)}"
        )
    factory = MECHANISMS.load(server.name)
    options = options_of(factory, server.options, "privacy.options", server.name)
    try:
        return factory(**options)
    except TypeError as error:
        raise ConfigError(f"mechanism {server.name!r} does not take these options: {error}") from error
