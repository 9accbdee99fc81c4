"""Strategies inside each of the Gaussian mechanisms, and rounds of them, for tests that name what differs."""

from support import all_nodes, content, grid_of, one_round, zeros

from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.ledger import Ledger
from cloister.server.private_strategy import GlobalDP, MetricDP
from cloister.utils.arrays import Layout

LAYOUT = Layout.of(zeros())
SEEDED = "the noise is seeded: whoever knows privacy.noise-seed can remove it"
SILENT = "privacy.noise-multiplier is 0: there is no noise"
NOMINAL = "the distance between private models sets the noise and is itself not noised; z/d is nominal"
DRIVEN = ", and before clipping one client can drive the noise to nothing"


def globally(inner=None, z=2.0, bound=1.5, **options):
    return GlobalDP(inner or all_nodes(), noise_multiplier=z, clipping_norm=bound, **options)


def metrically(inner=None, z=2.0, bound=1.5, **options):
    return MetricDP(inner or all_nodes(), noise_multiplier=z, clipping_norm=bound, **options)


def privately(**options):
    return metrically(release="private", **options)


def budget_in(folder, **options):
    """Return the budget of a run with a ledger of its own in this folder."""
    return PrivacyBudget(Ledger(folder / f"{len(list(folder.iterdir()))}.jsonl"), "run", **options)


def gone(node, _):
    raise RuntimeError("gone")


def played(strategy, models, sent=None, server_round=1):
    """A round in which every node answers with its model."""
    grid = grid_of(lambda node, _: content(models[node - 1]), len(models))
    return one_round(strategy, grid, zeros() if sent is None else sent, server_round)
