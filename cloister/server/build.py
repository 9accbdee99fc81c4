"""Construction of the objects of a run from its configuration: plugin options, strategy, mechanism, budget."""

import hashlib
import inspect
import random
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flwr.serverapp.strategy import Strategy

from cloister.config import variants
from cloister.config.io import Scalar
from cloister.config.run import RunConfig, known_keys
from cloister.privacy.accounting.account import best_epsilon, composed
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.filters import FilterKind
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.accounting.vocabulary import Relation
from cloister.privacy.claims.claim import Claim
from cloister.privacy.claims.premises import UNBROKEN, Premise
from cloister.privacy.claims.server import visible
from cloister.privacy.mechanisms import MECHANISMS
from cloister.privacy.mechanisms.distributed.steps import DistributedStep
from cloister.privacy.mechanisms.mechanism import Mechanism
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.canaries import Canaries
from cloister.server.clustering import LaplaceClustering
from cloister.server.polling_grid import later_quorum
from cloister.server.private_strategy import PrivateStrategy
from cloister.server.secure_steps import SecureSteps
from cloister.server.secure_sum import SecureSum
from cloister.server.strategy_wrapper import NoPrivacyStrategy, StrategyWrapper
from cloister.strategies import STRATEGIES as STRATEGIES
from cloister.strategies.averaging import HeldOut, Sampled, Sampling
from cloister.tasks.base import Recipe, Task
from cloister.tasks.making import named_task
from cloister.tasks.recipe import recipe_of
from cloister.training.plan import Schedule
from cloister.utils.arrays import Layout
from cloister.utils.errors import ConfigError
from cloister.utils.files import expanded
from cloister.utils.text import suggestion

NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
"""Kinds of parameters that accept a keyword argument."""


def options_of(
    factory: Callable[..., object], given: Mapping[str, Scalar], section: str, name: str, shared: Collection[str] = ()
) -> dict[str, Scalar]:
    """Return the options of a plugin by the parameter names of its constructor.

    Args:
        factory: constructs the plugin.
        given: the options by their keys.
        section: of the keys, `strategy` or `privacy.options`, for the message.
        name: of the plugin.
        shared: further valid keys of the section, for spelling suggestions.

    Raises:
        ConfigError: the plugin has no such option, or the value has another type.
    """
    allowed = {
        option: parameter.default
        for option, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind in NAMED
        and option not in ("train", "evaluate")
        # A configuration can set these alone.
        and (parameter.default is inspect.Parameter.empty or isinstance(parameter.default, str | int | float | bool))
    }
    found: dict[str, Scalar] = {}
    for key, value in given.items():
        option = key.replace("-", "_")
        if option not in allowed:
            valid = [each.replace("_", "-") for each in sorted(allowed)]
            raise ConfigError(
                f"{section}.{key} = {value!r} is not an option of {name!r}{suggestion(key, [*valid, *shared])}; "
                f"its options: {', '.join(f'{section}.{each}' for each in valid) or 'none'}"
            )
        default = allowed[option]
        if default is inspect.Parameter.empty or type(value) is type(default):
            found[option] = value
        elif isinstance(default, float) and type(value) is int:
            found[option] = float(value)
        else:
            wanted = f"expected {type(default).__name__}, such as {default!r}"
            raise ConfigError(f"{section}.{key} = {value!r} is not valid: {wanted}")
    return found


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


def decorate(
    strategy: Strategy, config: RunConfig, budget: PrivacyBudget, copy: Callable[[], Strategy]
) -> StrategyWrapper:
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
    shared = config.shared_release
    if isinstance(shared, DistributedStep):
        recipe = recipe_of(named_task(config.task), config.client, config.privacy)
        schedule = Schedule.of(recipe, config.num_rounds)
        step = replace(shared, rate=lambda number: recipe.learning_rate * schedule.share(number, 0, 1))
        return SecureSteps(strategy, step, budget=budget)
    if shared is not None:
        return SecureSum(strategy, shared, budget=budget)
    if isinstance(server, variants.NoServerPrivacy):
        return NoPrivacyStrategy(strategy, by_examples=config.weights_by_examples)
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
        raise MECHANISMS.unknown(server.name, {*MECHANISMS.names(), *variants.BY_NAME["server"]})
    factory = MECHANISMS.load(server.name)
    options = options_of(factory, server.options, "privacy.options", server.name)
    try:
        return factory(**options)
    except TypeError as error:
        raise ConfigError(f"mechanism {server.name!r} does not take these options: {error}") from error


