"""A budget over a ledger: what it counts, refuses and records."""

import contextlib
import math

import numpy as np
import pytest
from forged_ledgers import write

from cloister.privacy.accounting import filters
from cloister.privacy.accounting.account import Account
from cloister.privacy.accounting.budget import PrivacyBudget
from cloister.privacy.accounting.events import Gaussian, Laplace, Pure, Unaccounted
from cloister.privacy.accounting.filters import cost, filter_for
from cloister.privacy.accounting.ledger import Budget, Entry, Ledger, today
from cloister.privacy.accounting.vocabulary import Sampling
from cloister.utils.errors import BudgetExhausted, ConfigError, LedgerError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "budget" / "ledger.jsonl"


class TestABudget:
    def test_count_earlier_runs_and_tell_them_apart(self, path):
        for name in ("one", "two"):
            budget = PrivacyBudget(Ledger(path), name)
            with budget.release(Gaussian(4.0), 1):
                pass
        assert budget.account().epsilon(1e-5) > budget.account_of_run().epsilon(1e-5) > 0

    def test_refuse_to_go_on_from_what_has_no_guarantee(self, path):
        write(path, [Unaccounted("exact distance")])
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=100.0)
        with pytest.raises(BudgetExhausted, match="nothing can be claimed: no ε up to 100 covers them"):
            budget.require([Gaussian(50.0)])

    def test_enter_what_leaves_without_a_guarantee_and_then_claim_nothing(self, path):
        PrivacyBudget(Ledger(path), "seen", unit="example").record_unprotected("scores of examples leave")
        (entry,) = Ledger(path).entries
        reason = Unaccounted("scores of examples leave")
        assert entry == Entry(entry.release, "seen", 0, "example", "", 0.0, reason, today(), done=False)
        assert math.isinf(PrivacyBudget(Ledger(path), "later", unit="example").epsilon())
        with pytest.raises(BudgetExhausted):
            PrivacyBudget(Ledger(path), "later", unit="example", max_epsilon=100.0).require([Gaussian(50.0)])

    def test_without_a_budget_refuse_nothing(self, path):
        with PrivacyBudget(Ledger(path), "run").release(Unaccounted("exact distance"), 1):
            pass
        assert math.isinf(PrivacyBudget(Ledger(path), "run").epsilon())

    def test_count_a_release_whose_making_failed(self, path):
        budget = PrivacyBudget(Ledger(path), "run")
        with pytest.raises(ZeroDivisionError), budget.release(Gaussian(2.0), 1):
            raise ZeroDivisionError
        (entry,) = Ledger(path).entries
        assert not entry.done and budget.epsilon() > 0

    @pytest.mark.parametrize("kind", ["gaussian", "renyi"])
    @pytest.mark.parametrize("relation", ["add-or-remove", "replace-one"])
    def test_allow_a_budget_to_the_last_release_and_not_a_thousandth_more(self, path, kind, relation):
        """Ten releases of a multiplier that they fill it with; then the same with a ten-thousandth less noise each."""
        limit = filter_for(kind, 3.0, 1e-5).limit(3.0, 1e-5)
        per_unit = cost(filter_for(kind, 3.0, 1e-5), Gaussian(1.0), relation)
        exact = math.sqrt(10 * per_unit / limit)
        for z, allowed in ((exact * (1 + 1e-9), 10), (exact * (1 - 1e-4), 9)):
            budget = PrivacyBudget(Ledger(path.with_name(f"{allowed}")), "", "client", 1e-5, 3.0, relation, kind)
            budget.begin("run")
            made = 0
            with contextlib.suppress(BudgetExhausted):
                while made < 20:
                    with budget.release(Gaussian(z), made):
                        made += 1
            assert made == allowed and budget.share() == pytest.approx(allowed / 10, rel=1e-3)

    @pytest.mark.parametrize("kind", ["gaussian", "renyi"])
    def test_count_no_draw_that_the_clients_together_know(self, path, kind):
        """A cohort of a fixed size: all others know who was left. Against them a budget has to hold."""
        drawn = Gaussian(4.0, Sampling("without-replacement", cohort=1, population=1000))
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=2.0, relation="replace-one", kind=kind)
        made = 0
        with contextlib.suppress(BudgetExhausted):
            while made < 1000:
                with budget.release(drawn, made):
                    made += 1
        plain = PrivacyBudget(
            Ledger(path.with_name("plain")), "run", max_epsilon=2.0, relation="replace-one", kind=kind
        )
        assert made == int(plain.limit / plain.cost(Gaussian(4.0)))
        assert budget.epsilon() == pytest.approx(Account([Gaussian(2.0)] * made).epsilon(1e-5, "pld"))

    def test_count_a_draw_by_coins_under_a_rényi_filter_alone(self, path):
        drawn = Gaussian(1.0, Sampling("poisson", probability=0.01))
        shares = []
        for kind in ("gaussian", "renyi"):
            budget = PrivacyBudget(Ledger(path.with_name(kind)), "run", max_epsilon=8.0, kind=kind)
            with budget.release(drawn, 1):
                shares.append(budget.share())
        assert shares[0] > 20 * shares[1] > 0

    @pytest.mark.parametrize("kind", ["gaussian", "renyi"])
    @pytest.mark.parametrize("event", [Laplace(1e-9, 1e-9), Unaccounted("scores"), Gaussian(0.0)])
    def test_refuse_under_any_budget_what_has_no_bound(self, path, kind, event):
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=1e6, kind=kind)
        with pytest.raises(BudgetExhausted, match="nothing can be claimed"), budget.release(event, 1):
            pytest.fail("released")
        assert Ledger(path).entries == []

    @pytest.mark.parametrize("unit", ["client", "example", "group"])
    def test_pay_for_a_pure_release(self, path, unit):
        budget = PrivacyBudget(Ledger(path), "run", unit, max_epsilon=4.0)
        with budget.release(Pure(0.5), 1):
            pass
        assert 0 < budget.share() < 1
        with pytest.raises(BudgetExhausted, match=r"from .* % to .* %, past the budget of 4 at"):
            budget.require([Pure(3.9)])

    def test_say_what_is_spent_and_of_what(self, path):
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=2.0)
        assert budget.spent() == budget.share() == 0
        with budget.release(Gaussian(4.0), 1):
            pass
        assert budget.spent() == pytest.approx(1 / 16) and budget.share() == pytest.approx(1 / 16 / budget.limit)

    def test_know_what_is_spent_at_the_cost_of_one_release(self, path, monkeypatch):
        """Fifty releases are priced once each by both filters, not anew for each that follows."""
        priced = []
        monkeypatch.setattr(filters, "cost", lambda *arguments: priced.append(arguments) or cost(*arguments))
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=50.0)
        for number in range(50):
            with budget.release(Gaussian(50.0 + number), number):
                pass
        assert len(priced) == 100
        assert budget.spent() == pytest.approx(sum((50.0 + number) ** -2 for number in range(50)))

    def test_have_a_delta_that_is_a_probability(self, path):
        for delta in (0.0, 1.0, -1.0, math.nan):
            with pytest.raises(ConfigError, match="target_delta must be above 0 and below 1"):
                PrivacyBudget(Ledger(path), "run", delta=delta)

    def test_judge_by_their_relation(self, path):
        write(path, [Gaussian(4.0)])
        adding, replacing = (
            PrivacyBudget(Ledger(path), "", relation=relation) for relation in ("add-or-remove", "replace-one")
        )
        assert replacing.epsilon() > 1.9 * adding.epsilon()


