"""From a run configuration to the objects of a run: the one place where a strategy meets its privacy."""

import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from cloister.aggregation.decorator import Decorator
from cloister.config import variants
from cloister.config.run import RunConfig
from cloister.core.arrays import Layout
from cloister.core.errors import ConfigError
from cloister.core.files import expanded
from cloister.privacy.accounting.account import best_epsilon, composed
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Event
from cloister.privacy.accounting.filters import FilterKind
from cloister.privacy.accounting.ledger import Ledger
from cloister.privacy.accounting.vocabulary import Relation
from cloister.privacy.claims.claim import Claim
from cloister.privacy.claims.premises import UNBROKEN, Premise
from cloister.privacy.claims.server import visible
from cloister.server.mechanisms import decorate
from cloister.server.strategies import held_out_of, named_strategy
from cloister.strategies.averaging import Sampled
from cloister.strategies.sampling import HeldOut
from cloister.tasks.base import Recipe, Task
from cloister.tasks.making import named_task
from cloister.tasks.training.recipe import recipe_of


@dataclass(frozen=True)
class Plan:
    """Everything a run is made of.

    Attributes:
        config: as it was given.
        seed: the seed in force: the configured one, or one drawn for this run. It never seeds noise.
        task: the learning problem.
        strategy: the named strategy inside its mechanism.
        budget: of the run's releases.
        recipe: that clients train by.
        held_out: deals out the roles of nodes, where some never train; None where all do.
        resumes: how often the run was resumed: as many rounds may have been asked for, and released, once more.
    """

    config: RunConfig
    seed: int
    task: Task
    strategy: Decorator
    budget: PrivacyBudget
    recipe: Recipe
    held_out: HeldOut | None = None
    resumes: int = 0

    @property
    def is_accounted(self) -> bool:
        """Whether the server's mechanism makes a promise that composes over rounds."""
        return self.strategy.is_accounted

    @property
    def samples_by_itself(self) -> bool:
        """Whether the strategy draws nodes in a way of its own, which is not looked into."""
        return not isinstance(self.strategy.inner, Sampled)

    def cohort(self, nodes: int) -> float:
        """How many of so many nodes train in a round, on average where the draw is secret; all, if nobody knows."""
        held_out = int(self.config.evaluation.held_out_clients * nodes + 1e-9)
        inner = self.strategy.inner
        return inner.train_sampling.expected(nodes - held_out) if isinstance(inner, Sampled) else nodes

    @property
    def hides_times(self) -> bool:
        """Whether a draw is accounted for, of clients or of clients' examples: how long it took would tell of it."""
        privacy = self.config.privacy
        batches = privacy.client.clips_gradients and privacy.dp_sgd.batch_sampling == "poisson"
        return batches or self.strategy.has_secret_cohorts

    def maximum_epsilon(self, layout: Layout) -> float | None:
        """ε that this run promises if it runs to its end; None where nothing is promised for the models."""
        if not self.claim.is_guaranteed:
            return None
        account = composed(self.planned(layout), self.budget.relation, insiders=True)
        return best_epsilon(account, self.budget.delta)[0]

    def planned(self, layout: Layout) -> Counter[Event]:
        """Everything that this run releases if it runs to its end: each event, and how often.

        Nothing where the server noises nothing.
        """
        found: Counter[Event] = Counter()
        for event in self.strategy.events(layout):
            found[event] += self.config.num_rounds + self.resumes
        return found

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
        return self.strategy.hypotheses

    def _unprotected(self) -> list[str]:
        drawn = self.strategy.has_secret_cohorts and self.config.strategy.sampling == "poisson"
        return [*visible(drawn), *_unprotected(self.config, self.is_accounted)]

    @property
    def claim(self) -> Claim:
        """What may be said about the models, with what leaves beside them."""
        base = self.strategy.claim()
        reasons = base.reasons
        if base.mechanism != "none" and self.config.evaluates_on_clients:
            # The ledger holds them too, so that no ε is left to claim.
            reasons = (*reasons, "scores of the model on clients' own examples leave without noise")
        premises = (*base.premises, *self.resumed_on) if base.premises else ()
        return replace(base, reasons=reasons, unprotected=tuple(self._unprotected()), premises=premises)

    @property
    def resumed_on(self) -> tuple[Premise, ...]:
        """Return the premise of every claim about a run that was resumed; nothing for another run."""
        return (UNBROKEN,) if self.resumes else ()


def build(config: RunConfig) -> Plan:
    """Make the objects of a run; nothing has been sent yet when this fails.

    Raises:
        ConfigError: the configuration asks for what cannot be.
        PluginError: a name is unknown.
        LedgerError: the ledger of this data is broken.
    """
    seed = secrets.randbelow(2**31) if config.seed == -1 else config.seed
    task = named_task(config.task)
    recipe = recipe_of(task, config.client, config.privacy)
    budget = _budget(config)
    held_out = held_out_of(config)
    strategy = decorate(
        named_strategy(config, held_out=held_out), config, budget, lambda: named_strategy(config, draws=False)
    )
    limit = config.privacy.server.max_epsilon
    if limit and not strategy.is_accounted:
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
    return Plan(config, seed, task, strategy, budget, recipe, held_out)


def _demand_replies(strategy: Decorator, minimum: int) -> None:
    """Let rounds with fewer replies be abandoned.

    Raises:
        ConfigError: there is a guarantee that this would break.
    """
    if minimum and strategy.is_accounted:
        raise ConfigError(
            f"strategy.min-replies = {minimum} contradicts the guarantee of privacy.server = "
            f"{strategy.claim().mechanism!r}: whether a round is abandoned would "
            "tell whether one more client replied; use 0"
        )
    strategy.min_replies = minimum


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
    folder = expanded(privacy.ledger_dir or Path(config.output_dir) / "ledgers").resolve()
    path = folder / f"{data_identity(config)}.jsonl"
    relation: Relation = "replace-one" if privacy.server.population else "add-or-remove"
    # Only Rényi DP counts draws; `fixed` ones are known to the clients together, and amplify nothing in a budget.
    amplified = config.strategy.sampling == "poisson" and isinstance(privacy.server, variants.GlobalPrivacy)
    kind: FilterKind = "renyi" if amplified and config.strategy.fraction_train < 1 else "gaussian"
    return PrivacyBudget(Ledger(path), "", "client", privacy.target_delta, privacy.server.max_epsilon, relation, kind)


def data_identity(config: RunConfig) -> str:
    """The name of the data that budgets are about: as given, or the task with a digest of where its data lies."""
    return config.privacy.data_identity or place_of(config)


def place_of(config: RunConfig) -> str:
    """Return the task with a digest of where its data lies: the name of data that was given none."""
    path = expanded(config.task.data_path).resolve() if config.task.data_path else ""
    place = hashlib.sha256(f"{config.task.name} {path}".encode()).hexdigest()[:12]
    return f"{config.task.name}-{place}"


def _unprotected(config: RunConfig, is_accounted: bool) -> list[str]:
    """What leaves beside the models, and beside who replies and when."""
    items = [
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
    if config.secure_aggregation.enabled:
        items.append("whose updates are in the sum of a round, to the server and to all clients of the round")
    if config.strategy.pretrain_epochs:
        items.append("the server's own examples: the initial model was trained on them without noise")
    if config.evaluates_on_clients:
        items.append("scores of the global model on each client's own examples, and how many there were")
    return items