@dataclass(frozen=True)
class Plan:
    """Objects of a run.

    Attributes:
        config: as given.
        seed: the configured one, or one drawn for this run. It never seeds noise.
        task: the learning problem.
        strategy: the named strategy inside its mechanism.
        budget: that the run's releases are charged to.
        recipe: the training recipe of the clients.
        held_out: assigns the roles of nodes if some only evaluate; None: all train.
        resumes: number of resumes. Each may repeat one round, requests and releases included.
    """

    config: RunConfig
    seed: int
    task: Task
    strategy: StrategyWrapper
    budget: PrivacyBudget
    recipe: Recipe
    held_out: HeldOut | None = None
    resumes: int = 0

    @property
    def is_accounted(self) -> bool:
        """Return whether the server's guarantee composes over rounds."""
        return self.strategy.is_accounted

    @property
    def samples_by_itself(self) -> bool:
        """Return whether the strategy samples nodes by its own, unknown rule."""
        return not isinstance(self.strategy.inner, Sampled)

    def cohort(self, nodes: int) -> float:
        """Return the expected cohort size for `nodes` connected nodes.

        It is the number of nodes if the strategy samples by itself.
        """
        held_out = int(self.config.evaluation.held_out_clients * nodes + 1e-9)
        inner = self.strategy.inner
        return inner.train_sampling.expected(nodes - held_out) if isinstance(inner, Sampled) else nodes

    @property
    def hides_times(self) -> bool:
        """Return whether durations are hidden, as they would reveal random draws.

        Such draws are those of clients, and of clients' examples with Poisson batches.
        """
        privacy = self.config.privacy
        batches = privacy.client.clips_gradients and privacy.dp_sgd.batch_sampling == "poisson"
        return batches or self.strategy.has_secret_cohorts

    def maximum_epsilon(self, layout: Layout) -> float | None:
        """Return ε at the end of the planned rounds; None without a guarantee."""
        if not self.claim.is_guaranteed:
            return None
        account = composed(self.planned(layout), self.budget.relation, insiders=True)
        return best_epsilon(account, self.budget.delta)[0]

    def planned(self, layout: Layout) -> Counter[Event]:
        """Return the count of each event over all planned rounds.

        It is empty if the server adds no noise.
        """
        found: Counter[Event] = Counter()
        for event in self.strategy.events(layout):
            found[event] += self.config.num_rounds + self.resumes
        return found

    @property
    def unprotected_releases(self) -> list[str]:
        """Return the releases without a client-level guarantee.

        Releases that the ledger records round by round are not included.
        """
        reasons = []
        if not self.config.privacy.server.is_noised:
            reasons.append(f"privacy.server is {self.config.privacy.server.name!r}: the server noised no update")
        if self.config.evaluates_on_clients:
            reasons.append("scores on clients' examples left without noise")
        return reasons

    @property
    def hypotheses(self) -> int:
        """Return the number of models trained side by side; 0: one model."""
        return self.strategy.hypotheses

    @property
    def claim(self) -> Claim:
        """Return the claim about the models, with unprotected information."""
        base, config = self.strategy.claim(), self.config
        server, reasons = config.privacy.server, base.reasons
        if base.mechanism != "none" and config.evaluates_on_clients:
            # The ledger contains these scores too, so that no finite ε remains.
            reasons = (*reasons, "scores of the model on clients' own examples leave without noise")
        items = [*visible(self.strategy.has_secret_cohorts and config.strategy.sampling == "poisson")]
        items.append(
            "error replies: of which kind the error was (data, budget, policy), and which replies were malformed"
        )
        if not self.is_accounted:
            items.append("that a run ends because no reply counted")
        if not config.is_private:
            items.append("every client's model, example count and training loss, to the server")
        elif not server.is_noised and not config.privacy.client.noise_multiplier:
            seen = config.shared_release.seen if config.shared_release else "every client's model"
            items.append(f"{seen}, to the server")
        elif config.weights_by_examples:
            items.append("every client's example count, to the server")
        if isinstance(server, variants.MetricPrivacy) and server.distance_release == "exact":
            items.append("how far the clients' models lie apart: the standard deviation of the noise tells it")
        if config.secure_aggregation.enabled:
            items.append("whose updates are in the sum of a round, to the server and to all clients of the round")
        if config.strategy.pretrain_epochs:
            items.append("the server's own examples: the initial model was trained on them without noise")
        if config.evaluates_on_clients:
            items.append("scores of the global model on each client's own examples, and how many there were")
        premises = (*base.premises, *self.resumed_on) if base.premises else ()
        return replace(base, reasons=reasons, unprotected=tuple(items), premises=premises)

    @property
    def resumed_on(self) -> tuple[Premise, ...]:
        """Return the premise of every claim about a run that was resumed; nothing for another run."""
        return (UNBROKEN,) if self.resumes else ()


