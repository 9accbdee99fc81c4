"""From a run configuration to the objects of a run: the one place where a strategy meets its privacy."""

import hashlib
import inspect
import random
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Strategy

from cloister.aggregation import GlobalDP, LaplaceClustering, MetricDP
from cloister.aggregation.decorator import Decorator, Screened
from cloister.config import variants
from cloister.config.errors import suggestion
from cloister.config.run import RunConfig, known_keys
from cloister.config.section import Scalar
from cloister.core.arrays import Layout
from cloister.core.errors import ConfigError, PluginError
from cloister.privacy.accounting.account import Account, best_epsilon
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Relation
from cloister.privacy.accounting.filters import FilterKind
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.claims.claim import Claim
from cloister.privacy.mechanisms.clipping import AdaptiveClip, FixedClip
from cloister.privacy.mechanisms.noise import GaussianNoise
from cloister.server.quorum import later_quorum
from cloister.strategies import STRATEGIES
from cloister.strategies.averaging import Sampled
from cloister.strategies.sampling import HeldOut, Sampling
from cloister.tasks import TASKS
from cloister.tasks.base import Task

NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
"""Arguments that can be given by name."""


@dataclass(frozen=True)
class Plan:
    """Everything a run is made of.

    Attributes:
        config: as it was given.
        seed: the seed in force: the configured one, or one drawn for this run. It never seeds noise.
        task: the learning problem.
        strategy: the named strategy inside its decorator.
        budget: of the run's releases.
        held_out: deals out the roles of nodes, where some never train; None where all do.
    """

    config: RunConfig
    seed: int
    task: Task
    strategy: Decorator
    budget: PrivacyBudget
    held_out: HeldOut | None = None

    @property
    def is_accounted(self) -> bool:
        """Whether the server's mechanism makes a promise that composes over rounds."""
        return isinstance(self.strategy, GlobalDP) and self.strategy.is_accounted

    @property
    def samples_by_itself(self) -> bool:
        """Whether the strategy draws nodes in a way of its own, which is not looked into."""
        return not isinstance(self.strategy.inner, Sampled)

    @property
    def hides_times(self) -> bool:
        """Whether a draw is accounted for, of clients or of clients' examples: how long it took would tell of it."""
        privacy = self.config.privacy
        batches = privacy.client.clips_gradients and privacy.dp_sgd.batch_sampling == "poisson"
        return batches or self.strategy.has_secret_cohorts

    def maximum_epsilon(self, layout: Layout) -> float | None:
        """ε that this run promises if it runs to its end; None where nothing is promised for the models."""
        if not isinstance(self.strategy, GlobalDP) or self.claim.status != "sound":
            return None
        return best_epsilon(self.planned(layout), self.budget.delta)[0]

    def planned(self, layout: Layout, insiders: bool = True) -> Account:
        """Everything that this run releases if it runs to its end; nothing where the server noises nothing.

        Args:
            layout: of the model.
            insiders: as in `Account`.
        """
        account = Account((), self.budget.relation, insiders)
        for event in self.strategy.worst_events(layout) if isinstance(self.strategy, GlobalDP) else ():
            account = account.plus(event, self.config.num_rounds)
        return account

    @property
    def unprotected_releases(self) -> list[str]:
        """What leaves clients in this run without a guarantee for a client, beside what is recorded round by round."""
        reasons = []
        if not self.config.privacy.server.is_noised:
            reasons.append(f"privacy.server is {self.config.privacy.server.name!r}: the server noised no update")
        if self.config.evaluates_on_clients:
            reasons.append("scores on clients' examples left without noise")
        return reasons

    @property
    def hypotheses(self) -> int:
        """How many models are trained side by side; 0: one, under its own names."""
        return self.strategy.hypotheses if isinstance(self.strategy, LaplaceClustering) else 0

    def _unprotected(self) -> list[str]:
        items = _unprotected(self.config, self.is_accounted)
        if self.strategy.has_secret_cohorts and self.config.strategy.sampling == "poisson":
            items.append(
                "how long a round takes, to every client of the next one: where that tells that a client was drawn, as "
                "of one slower than all others, the draw amplifies nothing against clients who measure it"
            )
        return items

    @property
    def claim(self) -> Claim:
        """What may be said about the models, with what leaves beside them."""
        base = self.strategy.claim() if isinstance(self.strategy, GlobalDP) else Claim("none")
        reasons = base.reasons
        if base.mechanism != "none" and self.config.evaluates_on_clients:
            # The ledger holds them too, so that no ε is left to claim.
            reasons = (*reasons, "scores of the model on clients' own examples leave without noise")
        return replace(base, reasons=reasons, unprotected=tuple(self._unprotected()))