class TestABudgetToTheLetter:
    def test_what_it_is_about_unless_said(self, path):
        budget = PrivacyBudget(Ledger(path), "run")
        assert (budget.unit, budget.delta, budget.max_epsilon, budget.relation) == (
            "client",
            1e-5,
            0.0,
            "add-or-remove",
        )
        assert budget.kind == "gaussian" and PrivacyBudget(Ledger(path), "run", "example").kind == "renyi"
        assert PrivacyBudget(Ledger(path), "run", "example", kind="gaussian").kind == "gaussian"

    def test_a_budget_below_zero_is_none(self, path):
        with pytest.raises(ConfigError, match="max_epsilon must be >= 0, got -1"):
            PrivacyBudget(Ledger(path), "run", max_epsilon=-1.0)

    @pytest.mark.parametrize("delta", [0.0, 1.0])
    def test_a_delta_that_is_no_probability(self, path, delta):
        with pytest.raises(ConfigError) as refused:
            PrivacyBudget(Ledger(path), "run", delta=delta)
        assert str(refused.value) == f"target_delta must be above 0 and below 1, got {delta}"

    def test_a_run_begins_under_its_name_with_its_budget(self, path):
        budget = PrivacyBudget(Ledger(path), "", "example", 1e-6, 3.0, "replace-one")
        budget.begin("seven")
        expected = filter_for("renyi", 3.0, 1e-6)
        assert budget.ledger.budgets == [Budget("seven", "example", 1e-6, 3.0, "replace-one", expected, today())]
        with budget.release(Gaussian(9.0), 4, "by", 2.0):
            (entry,) = budget.ledger.entries
            assert (entry.run, entry.round, entry.unit, entry.mechanism) == ("seven", 4, "example", "by")
            assert (entry.clip, entry.event, entry.done) == (2.0, Gaussian(9.0), False)
        assert budget.ledger.entries[0].done
        with budget.release(Gaussian(9.0), 5):
            pass
        assert (budget.ledger.entries[1].mechanism, budget.ledger.entries[1].clip) == ("", 0.0)

    def test_accounts_of_a_run_and_of_all(self, path):
        drawn = Sampling("without-replacement", cohort=1, population=100)
        ledger = Ledger(path)
        for run, unit, event in (
            ("two", "client", Gaussian(3.0, drawn)),
            ("one", "example", Gaussian(2.0)),
            ("two", "example", Gaussian(1.5)),
        ):
            ledger.open(event, unit, run, 1, lambda: None)
        budget = PrivacyBudget(ledger, "one", relation="replace-one")
        budget.spend(Gaussian(4.0, drawn), 1)

        def same(found, events, insiders):
            assert (found.relation, found.insiders) == ("replace-one", insiders)
            assert found.epsilon(1e-5) == Account(events, "replace-one", insiders).epsilon(1e-5)

        same(budget.account(), [Gaussian(4.0, drawn), Gaussian(3.0, drawn)], True)
        same(budget.account_of_run(), [Gaussian(4.0, drawn)], True)
        same(budget.account_of_run(insiders=False), [Gaussian(4.0, drawn)], False)
        planned = Account([Gaussian(9.0)], "replace-one", True)
        same(budget.account_with(planned), [Gaussian(9.0), Gaussian(3.0, drawn)], True)
        assert budget.epsilon() == budget.account().epsilon(1e-5, "pld")

    def test_an_earlier_run_of_the_same_name_is_never_left_out(self, path):
        ledger = Ledger(path)
        PrivacyBudget(ledger, "one").spend(Gaussian(1.0), 1)
        again = PrivacyBudget(ledger, "one")
        again.spend(Gaussian(50.0), 1)
        everything = again.account_with(Account([Gaussian(50.0)] * 2))
        assert everything.epsilon(1e-5) == Account([Gaussian(1.0), *[Gaussian(50.0)] * 2]).epsilon(1e-5)

    def test_what_a_run_released_is_under_its_name_or_through_it(self, path):
        """A run that was resumed may have begun under another name; another run may have its name."""
        ledger = Ledger(path)
        budget, other = PrivacyBudget(ledger, "first"), PrivacyBudget(ledger, "second")
        budget.spend(Gaussian(2.0), 1)
        ledger.open(Gaussian(3.0), "client", "first", 1, lambda: None)
        budget.begin("second")
        budget.spend(Gaussian(4.0), 2)
        other.spend(Gaussian(5.0), 1)
        ledger.open(Gaussian(6.0), "example", "second", 1, lambda: None)

        def same(found, multipliers):
            assert found.mu_squared() == pytest.approx(sum(z**-2 for z in multipliers))

        same(budget.account_of_run(), [2, 4, 5])
        same(other.account_of_run(), [4, 5])
        same(budget.account_with(Account([Gaussian(9.0)])), [9, 2, 3, 5])
        assert budget.opened() == [Gaussian(2.0), Gaussian(4.0)] and other.opened() == [Gaussian(5.0)]
        budget.unit = "example"
        assert budget.opened() == [] and PrivacyBudget(ledger, "second", "example").opened() == []

    def test_its_state_is_the_ids_of_what_it_opened(self, path):
        ledger = Ledger(path)
        budget = PrivacyBudget(ledger, "run")
        assert budget.state_dict() == {}
        ids = sorted(budget.spend(Gaussian(z), 1) for z in (2.0, 3.0, 4.0))
        state = budget.state_dict()
        assert list(state) == ["opened"] and state["opened"].dtype == np.uint8 and state["opened"].shape == (3, 16)
        assert [bytes(row).hex() for row in state["opened"]] == ids

        resumed = PrivacyBudget(Ledger(path), "run")
        resumed.load_state_dict({})
        assert resumed.opened() == []
        resumed.spend(Gaussian(5.0), 2)
        resumed.load_state_dict(state)
        assert resumed.opened() == [Gaussian(z) for z in (2.0, 3.0, 4.0, 5.0)]

    def test_it_does_not_go_on_with_another_ledger(self, path):
        budget = PrivacyBudget(Ledger(path), "run")
        for number in range(3):
            budget.spend(Gaussian(2.0), number)
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
        later = PrivacyBudget(Ledger(path), "run")
        with pytest.raises(LedgerError) as refused:
            later.load_state_dict(budget.state_dict())
        assert str(refused.value) == (
            f"{path} holds 1 of the 3 releases that this run has made; resume it where it ran before, with its ledger "
            "as it left it"
        )
        assert later.opened() == []

    def test_how_many_more_rounds_fit(self, path):
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=2.0)
        quarter = Gaussian(math.sqrt(4 / budget.limit) * (1 + 1e-8))
        assert budget.fits([quarter]) == 4 and budget.fits([quarter, quarter]) == 2 and budget.fits([]) is None
        budget.spend(quarter, 1)
        assert budget.fits([quarter]) == 3 and budget.fits([quarter, quarter]) == 1
        assert budget.fits([quarter] * 4) == 0 == budget.fits([Unaccounted("x")])
        for number in range(3):
            budget.spend(quarter, number)
        assert budget.fits([quarter]) == 0 and budget.fits([Gaussian(1e6)]) > 0
        assert PrivacyBudget(Ledger(path), "run").fits([quarter]) is None, "there is no budget"
        budget.max_epsilon = 1.0
        assert budget.fits([quarter]) == 0, "more is spent than a lower budget allows"

    def test_of_what_fills_a_budget_exactly_one_less_fits(self, path):
        """Costs are added up one by one, and each addition may round up: the last release could be refused."""
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=2.0)
        assert budget.fits([Gaussian(math.sqrt(10 / budget.limit))]) == 9

    def test_a_share_of_no_limit(self, path):
        """ε = 0.001 has no room under a Rényi filter: nothing spent is nothing, and anything is too much."""
        budget = PrivacyBudget(Ledger(path), "run", "example", max_epsilon=1e-3)
        assert (budget.limit, budget.share()) == (0, 0)
        budget.require([])
        with pytest.raises(BudgetExhausted, match=r"from 0 % to inf %, past the budget of 0.001 at δ = 1e-05"):
            budget.require([Gaussian(1e6)])
        budget.ledger.open(Gaussian(5.0), "example", "run", 1, lambda: None)
        assert budget.share() == math.inf

    def test_all_events_of_a_message_count_together(self, path):
        budget = PrivacyBudget(Ledger(path), "run", max_epsilon=2.0)
        half = Gaussian(math.sqrt(2 / budget.limit) * (1 + 1e-9))
        budget.require([half, half])
        with pytest.raises(BudgetExhausted) as refused:
            budget.require([half, half, half])
        assert str(refused.value) == (
            "the next release would bring what is spent from 0 % to 150 %, past the budget of 2 at δ = 1e-05 "
            "(by Gaussian DP); 100 % of it is left: the release needs more noise, or a larger budget"
        )
        with budget.release(half, 1):
            pass
        budget.require([half])
        with pytest.raises(BudgetExhausted, match=r"from 50 % to 150 %.*; 50 % of it is left: the release needs"):
            budget.require([half, half])
        with pytest.raises(BudgetExhausted) as refused:
            budget.require([Unaccounted("x")])
        assert str(refused.value) == (
            f"{path} holds, or would hold, releases for which nothing can be claimed: no ε up to 2 covers them. "
            "Runs without this budget go on, and their own claims hold. If this is other data, or those runs were "
            "simulations whose results are neither published nor used, give the data another name: "
            "privacy.data-identity of a run, data-identity of a node"
        )