def build(config: RunConfig) -> Plan:
    """Build the objects of a run, without sending a message.

    Raises:
        ConfigError: the configuration contradicts itself.
        PluginError: a name is unknown.
        LedgerError: the ledger of this data is damaged.
    """
    seed = secrets.randbelow(2**31) if config.seed == -1 else config.seed
    task = named_task(config.task)
    recipe = recipe_of(task, config.client, config.privacy)
    privacy = config.privacy
    folder = expanded(privacy.ledger_dir or Path(config.output_dir) / "ledgers").resolve()
    ledger = Ledger(folder / f"{data_identity(config)}.jsonl")
    relation: Relation = "replace-one" if privacy.server.population else "add-or-remove"
    # Only Rényi DP counts draws. The clients together can determine a `fixed` draw, so that it does not amplify.
    amplified = config.strategy.sampling == "poisson" and isinstance(privacy.server, variants.GlobalPrivacy)
    kind: FilterKind = "renyi" if amplified and config.strategy.fraction_train < 1 else "gaussian"
    limit = privacy.server.max_epsilon
    budget = PrivacyBudget(ledger, "", "client", privacy.target_delta, limit, relation, kind)
    held_out = held_out_of(config)
    strategy = decorate(
        named_strategy(config, held_out=held_out), config, budget, lambda: named_strategy(config, draws=False)
    )
    if limit and not strategy.is_accounted:
        raise ConfigError(
            f"privacy.max-epsilon = {limit:g} is a budget for a guarantee, and there is none: "
            + "; ".join(strategy.caveats())
        )
    client, minimum = privacy.client, config.strategy.min_replies
    if client.counts_leakage and config.weights_by_examples:
        raise ConfigError(
            f"strategy.weighting = {config.strategy.weighting!r} contradicts privacy.client = 'laplace': clients send "
            "what they have noised and nothing else, no example count; use 'uniform'"
        )
    if client.counts_leakage and client.max_leakage and not client.noise_multiplier:
        raise ConfigError(
            f"privacy.max-leakage = {client.max_leakage:g} cannot be kept with {client.noise_key} = 0: a "
            "release without noise leaks without limit"
        )
    if limit and config.evaluates_on_clients:
        raise ConfigError(
            f"privacy.max-epsilon = {limit:g} cannot cover evaluation.federated = "
            f"{config.evaluation.federated!r}: scores on clients' examples leave without noise"
        )
    if minimum and strategy.is_accounted:
        raise ConfigError(
            f"strategy.min-replies = {minimum} contradicts the guarantee of privacy.server = "
            f"{strategy.claim().mechanism!r}: whether a round is abandoned would "
            "tell whether one more client replied; use 0"
        )
    strategy.min_replies = minimum
    return Plan(config, seed, task, strategy, budget, recipe, held_out)


def data_identity(config: RunConfig) -> str:
    """Return the name of a budget's data: the configured one, or `place_of`."""
    return config.privacy.data_identity or place_of(config)


def place_of(config: RunConfig) -> str:
    """Return the default name of the data: the task and a digest of its path."""
    path = expanded(config.task.data_path).resolve() if config.task.data_path else ""
    place = hashlib.sha256(f"{config.task.name} {path}".encode()).hexdigest()[:12]
    return f"{config.task.name}-{place}"