def build(config: RunConfig) -> Plan:
    """Make the objects of a run; nothing has been sent yet when this fails.

    Raises:
        ConfigError: the configuration asks for what cannot be.
        PluginError: a name is unknown.
        LedgerError: the ledger of this data is broken.
    """
    seed = secrets.randbelow(2**31) if config.seed == -1 else config.seed
    task: Task = TASKS.load(config.task.name)(config.task)
    budget = _budget(config)
    held_out = _held_out(config)
    strategy = decorate(named_strategy(config, held_out=held_out), config, budget)
    limit = config.privacy.server.max_epsilon
    if limit and isinstance(strategy, GlobalDP) and not strategy.is_accounted:
        raise ConfigError(
            f"privacy.max-epsilon = {limit:g} is a budget for a guarantee, and there is none: "
            + "; ".join(strategy.caveats())
        )
    if config.privacy.client.counts_leakage:
        _refuse_beside_laplace(config)
    if limit and config.evaluates_on_clients:
        raise ConfigError(
            f"privacy.max-epsilon = {limit:g} cannot cover evaluation.federated = "
            f"{config.evaluation.federated!r}: scores on clients' examples leave without noise"
        )
    _demand_replies(strategy, config.strategy.min_replies)
    return Plan(config, seed, task, strategy, budget, held_out)


def _demand_replies(strategy: Decorator, least: int) -> None:
    """Let rounds with fewer replies be abandoned.

    Raises:
        ConfigError: there is a guarantee that this would break.
    """
    if least and isinstance(strategy, GlobalDP) and strategy.is_accounted:
        raise ConfigError(
            f"strategy.min-replies = {least} contradicts the guarantee of privacy.server = {strategy.mechanism!r}: "
            "whether a round is abandoned would tell whether one more client replied; use 0"
        )
    strategy.min_replies = least


def _refuse_beside_laplace(config: RunConfig) -> None:
    """Refuse what would go past the noise of the clients."""
    if config.weights_by_examples:
        raise ConfigError(
            f"strategy.weighting = {config.strategy.weighting!r} contradicts privacy.client = 'laplace': clients send "
            "what they have noised and nothing else, no example count; use 'uniform'"
        )
    if config.privacy.client.max_leakage and not config.privacy.client.noise_multiplier:
        raise ConfigError(
            f"privacy.max-leakage = {config.privacy.client.max_leakage:g} cannot be kept with "
            "privacy.client-noise-multiplier = 0: a release without noise leaks without limit"
        )


def _budget(config: RunConfig) -> PrivacyBudget:
    privacy = config.privacy
    folder = Path(privacy.ledger_dir or Path(config.output_dir) / "ledgers").expanduser().resolve()
    path = folder / f"{data_identity(config)}.jsonl"
    relation: Relation = "replace-one" if privacy.server.population else "add-or-remove"
    # Only Rényi DP counts draws; `fixed` ones are known to the clients together, and amplify nothing in a budget.
    amplified = config.strategy.sampling == "poisson" and isinstance(privacy.server, variants.GlobalPrivacy)
    kind: FilterKind = "renyi" if amplified and config.strategy.fraction_train < 1 else "gaussian"
    return PrivacyBudget(Ledger(path), "", "client", privacy.target_delta, privacy.server.max_epsilon, relation, kind)


def data_identity(config: RunConfig) -> str:
    """The name of the data that budgets are about: as given, or the task with a digest of where its data lies."""
    if config.privacy.data_identity:
        return config.privacy.data_identity
    path = Path(config.task.data_path).expanduser().resolve() if config.task.data_path else ""
    place = hashlib.sha256(f"{config.task.name} {path}".encode()).hexdigest()[:12]
    return f"{config.task.name}-{place}"


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
    options = _options(factory, config)
    if _takes_draws(factory):
        sampling = _draws(config, draws, held_out or _held_out(config))
    else:
        sampling = _own_sampling(factory, config)
    try:
        strategy: Strategy = factory(**{**sampling, **options})
    except TypeError as error:
        raise ConfigError(f"strategy {config.strategy.name!r} does not take these options: {error}") from error
    return strategy


def _takes_draws(factory: Any) -> bool:
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


def _own_sampling(factory: Any, config: RunConfig) -> dict[str, Any]:
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


def _options(factory: Any, config: RunConfig) -> dict[str, Scalar]:
    """The options the strategy was given, by the names of its constructor.

    Raises:
        ConfigError: the strategy has no such option, or the value is not of its type.
    """
    allowed = {
        name: parameter.default
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind in NAMED and name not in ("train", "evaluate") and _is_scalar(parameter.default)
    }
    options: dict[str, Scalar] = {}
    for key, value in config.strategy.options.items():
        name = key.replace("-", "_")
        if name not in allowed:
            valid = [option.replace("_", "-") for option in sorted(allowed)]
            shared = [known.removeprefix("strategy.") for known in known_keys() if known.startswith("strategy.")]
            raise ConfigError(
                f"strategy.{key} = {value!r} is not an option of {config.strategy.name!r}"
                f"{suggestion(key, [*valid, *shared])}; "
                f"its options: {', '.join(f'strategy.{option}' for option in valid) or 'none'}"
            )
        options[name] = _typed(f"strategy.{key}", value, allowed[name])
    return options


