"""The needs of several runs together of their budgets: never less than a ledger counts."""

import math

import pytest

from cloister.config.run import parse
from cloister.privacy.accounting.events import Gaussian
from cloister.privacy.accounting.ledger import Ledger
from cloister.server.preflight import share_needed
from cloister.server.prepare import prepare

BASE = {
    "num-rounds": 2, "task.name": "breast-cancer", "privacy.server": "global-dp", "privacy.max-epsilon": 20.0,
    "privacy.noise-multiplier": 2.0, "strategy.sampling": "poisson", "strategy.fraction-train": 0.5,
}  # fmt: skip
EVERYBODY = {"strategy.fraction-train": 1.0}
REGISTERED = {"strategy.sampling": "fixed", "privacy.population": 6}


def prepared(tmp_path, **settings):
    return prepare(parse(BASE | {"output-dir": str(tmp_path)} | settings), pretrain=False)


def counted(runs, path):
    """The share of the budget that a ledger counts if these runs begin and release in this order."""
    budgets = [run.plan.budget for run in runs]
    for budget in budgets:
        budget.ledger = Ledger(path)
        budget.begin(path.stem)
    for run, budget in zip(runs, budgets, strict=True):
        budget.ledger.refresh()
        for _ in range(run.plan.config.num_rounds):
            for event in run.plan.strategy.events(run.layout):
                budget.ledger.open(event, "client", path.stem, 1, lambda: None)
    budgets[-1].ledger.refresh()
    return budgets[-1].share()


@pytest.mark.parametrize("other", [{}, EVERYBODY, REGISTERED], ids=["alike", "another filter", "another relation"])
def test_it_is_what_the_dearest_order_of_the_runs_costs(tmp_path, other):
    def two():
        return prepared(tmp_path), prepared(tmp_path, **other)

    needed = share_needed([(run, 1) for run in two()])
    orders = {"first": two(), "second": two()[::-1]}
    costs = [counted(runs, tmp_path / f"{name}.jsonl") for name, runs in orders.items()]
    assert needed >= max(costs) * (1 - 1e-12) and needed == pytest.approx(max(costs), rel=1e-9)


def test_each_ledger_has_a_budget_of_its_own(tmp_path):
    one, other = prepared(tmp_path), prepared(tmp_path, **{"privacy.data-identity": "elsewhere"})
    assert share_needed([(one, 3), (other, 1)]) == share_needed([(one, 3)])
    assert share_needed([(one, 3)]) == pytest.approx(3 * share_needed([(one, 1)]))


def test_of_a_spent_budget_nothing_is_left(tmp_path):
    run = prepared(tmp_path, **{"privacy.max-epsilon": 1.0})
    run.plan.budget.begin("before")
    run.plan.budget.ledger.open(Gaussian(0.5), "client", "before", 1, lambda: None)
    assert math.isinf(share_needed([(run, 1)])) and share_needed([]) == 0
