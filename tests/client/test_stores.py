"""Where a client's releases are counted: a ledger, or the state of a simulated node."""

import math

import numpy as np
import pytest
from flwr.app import RecordDict

from cloister.client.ledgers import InMemoryLeakage, InMemoryLedger
from cloister.privacy.accounting import filters
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian, Laplace, Pure, Repeated, Unaccounted
from cloister.privacy.accounting.ledger import Ledger, Opening
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.utils.errors import BudgetExhausted


class TestStores:
    """A ledger and the state of a simulated node are the same to a budget."""

    STORES = pytest.mark.parametrize(
        "make", [lambda path: Ledger(path / "ledger.jsonl"), lambda _: InMemoryLedger(RecordDict())]
    )
    EVENTS = (Gaussian(3.0), Repeated(Gaussian(2.0, Sampling("poisson", 0.1)), 5), Pure(0.1))

    @STORES
    @pytest.mark.parametrize("unit", ["client", "example", "group"])
    def test_a_budget_is_spent_to_the_last_release_that_fits(self, make, unit, tmp_path):
        budget = PrivacyBudget(make(tmp_path), "run", unit, max_epsilon=3.0, kind="renyi")
        costs = [budget.cost(event) for event in self.EVENTS * 20]
        fits = sum(np.cumsum(costs) <= budget.limit)
        with pytest.raises(BudgetExhausted, match="past the budget of 3 at"):
            for made, event in enumerate(self.EVENTS * 20):
                assert budget.spent() == pytest.approx(sum(costs[:made]))
                with budget.release(event, 1):
                    pass
        assert made == fits > 3 and budget.share() <= 1
        assert budget.account().epsilon(1e-5) == pytest.approx(Account((self.EVENTS * 20)[:made]).epsilon(1e-5))

    @STORES
    def test_units_are_apart(self, make, tmp_path):
        store = make(tmp_path)
        with PrivacyBudget(store, "run", "example").release(Gaussian(3.0), 1):
            pass
        assert PrivacyBudget(store, "run", "client").spent() == 0 < PrivacyBudget(store, "run", "example").spent()

    @STORES
    def test_a_draw_that_other_clients_know_hides_nothing(self, make, tmp_path):
        drawn = Gaussian(4.0, Sampling("without-replacement", cohort=1, population=1000))
        budget = PrivacyBudget(make(tmp_path), "run", max_epsilon=8.0, relation="replace-one", kind="renyi")
        with budget.release(drawn, 1):
            pass
        known, strangers = (Account((), "replace-one", insiders=insiders).plus(drawn) for insiders in (True, False))
        assert budget.spent() == budget.filter.spent(known) > 2 * budget.filter.spent(strangers)

    @STORES
    def test_what_is_refused_is_not_counted(self, make, tmp_path):
        budget = PrivacyBudget(make(tmp_path), "run", max_epsilon=1e-3)
        for event in (Gaussian(0.5), Unaccounted("no noise"), Laplace(1.0, 1.0)):
            with pytest.raises(BudgetExhausted), budget.release(event, 1):
                pytest.fail("the block was entered")
        assert budget.spent() == 0

    @pytest.mark.parametrize(
        "make", [lambda path: Ledger(path / "ledger.jsonl"), lambda _: InMemoryLeakage(RecordDict())]
    )
    def test_leakage_is_a_budget_too(self, make, tmp_path):
        budget = PrivacyBudget(make(tmp_path), "run", "neighbourhood", max_epsilon=4.0)
        for number in range(10):
            budget.spend(Laplace(0.2, 2.0), number, "laplace")
        assert budget.spent() == pytest.approx(4.0) and str(budget.filter) == "a sum of leakages"
        for event in (Laplace(1e-3, 1.0), Gaussian(100.0), Unaccounted("seeded")):
            with pytest.raises(BudgetExhausted, match="this client's limit of leakage would be passed"):
                budget.spend(event, 11)
        assert budget.spent() == pytest.approx(4.0)

    def test_what_a_client_without_a_ledger_may_still_release(self):
        chosen, store = filters.filter_for("renyi", 3.0, 1e-5), InMemoryLedger(RecordDict())
        fits = Gaussian(math.sqrt(chosen.order / 2 * 4 / chosen.limit(3.0, 1e-5)) * (1 + 1e-9))
        store.open_all([Opening(fits, "client", "run", 1)], lambda: None)
        budget = PrivacyBudget(store, "run", max_epsilon=3.0, kind="renyi")
        budget.require([fits, fits, fits])
        PrivacyBudget(store, "run", kind="renyi").require([Unaccounted("x")])
        with pytest.raises(BudgetExhausted) as refused:
            budget.require([fits] * 4)
        assert str(refused.value) == (
            "the next release would bring what is spent from 25 % to 125 %, past the budget of 3 at δ = 1e-05 "
            f"(by {chosen}); 75 % of it is left: the release needs more noise, or a larger budget"
        )
        with pytest.raises(BudgetExhausted, match=r"^this client holds, or would hold, releases for which nothing"):
            budget.require([Unaccounted("x")])
        replaced = PrivacyBudget(store, "run", max_epsilon=3.0, relation="replace-one", kind="renyi")
        with pytest.raises(BudgetExhausted, match=r"from 100 % to 200 %"):
            replaced.require([fits])

    def test_a_filter_of_leakage_is_in_no_ledger(self):
        with pytest.raises(ValueError, match="not enough values"):
            filters.to_json(filters.LeakageFilter())
