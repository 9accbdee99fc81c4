"""The budget of what a client's releases leak in all: on disk where its node keeps a ledger, else in its state."""

import math

from flwr.app import Context, UserConfig

from cloister.client.ledgers import MAX_LEAKAGE, keeps_ledger, ledger_of
from cloister.client.tally import LeakageTally
from cloister.config.privacy import PrivacyConfig
from cloister.core.errors import ConfigError
from cloister.privacy.accounting.budget import PrivacyBudget, Store


def leakage_budget(context: Context, task: str, run: str, limit: float = 0.0) -> PrivacyBudget[Store]:
    """The budget that this client's leakage is counted in.

    Args:
        context: of the node.
        task: the name of the learning problem.
        run: the id of the run.
        limit: Σ ε·radius that may not be passed; 0: no limit.
    """
    node = context.node_config
    store: Store = ledger_of(node, task) if keeps_ledger(node) else LeakageTally(context.state)
    return PrivacyBudget(store, run, "neighbourhood", max_epsilon=limit)


def limit_of(privacy: PrivacyConfig, node: UserConfig) -> float:
    """The smaller of the run's limit and the node's own; 0: neither has one.

    Args:
        privacy: of the run.
        node: the node's configuration.
    """
    return min((limit for limit in (privacy.client.max_leakage, own_limit(node)) if limit), default=0.0)


def own_limit(node: UserConfig) -> float:
    """The node's own limit; 0: it has none.

    Raises:
        ConfigError: it is no number of at least 0.
    """
    own = node.get(MAX_LEAKAGE, 0.0)
    if isinstance(own, bool) or not isinstance(own, int | float) or not 0 <= own < math.inf:
        raise ConfigError(f"{MAX_LEAKAGE} = {own!r} in the node configuration must be a number of at least 0")
    return float(own)