def _is_scalar(default: Any) -> bool:
    """Whether an argument with this default can be given in a configuration."""
    return default is inspect.Parameter.empty or isinstance(default, str | int | float | bool)


def _typed(key: str, value: Scalar, default: Any) -> Scalar:
    """`value`, if it is of the type of the default (an int will do for a float)."""
    if default is inspect.Parameter.empty or type(value) is type(default):
        return value
    if isinstance(default, float) and type(value) is int:
        return float(value)
    raise ConfigError(f"{key} = {value!r} is not valid: expected {type(default).__name__}, such as {default!r}")


def _sampling(config: RunConfig, use: str, fraction: float, kind: Any) -> Sampling:
    # Amplification relies on a secret draw: `poisson` is never seeded.
    rng = _rng(config, use) if kind == "fixed" else random.SystemRandom()
    strategy, population = config.strategy, config.privacy.server.population
    return Sampling(
        fraction, strategy.min_nodes, kind, config.node_timeout, rng, population, quorum=later_quorum(config)
    )


def _held_out(config: RunConfig) -> HeldOut | None:
    """Who never trains, decided by the run's seed: which of them it is is no secret."""
    fraction = config.evaluation.held_out_clients
    return HeldOut(fraction, _rng(config, "held out")) if fraction else None


def _rng(config: RunConfig, use: str) -> random.Random:
    """Each use of a seed has a stream of its own."""
    return random.SystemRandom() if config.seed == -1 else random.Random(f"{config.seed} {use}")


def decorate(strategy: Strategy, config: RunConfig, budget: PrivacyBudget) -> Decorator:
    """The decorator that `privacy.server` names, around the strategy."""
    privacy, server = config.privacy, config.privacy.server
    if isinstance(server, variants.ClusteringPrivacy):
        return LaplaceClustering(strategy, lambda: named_strategy(config, draws=False), server.hypotheses)
    if isinstance(server, variants.PluginPrivacy):
        known = variants.BY_NAME["server"]
        raise PluginError(
            f"unknown mechanism {server.name!r}; known: {', '.join(known)}{suggestion(server.name, known)}"
        )
    if not isinstance(server, variants.MetricPrivacy | variants.GlobalPrivacy):
        return Screened(strategy, by_examples=config.weights_by_examples)
    if not isinstance(server, variants.MetricPrivacy):
        return GlobalDP(strategy, budget=budget, **_gaussian(server, privacy.noise_seed))
    return MetricDP(
        strategy,
        budget=budget,
        **_gaussian(server, privacy.noise_seed),
        distance=server.distance,
        direction=server.distance_direction,
        measure=server.distance_clip,
        release=server.distance_release,
        distance_multiplier=server.distance_noise_multiplier,
        min_distance=server.min_distance,
        max_distance=server.max_distance,
    )


def _gaussian(server: variants.GlobalPrivacy | variants.MetricPrivacy, noise_seed: int) -> dict[str, Any]:
    return {
        # A multiplier that is left to calibration is chosen when the model's layout is known.
        "noise_multiplier": 1.0 if server.noise_multiplier == "auto" else server.noise_multiplier,
        "clipping_norm": _clip(server.clipping),
        "placement": server.placement,
        "noise": GaussianNoise(None if noise_seed == -1 else noise_seed),
        "examples_cap": server.examples_cap,
    }


def _clip(clipping: variants.Clipping) -> FixedClip:
    if not isinstance(clipping, variants.AdaptiveClipping):
        return FixedClip(clipping.norm)
    return AdaptiveClip(
        clipping.norm,
        quantile=clipping.quantile,
        rate=clipping.rate,
        bits_multiplier=clipping.bits_noise_multiplier,
    )


def _unprotected(config: RunConfig, is_accounted: bool) -> list[str]:
    """What leaves beside the models."""
    items = [
        "which nodes are connected, which of them replied, and when, to the server and its network",
        "error replies: of which kind the error was (data, budget, policy), and which replies were malformed",
    ]
    if not is_accounted:
        items.append("that a run ends because nobody's reply counted")
    if not config.is_private:
        items.append("every client's model, example count and training loss, to the server")
    elif not config.privacy.server.is_noised and not (config.privacy.client.noise_multiplier):
        items.append("every client's model, to the server")
    elif config.weights_by_examples:
        items.append("every client's example count, to the server")
    server = config.privacy.server
    if isinstance(server, variants.MetricPrivacy) and server.distance_release == "exact":
        items.append("how far the clients' models lie apart: the standard deviation of the noise tells it")
    if config.evaluates_on_clients:
        items.append("scores of the global model on each client's own examples, and how many there were")
    return items
